"""Endpoint and epoch equations of all members, and their fits."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tacit.ensembles.checks import prepare
from tacit.ensembles.data import MemberData
from tacit.ensembles.evaluation import batch_gradients, mean_gradients
from tacit.ensembles.members import Ensemble, flatten_members
from tacit.ensembles.penalties import Strengths
from tacit.ensembles.run import EnsembleEpoch, Run
from tacit.ensembles.targets import MemberTargets
from tacit.equations.equations import Equations, stack
from tacit.errors import InputError, check_type
from tacit.fitting.fits import Fit, fit
from tacit.objective.losses import Loss
from tacit.objective.params import Params, perturb_last_digit
from tacit.regularizers import Regularizer

ROUNDING_EXAMPLES = 64
"""Number of examples on which rounding errors are measured."""


def endpoint_equations(
    ensemble: Ensemble,
    loss: Loss,
    data: Any,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    known: Mapping[Regularizer, Strengths] | None = None,
) -> list[Equations]:
    """Equations Σ λ_k ∇R_k(θ) = −∇L(θ) of every member.

    The same as `tacit.endpoint_equations` for each member, in float64 and in one pass over the
    data. `known` penalties may have one strength per member.
    """
    ensemble, data = prepare(ensemble, loss, data, torch.float64)
    losses, gradients, unreached = mean_gradients(ensemble, loss, data)
    vector = {n: -gradient for n, gradient in gradients.items()}
    floors = rounding_floors(ensemble, loss, data)
    targets = MemberTargets(
        "endpoint", ensemble, [vector], floors, loss, data.examples, gradients, losses.tolist(),
        unreached=unreached,
    )  # fmt: skip
    return targets.equations(regularizers, known)


def epoch_equations(
    run: Run,
    loss: Loss,
    data: Any,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    known: Mapping[Regularizer, Strengths] | None = None,
) -> list[Equations]:
    """Equations Σ λ_k ∇R_k(θ̄) = −∇L(θ̄) − Δθ/time of every member over its last epochs.

    These are the steps of an epoch, summed. SGD moves by

        Δθ = −η Σ_t (∇L_t(θ_t) + Σ_k λ_k ∇R_k(θ_t)).

    Divided by the flow time η·steps/(1−β), with the mean point θ̄, this is the equation above. The
    noise of single batches averages out over the epoch, and Δθ accounts for training that has not
    reached the optimum.

    Each recorded epoch (`Plan.recorded_epochs`) is one source; several are stacked, and their
    disagreement gives the error bars of training. The columns of `Plan.averaged` regularizers are
    their mean gradients over the epoch. Other columns, and ∇L, are evaluated at the mean point.

    Adam's steps are scaled by 1/(√v̂ + ε), so its displacement is multiplied by √v̂ + ε first.
    Trap: this assumes that v̂ did not change over the epoch.
    """
    check_type("run", run, Run, "the result of ensembles.train")
    last, data = prepare(run.last, loss, data, torch.float64)
    eps = torch.finfo(run.last.first_tensor.dtype).eps
    parts: list[list[Equations]] = [[] for _ in range(len(last))]
    for epoch in run.recorded_epochs:
        equations = _epoch_targets(epoch, eps, loss, data).equations(regularizers, known)
        for m, time in enumerate(epoch.time.tolist()):
            if time:
                parts[m].append(equations[m])
    return [stack(member_parts) for member_parts in parts]


def _epoch_targets(epoch: EnsembleEpoch, eps: float, loss: Loss, data: MemberData) -> MemberTargets:
    """−∇L(θ̄) − Δθ/time of every member; `eps` is the precision that it was trained in."""
    average = epoch.average.to(torch.float64)
    _, gradients, unreached = mean_gradients(average, loss, data)
    time = torch.where(epoch.time > 0, epoch.time, 1.0)
    vector, floors = {}, {}
    for name, gradient in gradients.items():
        scale = 1 / time.view(-1, *[1] * (gradient.dim() - 1))
        scale = scale if epoch.metric is None else scale * epoch.metric[name]
        vector[name] = -gradient - epoch.displacement[name] * scale
        floors[name] = eps * flatten_members(average.params[name] * scale).norm(dim=1)
    return MemberTargets(
        "trajectory",
        average,
        [vector],
        floors,
        loss,
        data.examples,
        gradients,
        columns=epoch.columns,
        unreached=unreached,
    )


def fits(
    equations: Sequence[Equations], *, nonnegative: bool = False, psd: bool = False
) -> list[Fit]:
    """Fit the equations of every member."""
    if isinstance(equations, Equations):
        raise InputError("fits received the equations of one member: pass the list of all members.")
    return [fit(part, nonnegative=nonnegative, psd=psd) for part in equations]


def rounding_floors(ensemble: Ensemble, loss: Loss, data: MemberData) -> Params:
    """Norm of the change of ∇L when every weight changes in its last digit.

    For each tensor, one value per member.
    """
    inputs, targets = next(data.slices(ROUNDING_EXAMPLES))
    gradients = batch_gradients(ensemble, loss, inputs, targets).gradients
    perturbed = ensemble.with_params(perturb_last_digit(ensemble.params))
    perturbed_gradients = batch_gradients(perturbed, loss, inputs, targets).gradients
    return {
        n: flatten_members(perturbed_gradients[n] - gradients[n]).norm(dim=1) for n in gradients
    }

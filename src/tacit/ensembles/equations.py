"""Endpoint and epoch equations of all members, and their fits."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.ensembles.checks import check_ensemble, check_member_loss
from tacit.ensembles.data import MemberData, assign_data
from tacit.ensembles.evaluation import batch_gradients, mean_gradients
from tacit.ensembles.layout import flatten_members
from tacit.ensembles.members import Ensemble
from tacit.ensembles.penalties import Penalties, Strengths, expand_penalties
from tacit.ensembles.rows import StackedColumns, stacked_columns, write_member_blocks
from tacit.ensembles.run import EnsembleEpoch, Run
from tacit.equations.equations import Equations, Source, stack
from tacit.equations.rows import check_candidates
from tacit.errors import InputError
from tacit.fitting.fits import Fit, fit
from tacit.objective.losses import Loss
from tacit.objective.params import Params, perturb_last_digit, shorten
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
    check_ensemble(ensemble)
    ensemble = ensemble.to(torch.float64)
    data = assign_data(data, len(ensemble), ensemble.first_tensor)
    _check_finite([ensemble.params])
    check_member_loss(ensemble, loss, data)
    losses, gradients = mean_gradients(ensemble, loss, data)
    targets = {n: -gradient for n, gradient in gradients.items()}
    floors = rounding_floors(ensemble, loss, data)
    sources = MemberSources("endpoint", loss, data, member_norms(gradients), losses.tolist())
    return write_member_equations(ensemble, [targets], floors, sources, regularizers, known=known)


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
    if not isinstance(run, Run):
        raise InputError(f"run is a {type(run).__name__}: pass the result of ensembles.train.")
    _check_averaged_objects(run.recorded_epochs[-1], regularizers, known)
    last = run.last.to(torch.float64)
    data = assign_data(data, len(last), last.first_tensor)
    check_member_loss(last, loss, data)
    training_dtype = run.last.first_tensor.dtype
    parts: list[list[Equations]] = [[] for _ in range(len(last))]
    for epoch in run.recorded_epochs:
        equations = _equations_of_epoch(epoch, training_dtype, loss, data, regularizers, known)
        for m, time in enumerate(epoch.time.tolist()):
            if time:
                parts[m].append(equations[m])
    return [stack(member_parts) for member_parts in parts]


def _equations_of_epoch(
    epoch: EnsembleEpoch,
    training_dtype: torch.dtype,
    loss: Loss,
    data: MemberData,
    regularizers: Regularizer | Sequence[Regularizer],
    known: Mapping[Regularizer, Strengths] | None,
) -> list[Equations]:
    average = epoch.average.to(torch.float64)
    _check_finite([average.params])
    _, gradients = mean_gradients(average, loss, data)
    eps = torch.finfo(training_dtype).eps
    time = torch.where(epoch.time > 0, epoch.time, 1.0)
    targets, floors = {}, {}
    for name, gradient in gradients.items():
        scale = 1 / time.view(-1, *[1] * (gradient.dim() - 1))
        scale = scale if epoch.metric is None else scale * epoch.metric[name]
        targets[name] = -gradient - epoch.displacement[name] * scale
        floors[name] = eps * flatten_members(average.params[name] * scale).norm(dim=1)
    unsettled = {
        r.name: _distance_from_mean(r, average.params, column)
        for r, column in epoch.columns.items()
    }
    norms = member_norms(gradients)
    sources = MemberSources("trajectory", loss, data, norms, None, unsettled)
    return write_member_equations(
        average, [targets], floors, sources, regularizers, known=known, columns=epoch.columns
    )


def fits(equations: Sequence[Equations], *, nonnegative: bool = False) -> list[Fit]:
    """Fit the equations of every member."""
    if isinstance(equations, Equations):
        raise InputError("fits received the equations of one member: pass the list of all members.")
    return [fit(member_equations, nonnegative=nonnegative) for member_equations in equations]


class MemberSources(NamedTuple):
    """The contents of the `Source` records of all members."""

    mode: str
    loss: Loss
    data: MemberData
    gradient_norms: list[float]
    loss_values: list[float] | None
    unsettled: Mapping[str, list[float]] = MappingProxyType({})
    """By regularizer and member; see `Source.unsettled`."""

    def sources(self, ensemble: Ensemble, known: Penalties) -> Iterator[Source]:
        """The source of every member."""
        names = [n for n, _ in ensemble.model.named_parameters(remove_duplicate=False)]
        parameter_norms = member_norms(ensemble.params)
        for m in range(len(ensemble)):
            pairs = zip(known.regularizers, known.strengths, strict=True)
            yield Source(
                mode=self.mode,
                loss=getattr(self.loss, "__name__", type(self.loss).__name__),
                examples=self.data.examples,
                parameters=sum(p[0].numel() for p in ensemble.params.values()),
                tensors=len(ensemble.params),
                frozen=0,
                tied=len(names) - len(ensemble.params),
                dtype="float64",
                gradient_norm=self.gradient_norms[m],
                parameter_norm=parameter_norms[m],
                loss_value=None if self.loss_values is None else self.loss_values[m],
                known={r.name: float(strengths[m]) for r, strengths in pairs},
                unsettled={name: ratios[m] for name, ratios in self.unsettled.items()},
                epoch=self.mode == "trajectory",
            )


def write_member_equations(
    ensemble: Ensemble,
    targets: Sequence[Params],
    floors: Params,
    sources: MemberSources,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    known: Mapping[Regularizer, Strengths] | None = None,
    columns: Mapping[Regularizer, Params] | None = None,
) -> list[Equations]:
    """Write the equations of every member.

    Args:
        ensemble: the points, in float64.
        targets: stacked targets, one per group of draws; known penalties are subtracted in place.
        floors: for each tensor and member, the norm of a target that consists of rounding errors.
        sources: the contents of the sources.
        regularizers: candidates.
        known: penalties with known strengths.
        columns: columns that were computed already; see `write_member_blocks`.
    """
    candidates = check_candidates(regularizers, None)
    known_penalties = expand_penalties(known, ensemble.params, what="known", single=True)
    columns = columns or {}
    _check_finite(targets)
    kinks = {
        n: torch.zeros_like(flatten_members(p), dtype=torch.bool) for n, p in targets[0].items()
    }
    for regularizer, strengths in zip(
        known_penalties.regularizers, known_penalties.strengths, strict=True
    ):
        for name, mask in kinks.items():
            column = _known_column(regularizer, ensemble.params, name, columns)
            if column is not None:
                mask |= column.kinks
                for target in targets:
                    known_part = (column.values[..., 0] * strengths).reshape(target[name].shape)
                    target[name].sub_(known_part)
    bound = candidates.bind(ensemble.member(0))
    blocks = write_member_blocks(
        ensemble, candidates, targets, kinks=kinks, floors=floors, columns=columns
    )
    return [
        Equations(
            bound.families, bound.columns.names, len(targets), tuple(member_blocks), (source,)
        )
        for member_blocks, source in zip(
            blocks, sources.sources(ensemble, known_penalties), strict=True
        )
    ]


def _known_column(
    regularizer: Regularizer, params: Params, name: str, columns: Mapping[Regularizer, Params]
) -> StackedColumns | None:
    """The column of a known penalty on one tensor: its mean over the epoch, if it was averaged."""
    column = stacked_columns(regularizer, params, name)
    if column is None or regularizer not in columns:
        return column
    mean = flatten_members(columns[regularizer][name]).unsqueeze(2)
    return StackedColumns(mean, torch.zeros_like(column.kinks))


def _check_averaged_objects(
    epoch: EnsembleEpoch,
    regularizers: Regularizer | Sequence[Regularizer],
    known: Mapping[Regularizer, Strengths] | None,
) -> None:
    """Refuse another object with the name of an averaged regularizer.

    Mean gradients are looked up by identity, so its column would silently be that at the mean
    point.
    """
    averaged = {regularizer.name: regularizer for regularizer in epoch.columns}
    estimated = check_candidates(regularizers, None).estimated
    for regularizer in (*estimated, *(known or {})):
        if averaged.get(regularizer.name, regularizer) is not regularizer:
            raise InputError(
                f"{regularizer.name!r} was averaged during training, but this is another object "
                "with that name: pass the object that was passed to Plan(averaged=…), or give this "
                "one another name."
            )


def _check_finite(targets: Sequence[Params]) -> None:
    finite = [flatten_members(t).isfinite().all(1) for target in targets for t in target.values()]
    diverged = torch.nonzero(~torch.stack(finite).all(0))[:, 0].tolist()
    if diverged:
        raise InputError(
            f"weights or gradients of members {shorten(map(str, diverged))} are not finite: they "
            "have diverged. Leave them out with run.select(members) or ensemble.select(members)."
        )


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


def _distance_from_mean(regularizer: Regularizer, params: Params, mean: Params) -> list[float]:
    """‖mean of ∇R − ∇R at the mean point‖ / ‖mean of ∇R‖ of every member."""
    columns = {n: stacked_columns(regularizer, params, n) for n in params}
    at_mean_point = {n: c.values[..., 0] for n, c in columns.items() if c is not None}
    distances = member_norms({n: flatten_members(mean[n]) - c for n, c in at_mean_point.items()})
    norms = member_norms({n: mean[n] for n in at_mean_point})
    return [
        distance / norm if norm else 0.0 for distance, norm in zip(distances, norms, strict=True)
    ]


def member_norms(tensors: Params) -> list[float]:
    """Euclidean norm over all tensors, of every member."""
    squares: list[Tensor] = [flatten_members(t).square().sum(1) for t in tensors.values()]
    return torch.stack(squares).sum(0).sqrt().tolist()

"""Gradient matching for all members at once: batched gradients, columns and factors, M fits."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.ensembles.checks import check_ensemble, check_loss
from tacit.ensembles.data import Owned, own_data
from tacit.ensembles.evaluation import Loss, batch_slopes, whole_slopes
from tacit.ensembles.layout import per_member
from tacit.ensembles.members import Ensemble
from tacit.ensembles.penalties import Penalties, Strengths, own_penalties
from tacit.ensembles.rows import Columns, blocks, columns
from tacit.ensembles.run import Epoch, Run
from tacit.equations.equations import Equations, Source, stack
from tacit.equations.rows import check_candidates
from tacit.errors import InputError
from tacit.fitting.fits import Fit, fit
from tacit.objective.checks import perturb_last_digit
from tacit.objective.params import Params, shorten
from tacit.regularizers import Regularizer

PROBE = 64
"""Examples on which rounding is measured."""


def endpoint_equations(
    ensemble: Ensemble,
    loss: Loss,
    data: Any,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    known: Mapping[Regularizer, Strengths] | None = None,
) -> list[Equations]:
    """Equations Σ λ_k ∇R_k(θ) = −∇L(θ) of every member, as `tacit.endpoint_equations` writes.

    All in float64, in one pass over the data. `known` penalties may have one strength a member.
    """
    check_ensemble(ensemble)
    wide = ensemble.to(torch.float64)
    owned = own_data(data, len(wide), wide.first)
    _check_finite([wide.params])
    check_loss(wide, loss, owned)
    values, slopes = whole_slopes(wide, loss, owned)
    targets = {n: -slope for n, slope in slopes.items()}
    floors = rounding(wide, loss, owned)
    source = Sources("endpoint", loss, owned, norms(slopes), values.tolist())
    return write(wide, [targets], floors, source, regularizers, known=known)


def epoch_equations(
    run: Run,
    loss: Loss,
    data: Any,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    known: Mapping[Regularizer, Strengths] | None = None,
) -> list[Equations]:
    """Equations Σ λ_k ∇R_k(θ̄) = −∇L(θ̄) − Δθ/time of every member over its last epochs.

    The steps of an epoch summed up, with its mean point θ̄, whole displacement Δθ and flow time
    η·steps/(1−β): the noise of single batches averages out, and what was left of the way to the
    optimum is in the equation. One epoch is one source; where the plan kept several they are
    stacked, and error bars of training follow from how far they disagree. Regularizers that the
    plan averaged have their mean gradient over the epoch as column; for others, as for ∇L, it is
    taken at the mean point. After Adam the displacement is first scaled by √v̂ + ε, the metric that
    its steps are taken in; this assumes that v̂ was steady over the epoch.
    """
    if not isinstance(run, Run):
        raise InputError(f"run is a {type(run).__name__}: pass what ensembles.train returns.")
    _check_same(run.tail[-1], regularizers, known)
    owned = own_data(data, len(run.last), run.last.to(torch.float64).first)
    check_loss(run.last.to(torch.float64), loss, owned)
    every: list[list[Equations]] = [[] for _ in range(len(run.last))]
    for epoch in run.tail:
        found = _epoch_equations(epoch, run, loss, owned, regularizers, known)
        for own, equations, time in zip(every, found, epoch.time.tolist(), strict=True):
            if time:
                own.append(equations)
    return [stack(own) for own in every]


def _epoch_equations(
    epoch: Epoch,
    run: Run,
    loss: Loss,
    data: Owned,
    regularizers: Regularizer | Sequence[Regularizer],
    known: Mapping[Regularizer, Strengths] | None,
) -> list[Equations]:
    wide = epoch.average.to(torch.float64)
    _check_finite([wide.params])
    _, slopes = whole_slopes(wide, loss, data)
    eps = torch.finfo(run.last.first.dtype).eps
    time = torch.where(epoch.time > 0, epoch.time, 1.0)
    targets, floors = {}, {}
    for name, slope in slopes.items():
        scale = 1 / time.view(-1, *[1] * (slope.dim() - 1))
        scale = scale if epoch.metric is None else scale * epoch.metric[name]
        targets[name] = -slope - epoch.displacement[name] * scale
        floors[name] = eps * per_member(wide.params[name] * scale).norm(dim=1)
    bent = {r.name: _bent(r, wide.params, column) for r, column in epoch.columns.items()}
    source = Sources("trajectory", loss, data, norms(slopes), None, bent)
    return write(wide, [targets], floors, source, regularizers, known=known, given=epoch.columns)


def fits(equations: Sequence[Equations], *, nonnegative: bool = False) -> list[Fit]:
    """A fit of every member's equations: their factors are a few numbers each by now."""
    if isinstance(equations, Equations):
        raise InputError("fits was given the equations of one member: pass the list of all.")
    return [fit(own, nonnegative=nonnegative) for own in equations]


class Sources(NamedTuple):
    """What the sources of all members say."""

    mode: str
    loss: Loss
    data: Owned
    gradient_norms: list[float]
    values: list[float] | None
    unsettled: Mapping[str, list[float]] = MappingProxyType({})

    def of(self, ensemble: Ensemble, known: Penalties) -> Iterator[Source]:
        """The source of every member."""
        names = [n for n, _ in ensemble.model.named_parameters(remove_duplicate=False)]
        lengths = norms(ensemble.params)
        for m in range(len(ensemble)):
            strengths = zip(known.regularizers, known.strengths, strict=True)
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
                parameter_norm=lengths[m],
                loss_value=None if self.values is None else self.values[m],
                known={r.name: float(own[m]) for r, own in strengths},
                unsettled={name: each[m] for name, each in self.unsettled.items()},
                epoch=self.mode == "trajectory",
            )


def write(
    ensemble: Ensemble,
    targets: Sequence[Params],
    floors: Params,
    sources: Sources,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    known: Mapping[Regularizer, Strengths] | None = None,
    given: Mapping[Regularizer, Params] | None = None,
) -> list[Equations]:
    """Equations of every member from targets, one a group of draws; known penalties leave them."""
    candidates = check_candidates(regularizers, None)
    fixed = own_penalties(known, ensemble.params, what="known", single=True)
    _check_finite(targets)
    kinks = {n: torch.zeros_like(per_member(p), dtype=torch.bool) for n, p in targets[0].items()}
    for regularizer, strengths in zip(fixed.regularizers, fixed.strengths, strict=True):
        for name, mask in kinks.items():
            found = _known_column(regularizer, ensemble.params, name, given or {})
            if found is not None:
                mask |= found.kinks
                for target in targets:
                    known_part = (found.values[..., 0] * strengths).reshape(target[name].shape)
                    target[name].sub_(known_part)
    bound = candidates.bind(ensemble.member(0))
    every = blocks(ensemble, candidates, targets, kinks=kinks, floors=floors, given=given or {})
    count = len(targets)
    return [
        Equations(bound.families, bound.columns.names, count, tuple(own), (source,))
        for own, source in zip(every, sources.of(ensemble, fixed), strict=True)
    ]


def _known_column(
    regularizer: Regularizer, params: Params, name: str, given: Mapping[Regularizer, Params]
) -> Columns | None:
    """A known penalty's column on a tensor: as averaged, where it was."""
    found = columns(regularizer, params, name)
    if found is None or regularizer not in given:
        return found
    mean = per_member(given[regularizer][name]).unsqueeze(2)
    return Columns(mean, torch.zeros_like(found.kinks))


def _check_same(
    epoch: Epoch,
    regularizers: Regularizer | Sequence[Regularizer],
    known: Mapping[Regularizer, Strengths] | None,
) -> None:
    """Refuse a twin of an averaged regularizer: its mean gradient would not be found."""
    held = {regularizer.name: regularizer for regularizer in epoch.columns}
    estimated = check_candidates(regularizers, None).estimated
    for regularizer in (*estimated, *(known or {})):
        if held.get(regularizer.name, regularizer) is not regularizer:
            raise InputError(
                f"{regularizer.name!r} was averaged while training, but this is another object of "
                "that name: pass the one that Plan(averaged=…) had, or give this one its own name."
            )


def _check_finite(targets: Sequence[Params]) -> None:
    parts = [per_member(t).isfinite().all(1) for target in targets for t in target.values()]
    lost = torch.nonzero(~torch.stack(parts).all(0))[:, 0].tolist()
    if lost:
        raise InputError(
            f"weights or gradients of members {shorten(map(str, lost))} are not finite: they have "
            "diverged. Go on without them, as in run.chosen(members) or ensemble.chosen(members)."
        )


def rounding(ensemble: Ensemble, loss: Loss, data: Owned) -> Params:
    """Norm, by tensor and member, of the change of ∇L when every weight moves by its last digit."""
    inputs, targets = next(data.slices(PROBE))
    here = batch_slopes(ensemble, loss, inputs, targets).gradients
    moved = ensemble.at(perturb_last_digit(ensemble.params))
    there = batch_slopes(moved, loss, inputs, targets).gradients
    return {n: per_member(there[n] - here[n]).norm(dim=1) for n in here}


def _bent(regularizer: Regularizer, params: Params, mean: Params) -> list[float]:
    """‖mean of ∇R − ∇R at the mean point‖ / ‖mean of ∇R‖ of every member."""
    found = {n: columns(regularizer, params, n) for n in params}
    here = {n: c.values[..., 0] for n, c in found.items() if c is not None}
    apart = norms({n: per_member(mean[n]) - column for n, column in here.items()})
    lengths = norms({n: mean[n] for n in here})
    return [a / length if length else 0.0 for a, length in zip(apart, lengths, strict=True)]


def norms(tensors: Params) -> list[float]:
    """Euclidean norm over all tensors, of every member."""
    squares: list[Tensor] = [per_member(t).square().sum(1) for t in tensors.values()]
    return torch.stack(squares).sum(0).sqrt().tolist()

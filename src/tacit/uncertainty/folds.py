"""Cross-fitting: products of gradients from different folds of the data, in which noise cancels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from tacit.equations.blocks import Block
from tacit.equations.candidates import BoundCandidates, check_candidates, slices
from tacit.equations.equations import Equations
from tacit.equations.resampling import CandidatesOf, TensorData, check_candidates_of, check_tensors
from tacit.equations.rows import read_rows
from tacit.equations.target import endpoint_target
from tacit.errors import InputError, Problem, ProblemKind, check_whole
from tacit.fitting.error_bars import ErrorBars
from tacit.fitting.fits import Fit, fit
from tacit.fitting.solving import System
from tacit.objective.losses import Loss
from tacit.objective.models import BatchNorm
from tacit.objective.objective import Objective
from tacit.objective.params import Params, shorten
from tacit.objective.passes import track
from tacit.objective.ranks import check_alone
from tacit.regularizers.family import Regularizer

LEAST = 1e-3
"""Eigenvalues of products of unit columns are at least this part of the largest."""


def cross_fit(  # noqa: PLR0913 # the data and the candidates, then keyword options
    model: nn.Module,
    loss: Loss,
    data: TensorData,
    regularizers: Regularizer | Sequence[Regularizer] | CandidatesOf,
    *,
    folds: int = 8,
    params: Mapping[str, Tensor] | None = None,
    known: Mapping[Regularizer, float] | None = None,
    seed: int = 0,
    batch_norm: BatchNorm | None = None,
    batch_size: int | None = None,
) -> Fit:
    """The endpoint fit for the population that the data is a sample of, by products across folds.

    The gradient −∇L and a column that depends on data have noise from the same examples: their
    product is biased by it, and the square of a noisy column is too large. With t_j and Φ_j the
    target and the columns of fold j,

        (Σ_{j≠l} Φ_jᵀΦ_l) λ = Σ_{j≠l} Φ_jᵀ t_l

    has no such terms: columns of one fold meet the target of another. Two folds are the two halves
    of the data. From three on, leaving out one at a time gives error bars for the choice of
    examples. `explained` is net of their noise.

    Trap: it is for data that the model was not trained on. On its training data `estimate` is
    exact, and this is not, because the noise of the folds is then not independent of the weights.

    Args:
        model: the trained module.
        loss: loss(output, target), mean-reduced, without any penalty.
        data: a tuple of tensors (inputs, …, target), one row per example.
        regularizers: candidates; those that depend on data as a function of the objective, as in
            `bootstrap`.
        folds: how many parts the data is split into, at random.
        params: the point; by default the model's current parameters.
        known: penalties that training did apply, with their strengths.
        seed: seed of the split.
        batch_norm: as in `Objective`.
        batch_size: as in `Objective`.
    """
    check_whole("folds", folds, least=2)
    check_whole("seed", seed, least=0)
    check_tensors(data)
    candidates_of = check_candidates_of(regularizers, known)
    if len(data[-1]) < 2 * folds:
        raise InputError(
            f"{len(data[-1])} examples in {folds} folds: each needs two or more. Pass fewer folds."
        )
    order = torch.randperm(len(data[-1]), generator=torch.Generator().manual_seed(seed))
    parts: list[tuple[BoundCandidates, Params]] = []
    equations, examples = None, 0
    make_objective = partial(Objective, model, loss, batch_norm=batch_norm, batch_size=batch_size)
    for rows in track(order.tensor_split(folds), total=folds, label="folds"):
        fold = make_objective(tuple(part[rows.to(part.device)] for part in data))
        check_alone(fold.ranks, "cross_fit")
        target, candidates = endpoint_target(fold, params=params), candidates_of(fold)
        equations = target.equations(candidates, known=known)
        examples += equations.sources[0].examples
        (point,), checked = target.points, check_candidates(candidates, known)
        bound = checked.bind(point.params, **point.binding)
        _check_exact(bound)
        parts.append((bound, point.vectors[0]))
    assert equations is not None
    products = _products(parts)
    gradient_norm = float(products[:, :, -1, -1].mean().sqrt())
    source = replace(equations.sources[0], examples=examples, gradient_norm=gradient_norm)
    return _fit_products(replace(equations, sources=(source,)), products)


def _check_exact(bound: BoundCandidates) -> None:
    """Refuse columns from random probes, whose noise would be the same in all folds, and bounds."""
    if bounded := [family.name for family in bound.families if any(family.bounded)]:
        raise InputError(
            f"{shorten(bounded)} is convex, and products of folds are not fitted under bounds: "
            "leave convex=True out, or use estimate."
        )
    if noisy := [bound.columns.names[column] for column in bound.columns.noisy]:
        raise InputError(
            f"the columns of {shorten(noisy)} are from random probes, whose noise does not cancel "
            "in products of folds that use the same ones: make them exact, or use estimate."
        )


def _products(parts: Sequence[tuple[BoundCandidates, Params]]) -> Tensor:
    """Z_jᵀZ_l of the folds' Z = [design | target], (folds, folds, columns + 1, columns + 1)."""
    first = parts[0][0]
    width = len(first.columns.names) + 1
    if any(b.columns.names != first.columns.names or b.rows != first.rows for b, _ in parts):
        raise InputError("the candidates of the folds have different columns: make the same ones.")
    products = torch.zeros(len(parts), len(parts), width, width, dtype=torch.float64)
    for name in first.rows:
        size = first.params[name].numel()
        whole = first.subspace(name) is not None
        for part in [slice(0, size)] if whole else slices(first.params[name], width * len(parts)):
            Z, kinks = [], torch.zeros(part.stop - part.start, dtype=torch.bool)
            for bound, target in parts:
                design, values, mask = read_rows(bound, name, part, [target])
                rows = torch.zeros(len(values), width, dtype=torch.float64)
                rows[:, [*bound.columns.active.get(name, ()), width - 1]] = torch.cat(
                    [design, values], dim=1
                ).cpu()
                Z.append(rows)
                kinks |= mask.cpu() if mask is not None else False
            stacked = torch.stack(Z)[:, ~kinks]
            products += torch.einsum("jrm,lrn->jlmn", stacked, stacked)
    return products


def _across(products: Tensor, folds: Sequence[int]) -> Tensor:
    """The mean of Z_jᵀZ_l over different folds."""
    chosen = products[list(folds)][:, list(folds)]
    total = chosen.sum((0, 1)) - chosen.diagonal().sum(-1)
    return total / (len(folds) * (len(folds) - 1))


def _fit_products(equations: Equations, products: Tensor) -> Fit:
    """The fit of equations whose products are those across folds."""
    names, gram = equations.names, _across(products, range(len(products)))
    block = Block(
        "(all)", tuple(range(len(names))), _factor_of(gram), equations.rows, 0, equations.floor
    )
    whole = replace(
        equations, blocks=(block,), targets=1, origin=None, means=(), alternatives=(),
        other_families=(),
    )  # fmt: skip
    result = fit(whole)
    if len(products) == 2:
        return result
    bars, unclear = _leave_one_out(products, names)
    if not unclear:
        return result.with_error_bars(bars)
    noise = Problem(
        ProblemKind.NOISY,
        f"{', '.join(unclear)}: in products of different folds of the data, no more than noise of "
        "the examples is seen.",
        "Do not interpret the strengths. Pass more data, or fewer candidates.",
        names,
    )
    return result.with_error_bars(bars, noise)


def _leave_one_out(products: Tensor, names: tuple[str, ...]) -> tuple[ErrorBars, list[str]]:
    """Error bars by the jackknife over folds; and what is not clearly more than their noise.

    The latter are the target and columns whose square, across folds, is not above zero by a t test
    at 2.5 %. Whether the residual is more than noise is tested likewise, at 1 %.
    """
    count = len(products)
    parts = [range(count), *([j for j in range(count) if j != k] for k in range(count))]
    grams = [_across(products, part) for part in parts]
    numbers = torch.stack([torch.cat([_strengths(gram), gram.diagonal()]) for gram in grams])
    deviations = numbers[1:] - numbers[1:].mean(0)
    covariance = (count - 1) / count * deviations.T @ deviations
    size, errors = len(names), covariance.diagonal().sqrt()
    basis = f"{count} folds of the data"
    bars = ErrorBars("sampling", basis, names, covariance[:size, :size], count - 1.0)
    explained = bool(numbers[0, size] < bars.quantile(0.98) * errors[size])
    clear = numbers[0, size + 1 :] > bars.quantile(0.95) * errors[size + 1 :]
    unclear = [name for name, seen in zip((*names, "the target"), clear, strict=True) if not seen]
    return replace(bars, explains_residual=explained), unclear


def _strengths(gram: Tensor) -> Tensor:
    """The strengths, and the square of the residual."""
    factor = _factor_of(gram)
    strengths = System(factor[:, :-1]).solve(factor[:, -1:])[:, 0]
    residual = torch.cat([-strengths, torch.ones(1, dtype=torch.float64)])
    return torch.cat([strengths, (residual @ gram @ residual)[None]])


def _factor_of(gram: Tensor) -> Tensor:
    """A factor [design | target] of products.

    Of columns scaled to unit norm, eigenvalues below `LEAST` times the largest are raised to it.
    """
    scale = gram.diagonal()[:-1].abs().sqrt().clamp_min(torch.finfo(gram.dtype).tiny)
    values, axes = torch.linalg.eigh(gram[:-1, :-1] / scale / scale[:, None])
    values = values.clamp_min(LEAST * max(float(values.max()), LEAST))
    design = values.sqrt()[:, None] * axes.T * scale
    target = (axes.T @ (gram[:-1, -1] / scale)) / values.sqrt()
    rest = (gram[-1, -1] - target.square().sum()).clamp_min(0).sqrt()
    factor = torch.zeros(len(gram), len(gram), dtype=torch.float64)
    factor[:-1, :-1], factor[:-1, -1], factor[-1, -1] = design, target, rest
    return factor

"""The explicit regularizer of dropout as a family of penalties, streamed over the data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.losses import Loss
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, check_finite, float64_zeros, select, to_float64
from tacit.objective.per_example import derivatives_of_terms
from tacit.regularizers.dropout.layers import (
    DropoutLayer,
    dropout_layers,
    record_dropout_inputs,
    run_batch,
)
from tacit.regularizers.dropout.terms import (
    OutputCurvature,
    exact_terms,
    explain_missing_double_backward,
    random_signs,
    sampled_terms,
)
from tacit.regularizers.family import Columns, Regularizer, check_name

MAX_EXACT_OUTPUTS = 32
"""The largest number of outputs per example for which the default is the exact sum."""
DEFAULT_SAMPLES = 8
"""Draws of random signs if there are more outputs."""


def explicit_dropout(
    objective: Objective,
    *,
    by_layer: bool = False,
    samples: int | None = None,
    seed: int = 0,
    scope: Scope = None,
    name: str = "explicit_dropout",
) -> Regularizer:
    """The explicit regularizer of dropout, R(θ) = ½ Σ_l mean_i Σ_j h_lj² [J_lᵀ H J_l]_jj.

    For example i, h_l is the input of dropout layer l in eval mode, J_l the Jacobian of the outputs
    by h_l, and H the Hessian of the example's loss by the outputs (Wei, Kakade & Ma 2020).

    Dropout with probability q multiplies h by 1 + δ, where the δ_j are independent with mean 0 and
    variance q/(1−q). To second order in δ, the expected loss of the example rises by
    ½ q/(1−q) Σ_j h_j² [∇²_h ℓ]_jj, and JᵀHJ is the Gauss–Newton part of ∇²_h ℓ. So if all layers
    have rate q, dropout adds R to the mean loss with strength q/(1−q): exactly for dropout on the
    last hidden layer under squared loss, otherwise approximately, if no single unit matters much.

    Traps:
        The rest of ∇²_h ℓ, the curvature of the network behind the layer, is left out as in the
        paper. It shows as an unexplained part of the target.

        Layers with different rates have different strengths: use `by_layer=True`. Layers with p = 0
        when this function is called are left out.

        The exact sum holds one graph per output. If memory runs out, reduce the batch size of the
        objective, or pass `samples`.

        A custom autograd function in the loss needs a backward that torch can differentiate. One
        that is marked `once_differentiable` raises no error here: its curvature counts as zero.

    Args:
        objective: an Objective(model, loss, data), with or without `training=True`.
        by_layer: one strength per dropout layer, named such as `explicit_dropout[encoder.drop]`.
        samples: number of draws of random signs to average over. By default the sum is exact up to
            32 outputs per example, and averaged over 8 draws beyond.
        seed: the random signs depend only on the seed, the batch, the draw and the layer.
        scope: which rows the columns cover.
        name: the name that strengths are listed under.
    """
    check_name(name)
    loss = _check_options(objective, by_layer, samples, seed)
    layers = dropout_layers(objective, by_layer=by_layer)
    columns = (name,)
    if by_layer:
        columns = tuple(f"{name}[{layer.name}]" for layer in layers.values())
    penalty = _Penalty(objective, loss, layers, len(columns), samples, seed, scope, name)

    def bind(params: Params) -> Columns:
        gradients = penalty.gradients(params, torch.eye(len(columns), dtype=torch.float64))

        def rows(tensor_name: str, part: slice) -> Tensor:
            return torch.stack([g[tensor_name].flatten()[part] for g in gradients], dim=1)

        return Columns(columns, dict.fromkeys(gradients[0], tuple(range(len(columns)))), rows)

    def value(params: Params) -> Tensor:
        return _PenaltyValue.apply(penalty, tuple(params), *params.values())

    return Regularizer(name, bind, value, influence=penalty.influence, objective=objective)


@dataclass(frozen=True, eq=False)
class _Penalty:
    """Values and gradients of all columns; the graph of a batch is freed before the next batch."""

    objective: Objective
    loss: Loss
    layers: dict[nn.Module, DropoutLayer]
    columns: int
    samples: int | None
    seed: int
    scope: Scope
    name: str

    @torch.inference_mode(mode=False)
    def values(self, params: Params) -> Tensor:
        """R of every column, in float64."""
        totals = torch.zeros(self.columns, dtype=torch.float64)
        leaves = derivatives.leaves(self.objective.point(params))

        def add(terms: list[Tensor], index: int) -> None:
            batch_sums = torch.stack([column.sum() for column in terms])
            totals.add_(to_float64(batch_sums.detach()).cpu())

        weight = self._for_each_batch(leaves, add, create_graph=False)
        check_finite({self.name: totals}, what="the value")
        return totals / weight

    @torch.inference_mode(mode=False)
    def gradients(self, params: Params, combinations: Tensor) -> list[Params]:
        """∇ Σ_j c_j R_j for every row c of combinations, in float64."""
        leaves = derivatives.leaves(self.objective.point(params))
        scoped = {n: leaves[n] for n in self._in_scope(leaves)}
        totals = [float64_zeros(scoped) for _ in combinations]

        def add(terms: list[Tensor], index: int) -> None:
            batch_sums = [column.sum() for column in terms]
            for total, coefficients in zip(totals, combinations, strict=True):
                gradients = _combined_gradient(batch_sums, coefficients, list(scoped.values()))
                for accumulator, gradient in zip(total.values(), gradients, strict=True):
                    if gradient is not None:
                        accumulator.add_(gradient.to(accumulator.device))

        weight = self._for_each_batch(leaves, add, create_graph=True)
        for total in totals:
            for accumulator in total.values():
                accumulator.div_(weight)
            check_finite(total, what=f"the gradient of {self.name}")
        return totals

    @torch.inference_mode(mode=False)
    def influence(self, params: Params, directions: Sequence[Params]) -> Tensor:
        """D R_i[v] of every example i, direction v and column, in float64, without the weights."""
        leaves = derivatives.leaves(self.objective.point(params))
        in_scope = set(self._in_scope(leaves))
        scoped = [{n: t for n, t in v.items() if n in in_scope} for v in directions]
        by_batch: dict[int, Tensor] = {}

        def add(terms: list[Tensor], index: int) -> None:
            columns = [derivatives_of_terms(column, leaves, scoped) for column in terms]
            stacked = torch.stack(columns, dim=2)
            by_batch[index] = by_batch[index] + stacked if index in by_batch else stacked

        self._for_each_batch(leaves, add, create_graph=True, weighted=False)
        return torch.cat(list(by_batch.values()))

    def _in_scope(self, params: Params) -> tuple[str, ...]:
        return select(params, self.scope, what=f"scope of {self.name}")

    def _for_each_batch(
        self,
        leaves: Params,
        add: Callable[[list[Tensor], int], None],
        *,
        create_graph: bool,
        weighted: bool = True,
    ) -> float:
        """One pass over the data; returns the total weight of the examples.

        Calls add(terms, batch index) with one tensor per column, R_i of every example i of the
        batch, times its weight if `weighted`. If R is sampled, `add` is called once per draw.
        """
        batch_weights = []

        def use(model: nn.Module, batch: Any, weights: Tensor | None, index: int) -> None:
            with record_dropout_inputs(self.layers) as calls:
                outputs, target = run_batch(model, batch, calls)
                curvature = OutputCurvature.from_loss(
                    outputs,
                    len(outputs) * self.loss(outputs, target),  # a mean over examples, times n
                    calls,
                    weights=weights if weighted else None,
                    create_graph=create_graph,
                )
                for terms in self._terms(curvature, index):
                    add(terms, index)
            batch_weights.append(
                len(outputs) if weights is None else float(to_float64(weights).sum())
            )

        with explain_missing_double_backward():
            self.objective.for_each_batch(leaves, use)
        return sum(batch_weights)

    def _terms(self, curvature: OutputCurvature, index: int) -> Iterator[list[Tensor]]:
        """Terms of the batch's examples by column: lists, one or more, that sum to R_i."""
        outputs = curvature.outputs[0].numel()
        samples = self.samples or (0 if outputs <= MAX_EXACT_OUTPUTS else DEFAULT_SAMPLES)
        if not samples:
            yield exact_terms(curvature, self.columns)
            return
        draws = (random_signs(curvature.calls, (self.seed, index, draw)) for draw in range(samples))
        for terms in sampled_terms(curvature, self.columns, draws):
            yield [column / samples for column in terms]


def _combined_gradient(
    sums: list[Tensor], coefficients: Tensor, leaves: list[Tensor]
) -> Sequence[Tensor | None]:
    """∇ Σ_j c_j sum_j; the graphs of sums with coefficient zero are not visited."""
    pairs = [(s, c.to(s)) for s, c in zip(sums, coefficients, strict=True) if c and s.requires_grad]
    if not pairs:  # the loss has no curvature, or no layer affects the outputs
        return [None] * len(leaves)
    return torch.autograd.grad(
        [s for s, _ in pairs], leaves, [c for _, c in pairs], retain_graph=True, allow_unused=True
    )


class _PenaltyValue(torch.autograd.Function):
    """R of every column, with another pass over the data as its backward.

    This avoids one graph over the whole data set.
    """

    @staticmethod
    def forward(ctx: Any, penalty: _Penalty, names: tuple[str, ...], *tensors: Tensor) -> Tensor:
        ctx.penalty, ctx.names = penalty, names
        ctx.save_for_backward(*tensors)
        return penalty.values(dict(zip(names, tensors, strict=True))).to(tensors[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] # as torch documents it
        ctx: Any, *cotangents: Tensor
    ) -> tuple[Tensor | None, ...]:
        params = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        (gradient,) = ctx.penalty.gradients(params, cotangents[0][None])
        return (
            None,
            None,
            *(gradient[n].to(p) if n in gradient else None for n, p in params.items()),
        )


def _check_options(objective: Objective, by_layer: bool, samples: int | None, seed: int) -> Loss:
    """Refuse options of the wrong type; returns the loss as a function of the outputs."""
    if not isinstance(objective, Objective):
        raise InputError(
            f"explicit_dropout was given a {type(objective).__name__}: pass the tacit.Objective "
            "of the model with dropout layers."
        )
    if objective.loss is None:
        raise InputError(
            "explicit_dropout needs the loss as a function of the model's output, and this "
            "objective is from_batch_loss: make it as Objective(model, loss, data), with a module "
            "that returns one tensor and a mean-reduced loss(output, target)."
        )
    if not isinstance(by_layer, bool):
        raise InputError(f"by_layer is {by_layer!r}: pass True or False.")
    for name, number, least in (("samples", samples, 1), ("seed", seed, 0)):
        if name == "samples" and number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise InputError(f"{name} is {number!r}: pass a whole number, at least {least}.")
    return objective.loss

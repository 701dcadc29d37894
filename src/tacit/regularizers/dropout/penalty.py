"""The explicit regularizer of dropout as a family of penalties, streamed over the data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import InputError, check_type, check_whole
from tacit.objective import derivatives
from tacit.objective.losses import Loss
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, check_finite, float64_zeros, select, to_float64
from tacit.objective.per_example import derivatives_of_terms
from tacit.regularizers.data_dependent import StreamedValue
from tacit.regularizers.dropout.layers import DropoutLayer, dropout_layers, record_inputs, run_batch
from tacit.regularizers.dropout.terms import OutputCurvature, batch_terms
from tacit.regularizers.family import Columns, Regularizer, join_columns, whole_column


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
    needed = "the tacit.Objective of the model with dropout layers"
    check_type("the objective of explicit_dropout", objective, Objective, needed)
    check_type("by_layer", by_layer, bool, "True or False")
    check_whole("seed", seed, least=0)
    if samples is not None:
        check_whole("samples", samples)
    if objective.loss is None:
        raise InputError(
            "explicit_dropout needs the loss as a function of the model's output, and this "
            "objective is from_batch_loss: make it as Objective(model, loss, data)."
        )
    layers = dropout_layers(objective, by_layer=by_layer)
    columns = tuple(f"{name}[{layer.name}]" for layer in layers.values()) if by_layer else (name,)
    penalty = _Penalty(objective, objective.loss, layers, columns, samples, seed, scope, name)
    return Regularizer(
        name,
        penalty.bind,
        penalty.value,
        influence=penalty.influence,
        objective=objective,
        cost="second-order",
    )


@dataclass(frozen=True, eq=False)
class _Penalty:
    """Values and gradients of all columns; the graph of a batch is freed before the next batch."""

    objective: Objective
    loss: Loss
    layers: dict[nn.Module, DropoutLayer]
    columns: tuple[str, ...]
    samples: int | None
    seed: int
    scope: Scope
    name: str

    def bind(self, params: Params) -> Columns:
        """∇R of every column."""
        gradients = self.gradients(params, torch.eye(len(self.columns), dtype=torch.float64))
        return join_columns(list(map(whole_column, self.columns, gradients)))

    def value(self, params: Params) -> Tensor:
        """R of every column, for autograd."""

        def pull_back(params: Params, cotangent: Tensor) -> Params:
            return self.gradients(params, cotangent[None])[0]

        return StreamedValue.apply(self.evaluate, pull_back, tuple(params), *params.values())

    @torch.inference_mode(mode=False)
    def evaluate(self, params: Params) -> Tensor:
        """R of every column, in float64."""
        totals = torch.zeros(len(self.columns), dtype=torch.float64)
        leaves = derivatives.leaves(self.objective.point(params))

        def add(terms: list[Tensor], index: int) -> None:
            sums = torch.stack([column.sum() for column in terms])
            totals.add_(to_float64(sums.detach()).cpu())

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
        in_scope = self._in_scope(leaves)
        scoped = [{n: v[n] for n in in_scope if n in v} for v in directions]
        by_batch: dict[int, Tensor] = {}

        def add(terms: list[Tensor], index: int) -> None:
            columns = [derivatives_of_terms(column, leaves, scoped) for column in terms]
            by_batch[index] = by_batch.get(index, 0) + torch.stack(columns, dim=2)

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
            with record_inputs(self.layers) as calls:
                outputs, target = run_batch(model, batch, calls)
                loss = len(outputs) * self.loss(outputs, target)  # a mean over examples, times n
                if not loss.requires_grad:
                    raise InputError(
                        "the loss does not depend on the outputs: it detaches them, or computes "
                        "outside torch. Use a loss that autograd can differentiate twice."
                    )
                (gradient,) = torch.autograd.grad(loss, outputs, create_graph=True)
                used_weights = weights if weighted else None
                curvature = OutputCurvature(outputs, calls, gradient, used_weights, create_graph)
                seed = self.seed, index
                for terms in batch_terms(curvature, len(self.columns), self.samples, seed):
                    add(terms, index)
            batch_weights.append(
                len(outputs) if weights is None else float(to_float64(weights).sum())
            )

        try:
            self.objective.for_each_batch(leaves, use)
        except RuntimeError as error:
            if not derivatives.lacks_double_backward(error):
                raise
            raise InputError(
                f"explicit_dropout needs double backward, which an operator here lacks: {error}. "
                "Custom functions need a differentiable backward."
            ) from error
        return sum(batch_weights)


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

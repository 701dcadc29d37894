"""The penalty that dropout adds to a loss, by what its layers drop and how the loss bends."""

from collections.abc import Callable, Sequence
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
from tacit.regularizers.dropout.layers import Layer, dropout_layers, run, watched
from tacit.regularizers.dropout.terms import bend, exact, sampled, second_derivatives, signs
from tacit.regularizers.family import Columns, Regularizer, check_name

FEW = 32
"""Outputs of an example up to which each of them gets a backward pass of its own."""
SAMPLES = 8
"""Draws of signs where there are more."""


def explicit_dropout(
    objective: Objective,
    *,
    by_layer: bool = False,
    samples: int | None = None,
    seed: int = 0,
    scope: Scope = None,
    name: str = "explicit_dropout",
) -> Regularizer:
    """Dropout's own regularizer, ½ Σ_l mean_i Σ_j h_lj² [J_lᵀ H J_l]_jj (Wei, Kakade & Ma 2020).

    Of example i, h_l is what enters dropout layer l in eval mode, J_l the Jacobian of the outputs
    by it, and H the Hessian of the example's loss by the outputs. Where all layers drop with
    probability q, dropout adds this to the mean loss with strength q/(1−q): exactly for the last
    hidden layer under squared loss, else as far as no unit alone matters much.

    Traps: how the network bends behind a layer is left out, as in the paper, and shows as what
    stays unexplained. Layers with unequal rates have unequal strengths: ask for `by_layer`; those
    with p = 0, when this is made, are left out. An exact pass holds a graph for every output: mind
    the batch size.

    Args:
        objective: an Objective(model, loss, data), with `training=True` or without.
        by_layer: one strength a dropout layer, named `explicit_dropout[encoder.drop]` and so on.
        samples: draws of signs to average over; by default none, the exact sum, up to 32 outputs
            an example, and 8 beyond.
        seed: draws depend on (seed, batch, sample, layer) alone.
        scope: which parameters' rows its columns cover.
        name: what strengths are listed under.
    """
    check_name(name)
    loss = _check_options(objective, by_layer, samples, seed)
    layers = dropout_layers(objective, by_layer=by_layer)
    found = [layer.name for layer in layers.values()]
    names = tuple(f"{name}[{layer}]" for layer in found) if by_layer else (name,)
    penalty = _Penalty(objective, loss, layers, len(names), samples, seed, scope, name)

    def bind(params: Params) -> Columns:
        slopes = penalty.slopes(params, torch.eye(len(names), dtype=torch.float64))

        def rows(tensor: str, part: slice) -> Tensor:
            return torch.stack([slope[tensor].flatten()[part] for slope in slopes], dim=1)

        return Columns(names, dict.fromkeys(slopes[0], tuple(range(len(names)))), rows)

    def value(params: Params) -> Tensor:
        return _Value.apply(penalty, tuple(params), *params.values())

    return Regularizer(name, bind, value, influence=penalty.influence, objective=objective)


@dataclass(frozen=True, eq=False)
class _Penalty:
    """Values and gradients of all columns, streamed: a batch's graph is gone before the next."""

    objective: Objective
    loss: Loss
    layers: dict[nn.Module, Layer]
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

        def add(parts: list[Tensor], index: int) -> None:
            totals.add_(to_float64(torch.stack([part.sum() for part in parts]).detach()).cpu())

        weight = self._run(leaves, add, graph=False)
        check_finite({self.name: totals}, what="the value")
        return totals / weight

    @torch.inference_mode(mode=False)
    def slopes(self, params: Params, combinations: Tensor) -> list[Params]:
        """Gradients, in float64, of the columns combined by each row of weights."""
        leaves = derivatives.leaves(self.objective.point(params))
        chosen = {n: leaves[n] for n in select(leaves, self.scope, what=f"scope of {self.name}")}
        sums = [float64_zeros(chosen) for _ in combinations]

        def add(parts: list[Tensor], index: int) -> None:
            summed = [part.sum() for part in parts]
            for total, row in zip(sums, combinations, strict=True):
                found = _combined_slope(summed, row, list(chosen.values()))
                for held, slope in zip(total.values(), found, strict=True):
                    if slope is not None:
                        held.add_(slope.to(held.device))

        weight = self._run(leaves, add, graph=True)
        for total in sums:
            for held in total.values():
                held.div_(weight)
            check_finite(total, what=f"the gradient of {self.name}")
        return sums

    @torch.inference_mode(mode=False)
    def influence(self, params: Params, directions: Sequence[Params]) -> Tensor:
        """D R_i[v] of every example, direction and column, in float64, whatever examples weigh."""
        leaves = derivatives.leaves(self.objective.point(params))
        chosen = set(select(leaves, self.scope, what=f"scope of {self.name}"))
        kept = [{n: t for n, t in v.items() if n in chosen} for v in directions]
        found: dict[int, Tensor] = {}

        def add(parts: list[Tensor], index: int) -> None:
            columns = [derivatives_of_terms(part, leaves, kept) for part in parts]
            part = torch.stack(columns, dim=2)
            found[index] = found[index] + part if index in found else part

        self._run(leaves, add, graph=True, weighted=False)
        return torch.cat(list(found.values()))

    def _run(
        self,
        leaves: Params,
        add: Callable[[list[Tensor], int], None],
        *,
        graph: bool,
        weighted: bool = True,
    ) -> float:
        """One pass: R by example (times its weight), one a column, goes to `add`; the weight."""
        weighed = []

        def use(model: nn.Module, batch: Any, weights: Tensor | None, index: int) -> None:
            with watched(self.layers) as uses:
                outputs, target = run(model, batch, uses)
                # The batch's mean times its size has each example's own Hessian.
                summed = len(outputs) * self.loss(outputs, target)
                own = weights if weighted else None
                held = bend(outputs, summed, uses, weights=own, graph=graph)
                many = self.samples or (0 if outputs[0].numel() <= FEW else SAMPLES)
                draws = (signs(held.uses, (self.seed, index, draw)) for draw in range(many))
                found = sampled(held, self.columns, draws) if many else [exact(held, self.columns)]
                for parts in found:
                    add([part / max(many, 1) for part in parts], index)
            weighed.append(len(outputs) if weights is None else float(to_float64(weights).sum()))

        with second_derivatives():
            self.objective.for_each_batch(leaves, use)
        return sum(weighed)


def _combined_slope(
    parts: list[Tensor], weights: Tensor, leaves: list[Tensor]
) -> Sequence[Tensor | None]:
    """∇ Σ weight·part, without a walk through the graphs of parts that have no weight."""
    pairs = [(p, w.to(p)) for p, w in zip(parts, weights, strict=True) if w and p.requires_grad]
    if not pairs:  # nothing bends
        return [None] * len(leaves)
    return torch.autograd.grad(
        [p for p, _ in pairs], leaves, [w for _, w in pairs], retain_graph=True, allow_unused=True
    )


class _Value(torch.autograd.Function):
    """R of every column, whose backward is one more pass: no graph over the whole data set."""

    @staticmethod
    def forward(ctx: Any, penalty: _Penalty, names: tuple[str, ...], *tensors: Tensor) -> Tensor:
        ctx.penalty, ctx.names = penalty, names
        ctx.save_for_backward(*tensors)
        return penalty.values(dict(zip(names, tensors, strict=True))).to(tensors[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] # as torch documents it
        ctx: Any, *outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        params = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        (slope,) = ctx.penalty.slopes(params, outputs[0][None])
        parts = (slope[n].to(p) if n in slope else None for n, p in params.items())
        return (None, None, *parts)


def _check_options(objective: Objective, by_layer: bool, samples: int | None, seed: int) -> Loss:
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

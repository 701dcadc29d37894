"""One batch of the explicit dropout regularizer: how the loss bends in what enters the layers.

Only second derivatives of the model are taken, by reverse mode: torch's third derivatives through
a fused layer norm are wrong, and so are those of its forward mode.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tacit.errors import InputError
from tacit.regularizers.dropout.layers import Use


class Bend(NamedTuple):
    """The outputs of a batch, the layers on their way, and how the loss bends in the outputs."""

    outputs: Tensor
    uses: tuple[Use, ...]
    slope: Tensor
    """Of the sum of the examples' losses, by the outputs, with its graph."""
    weights: Tensor | None
    graph: bool
    """Whether what is found will be differentiated by the parameters."""

    def back(self, force: Tensor, places: Iterable[int], *, graph: bool) -> tuple[Tensor, ...]:
        """Jᵀ·force at some of the uses, by one backward pass for all."""
        return torch.autograd.grad(
            self.outputs, [self.uses[i].entered for i in places], force,
            create_graph=graph, retain_graph=True, allow_unused=True, materialize_grads=True,
        )  # fmt: skip

    def hessian(self, direction: Tensor) -> Tensor:
        """H·direction, each example with its own H, times its weight."""
        if not self.slope.requires_grad:  # the loss is linear in the outputs
            return torch.zeros_like(direction)
        (product,) = torch.autograd.grad(
            self.slope, self.outputs, direction,
            create_graph=self.graph, retain_graph=True, allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        if self.weights is None:
            return product
        return product * self.weights.to(product).view(-1, *[1] * (product.ndim - 1))


def bend(
    outputs: Tensor, summed: Tensor, uses: Sequence[Use], *, weights: Tensor | None, graph: bool
) -> Bend:
    """Put a batch together: its outputs, and the sum of its examples' losses."""
    if not summed.requires_grad:
        raise InputError(
            "the loss does not depend on the outputs: it detaches them, or leaves torch. "
            "explicit_dropout needs a loss that autograd can differentiate twice."
        )
    (slope,) = torch.autograd.grad(summed, outputs, create_graph=True, retain_graph=True)
    return Bend(outputs, tuple(uses), slope, weights, graph)


def exact(batch: Bend, columns: int) -> list[Tensor]:
    """½ Σ_j h_j² [JᵀHJ]_jj by example, one a column: a backward pass an output for all layers."""
    outputs = batch.outputs
    everywhere, rows, bends = range(len(batch.uses)), [], []
    for unit in torch.eye(outputs[0].numel(), dtype=outputs.dtype, device=outputs.device):
        force = unit.view(outputs[:1].shape).expand_as(outputs)
        rows.append(batch.back(force, everywhere, graph=batch.graph))
        bends.append(batch.hessian(force).flatten(1))
    hessian = torch.stack(bends, dim=1)
    totals = [outputs.new_zeros(len(outputs)) for _ in range(columns)]
    for place, (layer, entered) in enumerate(batch.uses):
        scaled = torch.stack([(row[place] * entered).flatten(1) for row in rows], dim=1)
        part = (hessian * (scaled @ scaled.mT)).flatten(1).sum(1) / 2
        totals[layer.column] = totals[layer.column] + part
    return totals


def sampled(batch: Bend, columns: int, draws: Iterable[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
    """½ tᵀHt by example, t = J(h∘u), the same on average over signs u: one for every draw of them.

    Layers of one column share t: their cross terms vanish on average.
    """
    dummy = torch.zeros_like(batch.outputs, requires_grad=True)
    pulled = batch.back(dummy, range(len(batch.uses)), graph=True)
    # Layers that do not reach the outputs have no part in dummy's graph.
    used = [i for i, found in enumerate(pulled) if found.requires_grad]
    for signs in draws:
        totals = []
        for column in range(columns):
            own = [i for i in used if batch.uses[i].layer.column == column]
            along = [batch.uses[i].entered * signs[i] for i in own]
            totals.append(_along(batch, own, along, dummy, [pulled[i] for i in own]))
        yield totals


def _along(
    batch: Bend, own: list[int], along: list[Tensor], dummy: Tensor, pulled: list[Tensor]
) -> Tensor:
    """½ tᵀHt for t = Σ J·along over some uses, with its gradient where that is wanted."""
    if not own:
        return batch.outputs.new_zeros(len(batch.outputs))
    # Jᵀ·dummy is linear in dummy, and its derivative along a direction is J times the direction.
    (t,) = torch.autograd.grad(pulled, dummy, [a.detach() for a in along], retain_graph=True)
    force = batch.hessian(t)
    total = (t * force).flatten(1).sum(1) / 2
    if batch.graph:
        # ∇ ½ tᵀHt = (Ht)·∇t + ½ t·(∇H)t. The first by Jᵀ(Ht) with Ht held, so that t needs no
        # graph, which would be one of third derivatives.
        back = batch.back(force.detach(), own, graph=True)
        parts = [(b * a).flatten(1).sum(1) for b, a in zip(back, along, strict=True)]
        first = torch.stack(parts).sum(0)
        total = total + first - first.detach()
    return total


def signs(uses: Sequence[Use], draw: tuple[int, ...]) -> list[Tensor]:
    """Random signs for what entered each layer; they depend on the draw and the use alone."""
    found = []
    for place, (_, entered) in enumerate(uses):
        state = np.random.SeedSequence([*draw, place]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state[0]) >> 1)
        ones = torch.randint(0, 2, entered.shape, generator=generator, dtype=torch.int8)
        found.append(2 * ones.to(entered) - 1)
    return found


@contextmanager
def second_derivatives() -> Iterator[None]:
    """Attention on the math path, which has them; what has none is told."""
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    except RuntimeError as error:
        if "derivative" not in str(error) and "differentiate twice" not in str(error):
            raise
        raise InputError(
            f"explicit_dropout needs double backward, which an operator here lacks: {error}. "
            "Custom functions need a differentiable backward."
        ) from error

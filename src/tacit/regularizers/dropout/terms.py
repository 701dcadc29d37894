"""The explicit dropout regularizer of one batch, example by example.

With h the input of a dropout layer, J the Jacobian of an example's outputs by h, and H the Hessian
of its loss by the outputs, the term of the example is ½ Σ_j h_j² [JᵀHJ]_jj: exactly, or estimated
from random signs.

Only second derivatives of the model are taken, and only in reverse mode: torch's third derivatives
through a fused layer norm are wrong, and so is its forward mode.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tacit.regularizers.dropout.layers import LayerCall

MAX_EXACT_OUTPUTS = 32
"""The largest number of outputs per example for which the default is the exact sum."""
DEFAULT_SAMPLES = 8
"""Draws of random signs if there are more outputs."""

_gradient = partial(torch.autograd.grad, retain_graph=True, materialize_grads=True)

Branch = tuple[LayerCall, Tensor, Tensor]
"""A call of a dropout layer, its product Jᵀw, and random signs in the shape of its input."""


class OutputCurvature(NamedTuple):
    """The outputs of one batch, with the products Jᵀw and Hv that the penalty is made of."""

    outputs: Tensor
    calls: list[LayerCall]
    loss_gradient: Tensor
    """Gradient of the sum of the examples' losses by the outputs, with its graph."""
    weights: Tensor | None
    """One weight per example, multiplied into H; None if all are 1."""
    create_graph: bool
    """Whether the penalty will be differentiated by the parameters."""

    def vjp(
        self, cotangent: Tensor, calls: Sequence[LayerCall], *, create_graph: bool
    ) -> tuple[Tensor, ...]:
        """Jᵀ·cotangent for each of the calls, by one backward pass for all of them."""
        inputs = [call.input for call in calls]
        return _gradient(self.outputs, inputs, cotangent, create_graph=create_graph)

    def hessian_product(self, direction: Tensor) -> Tensor:
        """H·direction, with the H and the weight of each example."""
        gradient, graph = self.loss_gradient, self.create_graph
        if not gradient.requires_grad:  # the loss is linear in the outputs
            return torch.zeros_like(direction)
        (product,) = _gradient(gradient, self.outputs, direction, create_graph=graph)
        if self.weights is None:
            return product
        return product * self.weights.to(product).view(-1, *[1] * (product.ndim - 1))


def batch_terms(
    curvature: OutputCurvature, columns: int, samples: int | None, seed: tuple[int, int]
) -> Iterator[list[Tensor]]:
    """R_i of every example i, one tensor per column: lists, one or more, whose sum it is."""
    if samples is None and curvature.outputs[0].numel() <= MAX_EXACT_OUTPUTS:
        return iter([exact_terms(curvature, columns)])
    return sampled_terms(curvature, columns, samples or DEFAULT_SAMPLES, seed)


def exact_terms(curvature: OutputCurvature, columns: int) -> list[Tensor]:
    """½ Σ_j h_j² [JᵀHJ]_jj by example, one tensor per column.

    One backward pass per output gives the rows of J for all layers at once. With A = J diag(h), the
    sum is the trace of AᵀHA, computed as Σ_ab H_ab [AAᵀ]_ab.
    """
    outputs = curvature.outputs
    jacobian_rows, hessian_rows = [], []
    for unit in torch.eye(outputs[0].numel(), dtype=outputs.dtype, device=outputs.device):
        cotangent = unit.view(outputs[:1].shape).expand_as(outputs)
        rows = curvature.vjp(cotangent, curvature.calls, create_graph=curvature.create_graph)
        jacobian_rows.append(rows)
        hessian_rows.append(curvature.hessian_product(cotangent).flatten(1))
    H = torch.stack(hessian_rows, dim=1)
    totals = [outputs.new_zeros(len(outputs)) for _ in range(columns)]
    for i, (layer, h) in enumerate(curvature.calls):
        A = torch.stack([(row[i] * h).flatten(1) for row in jacobian_rows], dim=1)
        terms = (H * (A @ A.mT)).flatten(1).sum(1) / 2
        totals[layer.column] = totals[layer.column] + terms
    return totals


def sampled_terms(
    curvature: OutputCurvature, columns: int, samples: int, seed: tuple[int, int]
) -> Iterator[list[Tensor]]:
    """An unbiased estimate of `exact_terms`: one list per draw of random signs u, to be summed.

    A draw estimates ½ tᵀHt with t = J(h∘u). Its mean over u is

        E[½ tᵀHt] = ½ Σ_ij h_i h_j [JᵀHJ]_ij E[u_i u_j] = ½ Σ_j h_j² [JᵀHJ]_jj,

    because independent signs have E[u_i u_j] = δ_ij. For the same reason the layers of one column
    share one t = Σ_l J_l(h_l∘u_l): the terms between different layers have mean zero.
    """
    # Jᵀw is linear in w, so that its derivative by w is J, whatever w is.
    w = torch.zeros_like(curvature.outputs, requires_grad=True)
    vjps = curvature.vjp(w, curvature.calls, create_graph=True)
    for draw in range(samples):
        branches: list[list[Branch]] = [[] for _ in range(columns)]
        signs = random_signs(curvature.calls, (*seed, draw))
        for call, vjp, sign in zip(curvature.calls, vjps, signs, strict=True):
            # Jᵀw has no graph for layers that do not affect the outputs; their terms are zero.
            if vjp.requires_grad:
                branches[call.layer.column].append((call, vjp, sign))
        yield [_half_quadratic_form(curvature, w, column) / samples for column in branches]


def _half_quadratic_form(curvature: OutputCurvature, w: Tensor, branches: list[Branch]) -> Tensor:
    """½ tᵀHt by example for t = Σ_l J_l a_l, where a_l = h_l∘u_l.

    Its gradient by the parameters, where one is needed, is

        ∇ ½ tᵀHt = (∇t)ᵀHt + ½ tᵀ(∇H)t.

    The second part is that of ½ tᵀHt with t constant. The first is ∇ Σ_l ⟨J_lᵀ(Ht), a_l⟩ with Ht
    constant, which takes one more backward pass. So t itself needs no graph; it would be a graph of
    third derivatives.
    """
    if not branches:
        return curvature.outputs.new_zeros(len(curvature.outputs))
    calls, vjps, _ = zip(*branches, strict=True)
    directions = [call.input * sign for call, _, sign in branches]
    # The derivative of ⟨J_lᵀw, a_l⟩ by w is J_l a_l.
    (t,) = torch.autograd.grad(vjps, w, [a.detach() for a in directions], retain_graph=True)
    product = curvature.hessian_product(t)
    terms = (t * product).flatten(1).sum(1) / 2
    if curvature.create_graph:
        pulled_back = curvature.vjp(product.detach(), calls, create_graph=True)
        inner = [(p * a).flatten(1).sum(1) for p, a in zip(pulled_back, directions, strict=True)]
        first = torch.stack(inner).sum(0)
        terms = terms + first - first.detach()  # adds the gradient of `first`, not its value
    return terms


def random_signs(calls: Sequence[LayerCall], draw: tuple[int, ...]) -> list[Tensor]:
    """Random signs in the shape of each call's input; they depend only on the draw and the call."""
    signs = []
    for i, (_, h) in enumerate(calls):
        state = np.random.SeedSequence([*draw, i]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state[0]) >> 1)
        bits = torch.randint(0, 2, h.shape, generator=generator, dtype=torch.int8)
        signs.append(2 * bits.to(h) - 1)
    return signs

"""The explicit dropout regularizer of one batch, example by example.

With h the input of a dropout layer, J the Jacobian of an example's outputs by h, and H the Hessian
of its loss by the outputs, the term of the example is ½ Σ_j h_j² [JᵀHJ]_jj: exactly, or estimated
from random signs.

Only second derivatives of the model are taken, and only in reverse mode: torch's third derivatives
through a fused layer norm are wrong, and so is its forward mode.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.regularizers.dropout.layers import LayerCall


class OutputCurvature(NamedTuple):
    """The outputs of one batch, with the products Jᵀw and Hv that the penalty is made of."""

    outputs: Tensor
    calls: tuple[LayerCall, ...]
    loss_gradient: Tensor
    """Gradient of the sum of the examples' losses by the outputs, with its graph."""
    weights: Tensor | None
    """One weight per example, multiplied into H; None if all are 1."""
    create_graph: bool
    """Whether the penalty will be differentiated by the parameters."""

    @classmethod
    def from_loss(
        cls,
        outputs: Tensor,
        summed_loss: Tensor,
        calls: Sequence[LayerCall],
        *,
        weights: Tensor | None,
        create_graph: bool,
    ) -> Self:
        """The curvature of a sum of losses, one per example, in the outputs."""
        if not summed_loss.requires_grad:
            raise InputError(
                "the loss does not depend on the outputs: it detaches them, or computes outside "
                "torch. explicit_dropout needs a loss that autograd can differentiate twice."
            )
        (loss_gradient,) = torch.autograd.grad(
            summed_loss, outputs, create_graph=True, retain_graph=True
        )
        return cls(outputs, tuple(calls), loss_gradient, weights, create_graph)

    def vjp(
        self, cotangent: Tensor, indices: Iterable[int], *, create_graph: bool
    ) -> tuple[Tensor, ...]:
        """Jᵀ·cotangent for each of the indexed calls, by one backward pass for all of them."""
        return torch.autograd.grad(
            self.outputs, [self.calls[i].input for i in indices], cotangent,
            create_graph=create_graph, retain_graph=True, allow_unused=True, materialize_grads=True,
        )  # fmt: skip

    def hessian_product(self, direction: Tensor) -> Tensor:
        """H·direction, with the H and the weight of each example."""
        if not self.loss_gradient.requires_grad:  # the loss is linear in the outputs
            return torch.zeros_like(direction)
        (product,) = torch.autograd.grad(
            self.loss_gradient, self.outputs, direction, create_graph=self.create_graph,
            retain_graph=True, allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        if self.weights is None:
            return product
        return product * self.weights.to(product).view(-1, *[1] * (product.ndim - 1))


def exact_terms(curvature: OutputCurvature, columns: int) -> list[Tensor]:
    """½ Σ_j h_j² [JᵀHJ]_jj by example, one tensor per column.

    One backward pass per output gives the rows of J for all layers at once. With A = J diag(h), the
    sum is the trace of AᵀHA, computed as Σ_ab H_ab [AAᵀ]_ab.
    """
    outputs = curvature.outputs
    all_calls, jacobian_rows, hessian_rows = range(len(curvature.calls)), [], []
    for unit in torch.eye(outputs[0].numel(), dtype=outputs.dtype, device=outputs.device):
        cotangent = unit.view(outputs[:1].shape).expand_as(outputs)
        jacobian_rows.append(
            curvature.vjp(cotangent, all_calls, create_graph=curvature.create_graph)
        )
        hessian_rows.append(curvature.hessian_product(cotangent).flatten(1))
    H = torch.stack(hessian_rows, dim=1)
    totals = [outputs.new_zeros(len(outputs)) for _ in range(columns)]
    for i, (layer, h) in enumerate(curvature.calls):
        A = torch.stack([(row[i] * h).flatten(1) for row in jacobian_rows], dim=1)
        terms = (H * (A @ A.mT)).flatten(1).sum(1) / 2
        totals[layer.column] = totals[layer.column] + terms
    return totals


def sampled_terms(
    curvature: OutputCurvature, columns: int, draws: Iterable[Sequence[Tensor]]
) -> Iterator[list[Tensor]]:
    """Unbiased estimates of `exact_terms`, one list per draw of random signs u.

    The estimate is ½ tᵀHt with t = J(h∘u). Its mean over u is

        E[½ tᵀHt] = ½ Σ_ij h_i h_j [JᵀHJ]_ij E[u_i u_j] = ½ Σ_j h_j² [JᵀHJ]_jj,

    because independent signs have E[u_i u_j] = δ_ij. For the same reason the layers of one column
    share one t = Σ_l J_l(h_l∘u_l): the terms between different layers have mean zero.
    """
    # Jᵀw is linear in w, so that its derivative by w is J, whatever w is.
    w = torch.zeros_like(curvature.outputs, requires_grad=True)
    vjps = curvature.vjp(w, range(len(curvature.calls)), create_graph=True)
    # Jᵀw has no graph for layers that do not affect the outputs; their terms are zero.
    connected = [i for i, vjp in enumerate(vjps) if vjp.requires_grad]
    for signs in draws:
        totals = []
        for column in range(columns):
            indices = [i for i in connected if curvature.calls[i].layer.column == column]
            directions = [curvature.calls[i].input * signs[i] for i in indices]
            totals.append(
                _half_quadratic_form(curvature, indices, directions, w, [vjps[i] for i in indices])
            )
        yield totals


def _half_quadratic_form(
    curvature: OutputCurvature,
    indices: list[int],
    directions: list[Tensor],
    w: Tensor,
    vjps: list[Tensor],
) -> Tensor:
    """½ tᵀHt by example for t = Σ_l J_l a_l, with the directions a_l and vjps J_lᵀw of some calls.

    Its gradient by the parameters, where one is needed, is

        ∇ ½ tᵀHt = (∇t)ᵀHt + ½ tᵀ(∇H)t.

    The second part is that of ½ tᵀHt with t constant. The first is ∇ Σ_l ⟨J_lᵀ(Ht), a_l⟩ with Ht
    constant, which takes one more backward pass. So t itself needs no graph; it would be a graph of
    third derivatives.
    """
    if not indices:
        return curvature.outputs.new_zeros(len(curvature.outputs))
    # The derivative of ⟨J_lᵀw, a_l⟩ by w is J_l a_l.
    (t,) = torch.autograd.grad(vjps, w, [a.detach() for a in directions], retain_graph=True)
    product = curvature.hessian_product(t)
    terms = (t * product).flatten(1).sum(1) / 2
    if curvature.create_graph:
        pulled_back = curvature.vjp(product.detach(), indices, create_graph=True)
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


@contextmanager
def explain_missing_double_backward() -> Iterator[None]:
    """Turn torch's errors about missing second derivatives into an InputError with a remedy."""
    try:
        yield
    except RuntimeError as error:
        if not derivatives.lacks_double_backward(error):
            raise
        raise InputError(
            f"explicit_dropout needs double backward, which an operator here lacks: {error}. "
            "Custom functions need a differentiable backward."
        ) from error

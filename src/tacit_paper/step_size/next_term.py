"""The change of H∇L along the gradient flow, as a candidate column.

Over a time η the gradient flow θ' = −g(θ), with g = ∇L, moves by

    −ηg + (η²/2) Hg − (η³/6) D(Hg)[g] + …,

because d/dt g = −Hg and d/dt Hg = −D(Hg)[g] along the flow. A step of descent moves by −ηg, so

    (flow − step)/η = (η/2) Hg − (η²/6) D(Hg)[g] + ….

The first term is the gradient of (η/4)‖∇L‖². The second is η²/6 times the column of this module.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.losses import Loss
from tacit.objective.params import Params
from tacit.regularizers import Columns, Regularizer
from tacit.regularizers.family import whole_column
from tacit_paper.step_size.networks import Examples

NEXT_TERM = "change of H∇L along the flow"


def flow_change(model: nn.Module, loss: Loss, data: Examples) -> Regularizer:
    """The column −D(Hg)[g], the change of Hg along the flow, as a candidate.

    Trap: in general it is the gradient of no penalty. It can be matched, but not trained with.
    """

    def bind(params: Params) -> Columns:
        change = change_along_gradient(model, loss, data, params)
        return whole_column(NEXT_TERM, {name: -tensor for name, tensor in change.items()})

    def value(params: Params) -> Tensor:
        raise InputError(
            f"{NEXT_TERM} has no value, because it is the gradient of no penalty: use it as a "
            "candidate and do not train with it."
        )

    return Regularizer(NEXT_TERM, bind, value)


def change_along_gradient(model: nn.Module, loss: Loss, data: Examples, params: Params) -> Params:
    """D(Hg)[g], the derivative of H(θ)g(θ) along g, by a third backward pass.

    By the product rule D(Hg)[g] = D(H)[g] g + H Hg. With v = g and w = Hg held constant the first
    term is ∇⟨Hv, v⟩, because third derivatives are symmetric, and the second is ∇⟨g, w⟩.

    Trap: torch's third derivatives are wrong through fused layer norm. Those of linear layers and
    tanh are right.
    """
    leaves = derivatives.leaves(params)
    tensors = list(leaves.values())
    with torch.enable_grad():
        mean_loss = loss(functional_call(model, leaves, (data[0],)), data[1])
        gradient = torch.autograd.grad(mean_loss, tensors, create_graph=True)
        v = [g.detach() for g in gradient]
        curvature = torch.autograd.grad(gradient, tensors, v, create_graph=True)  # Hv
        pairs = (
            *zip(curvature, v, strict=True),
            *((g, w.detach()) for g, w in zip(gradient, curvature, strict=True)),
        )
        products = torch.stack([(a * b).sum() for a, b in pairs]).sum()
        change = torch.autograd.grad(products, tensors)
    return dict(zip(leaves, change, strict=True))

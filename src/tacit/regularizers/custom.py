"""A regularizer from any differentiable function of the parameters."""

from collections.abc import Callable

import torch
from torch import Tensor

from tacit.errors import InputError, check_type
from tacit.objective import derivatives
from tacit.objective.params import Params, Scope, check_finite, select
from tacit.regularizers.family import Columns, Regularizer, whole_column


def regularizer(
    name: str, function: Callable[[Params], Tensor], *, scope: Scope = None
) -> Regularizer:
    """The penalty R(θ) = function(params), for any differentiable scalar function.

    Autograd computes ∇R, which takes the memory of one parameter-sized vector. Parameters outside
    the scope are passed to the function detached, so that they act as constants.

    Trap: tacit cannot know whether the function reads data. `score_examples` therefore treats its
    column as fixed, and leaves out how the column changes with the examples.

    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> regularizer("norm", lambda params: params["w"].norm()).gradient(params)
    {'norm': {'w': tensor([0.6000, 0.8000], dtype=torch.float64)}}
    """
    needed = "a function of the parameters' dictionary that returns a scalar"
    check_type(f"the function of {name!r}", function, Callable, needed)

    def value(params: Params) -> Tensor:
        in_scope = select(params, scope, what=f"scope of {name}")
        penalty = function({n: p if n in in_scope else p.detach() for n, p in params.items()})
        if not isinstance(penalty, Tensor) or penalty.numel() != 1:
            shape = tuple(penalty.shape) if isinstance(penalty, Tensor) else type(penalty).__name__
            raise InputError(
                f"regularizer {name!r} returned {shape}: a scalar tensor is needed. Sum over its "
                "entries, or make one regularizer of each."
            )
        return penalty.reshape(1)

    def bind(params: Params) -> Columns:
        with torch.inference_mode(mode=False), torch.enable_grad():
            leaves = derivatives.leaves(params)
            penalty = value(leaves)
            if not penalty.requires_grad:
                raise InputError(
                    f"regularizer {name!r} does not depend on the parameters it covers: compute it "
                    "from the tensors it is called with, without .item(), .detach() or .data."
                )
            gradients = torch.autograd.grad(penalty, list(leaves.values()), allow_unused=True)
        gradient = {n: g for n, g in zip(leaves, gradients, strict=True) if g is not None}
        check_finite(gradient, what=f"the gradient of regularizer {name!r}")
        return whole_column(name, gradient)

    return Regularizer(name, bind, value)

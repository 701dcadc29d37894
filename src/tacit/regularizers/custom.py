"""A regularizer from any differentiable function of the parameters."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tacit.errors import InputError, check_type
from tacit.objective import derivatives
from tacit.objective.borrowing import forked_randomness
from tacit.objective.params import Params, Scope, check_finite, select, shorten
from tacit.regularizers.family import Columns, Regularizer, whole_column


def regularizer(
    name: str, function: Callable[[Params], Tensor], *, scope: Scope = None
) -> Regularizer:
    """The penalty R(θ) = function(params), for any differentiable scalar function.

    Autograd computes ∇R, which takes the memory of one parameter-sized vector. Parameters outside
    the scope are passed to the function detached, so that they act as constants. The first gradient
    is compared with a finite difference, and refused where torch's derivative is wrong.

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
        with derivatives.twice_differentiable():  # it may take derivatives itself
            penalty = function({n: p if n in in_scope else p.detach() for n, p in params.items()})
        if not isinstance(penalty, Tensor) or penalty.numel() != 1:
            shape = tuple(penalty.shape) if isinstance(penalty, Tensor) else type(penalty).__name__
            raise InputError(
                f"regularizer {name!r} returned {shape}: a scalar tensor is needed. Sum over its "
                "entries, or make one regularizer of each."
            )
        return penalty.reshape(1)

    checked = False

    def bind(params: Params) -> Columns:
        nonlocal checked
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
        if not checked:
            _check_gradient(name, value, params, select(params, scope, what=f"scope of {name}"))
            checked = True
        return whole_column(name, gradient)

    return Regularizer(name, bind, value, custom=True)


def _check_gradient(
    name: str, value: Callable[[Params], Tensor], params: Params, in_scope: Sequence[str]
) -> None:
    """Refuse a function whose gradient by autograd is not its finite difference."""
    devices = {p.device for p in params.values()}

    def repeatable(params: Params) -> Tensor:
        with forked_randomness(devices):
            return value(params)

    if layers := derivatives.wrong_gradient(repeatable, params, in_scope):
        raise InputError(
            f"autograd's gradient of regularizer {name!r} is wrong in {shorten(layers)}: it is not "
            "the finite difference of its value. Either it holds a part constant (.detach(), "
            ".data, numpy): compute constants outside of the function. Or it takes derivatives "
            "itself through a layer that torch cannot differentiate that often (a custom "
            "function; three times a fused norm, or batch norm in training mode): write that layer "
            "in elementary torch operations."
        )

"""The outputs of all members at once, from stacked parameters and one batch per member."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from tacit.errors import InputError
from tacit.objective.borrowing import call_with_params, leaves_of_graph, temporary_mode
from tacit.objective.derivatives import leaves, math_attention
from tacit.objective.models import named_modules
from tacit.objective.params import Params

PLAIN = (type(None), (), (), (), ())
"""The behaviour of a module with the forward of its class and without hooks."""

DropoutFunction = Callable[[Tensor, float], Tensor]
"""Applies dropout to activations (members, batch, …); the second argument is the layer's rate."""

Forward = Callable[[Params, Tensor, "DropoutFunction | None"], Tensor]
"""Outputs (members, batch, …) from stacked parameters and inputs (members, batch, …)."""

CHAIN_MODULES = (
    nn.Linear, nn.Dropout, nn.Flatten, nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU,
    nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign,
    nn.Hardtanh, nn.LogSigmoid,
)  # fmt: skip
"""Modules that the fast path evaluates for all members at once."""


def batched_forward(model: nn.Module) -> Forward:
    """The forward function of all members of an architecture.

    A chain of linear layers takes the fast path, with one batched matrix product per layer; any
    other model is mapped over the members with `torch.func.vmap`.
    """
    chain = list(_flatten_sequential(model))
    tied = len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))
    plain = not tied and all(behaviour(module) == PLAIN for module in model.modules())
    if plain and all(_accepts_members(module) for _, module in chain):
        return _chain_forward(chain)
    return _vmap_forward(model)


def behaviour(module: nn.Module) -> tuple[Any, ...]:
    """What a module does besides its class's forward: a forward of its own, and its hooks."""
    forward = vars(module).get("forward")
    function = getattr(forward, "__func__", getattr(forward, "func", forward))
    hooks = (
        module._forward_pre_hooks, module._forward_hooks,
        module._backward_pre_hooks, module._backward_hooks,
    )  # fmt: skip
    return _code(function), *(tuple(map(_code, of_kind.values())) for of_kind in hooks)


def _code(function: Any) -> Any:
    """What a function does; the same for all functions that one line of code has made."""
    return getattr(function, "__code__", type(function))


def check_backward_hooks(model: nn.Module) -> None:
    """Refuse hooks that change gradients: the backward pass of all members does not call them."""
    for name, module in named_modules(model).items():
        hooks = {n: p._backward_hooks for n, p in module._parameters.items() if p is not None}
        hooks["the module"] = module._backward_hooks or module._backward_pre_hooks
        hooked = [part for part, of_part in hooks.items() if of_part]
        if hooked:
            raise InputError(
                f"{hooked[0]} of {name or type(model).__name__!r} has a backward hook, which an "
                "ensemble does not apply: remove it, or write tacit.endpoint_equations for each "
                "model."
            )


def _accepts_members(module: nn.Module | None) -> bool:
    """Whether a module treats each example separately, so that a dimension can be put first."""
    first_dim = module.start_dim if isinstance(module, nn.Flatten) else 1
    return type(module) in CHAIN_MODULES and first_dim >= 1


def _flatten_sequential(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules of nested nn.Sequential in order, each with the prefix of its parameters."""
    if type(model) is nn.Sequential:
        # named_children() would leave out the second use of a module.
        for name, child in model._modules.items():
            yield from _flatten_sequential(child, f"{prefix}{name}.")
    else:
        yield prefix, model


def _chain_forward(chain: list[tuple[str, nn.Module]]) -> Forward:
    def forward(params: Params, inputs: Tensor, apply_dropout: DropoutFunction | None) -> Tensor:
        x = inputs
        for prefix, module in chain:
            if isinstance(module, nn.Linear):
                x = _linear(x, params[f"{prefix}weight"], params.get(f"{prefix}bias"))
            elif isinstance(module, nn.Flatten):
                dims = (module.start_dim, module.end_dim)
                x = x.flatten(*(dim if dim < 0 else dim + 1 for dim in dims))
            elif not isinstance(module, nn.Dropout):
                x = module(x)
            elif apply_dropout is not None:
                x = apply_dropout(x, module.p)
        return x

    return forward


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(len(x), -1, x.shape[-1])
    transposed = weight.transpose(1, 2)
    y = rows @ transposed if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, transposed)
    return y.reshape(*x.shape[:-1], weight.shape[1])


def _vmap_forward(model: nn.Module) -> Forward:
    """The forward function of any model."""
    dropout = [n for n, m in model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    checked = False

    def forward(params: Params, inputs: Tensor, apply_dropout: DropoutFunction | None) -> Tensor:
        nonlocal checked
        if apply_dropout is not None and dropout:
            raise InputError(
                f"{type(model).__name__} has dropout ({dropout[0]!r}) but is not a chain of linear "
                "layers, and only a chain can give each member its own masks: write the model as "
                "nn.Sequential of Linear, activations, Flatten and Dropout, or remove the dropout."
            )
        with temporary_mode(model, training=apply_dropout is not None):
            if torch.compiler.is_compiling():
                # It can be compiled, but it damages modules under two names.
                return vmap(lambda p, x: functional_call(model, p, (x,)))(params, inputs)
            with math_attention():  # the fast path of attention has no derivative under vmap
                if not checked:
                    _check_own_parameters(model, params, inputs)
                    checked = True
                return vmap(lambda p, x: call_with_params(model, p, lambda m: m(x)))(params, inputs)

    return forward


def check_compilable(model: nn.Module) -> None:
    """Refuse to compile a model that has layers under two names."""
    layers = [m for _, m in model.named_modules(remove_duplicate=False) if m._parameters]
    if len(layers) > len(set(layers)):
        raise InputError(
            f"{type(model).__name__} has a layer under two names, which cannot be compiled: leave "
            "compile= out of the plan."
        )


def _check_own_parameters(model: nn.Module, params: Params, inputs: Tensor) -> None:
    """Refuse a model whose outputs use parameters that are not swapped for those of a member."""
    first = leaves({name: tensor[0] for name, tensor in params.items()})
    with torch.enable_grad():
        output = call_with_params(model, first, lambda m: m(inputs[0].detach()))
    swapped_in = {id(tensor) for tensor in first.values()}
    used = [tensor for tensor in leaves_of_graph(output) if id(tensor) not in swapped_in]
    if any(isinstance(tensor, nn.Parameter) for tensor in used):
        raise InputError(
            f"the outputs of {type(model).__name__} depend on parameters outside of its modules, "
            "which all members would share: a forward or a hook that refers to the original of a "
            "copied model, or a parameter in a closure. Use the module that forward or the hook "
            "receives as its first argument."
        )

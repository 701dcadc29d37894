"""The outputs of all members at once, from stacked parameters and one batch per member."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from tacit.errors import InputError
from tacit.objective.borrowing import temporary_mode
from tacit.objective.params import Params

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
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    if not tied and not hooked and all(_accepts_members(module) for _, module in chain):
        return _chain_forward(chain)
    return _vmap_forward(model)


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
    """The forward function of any model.

    `objective.borrowing.call_with_params` would copy the buffers for each call; those of an
    ensemble's model are not floating-point, and stay as they are.
    """
    dropout = [n for n, m in model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]

    def forward(params: Params, inputs: Tensor, apply_dropout: DropoutFunction | None) -> Tensor:
        if apply_dropout is not None and dropout:
            raise InputError(
                f"{type(model).__name__} has dropout ({dropout[0]!r}) but is not a chain of linear "
                "layers, and only a chain can give each member its own masks: write the model as "
                "nn.Sequential of Linear, activations, Flatten and Dropout, or remove the dropout."
            )
        with temporary_mode(model, training=apply_dropout is not None):
            return vmap(lambda p, x: functional_call(model, p, (x,)))(params, inputs)

    return forward

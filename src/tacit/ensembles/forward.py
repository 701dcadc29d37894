"""One architecture evaluated for all members at once: M networks, M batches, M outputs."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from tacit.errors import InputError
from tacit.objective.params import Params

Drop = Callable[[Tensor, float], Tensor]
"""What dropout does to activations (members, batch, …), given the layer's own rate."""

Forward = Callable[[Params, Tensor, "Drop | None"], Tensor]
"""Outputs (members, batch, …) from stacked parameters and inputs (members, batch, …)."""

ENTRYWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.LogSigmoid,
)  # fmt: skip


def forward_of(model: nn.Module) -> Forward:
    """The fast path for chains of linear layers, one batched product a layer; else vmap."""
    chain = list(_chain(model))
    known = (nn.Linear, nn.Dropout, nn.Flatten, *ENTRYWISE)
    tied = len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    if not tied and not hooked and all(_plain(module, known) for _, module in chain):
        return _chained(chain)
    return _mapped(model)


def _plain(module: nn.Module | None, known: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module acts on each example alone, so that members can be put before it."""
    first = module.start_dim if isinstance(module, nn.Flatten) else 1
    return type(module) in known and first >= 1


def _chain(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    if type(model) is nn.Sequential:
        for name, child in model._modules.items():  # named_children leaves out second uses
            yield from _chain(child, f"{prefix}{name}.")
    else:
        yield prefix, model


def _chained(chain: list[tuple[str, nn.Module]]) -> Forward:
    def forward(params: Params, inputs: Tensor, drop: Drop | None) -> Tensor:
        x = inputs
        for prefix, module in chain:
            if isinstance(module, nn.Linear):
                x = _linear(x, params[f"{prefix}weight"], params.get(f"{prefix}bias"))
            elif isinstance(module, nn.Flatten):
                ends = (module.start_dim, module.end_dim)
                x = x.flatten(*(end if end < 0 else end + 1 for end in ends))
            elif not isinstance(module, nn.Dropout):
                x = module(x)
            elif drop is not None:
                x = drop(x, module.p)
        return x

    return forward


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(len(x), -1, x.shape[-1])
    turned = weight.transpose(1, 2)
    y = rows @ turned if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, turned)
    return y.reshape(*x.shape[:-1], weight.shape[1])


def _mapped(model: nn.Module) -> Forward:
    noisy = [n for n, m in model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]

    def forward(params: Params, inputs: Tensor, drop: Drop | None) -> Tensor:
        if drop is not None and noisy:
            raise InputError(
                f"{type(model).__name__} has dropout ({noisy[0]!r}) but is no chain of linear "
                "layers, and only in a chain has each member its own masks: write it as "
                "nn.Sequential of Linear, activations, Flatten and Dropout, or leave dropout out."
            )
        modes = [(module, module.training) for module in model.modules()]
        model.train(drop is not None)
        try:
            return vmap(lambda p, x: functional_call(model, p, (x,)))(params, inputs)
        finally:
            for module, mode in modes:
                module.training = mode

    return forward

"""A model read as a chain of linear layers, activations and dropout masks.

The normal form alternates linear layers and units, where a unit is an activation followed by a
mask; either may be absent. Every order of activations and dropout has it exactly:

    dropout at rate p, then at rate q     = dropout at rate 1 − (1−p)(1−q);
    φ(dropout of x), for φ(0) = 0         = dropout of (1−q) φ(x/(1−q)) with the same mask.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective.models import named_modules, walk_modules
from tacit.objective.params import Params, shorten

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh)
CHAIN = (nn.Linear, nn.Dropout, nn.Flatten, nn.Identity, *ACTIVATIONS)
NEEDED = (
    "dropout_moments needs a chain of nn.Linear, nn.ReLU, nn.GELU, nn.Tanh and nn.Dropout modules "
    "(nn.Flatten and nn.Identity do no harm), such as nn.Sequential"
)


@dataclass(frozen=True)
class Linear:
    """A linear layer, by the names of its parameters; one without bias has bias ""."""

    weight: str
    bias: str

    def of(self, params: Params) -> tuple[Tensor, Tensor | None]:
        """Weight and bias."""
        return params[self.weight], params[self.bias] if self.bias else None


@dataclass(frozen=True)
class Unit:
    """φ_c(x) = φ(cx)/c, then a mask; φ is the identity where there is no activation."""

    activation: nn.Module | None = None
    before: tuple[float, ...] = ()
    """Rates of the dropout before the activation."""
    after: tuple[float, ...] = ()

    def keep(self, rate: Tensor | None) -> tuple[Any, Any]:
        """The probabilities that an entry is kept before the activation, and by the whole mask."""
        kept = [1 - q if rate is None else 1 - rate for q in (*self.before, *self.after) if q > 0]
        products: list[Any] = [1.0]
        for k in kept:
            products.append(products[-1] * k)
        return products[sum(q > 0 for q in self.before)], products[-1]

    @property
    def random(self) -> bool:
        """Whether it drops anything."""
        return any(q > 0 for q in (*self.before, *self.after))


@dataclass(frozen=True)
class Chain:
    """The steps of a model, in order, and its modules in the order in which they are called."""

    steps: tuple[Linear | Unit, ...]
    modules: tuple[nn.Module, ...]

    @property
    def random(self) -> bool:
        """Whether the chain has a dropout layer with p > 0."""
        return any(isinstance(step, Unit) and step.random for step in self.steps)

    def outputs(self, params: Params, x: Tensor) -> Tensor:
        """The outputs in eval mode, for inputs (…, examples, features)."""
        for step in self.steps:
            if isinstance(step, Linear):
                x = linear(x, *step.of(params))
            elif step.activation is not None:
                x = step.activation(x)
        return x

    def params(self) -> Params:
        """The parameters that the modules have now, by the names that the steps know."""
        linears = (module for module in self.modules if isinstance(module, nn.Linear))
        params: Params = {}
        for step in self.steps:
            if isinstance(step, Linear):
                module = next(linears)
                params[step.weight] = module.weight
                if step.bias:
                    params[step.bias] = module.bias
        return params


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Wx + b for x (…, examples, in), W (…, out, in) and b (…, out)."""
    y = x @ weight.mT
    return y if bias is None else y + bias.unsqueeze(-2)


def read_chain(model: nn.Module) -> Chain:
    """The chain of a model's modules in the order in which they are registered.

    Refused unless all of them are modules of a chain. Whether the model calls them in this order,
    and does nothing else, is for the caller to check.
    """
    leaves = [(own[:-1], m) for own, _, m in walk_modules(model) if not any(m.children())]
    names = {module: name for name, module in named_modules(model).items()}
    others = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in leaves
        if type(module) not in CHAIN
    ]
    if others:
        raise InputError(
            f"{NEEDED}; {type(model).__name__} has {shorten(others)}. Use explicit_dropout, which "
            "takes any model, to second order in the noise of the masks."
        )
    steps: list[Linear | Unit] = []
    for name, module in leaves:
        if isinstance(module, nn.Linear):
            prefix = names.get(module, name)
            prefix = f"{prefix}." if prefix else ""
            bias = f"{prefix}bias" if module.bias is not None else ""
            if steps and isinstance(steps[-1], Linear):
                steps.append(Unit())
            steps.append(Linear(f"{prefix}weight", bias))
        elif isinstance(module, nn.Dropout | nn.ReLU | nn.GELU | nn.Tanh):
            unit = steps.pop() if steps and isinstance(steps[-1], Unit) else Unit()
            assert isinstance(unit, Unit)
            steps.append(_extend(unit, module, name))
    chain = Chain(tuple(steps), tuple(module for _, module in leaves))
    if not any(isinstance(step, Linear) for step in steps):
        raise InputError(f"{NEEDED}; {type(model).__name__} has no nn.Linear.")
    if not chain.random:
        raise InputError(
            f"{type(model).__name__} has no nn.Dropout with p > 0, so that the penalty of dropout "
            "is zero: set p to the rate of training. F.dropout is not seen: use nn.Dropout modules."
        )
    _check_rates(leaves)
    return chain


def _extend(unit: Unit, module: nn.Module, name: str) -> Unit:
    if isinstance(module, nn.Dropout):
        if unit.activation is None:
            return replace(unit, before=(*unit.before, module.p))
        return replace(unit, after=(*unit.after, module.p))
    if unit.activation is not None:
        raise InputError(
            f"{name!r} ({type(module).__name__}) follows another activation: {NEEDED}, with a "
            "linear layer between two activations. Remove one of them."
        )
    # On its way through the activation, which may work in place, a tensor of a graph must not
    # change.
    return replace(unit, activation=_out_of_place(module))


def _out_of_place(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.ReLU):
        return nn.ReLU()
    return nn.GELU(module.approximate) if isinstance(module, nn.GELU) else nn.Tanh()


def _check_rates(leaves: list[tuple[str, nn.Module]]) -> None:
    for name, module in leaves:
        if isinstance(module, nn.Dropout) and not 0 <= module.p < 1:
            raise InputError(
                f"{name!r} drops everything (p = {module.p}), so that no moments of what follows "
                "exist: set p below 1."
            )


def called_modules(chain: Chain, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, list]:
    """The outputs of the model, and the modules of the chain in the order of their calls."""
    called: list[nn.Module] = []
    hooks = [
        module.register_forward_hook(lambda m, _, output: called.append(m))
        for module in dict.fromkeys(chain.modules)
    ]
    try:
        with torch.no_grad():
            return model(*inputs), called
    finally:
        for hook in hooks:
            hook.remove()

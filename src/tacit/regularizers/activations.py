"""The size of activations, plain or weighted by the squared weights that read them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import activation

from tacit.errors import InputError, check_type
from tacit.objective.losses import count_examples, split_batch
from tacit.objective.models import walk_modules
from tacit.objective.objective import Objective
from tacit.objective.params import Scope, describe, shorten
from tacit.regularizers.data_dependent import mean_penalty, per_example
from tacit.regularizers.family import Regularizer

NOT_HIDDEN = (nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.Softmin, nn.LogSoftmax)
ACTIVATIONS = tuple(
    kind for kind in vars(activation).values()
    if isinstance(kind, type) and kind.__module__ == activation.__name__ and kind not in NOT_HIDDEN
)  # fmt: skip
"""Torch's modules of activation functions; softmax makes probabilities and attention weights."""
LINEAR = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
"""How the layers run whose inputs can be weighted by their weights."""

Patterns = str | Sequence[str]


def activation_norm(
    objective: Objective,
    *,
    layers: Patterns | None = None,
    weighted: bool = False,
    scope: Scope = None,
    name: str = "activation_norm",
) -> Regularizer:
    """The mean squared norm of activations, R(θ) = mean_i Σ_l ‖h_l(x_i)‖².

    h_l are the outputs of the modules named by `layers`, by default of all activation modules
    (`nn.ReLU`, `nn.Tanh`, …; not softmax) that the model runs through. The norm sums over all
    entries of an example (units, positions, tokens), and over the calls of a module that runs
    several times.

    With `weighted=True` it is the activation-weighted ridge of linear and convolution layers with
    inputs h and weights W,

        R(θ) = mean_i Σ_l Σ_jk W_jk² h_k(x_i)².

    Dropout of rate q before the last linear layer adds this to the mean of ½(f − y)² at
    ½ q/(1−q), and to torch's mse_loss of m outputs at q/(1−q)/m: exactly. Dropout of the inputs of
    a linear model is the same with h = x.

    R is differentiated by the weights and by what the activations depend on. It takes one pass.

    Traps:
        Activations that are functions in the model's code (F.relu) are no modules and are not in
        the default: name the layers then, as in layers=["encoder.*", "head"].

        The outputs of a normalisation layer have a constant norm, up to its scale and shift:
        R then says little.

        Layers inside activation checkpointing run a second time during backward: torch raises an
        error. Switch it off.

    Args:
        objective: an Objective(model, loss, data). Its model is evaluated in eval mode, with the
            objective's choice of batch norm.
        layers: names of modules as in `model.named_modules()`, patterns such as "blocks.*.act", or
            a list of both. weighted=True needs them, and counts the linear and convolution layers
            among them. A model that is a bare layer has the name "".
        weighted: whether to weigh the inputs of the layers by the squares of their weights.
        scope: which rows the column covers.
        name: the name that the strength is listed under.
    """
    needed = "the tacit.Objective of the model and its data"
    check_type(f"the objective of {name}", objective, Objective, needed)
    check_type("weighted", weighted, bool, "True or False")
    chosen = _choose(objective.model, layers, weighted=weighted)
    called: set[nn.Module] = set()

    def penalties(model: nn.Module, batch: Any) -> Tensor:
        inputs, _ = split_batch(batch)
        with _recorded(chosen, count_examples(batch), weighted=weighted) as terms:
            model(*inputs)
        called.update(module for module, _ in terms)
        if not terms:
            raise InputError(
                f"the model runs through none of the layers {shorten(chosen.values())} as modules: "
                "name others, as in layers=."
            )
        return torch.stack([term for _, term in terms]).sum(0)

    derived = per_example(name, objective, penalties)
    idle = [layer for module, layer in chosen.items() if module not in called]
    if layers is not None and idle:
        raise InputError(
            f"the model does not run through {shorten(idle)} as a module (its weights may be read "
            "without calling it, as in attention): leave it out of layers=."
        )
    definition = f"activation_norm(layers={layers!r}, weighted={weighted})"
    penalty = mean_penalty(derived, objective, scope=scope, name=name, cost="pass")
    return replace(penalty, definition=definition)


@contextmanager
def _recorded(
    chosen: dict[nn.Module, str], count: int, *, weighted: bool
) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """The sizes of activations while the model runs: one per call of a layer, by example."""
    terms: list[tuple[nn.Module, Tensor]] = []

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        h = (*args, *kwargs.values())[0] if weighted else output
        if not isinstance(h, Tensor) or not h.ndim or len(h) != count:
            raise InputError(
                f"layer {chosen[module]!r} has {describe(h)} for {count} examples: a tensor with "
                "one row per example is needed. Put the examples first, as with batch_first=True, "
                "or name other layers."
            )
        if not torch.is_grad_enabled():
            raise InputError(
                f"layer {chosen[module]!r} runs under no_grad, where its activations have no "
                "gradient. Freeze parameters with requires_grad_(False) instead, and switch "
                "activation checkpointing off."
            )
        squares = h.clone().square()  # a clone, because the next layer may work in place
        sizes = _with_squared_weights(module, squares) if weighted else squares
        terms.append((module, sizes.reshape(count, -1).sum(1)))

    with ExitStack() as hooks:
        for module in chosen:
            hooks.enter_context(module.register_forward_hook(record, with_kwargs=True))
        yield terms


def _with_squared_weights(module: nn.Module, squares: Tensor) -> Tensor:
    """The layer with squared weights and no bias, summed over the outputs if it is linear."""
    if isinstance(module, nn.Linear):
        return squares @ module.weight.square().sum(0)
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return module._conv_forward(squares, module.weight.square(), None)


def _choose(model: nn.Module, layers: Patterns | None, *, weighted: bool) -> dict[nn.Module, str]:
    """The modules whose activations count, with their names."""
    candidates = _candidates(model, weighted=weighted)
    there_are = f"There are: {shorten(n or repr(n) for n, _ in candidates)}."
    if layers is None:
        if weighted:
            raise InputError(
                "layers is missing: weighted=True needs the linear or convolution layers whose "
                f"inputs count. {there_are}"
            )
        chosen = {module: n for n, module in candidates if isinstance(module, ACTIVATIONS)}
        if not chosen:
            raise InputError(
                "the model has no activation modules (nn.ReLU, nn.Tanh, …): pass layers=, the "
                f"modules whose outputs count. {there_are}"
            )
        return chosen
    patterns = [layers] if isinstance(layers, str) else layers
    needed = "a module's name, a pattern such as 'blocks.*.act', or a list of them"
    check_type("layers", patterns, Sequence, needed)
    chosen: dict[nn.Module, str] = {}
    for pattern in patterns:
        check_type("an entry of layers", pattern, str, needed)
        matches = {module: n for n, module in candidates if fnmatchcase(n, pattern)}
        if not matches:
            kind = "nn.Linear, nn.Conv1d, nn.Conv2d or nn.Conv3d" if weighted else "module"
            raise InputError(f"layers: {pattern!r} matches no {kind}. {there_are}")
        chosen = matches | chosen
    return chosen


def _candidates(model: nn.Module, *, weighted: bool) -> list[tuple[str, nn.Module]]:
    """All modules that can be chosen, under all their names; a bare layer has the name ""."""
    modules = [(own[:-1], module) for own, _, module in walk_modules(model)]
    if len(modules) > 1:
        modules = [(n, module) for n, module in modules if n]
    if weighted:
        return [(n, module) for n, module in modules if type(module).forward in LINEAR]
    return [(n, m) for n, m in modules if not isinstance(m, nn.ModuleList | nn.ModuleDict)]

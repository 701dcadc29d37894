"""Stochastic depth: residual blocks that are left out at random."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import InputError, check_number, check_type
from tacit.objective.batches import BatchPair, row_count, tensors_in
from tacit.objective.deriving import count_calls, probe_of, with_noise, with_scale
from tacit.objective.models import named_modules
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import describe, shorten
from tacit.objective.randomness import Noise
from tacit.objective.scale import Scale


def stochastic_depth(
    objective: Objective,
    q: float,
    *,
    layers: str | Sequence[str],
    draws: int | None = None,
    seed: int = 0,
) -> Objective:
    """E L with the outputs of residual branches multiplied by m/(1 − q), m = 0 with probability q.

    A layer is a module F whose output is added to the stream, x + F(x). Every example has its own
    m, and so has every layer. For the last block of a network with loss ½(f−y)² it adds exactly
    q/(1−q) · ½ mean (what the block adds to f)².

    Trap: a module that adds x itself (a whole residual block) is not such a layer: its input would
    be left out too. Name the branch inside of it. With one q per layer, apply the technique once
    for each.

    Args:
        objective: the objective without the technique.
        q: probability of leaving a branch out, from 0 to below 1.
        layers: names of the branches, as in model.named_modules().
        draws: how many draws are averaged, an even number; by default 16, or twice those
            of an objective that has draws itself.
        seed: draws depend only on (seed, draw, batch).
    """
    check_objective(objective)
    check_number("q", q, least=0, below=1)
    names = _check_layers(objective, layers)

    def change(model: nn.Module, pair: BatchPair, noise: Noise) -> BatchPair:
        rows = _rows(pair[0])
        modules = named_modules(model)
        like = next(t for t in tensors_in(pair[0]) if t.ndim)
        for name in names:
            uniform = noise.uniform(torch.empty(rows, device=like.device, dtype=torch.float64))
            modules[name].register_forward_hook(_Mask((uniform >= q) / (1 - q)))
        # The hooks stay until the parameters are swapped back, which restores all attributes of
        # modules: activation checkpointing calls a module again in the backward pass.
        return pair

    options = {"layers": layers, "draws": draws, "seed": seed}
    full, half = q / (1 - q), q / (2 - q)
    return with_scale(
        with_noise(objective, f"stochastic_depth({q:g})", change=change, draws=draws, seed=seed),
        Scale("q", float(q), growth=full / half if q else 2.0, order=1),
        lambda other: stochastic_depth(objective, other, **options),
    )


class _Mask:
    """A forward hook that multiplies the output of every example by a number."""

    def __init__(self, factors: Tensor):
        self._factors = factors

    def __call__(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        if len(self._factors) != len(output):
            raise InputError(
                f"a branch has {len(output)} rows for {len(self._factors)} examples: apply "
                "stochastic_depth first, and mixup to its result."
            )
        factors = self._factors.to(output.device, output.dtype)
        return output * factors.view(-1, *[1] * (output.ndim - 1))


def _rows(batch: Any) -> int:
    """How many examples a batch has."""
    rows = row_count(batch)
    if rows is None:
        rows = next((len(t) for t in tensors_in(batch) if t.ndim), 0)
    return rows


def _check_layers(objective: Objective, layers: Any) -> list[str]:
    """The names of layers, each called once with one row per example."""
    needed = "the name of a module, or a list of names"
    check_type("layers", layers, str | Sequence, needed)
    names = [layers] if isinstance(layers, str) else list(layers)
    modules = named_modules(objective.model)
    unknown = [name for name in names if name not in modules or not name]
    if unknown or not names:
        raise InputError(
            f"layers={layers!r} names no module of the model: there are "
            f"{shorten(filter(None, modules))}."
        )
    rows = _rows(probe_of(objective)[0])
    for name, outputs in count_calls(objective, names).items():
        if len(outputs) != 1:
            raise InputError(
                f"layer {name!r} is called {len(outputs)} times in a forward pass: stochastic "
                "depth needs a module that is called once. Give every block its own module."
            )
        (output,) = outputs
        if not isinstance(output, Tensor) or output.shape[:1] != (rows,):
            raise InputError(
                f"layer {name!r} returns {describe(output)} for {rows} examples: a tensor with one "
                "row per example is needed, the branch that is added to the stream."
            )
    return names

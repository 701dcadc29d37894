"""Derivatives of every example's own loss along a few directions, in one pass over the data."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from tacit import derivatives
from tacit.by_unit import Mix, duals, forward, reverse, second
from tacit.data import cut
from tacit.errors import InputError
from tacit.losses import Spread, examples
from tacit.noise import Noise
from tacit.params import Params, wide
from tacit.streaming import Stream


class Along(NamedTuple):
    """Derivatives by unit, in the order of the data, and what each unit weighs in the mean."""

    values: Tensor
    """(units, directions), in float64 on the CPU."""
    weights: Tensor | None
    """None where all weigh the same."""
    mixed: Params | None = None
    """Σ s_i w_i ∇ℓ_i for the signs s that were given, in float64: the backward pass has it."""


Contract = Callable[[Spread], Tensor]
"""From a batch's outputs to its values, (units, directions)."""


@dataclass
class _Route:
    """How derivatives are taken: by reverse mode, until it is seen to fail."""

    forward: bool = False
    tried: bool = False
    reason: str = field(default="", repr=False)


@torch.inference_mode(mode=False)
def along(
    stream: Stream,
    params: Params,
    first: tuple[Any, Tensor | None],
    directions: Sequence[Params],
    *,
    draws: Sequence[int] | None = None,
    base: Params | None = None,
    signs: Tensor | None = None,
) -> Along:
    """D ℓ_i[v_j] of every unit, or D²ℓ_i[v_j, base]; `first` are the examples that probes see.

    Directions are asked for by index once a batch and draw, so that they may be made on demand.
    With a sign for every unit, the sum of their gradients with these signs comes along.
    """
    if not len(directions):
        raise InputError("directions is empty: pass at least one, a dictionary of named tensors.")
    for given in (directions[0], base or {}):
        _check(given, params)
    draws, route = stream.drawn(draws), _Route()
    mix = Mix(signs, params, len(draws))
    values: list[Tensor] = []
    weighed: list[Tensor | None] = []
    with stream.ready(training=stream.training), _differentiable_attention():
        _check_rows(stream, params, first)
        for index, (batch, weights) in enumerate(stream.read()):
            total, unit_weights = torch.zeros(()), None
            for draw in draws:

                def take(
                    leaves: Params, contract: Contract, b=batch, w=weights, d=draw, i=index
                ) -> tuple[Tensor, Tensor | None]:
                    def use(model: nn.Module, noise: Noise | None) -> tuple[Tensor, Tensor | None]:
                        found = stream.spread(model, b, w, noise)
                        return wide(contract(found)).cpu(), found.weights

                    return stream.lend(leaves, use, draw=d, index=i)

                part, unit_weights = (
                    _batch(take, params, directions, route, mix)
                    if base is None
                    else _second_order(take, params, directions, base)
                )
                total = total + part / len(draws)
            mix.next(len(total))
            values.append(total)
            weighed.append(unit_weights)
    found = torch.cat(values)
    if not torch.isfinite(found).all():
        raise InputError(
            "derivatives of single examples are not finite, with a finite mean loss: they overflow "
            "the model's dtype. Evaluate in a wider one."
        )
    return Along(found, _joined(values, weighed), mix.sums)


Take = Callable[[Params, Contract], tuple[Tensor, Tensor | None]]


def _joined(values: list[Tensor], weighed: list[Tensor | None]) -> Tensor | None:
    """Weights of all units, where any batch has some; those of others weigh one."""
    if all(own is None for own in weighed):
        return None
    ones = [torch.ones(len(part), dtype=torch.float64) for part in values]
    pairs = zip(ones, weighed, strict=True)
    return torch.cat([one if own is None else wide(own.detach()).cpu() for one, own in pairs])


def _second_order(
    take: Take, params: Params, directions: Sequence[Params], base: Params
) -> tuple[Tensor, Tensor | None]:
    with torch.enable_grad():
        leaves = derivatives.leaves(params)
        return take(leaves, lambda found: second(found, leaves, directions, base))


def _batch(
    take: Take,
    params: Params,
    directions: Sequence[Params],
    route: _Route,
    mix: Mix,
) -> tuple[Tensor, Tensor | None]:
    """One batch and draw; where reverse mode fails the first time, all go by forward mode."""
    if not route.forward:
        try:
            with torch.enable_grad():
                leaves, check = derivatives.leaves(params), not route.tried
                result = take(
                    leaves, lambda found: reverse(found, leaves, directions, mix, check=check)
                )
            route.tried = True
            return result
        except RuntimeError as error:
            if route.tried or isinstance(error, torch.OutOfMemoryError):
                raise
            route.forward, route.reason = True, str(error)
    try:
        if mix.sums is not None:
            with torch.enable_grad():
                leaves = derivatives.leaves(params)
                take(leaves, lambda found: mix.backward(found, leaves))
        columns, weights = [], None
        for j in range(len(directions)):
            with forward_ad.dual_level(), torch.no_grad():
                column, weights = take(duals(params, directions[j]), forward)
            columns.append(column)
        return torch.cat(columns, dim=1), weights
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(
            "derivatives of single examples need double backward or forward mode, and an operator "
            f"here has neither ({route.reason}; {error}). Custom functions need a differentiable "
            "backward or a jvp."
        ) from error


def _check(given: Params, params: Params) -> None:
    """Refuse a direction that does not fit the parameters."""
    for name, tensor in given.items():
        if name not in params or tensor.shape != params[name].shape:
            raise InputError(
                f"a direction has {name!r} of shape {tuple(tensor.shape)}: the model's parameters "
                "are others. Pass tensors by the names of Objective.params, in their shapes."
            )


def _check_rows(stream: Stream, params: Params, first: tuple[Any, Tensor | None]) -> None:
    """Refuse outputs whose first dimension is as long as the batch by accident."""

    def half(model: nn.Module, noise: Noise | None) -> None:
        batch, weights = cut(first, slice(count // 2), count)
        stream.spread(model, batch, weights, noise)

    # Losses of units are rows by their definition.
    count = 0 if stream.masks else examples(first[0])
    if count > 1:
        with torch.no_grad():
            stream.lend(params, half, draw=0)


@contextmanager
def _differentiable_attention() -> Iterator[None]:
    """Attention on the math path, whose derivatives have derivatives."""
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)

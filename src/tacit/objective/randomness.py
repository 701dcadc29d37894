"""Randomness by explicit seeds: draws of a technique's noise, in mirrored pairs."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.errors import InputError


class Noise:
    """The random numbers of one draw on one batch; draws 2j and 2j+1 are mirror images.

    Effects that are odd in the noise cancel exactly within a pair; for small noise they are nearly
    all of the difference between draws. The numbers depend only on (seed, pair, batch) and on the
    order of the calls.

    Trap: a technique must ask for the same shapes in the same order at every draw, or its pairs
    are not mirror images.
    """

    def __init__(self, seed: int, draw: int, batch: int):
        self._mirrored = draw % 2 == 1
        self._seed = _seed_from(seed, draw // 2, batch, 1)
        self._generators: dict[torch.device, torch.Generator] = {}

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers with a tensor's shape, dtype and device; z and −z in a pair."""
        z = torch.randn(like.shape, **self._options(like))
        return -z if self._mirrored else z

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers from 0 to 1 with a tensor's shape, dtype and device; u and 1 − u in a pair."""
        u = torch.rand(like.shape, **self._options(like))
        return 1 - u if self._mirrored else u

    def signs(self, like: Tensor) -> Tensor:
        """Numbers −1 or 1 with a tensor's shape, dtype and device; s and −s in a pair."""
        s = 2 * torch.randint(0, 2, like.shape, **self._options(like)) - 1
        return -s if self._mirrored else s

    def _options(self, like: Tensor) -> dict[str, Any]:
        """Dtype, device and generator; the default dtype for integer tensors such as tokens."""
        if like.device not in self._generators:
            generator = torch.Generator(device=like.device)
            self._generators[like.device] = generator.manual_seed(self._seed)
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        return {"dtype": dtype, "device": like.device, "generator": self._generators[like.device]}


def takes_noise(batch_loss: Callable[..., Any], training: bool, draws: int) -> bool:
    """Whether a batch_loss has three required parameters (model, batch, noise)."""
    try:
        parameters = inspect.signature(batch_loss).parameters.values()
    except (TypeError, ValueError):
        return False  # some callables written in C have no signature: they are called with two
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    optional = any(p.name == "noise" and p not in required for p in parameters)
    if len(required) > 3 or optional or (training and variadic and len(required) < 3):
        raise InputError(
            f"batch_loss{inspect.signature(batch_loss)} may or may not take noise: write (model, "
            "batch) or (model, batch, noise) without defaults; bind others by functools.partial."
        )
    if len(required) < 3:
        return False
    if not training or draws % 2:
        raise InputError(
            f"batch_loss takes noise, with training={training} and draws={draws}: its draws come "
            "in mirrored pairs. Pass training=True and an even number of draws, such as draws=16."
        )
    return True


def split_draws(draws: int, groups: int, *, paired: bool) -> list[list[int]]:
    """The draws of each group, assigned in turn; mirrored pairs stay in one group."""
    size = 2 if paired else 1
    return [[d for d in range(draws) if d // size % groups == group] for group in range(groups)]


def seed_draw(seed: int, draw: int, batch: int, devices: set[torch.device]) -> None:
    """Seed torch for one draw on one batch."""
    seed_devices(_seed_from(seed, draw, batch), devices)


def seed_devices(seed: int, devices: set[torch.device]) -> None:
    """Seed the generators that a model on these devices draws from, and no others."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def _seed_from(*numbers: int) -> int:
    """A seed of 63 bits that depends on all the numbers."""
    state = np.random.SeedSequence(list(numbers)).generate_state(1, np.uint64)
    return int(state[0]) >> 1

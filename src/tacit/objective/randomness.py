"""Random numbers for techniques that take their noise as an argument, in mirrored pairs."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.errors import InputError


class Noise:
    """The random numbers of one draw on one batch; draws 2j and 2j+1 are mirror images.

    What is odd in the noise cancels within a pair, exactly: for small noise that is nearly all of
    what one draw differs from another. Numbers depend on (seed, pair, batch) and on the order of
    the calls alone, so a technique must ask for the same shapes in the same order at every draw.
    """

    def __init__(self, seed: int, draw: int, batch: int):
        self._mirrored = draw % 2 == 1
        state = np.random.SeedSequence([seed, draw // 2, batch, 1]).generate_state(1, np.uint64)
        self._seed = int(state[0]) >> 1
        self._generators: dict[torch.device, torch.Generator] = {}

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers in a tensor's shape, dtype and place; z and −z in a pair."""
        drawn = torch.randn(like.shape, **self._where(like))
        return -drawn if self._mirrored else drawn

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers between 0 and 1 in a tensor's shape, dtype and place; u and 1 − u in a pair."""
        drawn = torch.rand(like.shape, **self._where(like))
        return 1 - drawn if self._mirrored else drawn

    def signs(self, like: Tensor) -> Tensor:
        """Numbers −1 or 1 in a tensor's shape, dtype and place; s and −s in a pair."""
        drawn = 2 * torch.randint(0, 2, like.shape, **self._where(like)) - 1
        return -drawn if self._mirrored else drawn

    def _where(self, like: Tensor) -> dict[str, Any]:
        """Dtype, device and generator; the default dtype beside whole numbers such as tokens."""
        if like.device not in self._generators:
            generator = torch.Generator(device=like.device)
            self._generators[like.device] = generator.manual_seed(self._seed)
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        return {"dtype": dtype, "device": like.device, "generator": self._generators[like.device]}


def takes_noise(batch_loss: Callable[..., Any], *, training: bool, draws: int) -> bool:
    """Whether a batch_loss is one of (model, batch, noise), by its three required parameters."""
    try:
        given = inspect.signature(batch_loss).parameters.values()
    except (TypeError, ValueError):
        return False  # of some callables written in C nothing can be known: they get two
    places = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in places if p.default is p.empty]
    more = any(p.kind is p.VAR_POSITIONAL for p in given)
    optional = any(p.name == "noise" and p not in needed for p in given)
    if len(needed) > 3 or optional or (training and more and len(needed) < 3):
        raise InputError(
            f"batch_loss{inspect.signature(batch_loss)} may or may not take noise: write "
            "batch_loss(model, batch), or batch_loss(model, batch, noise) with three parameters "
            "that have no default, and bind all others with functools.partial."
        )
    if len(needed) < 3:
        return False
    if not training or draws % 2:
        raise InputError(
            f"batch_loss takes noise, with training={training} and draws={draws}: its draws come "
            "in mirrored pairs. Pass training=True and an even number of draws, such as draws=16."
        )
    return True


def split_draws(draws: int, groups: int, *, paired: bool) -> list[list[int]]:
    """Draws dealt to groups in turn; mirrored pairs stay together."""
    size = 2 if paired else 1
    return [[d for d in range(draws) if d // size % groups == group] for group in range(groups)]


def seed_devices(seed: int, devices: set[torch.device]) -> None:
    """Seed the generators that a model on these devices draws from, and no others."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)

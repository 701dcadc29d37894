"""Each member's own randomness: batch orders and dropout masks, from its seed alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tacit.ensembles.forward import Drop

MASKS = 2**32
"""Added to a seed for masks, so that they are independent of the batch order."""


def order_generator(seed: int) -> torch.Generator:
    """What draws a member's batch orders: one `torch.randperm(examples)` an epoch."""
    return torch.Generator().manual_seed(seed)


def mask_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """What draws a member's masks: one `torch.rand(batch, …)` a dropout layer and step.

    A unit is dropped where the number is below the rate, so that members of one seed and several
    rates have nested masks.
    """
    return torch.Generator(device).manual_seed(seed + MASKS)


@dataclass
class Chance:
    """Batch orders and masks of all members; members of one seed share theirs."""

    seeds: Sequence[int]
    device: torch.device
    _slots: Tensor = field(init=False)
    _orders: list[torch.Generator] = field(init=False)
    _masks: list[torch.Generator] = field(init=False)

    def __post_init__(self) -> None:
        distinct = list(dict.fromkeys(self.seeds))
        place = {seed: slot for slot, seed in enumerate(distinct)}
        self._slots = torch.tensor([place[seed] for seed in self.seeds], device=self.device)
        self._orders = [order_generator(seed) for seed in distinct]
        self._masks = [mask_generator(seed, self.device) for seed in distinct]

    def order(self, examples: int) -> Tensor:
        """A fresh order of the examples for each member."""
        drawn = torch.stack([torch.randperm(examples, generator=g) for g in self._orders])
        return drawn.to(self.device)[self._slots]

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Uniform numbers of that shape for each member."""
        drawn = [torch.rand(shape, generator=g, device=self.device) for g in self._masks]
        return torch.stack(drawn)[self._slots]

    def drop(self, rates: Tensor | None) -> Drop:
        """Dropout of the members' activations at their own rates, or at the layers'."""

        def drop(x: Tensor, own: float) -> Tensor:
            each = x.new_full((len(x),), own) if rates is None else rates
            each = each.view(-1, *[1] * (x.dim() - 1))
            kept = self.uniform(x.shape[1:]) >= each
            least = torch.finfo(x.dtype).tiny  # a rate of 1 drops all
            return x * kept / (1 - each).clamp_min(least)

        return drop

    def keep(self, members: Tensor) -> None:
        """Go on with some of the members alone; the draws of the others do not change."""
        slots = self._slots[members]
        used = torch.unique(slots)
        self._orders = [self._orders[slot] for slot in used.tolist()]
        self._masks = [self._masks[slot] for slot in used.tolist()]
        self._slots = torch.searchsorted(used, slots)

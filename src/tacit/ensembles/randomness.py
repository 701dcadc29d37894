"""The batch orders and dropout masks of each member, determined by its seed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.ensembles.forward import DropoutFunction

MASK_SEED_OFFSET = 2**32
"""Added to a seed for its masks, so that they are independent of the batch order."""


def order_generator(seed: int) -> torch.Generator:
    """The generator of a member's batch orders: one `torch.randperm(examples)` per epoch."""
    return torch.Generator().manual_seed(seed)


def mask_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of a member's masks: one `torch.rand(batch, …)` per dropout layer and step.

    A unit is dropped where its uniform number is below the rate. Members with one seed and
    different rates therefore have nested masks.
    """
    return torch.Generator(device).manual_seed(seed + MASK_SEED_OFFSET)


class MemberRandomness:
    """Batch orders and masks of all members; members with equal seeds share them."""

    def __init__(self, seeds: Sequence[int], device: torch.device):
        distinct = list(dict.fromkeys(seeds))
        # Position of each member's generators in the two lists.
        self._generator_index = torch.tensor([distinct.index(s) for s in seeds], device=device)
        self._orders = [order_generator(seed) for seed in distinct]
        self._masks = [mask_generator(seed, device) for seed in distinct]
        self._device = device

    def draw_orders(self, examples: int) -> Tensor:
        """Draw a fresh order of the examples for each member, (members, examples)."""
        orders = torch.stack([torch.randperm(examples, generator=g) for g in self._orders])
        return orders.to(self._device)[self._generator_index]

    def draw_uniform(self, shape: Sequence[int]) -> Tensor:
        """Draw uniform numbers for each member, (members, *shape)."""
        uniform = [torch.rand(shape, generator=g, device=self._device) for g in self._masks]
        return torch.stack(uniform)[self._generator_index]

    def dropout(self, rates: Tensor | None) -> DropoutFunction:
        """Dropout with fresh masks, at one rate per member or, with None, at the layers' rates."""

        def apply_dropout(x: Tensor, layer_rate: float) -> Tensor:
            rate = x.new_full((len(x),), layer_rate) if rates is None else rates
            rate = rate.view(-1, *[1] * (x.dim() - 1))
            mask = self.draw_uniform(x.shape[1:]) >= rate
            smallest = torch.finfo(x.dtype).tiny  # a rate of 1 drops everything: avoid 0/0
            return x * mask / (1 - rate).clamp_min(smallest)

        return apply_dropout

    def restrict_to(self, members: Tensor) -> None:
        """Continue with some of the members, in place; their later draws do not change."""
        used, self._generator_index = self._generator_index[members].unique(return_inverse=True)
        self._orders = [self._orders[i] for i in used.tolist()]
        self._masks = [self._masks[i] for i in used.tolist()]

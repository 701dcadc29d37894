"""Weighted sums of vectors over batches, one tensor per parameter."""

import torch
from torch import Tensor

from tacit.objective.params import Params, add_scaled, zero_sums

SMALL = 2**16
"""Tensors of fewer entries are added together."""


class VectorSum:
    """Σ factor·vector, where a vector has one tensor per parameter, or for some of them.

    Small tensors share one accumulator: to add a hundred of them one by one takes longer than to
    add the large ones.
    """

    def __init__(self, params: Params, dtype: torch.dtype) -> None:
        one_device = len({p.device for p in params.values()}) == 1
        self.unreached = dict.fromkeys(params)
        """Parameters for which nothing was added."""
        self._small = [n for n, p in params.items() if p.numel() < SMALL and one_device]
        self._joined = torch.zeros(0, dtype=dtype)
        """The sums of small tensors, one after the other."""
        self._totals = zero_sums({n: p for n, p in params.items() if n not in self._small}, dtype)
        if self._small:
            sizes = [params[name].numel() for name in self._small]
            all_entries = params[self._small[0]].detach().new_empty(sum(sizes))
            (self._joined,) = zero_sums({"": all_entries}, dtype).values()
            parts = zip(self._small, self._joined.split(sizes), strict=True)
            self._totals |= {name: part.view(params[name].shape) for name, part in parts}
        self._totals = {name: self._totals[name] for name in params}
        self._waiting: Params = {}
        """Small tensors of the vector that is added now."""

    def add(self, name: str, tensor: Tensor, factor: float) -> None:
        """Add factor times one tensor of a vector; a small one is added by `finish_vector`."""
        self.unreached.pop(name, None)
        if len(self._small) > 1 and tensor.numel() < SMALL:
            self._waiting[name] = tensor
        else:
            add_scaled(self._totals[name], tensor, factor)

    def finish_vector(self, factor: float) -> None:
        """Add factor times the small tensors of the vector that `add` was called for."""
        if len(self._waiting) == len(self._small) > 0:
            tensors = [self._waiting[name].flatten() for name in self._small]
            add_scaled(self._joined, torch.cat(tensors), factor)
        else:
            for name, tensor in self._waiting.items():
                add_scaled(self._totals[name], tensor, factor)
        self._waiting = {}

    def divided(self, divisor: float) -> Params:
        """The sum divided by a number; every tensor has memory of its own."""
        small = set(self._small)
        for name, total in self._totals.items():
            self._totals[name] = total / divisor if name in small else total.div_(divisor)
        return self._totals

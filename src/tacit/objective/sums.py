"""Weighted sums of vectors over batches, one tensor per parameter."""

import torch

from tacit.objective.params import Params, add_scaled, zero_sums
from tacit.objective.ranks import Ranks

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

    def add(self, vector: Params, factor: float) -> None:
        """Add factor times a vector, or the part of one."""
        small = [vector[name] for name in self._small if name in vector]
        rest = vector
        if len(small) == len(self._small) > 1:
            add_scaled([self._joined], [torch.cat([t.flatten() for t in small])], factor)
            rest = {name: tensor for name, tensor in vector.items() if tensor.numel() >= SMALL}
        add_scaled([self._totals[name] for name in rest], list(rest.values()), factor)
        if self.unreached:
            self.unreached = {n: None for n in self.unreached if n not in vector}

    def sum_over_replicas(self, ranks: Ranks) -> None:
        """Add up the sums of all processes that have the same rows of parameters."""
        large = [t for name, t in self._totals.items() if name not in self._small]
        ranks.sum_over_replicas([self._joined, *large])

    def divided(self, divisor: float) -> Params:
        """The sum divided by a number; every tensor has memory of its own."""
        small = set(self._small)
        for name, total in self._totals.items():
            self._totals[name] = total / divisor if name in small else total.div_(divisor)
        return self._totals

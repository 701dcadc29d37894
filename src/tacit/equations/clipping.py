"""Whether the gradients of a training loop are clipped, from their sizes at every update."""

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tacit.equations.step_hooks import StepHooks
from tacit.objective.ranks import current_ranks, own_rows

FLAT, DIFFERENT = 1e-5, 1e-3
"""Relative differences: sizes of clipped gradients agree to FLAT, and other sizes of them do not to
DIFFERENT."""
FEW_TIES = 0.95
"""Part of the sizes that are not cut off which must differ from each other."""
MOST_UPDATES, MOST_ENTRIES = 2000, 1000
"""How many updates, and about how many entries of each gradient, are looked at for clipping."""


class GradientSizes:
    """Sizes of the gradients of the last updates, from which `clipped_part` tells clipping.

    By update: the norm of every tensor; of the entries of matrices their absolute sum, the largest,
    and how many are as large; and the largest entry of vectors. They stay on their device, so that
    no update waits for them.
    """

    def __init__(self, hooks: Optimizer | StepHooks):
        self._rows: deque[Tensor] = deque(maxlen=MOST_UPDATES)
        self.hooks = (
            hooks.register_step_pre_hook(self._before_step),
            hooks.register_step_post_hook(self._after_step),
        )

    def last(self, updates: int = MOST_UPDATES) -> Tensor:
        """One row for each of that many updates, the latest last; of the rows of this process."""
        rows = list(self._rows)[-updates:]
        rows = [row.to(rows[-1]) for row in rows if len(row) == len(rows[-1])]
        return torch.stack(rows) if rows else torch.zeros(0, 5)

    def restore(self, rows: Tensor) -> None:
        """Go on after these rows."""
        self._rows.clear()
        self._rows.extend(rows)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _has_closure(args, kwargs):
            self._add_row(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs):  # which computed the gradients
            self._add_row(optimizer)

    @torch.no_grad()
    def _add_row(self, optimizer: Optimizer) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        gradients = [g for p in parameters if (g := p.grad) is not None and g.numel()]
        gradients = [_widen(own_rows(g)) for g in gradients if g.layout is torch.strided]
        if not gradients or was_skipped(optimizer):
            return
        device = gradients[0].device
        norms = torch.stack([torch.linalg.vector_norm(g).to(device) for g in gradients])
        matrices = [g for g in gradients if g.ndim > 1] or gradients
        samples = [g.reshape(-1)[:: 1 + g.numel() // MOST_ENTRIES].to(device) for g in matrices]
        entries = torch.cat(samples).abs_()
        largest = _largest(entries)
        vectors = [_largest(g.abs()).to(device) for g in gradients if g.ndim <= 1]
        in_vectors = torch.stack(vectors).max() if vectors else torch.zeros_like(largest)
        facts = torch.stack([entries.sum(), largest, (entries == largest).sum(), in_vectors])
        self._rows.append(torch.cat([norms, facts]))


def clipped_part(sizes: Tensor, updates: int | None = None) -> float:
    """The part of the last updates whose gradients look clipped, judged from all rows of sizes.

    Clipping cuts off the sizes of gradients that differ: the norm of all, those of two or more
    tensors, or entries. At rest, where the gradient stays the same, nothing differs.
    """
    if len(sizes) < 3:
        return 0.0
    sizes = _of_all_rows(sizes.double().cpu())
    norms, (entry_sum, entry, shared, vector_entry) = sizes[:, :-4], sizes[:, -4:].T
    total, largest = norms.norm(dim=1), norms.amax(1)
    equal_norms = (norms >= largest[:, None] * (1 - FLAT)).sum(1)
    clipped = (
        _cut_off(total, entry_sum, torch.full_like(total, 2))
        | _cut_off(largest, entry_sum, equal_norms)
        | _cut_off(entry, total, shared)
        | _cut_off_once(entry, total)
        | _cut_off_once(vector_entry, total)
    )
    return float(clipped[-(updates or len(clipped)) :].double().mean())


def _of_all_rows(sizes: Tensor) -> Tensor:
    """The sizes of whole gradients, from those of the rows of every process."""
    if current_ranks().shards is None:
        return sizes
    parts = torch.stack(current_ranks().gather_parts(sizes))
    norms, (entry_sum, entry, shared, vector_entry) = parts[..., :-4], parts[..., -4:].movedim(2, 0)
    largest = entry.amax(0)
    facts = entry_sum.sum(0), largest, (shared * (entry == largest)).sum(0), vector_entry.amax(0)
    return torch.cat([norms.norm(dim=0), torch.stack(facts, dim=1)], dim=1)


def _largest(entries: Tensor) -> Tensor:
    """The largest entry; 0 of none."""
    return entries.max() if entries.numel() else entries.new_zeros(())


def _cut_off(size: Tensor, other: Tensor, shared: Tensor) -> Tensor:
    """The updates of the largest size, if three or more have it, share it, and differ in others."""
    top = size >= size.max() * (1 - FLAT)
    lowest, highest = other[top].aminmax() if top.any() else (other[0], other[0])
    differ = top.sum() >= 3 and highest - lowest > DIFFERENT * highest
    return top & bool(differ and shared[top].median() >= 2)


def _cut_off_once(size: Tensor, other: Tensor) -> Tensor:
    """The same where each has it once: if it is exactly the same, and smaller sizes all differ.

    Under some losses (l1_loss, hinge) gradients of biases have few values: smaller ones repeat too.
    """
    top, below = size == size.max(), size[size < size.max()]
    if top.sum() < 3 or len(below) < 3 or len(below.unique()) < FEW_TIES * len(below):
        return torch.zeros_like(top)
    return _cut_off(torch.where(top, size, 0.0), other, torch.full_like(size, 2))


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether step was called with a closure; the first argument is the optimizer itself."""
    return any(value is not None for value in (*args[1:], *kwargs.values()))


def _widen(gradient: Tensor) -> Tensor:
    """At least in float32."""
    return gradient.float() if gradient.itemsize < 4 else gradient


def was_skipped(optimizer: Optimizer) -> bool:
    """Whether a GradScaler told a fused optimizer, which is called anyway, not to move."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(float(found_inf))

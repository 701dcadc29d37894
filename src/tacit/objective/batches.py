"""Batches from tensors, a loader, or any iterable that can be read more than once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from operator import length_hint
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torch.utils.data import SubsetRandomSampler as Subset
from torch.utils.data import WeightedRandomSampler as Weighted

from tacit.errors import InputError, check_type
from tacit.objective.randomness import Generator, find_generators, seed_reading

BatchPair = tuple[Any, Tensor | None]
"""A batch, and the weights of its examples; None where all are equal."""


@dataclass(frozen=True, eq=False)
class Batches:
    """Data that can be read repeatedly, as pairs of a batch and its weights."""

    read: Callable[[], Iterator[BatchPair]]
    length: int | None
    """Number of batches where it is known (only for the progress bar)."""
    generators: tuple[Generator, ...] = ()
    """Generators that belong to the data; their states must be restored after reading."""
    sample: Callable[[int], BatchPair | None] | None = None
    """sample(n): at most n examples spread over the data, if that is cheap; None if not finite."""
    source: Any = None
    """The loader or iterable that is read; None for tensors."""
    changes: str = ""
    """Why every reading has other examples, where that is known without reading; else empty."""

    def redraw(self, numbers: Sequence[int], devices: set[torch.device]) -> Iterator[BatchPair]:
        """Read the data with its order and its randomness seeded by the numbers.

        Every batch is seeded anew, so that it does not depend on what the model draws in between.
        """
        seed_reading((*numbers, 0), devices, self.generators)
        pairs = self.read()
        for index in count(1):
            seed_reading((*numbers, index), devices, self.generators)
            pair = next(pairs, None)
            if pair is None:
                return
            yield pair


def open_batches(
    data: Any, weights: Tensor | None, batch_size: int, *, shuffled: bool = False
) -> Batches:
    """Check the data and return its batches.

    With shuffled=True tensors and data sets are read in a random order, from torch's random state,
    and a loader may leave out the examples of its ragged last batch.
    """
    if is_tensors(data):
        return _tensor_batches(data, weights, batch_size, shuffled=shuffled)
    if weights is not None:
        raise InputError(
            "weights= needs data in tensors, whose order is known. For a loader, put the weights "
            "into its batches and return (losses, weights) from Objective.from_batch_loss."
        )
    if is_indexed(data):
        data = DataLoader(data, batch_size=batch_size, shuffle=shuffled)
    forms = "a tuple of tensors (inputs, …, target), a DataLoader, or a list of batches"
    check_type("data", data, Iterable, forms)
    return Batches(
        lambda: ((batch, None) for batch in data),
        length_hint(data) or None,
        generators=find_generators(data),
        source=data,
        changes=_changes_of(data, drops=shuffled) if isinstance(data, DataLoader) else "",
    )


def needs_batch_size(data: Any) -> bool:
    """Whether batch_size= decides which examples share a batch: tensors, and data sets by index."""
    return is_tensors(data) or is_indexed(data)


def is_tensors(data: Any) -> bool:
    """Whether data is a tuple or a dictionary of tensors, with one row per example."""
    values = data.values() if isinstance(data, Mapping) else data if type(data) is tuple else ()
    return len(values) > 0 and all(isinstance(value, Tensor) for value in values)


def is_indexed(data: Any) -> TypeGuard[Dataset]:
    """Whether data is a data set whose examples are read by their number."""
    return isinstance(data, Dataset) and not isinstance(data, IterableDataset)


def is_empty(data: Any) -> bool:
    """Whether data is known to have no examples."""
    if is_tensors(data):
        return any(t.ndim and not len(t) for t in tensors_in(data))
    return not length_hint(getattr(data, "dataset", data), 1)


def _tensor_batches(
    data: Any, weights: Tensor | None, batch_size: int, *, shuffled: bool
) -> Batches:
    named = data.items() if isinstance(data, Mapping) else enumerate(data)
    sizes = {name: len(t) if t.ndim else 0 for name, t in named}
    count = next(iter(sizes.values()))
    if len(set(sizes.values())) > 1:
        raise InputError(
            f"inputs and targets differ in length: {sizes}. Every tensor needs one row per example."
        )
    if count == 0:
        raise InputError("data is empty: its tensors have no rows. Pass at least one example.")
    weights = None if weights is None else check_weights(weights, count)

    def rows(index: slice | Tensor) -> BatchPair:
        return map_tensors((data, weights), lambda tensor: tensor[index])

    def sample(most: int) -> BatchPair | None:
        examples = rows(torch.linspace(0, count - 1, min(most, count)).long())
        return None if _count_nonfinite(examples, masks=True) else examples

    parts = [slice(start, start + batch_size) for start in range(0, count, batch_size)]

    def read() -> Iterator[BatchPair]:
        order = torch.randperm(count) if shuffled else None
        for part in parts:
            yield rows(part if order is None else order[part])

    return Batches(read, len(parts), sample=sample)


def check_weights(weights: Any, count: int) -> Tensor:
    """The weights as a tensor: one per example, finite, none negative, not all zero."""
    try:
        weights = torch.as_tensor(weights)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"weights is a {type(weights).__name__}: pass a tensor.") from error
    if weights.shape != (count,):
        raise InputError(
            f"weights has shape {tuple(weights.shape)} for {count} examples: "
            f"pass one weight per example, shape ({count},)."
        )
    if not torch.isfinite(weights).all() or (weights < 0).any() or not (weights > 0).any():
        raise InputError("weights must be finite and not negative, with one above zero.")
    return weights


def _changes_of(loader: DataLoader, *, drops: bool) -> str:
    """Why a loader with one of torch's samplers reads different examples at every pass, if so.

    The mean over examples must be over the same examples each time: gradients, Hessian products
    and steps are all compared with one another.
    """
    if isinstance(loader.dataset, IterableDataset):
        return ""
    # A batch sampler has its own sampler; the loader's default sampler is then not used.
    batcher = loader if loader.batch_sampler is None else loader.batch_sampler
    sampler = getattr(batcher, "sampler", loader.sampler)
    averages = "Objective(…, training=True, draws=16) averages over such draws."
    if isinstance(sampler, RandomSampler | Weighted):
        source = sampler.weights if isinstance(sampler, Weighted) else sampler.data_source
        if sampler.replacement or len(sampler) != len(source):
            return (
                f"the loader's {type(sampler).__name__} draws different examples at every pass: "
                "its mean is not one objective. Pass a loader that reads each example once. "
                + averages
            )
    shuffles = isinstance(sampler, RandomSampler | Subset | Weighted)
    size = getattr(batcher, "batch_size", None) if getattr(batcher, "drop_last", False) else None
    if not drops and shuffles and size and len(sampler) % size:
        return (
            "the loader shuffles with drop_last=True: every pass leaves out different examples. "
            f"Pass drop_last=False; tacit's mean is exact for a ragged last batch. {averages}"
        )
    return ""


def same(a: Any, b: Any) -> bool:
    """Whether two items hold equal numbers; objects without numbers count as equal."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor | np.ndarray):
        # Only NaN is unequal to itself; NaN is refused later with its own message.
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Mapping):
        return all(same(a[key], b[key]) for key in a)
    if isinstance(a, int | float):
        return a == b or (a != a and b != b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return True


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors inside a batch of nested mappings, lists and tuples."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(value)


def slice_batch(batch: Any, part: slice, count: int) -> Any:
    """Some examples of a batch: the same rows of every tensor with one row per example."""
    return map_tensors(batch, lambda t: t[part] if t.ndim and len(t) == count else t)


def select_rows(batch: Any, rows: Tensor, count: int, dim: int = 0) -> Any:
    """Some examples of a batch: the same rows of all tensors and lists with one per example."""
    if isinstance(batch, list | tuple) and _is_column(batch) and len(batch) == count:
        return type(batch)(batch[row] for row in rows.tolist())
    if isinstance(batch, Tensor):
        fits = batch.ndim > dim and batch.shape[dim] == count
        # A few numbers are copied to a GPU without waiting for what it computes.
        rows = rows.to(batch.device, non_blocking=rows.is_cpu)
        return batch.index_select(dim, rows) if fits else batch
    if isinstance(batch, Mapping):
        changed = copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        for key, value in batch.items():
            changed[key] = select_rows(value, rows, count, dim)
        return changed
    if isinstance(batch, list | tuple):
        values = [select_rows(value, rows, count, dim) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def row_count(batch: Any, dim: int = 0) -> int | None:
    """How many rows all tensors and lists of a batch have in common; None where they differ."""
    sizes = set(_row_counts(batch, dim))
    return sizes.pop() if len(sizes) == 1 else None


def _row_counts(batch: Any, dim: int) -> Iterator[int | None]:
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch.shape[dim] if batch.ndim > dim else None
    elif isinstance(batch, Mapping | list | tuple):
        if isinstance(batch, list | tuple) and _is_column(batch):
            yield len(batch) if dim == 0 else None
            return
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _row_counts(value, dim)
    elif not isinstance(batch, str | int | float | None):
        yield None  # of unknown content


def _is_column(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list holds one plain value per example, such as texts."""
    return len(values) > 0 and all(isinstance(value, str | int | float) for value in values)


def join_batches(a: Any, b: Any) -> Any:
    """The examples of two batches of one structure as one batch."""
    if isinstance(a, Tensor):
        return torch.cat([a, b]) if a.ndim else a
    if isinstance(a, Mapping):
        joined = copy(a) if isinstance(a, MutableMapping) else dict(a)
        for key, value in a.items():
            joined[key] = join_batches(value, b[key])
        return joined
    if isinstance(a, list | tuple):
        if _is_column(a):
            return type(a)([*a, *b])
        values = [join_batches(*values) for values in zip(a, b, strict=True)]
        return type(a)(*values) if hasattr(a, "_fields") else type(a)(values)
    return a


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a batch, of the same type, with a function applied to every tensor in it."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        # The same type, because losses may read a tokenizer's encoding by attribute.
        changed = copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        for key, value in batch.items():
            changed[key] = map_tensors(value, function)
        return changed
    if isinstance(batch, list | tuple):
        values = [map_tensors(value, function) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def check_batch_finite(batch: Any, index: int, *, masks: bool) -> None:
    """Refuse NaN and infinities in a batch; `masks` allows -inf (additive attention masks)."""
    if nonfinite := _count_nonfinite(batch, masks=masks):
        raise InputError(
            f"data holds {nonfinite} NaN or infinite values in batch {index} (counted from 0): "
            "drop or impute those examples."
        )


def _count_nonfinite(batch: Any, *, masks: bool) -> int:
    total = 0
    for tensor in tensors_in(batch):
        # One read of the data: a sum is finite only if every term is.
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum()):
            bad = torch.isnan(tensor) | torch.isposinf(tensor) if masks else ~torch.isfinite(tensor)
            total += int(bad.sum())
    return total

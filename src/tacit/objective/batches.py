"""Batches from tensors, a loader, or any iterable that can be read more than once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass
from operator import length_hint
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torch.utils.data import SubsetRandomSampler as Subset
from torch.utils.data import WeightedRandomSampler as Weighted

from tacit.errors import InputError, check_type

BatchPair = tuple[Any, Tensor | None]
"""A batch, and the weights of its examples; None where all are equal."""


@dataclass(frozen=True, eq=False)
class Batches:
    """Data that can be read repeatedly, as pairs of a batch and its weights."""

    read: Callable[[], Iterator[BatchPair]]
    length: int | None
    """Number of batches where it is known (only for the progress bar)."""
    generators: tuple[torch.Generator, ...] = ()
    """Generators that belong to the data; their states must be restored after reading."""
    sample: Callable[[int], BatchPair | None] | None = None
    """sample(n): at most n examples spread over the data, if that is cheap; None if not finite."""


def open_batches(data: Any, weights: Tensor | None, batch_size: int) -> Batches:
    """Check the data and return its batches."""
    values = data.values() if isinstance(data, Mapping) else data if type(data) is tuple else ()
    if len(values) > 0 and all(isinstance(value, Tensor) for value in values):
        return _tensor_batches(data, weights, batch_size)
    if weights is not None:
        raise InputError(
            "weights= needs data in tensors, whose order is known. For a loader, put the weights "
            "into its batches and return (losses, weights) from Objective.from_batch_loss."
        )
    if _is_indexed(data):
        data = DataLoader(data, batch_size=batch_size)
    forms = "a tuple of tensors (inputs, …, target), a DataLoader, or a list of batches"
    check_type("data", data, Iterable, forms)
    owners = ()
    if isinstance(data, DataLoader):
        _check_loader(data)
        owners = (data, data.sampler)
    candidates = [getattr(owner, "generator", None) for owner in owners]
    generators = tuple(g for g in candidates if isinstance(g, torch.Generator))
    return Batches(lambda: ((batch, None) for batch in data), length_hint(data) or None, generators)


def _is_indexed(data: Any) -> TypeGuard[Dataset]:
    return isinstance(data, Dataset) and not isinstance(data, IterableDataset)


def _tensor_batches(data: Any, weights: Tensor | None, batch_size: int) -> Batches:
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
    return Batches(lambda: (rows(part) for part in parts), len(parts), sample=sample)


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


def _check_loader(loader: DataLoader) -> None:
    """Refuse a loader that reads different examples at every pass.

    The mean over examples must be over the same examples each time: gradients, Hessian products
    and steps are all compared with one another.
    """
    if isinstance(loader.dataset, IterableDataset):
        return
    # A batch sampler has its own sampler; the loader's default sampler is then not used.
    batcher = loader if loader.batch_sampler is None else loader.batch_sampler
    sampler = getattr(batcher, "sampler", loader.sampler)
    if isinstance(sampler, RandomSampler | Weighted):
        source = sampler.weights if isinstance(sampler, Weighted) else sampler.data_source
        if sampler.replacement or len(sampler) != len(source):
            raise InputError(
                f"the loader's {type(sampler).__name__} draws different examples at every pass: "
                "its mean is not one objective. Pass a loader that reads each example once."
            )
    shuffles = isinstance(sampler, RandomSampler | Subset | Weighted)
    size = getattr(batcher, "batch_size", None) if getattr(batcher, "drop_last", False) else None
    if shuffles and size and len(sampler) % size:
        raise InputError(
            "the loader shuffles with drop_last=True: every pass leaves out different examples. "
            "Pass drop_last=False; tacit's mean is exact for a ragged last batch."
        )


def check_rereadable(batches: Batches, data: Any) -> None:
    """Refuse data whose second pass would differ from its first, or be empty.

    The first item of an indexed data set is read twice. Two passes over an iterable that begin
    differently may be shuffled, so both are counted to the end.
    """
    source = getattr(data, "dataset", data)
    indexed = _is_indexed(source)
    lasting = indexed or batches.sample is not None or _restarts(batches, source)
    if isinstance(data, Iterator) or not lasting:
        raise InputError(
            f"data is a {type(source).__name__}, which can be read only once; tacit reads the data "
            "more than once. Pass list(data), or an object whose __iter__ starts at the beginning."
        )
    if indexed and not len(source):  # pyright: ignore[reportArgumentType] # map-style data has one
        raise InputError("data is empty: the data set has no items. Pass at least one example.")
    if indexed and not _same(source[0], source[0]):
        raise InputError(
            "the data set's first item differs between two reads: a random transform is likely. "
            "Pass it without augmentation, or a fixed copy of its items; to estimate what "
            "augmentation adds, use difference_equations on two fixed data sets."
        )


def _restarts(batches: Batches, source: Any) -> bool:
    """Whether a second pass over an iterable begins as the first does, or is as long."""
    if isinstance(source, Iterable) and iter(source) is iter(source):
        return False
    state = torch.get_rng_state()
    first = next(batches.read(), None)
    torch.set_rng_state(state)
    if _same(first, next(batches.read(), None)):
        return True
    first_count, second_count = (sum(1 for _ in batches.read()) for _ in range(2))
    return first_count == second_count


def _same(a: Any, b: Any) -> bool:
    """Whether two items hold equal numbers; objects without numbers count as equal."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor | np.ndarray):
        # Only NaN is unequal to itself; NaN is refused later with its own message.
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Mapping):
        return all(_same(a[key], b[key]) for key in a)
    if isinstance(a, int | float):
        return a == b or (a != a and b != b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
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


def join_batches(a: Any, b: Any, counts: tuple[int, int]) -> Any:
    """The examples of two batches as one batch; None where their shapes do not fit."""
    first, second = list(tensors_in(a)), list(tensors_in(b))
    if [t.shape[1:] for t in first] != [t.shape[1:] for t in second]:
        return None
    remaining = iter(second)

    def join(tensor: Tensor) -> Tensor:
        other = next(remaining)
        rows = (len(tensor), len(other)) if tensor.ndim else (-1, -1)
        return torch.cat([tensor, other]) if rows == counts else tensor

    return map_tensors(a, join)


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

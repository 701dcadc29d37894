"""Batches from whatever holds the data: tensors, a loader, or any iterable that starts anew."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torch.utils.data import SubsetRandomSampler as Subset
from torch.utils.data import WeightedRandomSampler as Weighted

from tacit.errors import InputError


@dataclass(frozen=True, eq=False)
class Batches:
    """Data as something that can be read again and again: pairs of a batch and its weights."""

    read: Callable[[], Iterator[tuple[Any, Tensor | None]]]
    length: int | None
    """How many batches there are, where that is known (for progress alone)."""
    generators: tuple[torch.Generator, ...] = ()
    """Random states of the data's own, which reading must not move."""
    sample: Callable[[int], tuple[Any, Tensor | None]] | None = None
    """At most so many examples from all over the data, where that can be had cheaply."""


def open_batches(data: Any, *, weights: Tensor | None, batch_size: int) -> Batches:
    """Check what was handed over and say how to read it."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size is {batch_size!r}: pass a whole number of at least 1.")
    if _held_in_tensors(data):
        return _tensor_batches(data, weights, batch_size)
    if weights is not None:
        raise InputError(
            "weights= go with data held in tensors, whose order is known. For a loader, put the "
            "weights into its batches and return (losses, weights) from the batch_loss of "
            "Objective.from_batch_loss."
        )
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=batch_size)
    if not isinstance(data, Iterable):
        raise InputError(
            f"data is a {type(data).__name__}: pass a tuple of tensors (inputs, …, target), "
            "a DataLoader, or a list of batches."
        )
    if isinstance(data, Iterator):
        raise InputError(
            f"data is a {type(data).__name__}, which can be read only once; tacit reads the data "
            "more than once. Pass list(data), or an object whose __iter__ starts anew."
        )
    generators = ()
    if isinstance(data, DataLoader):
        _check_loader(data)
        held = (getattr(part, "generator", None) for part in (data, data.sampler))
        generators = tuple(g for g in held if isinstance(g, torch.Generator))
    return Batches(lambda: ((batch, None) for batch in data), _length(data), generators)


def _held_in_tensors(data: Any) -> bool:
    parts = data.values() if isinstance(data, Mapping) else data if type(data) is tuple else ()
    return len(parts) > 0 and all(isinstance(part, Tensor) for part in parts)


def _tensor_batches(data: Any, weights: Tensor | None, batch_size: int) -> Batches:
    named = data.items() if isinstance(data, Mapping) else enumerate(data)
    sizes = {name: len(t) if t.ndim else 0 for name, t in named}
    count = next(iter(sizes.values()))
    if len(set(sizes.values())) > 1:
        raise InputError(
            f"inputs and targets differ in length: {sizes}. Every tensor needs one row an example."
        )
    if count == 0:
        raise InputError("data is empty: its tensors have no rows. Pass at least one example.")
    weights = None if weights is None else check_weights(weights, count)

    def read() -> Iterator[tuple[Any, Tensor | None]]:
        for start in range(0, count, batch_size):
            part = slice(start, start + batch_size)
            yield slice_batch(data, part, count), None if weights is None else weights[part]

    def sample(most: int) -> tuple[Any, Tensor | None]:
        chosen = torch.linspace(0, count - 1, min(most, count)).long()
        part = map_tensors(data, lambda tensor: tensor[chosen.to(tensor.device)])
        return part, None if weights is None else weights[chosen.to(weights.device)]

    return Batches(read, -(-count // batch_size), sample=sample)


def check_weights(weights: Any, count: int) -> Tensor:
    """One finite weight an example, none negative and not all zero."""
    try:
        weights = torch.as_tensor(weights)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"weights is a {type(weights).__name__}: pass a tensor.") from error
    if weights.shape != (count,):
        raise InputError(
            f"weights has shape {tuple(weights.shape)} for {count} examples: "
            f"pass one weight an example, shape ({count},)."
        )
    if not torch.isfinite(weights).all() or (weights < 0).any() or not (weights > 0).any():
        raise InputError("weights must be finite and not negative, with one above zero.")
    return weights


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def _check_loader(loader: DataLoader) -> None:
    """Refuse a loader that reads different examples at every pass.

    The mean over examples must be over the same examples each time: gradients, Hessian products
    and steps are all compared with one another.
    """
    if isinstance(loader.dataset, IterableDataset):
        return
    # A batch sampler that the user made holds the sampler that counts; the loader's own is idle.
    batcher = loader if loader.batch_sampler is None else loader.batch_sampler
    sampler = getattr(batcher, "sampler", loader.sampler)
    replaced = isinstance(sampler, RandomSampler | Weighted) and sampler.replacement
    fewer = (isinstance(sampler, RandomSampler) and len(sampler) != len(sampler.data_source)) or (
        isinstance(sampler, Weighted) and len(sampler) != len(sampler.weights)
    )
    if replaced or fewer:
        raise InputError(
            f"the loader's {type(sampler).__name__} draws other examples at every pass, so its "
            "mean is not one objective. Pass a loader that reads each example once."
        )
    shuffles = isinstance(sampler, RandomSampler | Subset | Weighted)
    size = getattr(batcher, "batch_size", None) if getattr(batcher, "drop_last", False) else None
    if shuffles and size and len(sampler) % size:
        raise InputError(
            "the loader shuffles with drop_last=True: at every pass it leaves out other examples. "
            "Pass drop_last=False; tacit's mean is exact for a ragged last batch."
        )


def check_restarts(batches: Batches, data: Any) -> None:
    """Refuse an iterable that can be read only once: batches would go missing unseen.

    Where two readings begin differently it may be shuffled, so both are counted to the end.
    """
    source = getattr(data, "dataset", data)
    indexed = isinstance(source, Dataset) and not isinstance(source, IterableDataset)
    if indexed or batches.sample is not None:
        return
    again = not isinstance(source, Iterable) or iter(source) is not iter(source)
    if again:
        state = torch.get_rng_state()
        first = next(batches.read(), None)
        torch.set_rng_state(state)
        if _same(first, next(batches.read(), None)):
            return
        once, twice = (sum(1 for _ in batches.read()) for _ in range(2))
        again = once == twice
    if not again:
        raise InputError(
            f"data is a {type(source).__name__} that gives its batches only once; tacit reads the "
            "data more than once. Pass list(data), or an object whose __iter__ starts anew."
        )


def check_items(data: Any) -> None:
    """Refuse an indexable data set whose first item changes from one look to the next."""
    dataset = getattr(data, "dataset", data)
    if not isinstance(dataset, Dataset) or isinstance(dataset, IterableDataset):
        return
    if not len(dataset):  # pyright: ignore[reportArgumentType] # map-style data sets have one
        raise InputError("data is empty: the data set has no items. Pass at least one example.")
    if not _same(dataset[0], dataset[0]):
        raise InputError(
            "the data set's first item differs between two looks: a random transform is likely. "
            "Pass the data set without augmentation, or one fixed copy of its items; to estimate "
            "what the augmentation adds, use difference_equations on two fixed data sets."
        )


def _same(a: Any, b: Any) -> bool:
    """Whether two items hold equal tensors; what holds no numbers is taken to be the same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor | np.ndarray):
        # Unequal to themselves are NaN alone, which are refused later, by their own name.
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Mapping):
        return all(_same(a[key], b[key]) for key in a)
    if isinstance(a, int | float):
        return a == b or (a != a and b != b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return True


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors inside a batch, whatever holds them."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_in(value)


def move_batch(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device."""
    return map_tensors(batch, lambda tensor: tensor.to(device))


def slice_batch(batch: Any, part: slice, count: int) -> Any:
    """Some of the examples of a batch: the same rows of every tensor that has one an example."""
    return map_tensors(batch, lambda t: t[part] if t.ndim and len(t) == count else t)


def join_batches(a: Any, b: Any, counts: tuple[int, int]) -> Any:
    """The examples of two batches of such counts as one batch; None where they do not fit."""
    ones, others = list(tensors_in(a)), list(tensors_in(b))
    if [t.shape[1:] for t in ones] != [t.shape[1:] for t in others]:
        return None
    rest = iter(others)

    def both(tensor: Tensor) -> Tensor:
        other = next(rest)
        rows = (len(tensor), len(other)) if tensor.ndim else (-1, -1)
        return torch.cat([tensor, other]) if rows == counts else tensor

    return map_tensors(a, both)


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a batch, of its own kind, with a function applied to every tensor in it."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        # A copy of its own kind: losses may read a tokenizer's encoding by attribute.
        changed = copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        for key, value in batch.items():
            changed[key] = map_tensors(value, function)
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch

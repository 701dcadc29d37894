"""Objectives of a part of the data: of some of its examples, or of some of its batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from tacit.errors import InputError
from tacit.objective.batches import Batches, is_indexed, is_tensors, map_tensors, open_batches
from tacit.objective.borrowing import forked_randomness
from tacit.objective.compared import ComparedDerivatives
from tacit.objective.objective import BATCH_SIZE, Objective


@dataclass(frozen=True, eq=False)
class Units:
    """What the data of an objective can be divided into: examples, or whole batches."""

    count: int
    per_batch: int
    """How many of them a batch has; 1 where they are batches themselves."""
    choose: Callable[[Tensor], Batches]
    """choose(numbers) returns the batches of these units alone."""
    indexed: bool = True
    """Whether units are read alone; of an iterable, all before them are read, too."""


def units_of(objective: Objective) -> Units:
    """The units of the objective's data.

    Examples, for tensors, data sets, and loaders with one of torch's plain samplers; batches, for
    loaders that compose them in their own way, and for lists and other iterables of batches. Where
    an iterable has no length, this reads it once.
    """
    passes = objective._passes
    with forked_randomness(passes.devices, passes.batches.generators):
        return _units(objective)


def sample(objective: Objective, units: Units, numbers: Tensor) -> Objective:
    """The objective of these units alone: the same model, loss, draws and seeds."""
    if not len(numbers):
        raise InputError("a sample without examples was asked for: pass one number or more.")
    chosen = copy(objective)
    chosen._passes = replace(objective._passes, batches=units.choose(numbers))
    chosen._checked_passes = replace(objective._checked_passes, batches=chosen._passes.batches)
    chosen._count = None
    chosen.compared = ComparedDerivatives(chosen._passes, objective._probe)
    return chosen


def _units(objective: Objective) -> Units:
    data, grouped = objective.data, objective.batch_norm == "batch"
    size = objective.batch_size or BATCH_SIZE
    if is_tensors(data):
        first = next(iter(data.values() if isinstance(data, Mapping) else data))

        def rows(numbers: Tensor) -> Batches:
            whole = data, objective.weights
            values, weights = map_tensors(whole, lambda t: t[numbers.to(t.device)])
            return open_batches(values, weights, size, shuffled=grouped)

        return Units(len(first), size, rows)
    if is_indexed(data):
        data = DataLoader(data, batch_size=size, shuffle=grouped)
    if type(data) is DataLoader and not isinstance(data.dataset, IterableDataset):
        return _units_of_loader(data, shuffled=grouped)
    if isinstance(data, Sequence):
        return Units(len(data), 1, lambda numbers: _listed([data[i] for i in numbers.tolist()]))
    count = sum(1 for _ in data)
    return Units(
        count, 1, lambda numbers: _listed(_Chosen(data, {*numbers.tolist()})), indexed=False
    )


def _units_of_loader(loader: DataLoader, *, shuffled: bool) -> Units:
    """Examples where the loader batches them one after the other; else the loader's batches.

    Samples are loaded in this process: starting workers takes longer than reading a few batches.
    """
    plain = isinstance(loader.sampler, SequentialSampler | RandomSampler)
    if plain and loader.batch_size is not None:
        members, size = list(loader.sampler), loader.batch_size
        if loader.drop_last:
            members = members[: len(members) // size * size]

        def examples(numbers: Tensor) -> Batches:
            chosen = Subset(loader.dataset, [members[i] for i in numbers.tolist()])
            # An objective whose batches are groups of examples reads them in another order.
            part = DataLoader(chosen, size, shuffle=shuffled, collate_fn=loader.collate_fn)
            return open_batches(part, None, size, shuffled=shuffled)

        return Units(len(members), size, examples)
    composed: list[Any] = list(loader.batch_sampler or loader.sampler)

    def batches(numbers: Tensor) -> Batches:
        chosen = [composed[i] for i in numbers.tolist()]
        if loader.batch_sampler is None:  # the data set has whole batches as its items
            part = DataLoader(loader.dataset, None, sampler=chosen, collate_fn=loader.collate_fn)
        else:
            part = DataLoader(loader.dataset, batch_sampler=chosen, collate_fn=loader.collate_fn)
        return _listed(part)

    return Units(len(composed), 1, batches)


def _listed(data: Iterable[Any]) -> Batches:
    return open_batches(data, None, BATCH_SIZE)


@dataclass(frozen=True)
class _Chosen:
    """Some of the batches of an iterable, which is read to the last of them."""

    data: Iterable[Any]
    numbers: set[int]

    def __iter__(self) -> Iterator[Any]:
        last = max(self.numbers)
        for number, batch in enumerate(self.data):
            if number in self.numbers:
                yield batch
            if number == last:
                return

"""Whether data is the same at every pass: readings under different random states are compared.

The order may change. What a reading holds may change only in training mode, where each draw is one
reading: one augmentation, one sample of examples.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import islice
from operator import length_hint
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from tacit.errors import InputError
from tacit.objective.batches import Batches, tensors_in
from tacit.objective.borrowing import forked_randomness
from tacit.objective.randomness import seed_reading

ITEMS = 64
"""Number of items, spread over a data set, that are compared between readings."""
GROUP = 16
"""Largest number of items that are compared as one batch."""
READINGS = 4
"""Number of readings that are compared. A flip of one item goes unnoticed in one case of 8."""
MOST_READINGS = 16
"""Number of readings of a data set with one item."""
START = 4
"""Number of batches at the start of the data that are compared between readings."""
MOST_KEYS = 100
"""Number of indices per item of the data set after which a sampler is taken as endless."""
REMEDY = (
    "Pass the data without augmentation, or a fixed copy of it. Objective(…, training=True, "
    "draws=16) draws it anew for each draw; what augmentation adds is difference_equations of that "
    "objective and the plain one."
)

Seed = Callable[[int], None]
"""seed(number): seed all that the data may draw from."""
Order = Literal["fixed", "repeats", "free"]
"""Of examples: always the same, the same from the same random state, or not even that."""


class _Reads(NamedTuple):
    """Which items a loader reads."""

    groups: list[list[Any]]
    """The indices of parts of a few batches; single ones if it does not batch."""
    order: Order
    constant: bool = True
    """Whether every pass has the same items."""


def check_rereadable(batches: Batches, devices: set[torch.device], *, training: bool) -> bool:
    """Refuse data that cannot be read repeatedly; return whether each draw must read it anew.

    In training mode what the data holds may depend on the random states, but only on them, so that
    a draw can be repeated.
    """
    source = batches.source
    if batches.sample is not None or type(source) in (list, tuple):
        return False
    loader = _indexed_loader(source)
    if loader is not None and not length_hint(loader.dataset, 1):
        raise InputError("data is empty: the data set has no items. Pass at least one example.")
    with forked_randomness(devices, batches.generators):

        def seed(number: int) -> None:
            seed_reading((number,), devices, batches.generators)

        change = batches.changes
        if not change and loader is not None:
            change = _change_of_loader(loader, seed)
        elif not change:
            change = _change_of_iterable(batches, getattr(source, "dataset", source), seed)
        if change and not training:
            raise InputError(change)
        if change:
            _check_repeatable(batches, devices)
    return bool(change)


def _indexed_loader(source: Any) -> DataLoader | None:
    """The source if it is a loader of items by index; None if not."""
    indexed = isinstance(source, DataLoader) and not isinstance(source.dataset, IterableDataset)
    return source if indexed else None


def check_draws_align(batches: Batches, devices: set[torch.device]) -> None:
    """Refuse data whose draws cannot be averaged example by example."""
    if not keeps_order(batches, devices):
        raise InputError(
            "each draw reads other examples, or in another order, so that derivatives of single "
            "examples cannot be averaged over draws: pass a DataLoader with shuffle=False over a "
            "data set with __getitem__, or draws=1."
        )


def keeps_order(batches: Batches, devices: set[torch.device]) -> bool:
    """Whether the data has the same order under every random state, as far as can be observed.

    The items of a loader may be random; of other data only what stays the same has a known order.
    """

    def seed(number: int) -> None:
        seed_reading((number,), devices, batches.generators)

    if batches.changes:
        return False
    with forked_randomness(devices, batches.generators):
        loader = _indexed_loader(batches.source)
        if loader is None:
            starts = _starts(batches, seed)
            return all(start == starts[0] for start in starts)
        reads = _reads_of(loader, seed)
        return reads.constant and reads.order == "fixed"


def _change_of_loader(loader: DataLoader, seed: Seed) -> str:
    """What differs between readings of a loader of items by index; "" if nothing.

    A loader that shuffles has a batch in another place each time, on which it must not depend.
    """
    groups, order, constant = _reads_of(loader, seed)
    if not constant:
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        return (
            f"the loader's {type(sampler).__name__} draws different examples at every pass: its "
            "mean is not one objective. Pass a loader that reads each example once; "
            "Objective(…, training=True, draws=16) averages over such draws."
        )
    count = len(groups)
    moves = order != "fixed" and type(loader).__iter__ is DataLoader.__iter__
    first: list[Hashable] = []
    for number in range(max(READINGS, MOST_READINGS // count)):
        seed(number)
        shift = number % count if moves else 0
        digests = [digest(b) for b in _read_groups(loader, groups[shift:] + groups[:shift])]
        digests = digests[count - shift :] + digests[: count - shift]
        first = first or digests
        if digests != first:
            differing = (g for g, a, b in zip(groups, first, digests, strict=False) if a != b)
            items = ", ".join(str(key) for key in next(differing, groups[0])[:4])
            return (
                f"a batch of the items {items}, … differs between two reads: a random transform, "
                f"or a random collate_fn, is likely. {REMEDY}"
            )
    return ""


def _reads_of(loader: DataLoader, seed: Seed) -> _Reads:
    """Which items a loader reads; torch's own samplers need not be asked."""
    batcher = loader.batch_sampler
    sampler = loader.sampler if batcher is None else getattr(batcher, "sampler", None)
    size = getattr(batcher, "batch_size", 1)
    if batcher is None or type(batcher) is BatchSampler:
        if type(sampler) is SequentialSampler:
            return _Reads(_split(range(len(sampler.data_source)), size), "fixed")
        if type(sampler) is RandomSampler:
            return _Reads(_split(range(len(sampler.data_source)), size), "repeats")
        if type(sampler) is SubsetRandomSampler:
            return _Reads(_split(sampler.indices, size), "repeats")
    most = MOST_KEYS * length_hint(loader.dataset, 10**6)
    passes: list[list[list[Any]]] = []
    for number in (0, *range(READINGS)):
        seed(number)
        passes.append(list(islice(_read_keys(loader), most + 1)))
        if len(passes[-1]) > most:
            raise InputError(
                f"the loader's sampler gives more than {most} indices, {MOST_KEYS} per item, and "
                "seems to have no end: pass a loader that reads each example once."
            )
    first, again, *others = passes
    contents = _count_keys(first)
    constant = all(_count_keys(keys) == contents for keys in (again, *others))
    fixed = all(keys == first for keys in (again, *others))
    order = "fixed" if fixed else "repeats" if again == first else "free"
    return _Reads(_choose_groups(_spread(first, ITEMS)), order, constant)


def _split(keys: Sequence[Any], size: int) -> list[list[Any]]:
    """The indices of a few batches."""
    starts = _spread(range(0, len(keys), size), ITEMS)
    return _choose_groups([keys[start : start + size] for start in starts])


def _choose_groups(batches: list[Sequence[Any]]) -> list[list[Any]]:
    """About ITEMS of the indices in parts of batches, because items of one shape share a batch."""
    size = max([1, *map(len, batches)])
    batches = _spread(batches, max(ITEMS // GROUP, ITEMS // size))
    chosen = [_spread(batch, ITEMS // len(batches)) for batch in batches]
    return [keys[i : i + GROUP] for keys in chosen for i in range(0, len(keys), GROUP)]


def _spread(items: Sequence[Any], number: int) -> list[Any]:
    """At most this many of the items, from the first to the last."""
    number = min(number, len(items))
    return [items[i * (len(items) - 1) // max(1, number - 1)] for i in range(number)]


def _read_keys(loader: DataLoader) -> Iterator[list[Any]]:
    """The indices of every batch of one pass, as Python numbers where they are numbers."""
    batcher = loader.batch_sampler
    lists = ([key] for key in loader.sampler) if batcher is None else batcher
    for keys in lists:
        yield [k.tolist() if isinstance(k, Tensor | np.ndarray | np.generic) else k for k in keys]


def _count_keys(batches: Iterable[list[Any]]) -> Counter[Hashable]:
    """How often each item is read; an index may be a list of items, where a data set takes that."""
    keys = (key for batch in batches for key in batch)
    parts = (part for key in keys for part in (key if isinstance(key, list) else [key]))
    return Counter(part if isinstance(part, Hashable) else repr(part) for part in parts)


def _read_groups(loader: DataLoader, groups: list[list[Any]]) -> Iterator[Any]:
    """Read these items as the loader does, in a worker process if it has some."""
    copied = copy(loader)
    sampler = {"batch_sampler": groups}
    if loader.batch_sampler is None:
        sampler = {"sampler": [key for group in groups for key in group]}
    workers = {"num_workers": min(1, loader.num_workers), "persistent_workers": False}
    # A loader refuses to change these attributes, because its iterator would not notice.
    vars(copied).update(sampler, _iterator=None, **workers)
    return iter(copied)


def _change_of_iterable(batches: Batches, dataset: Any, seed: Seed) -> str:
    """What differs between readings of an iterable; "" if nothing but the order does.

    Readings that begin differently may be shuffled, so they are read to the end.
    """
    if isinstance(dataset, Iterable) and iter(dataset) is iter(dataset):
        raise InputError(_read_only_once(dataset))
    starts = _starts(batches, seed)
    if all(start == starts[0] for start in starts):
        return ""
    contents = []
    for number in range(2):
        seed(number)
        contents.append(_contents(batch for batch, _ in batches.read()))
    if not all(by_batch for by_batch, _ in contents):
        raise InputError(_read_only_once(dataset))
    (first_batches, first_rows), (second_batches, second_rows) = contents
    if first_batches == second_batches or first_rows == second_rows:
        return ""
    return (
        f"two readings of the data, a {type(dataset).__name__}, hold different examples, or "
        f"different batches of them. {REMEDY} If it only shuffles, pass it without shuffling."
    )


def _read_only_once(dataset: Any) -> str:
    return (
        f"data is a {type(dataset).__name__}, which can be read only once; tacit reads the data "
        "more than once. Pass list(data), or an object whose __iter__ starts at the beginning."
    )


def _check_repeatable(batches: Batches, devices: set[torch.device]) -> None:
    """Refuse data whose draws cannot be repeated by seeding the random states."""
    starts = [_start(batches.redraw((0, 0), devices)) for _ in range(READINGS)]
    if all(start == starts[0] for start in starts):
        return
    cause = (
        "it draws from os.urandom, or from a generator that tacit does not find. Draw from the "
        "global generator of torch, numpy or Python, or keep the generator as an attribute"
    )
    if getattr(batches.source, "persistent_workers", False):
        cause = "persistent workers keep their random states. Pass persistent_workers=False"
    raise InputError(
        "the data changes between readings, and seeds do not repeat it, so that no draw is the "
        f"same twice: {cause}, or pass a fixed copy of the data."
    )


def _starts(batches: Batches, seed: Seed) -> list[list[Hashable]]:
    """The first batches of several readings, each from another random state."""
    starts = []
    for number in range(READINGS):
        seed(number)
        starts.append(_start(batches.read()))
    return starts


def _start(pairs: Iterator[Any]) -> list[Hashable]:
    """Digests of the first batches."""
    return [digest(batch) for batch, _ in islice(pairs, START)]


def _contents(batches: Iterable[Any]) -> tuple[Counter[Hashable], Counter[Hashable]]:
    """How often each batch, and each row of the batches, occurs."""
    by_batch, by_row = Counter(), Counter()
    for batch in batches:
        by_batch[digest(batch)] += 1
        by_row.update(_row_digests(batch))
    return by_batch, by_row


def _row_digests(batch: Any) -> list[Hashable]:
    """A digest per row of the tensors in a batch; of the batch where they have no common rows."""
    tensors = [tensor.detach().cpu() for tensor in tensors_in(batch)]
    counts = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    if len(counts) != 1 or 0 in counts:
        return [digest(batch)]
    rows = zip(*(_bytes_of(tensor).reshape(len(tensor), -1) for tensor in tensors), strict=True)
    return [tuple(hash(part.tobytes()) for part in row) for row in rows]


def digest(value: Any, depth: int = 8) -> Hashable:
    """A number or nested tuple that is equal for values that hold the same numbers and texts."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype), hash(_bytes_of(value.detach().cpu()).tobytes())
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.shape, str(value.dtype), hash(value.tobytes())
    if isinstance(value, int | float | complex | str | bytes | np.generic):
        return repr(value) if isinstance(value, float | np.generic) else value
    if depth == 0 or value is None or isinstance(value, type):
        return None
    if isinstance(value, Mapping):
        return tuple((str(key), digest(value[key], depth - 1)) for key in value)
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
        return tuple(digest(part, depth - 1) for part in value)
    if hasattr(value, "__array_interface__"):  # images
        return digest(np.asarray(value), depth - 1)
    return digest(getattr(value, "__dict__", None), depth - 1)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor on the CPU, of any dtype."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return dense.contiguous().reshape(-1).view(torch.uint8).numpy()

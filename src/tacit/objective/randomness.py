"""Randomness by explicit seeds: a technique's noise in mirrored pairs, and that of the data."""

import inspect
import random
import site
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.errors import InputError

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""A generator of random numbers that data may have for itself."""
INSTALLED = (*site.getsitepackages(), str(Path(inspect.__file__).parent))
"""Folders of installed packages, whose methods draw from global generators or from attributes."""
WHOLE = 2**32
"""In place of the number of a batch: noise that all batches of a draw share."""
MOST_OBJECTS = 2000
"""Number of objects in which generators are looked for."""
MOST_PARTS = 256
"""Length of the longest list in which generators are looked for: longer ones are data."""


class Noise:
    """The random numbers of one draw on one batch; draws 2j and 2j+1 are mirror images.

    Effects that are odd in the noise cancel exactly within a pair; for small noise they are nearly
    all of the difference between draws. The numbers depend only on (seed, pair, batch) and on the
    order of the calls.

    Trap: a technique must ask for the same shapes in the same order at every draw, or its pairs
    are not mirror images.
    """

    def __init__(self, seed: int, draw: int, batch: int):
        self._mirrored = draw % 2 == 1
        self._seed = _seed_from(seed, draw // 2, batch, 1)
        self._own_seed = _seed_from(seed, draw, batch, 4)
        self._generators: dict[torch.device, torch.Generator] = {}

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers with a tensor's shape, dtype and device; z and −z in a pair."""
        z = torch.randn(like.shape, **self._options(like))
        return -z if self._mirrored else z

    def uniform(self, like: Tensor, *, mirrored: bool = True) -> Tensor:
        """Numbers from 0 to 1 with a tensor's shape, dtype and device; u and 1 − u in a pair.

        With mirrored=False both draws of a pair have the same numbers.
        """
        u = torch.rand(like.shape, **self._options(like))
        return 1 - u if self._mirrored and mirrored else u

    def signs(self, like: Tensor) -> Tensor:
        """Numbers −1 or 1 with a tensor's shape, dtype and device; s and −s in a pair."""
        s = 2 * torch.randint(0, 2, like.shape, **self._options(like)) - 1
        return -s if self._mirrored else s

    def generator(self, device: torch.device) -> torch.Generator:
        """A new generator for numbers that cannot be mirrored: another one in every draw."""
        return torch.Generator(device=device).manual_seed(self._own_seed)

    def _options(self, like: Tensor) -> dict[str, Any]:
        """Dtype, device and generator; the default dtype for integer tensors such as tokens."""
        if like.device not in self._generators:
            generator = torch.Generator(device=like.device)
            self._generators[like.device] = generator.manual_seed(self._seed)
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        return {"dtype": dtype, "device": like.device, "generator": self._generators[like.device]}


def takes_noise(batch_loss: Callable[..., Any], training: bool, draws: int) -> bool:
    """Whether a batch_loss has three required parameters (model, batch, noise)."""
    try:
        parameters = inspect.signature(batch_loss).parameters.values()
    except (TypeError, ValueError):
        return False  # some callables written in C have no signature: they are called with two
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    optional = any(p.name == "noise" and p not in required for p in parameters)
    if len(required) > 3 or optional or (training and variadic and len(required) < 3):
        raise InputError(
            f"batch_loss{inspect.signature(batch_loss)} may or may not take noise: write (model, "
            "batch) or (model, batch, noise) without defaults; bind others by functools.partial."
        )
    if len(required) < 3:
        return False
    if not training or draws % 2:
        raise InputError(
            f"batch_loss takes noise, with training={training} and draws={draws}: its draws come "
            "in mirrored pairs. Pass training=True and an even number of draws, such as draws=16."
        )
    return True


def split_draws(draws: int, groups: int, *, paired: bool) -> list[list[int]]:
    """The draws of each group, assigned in turn; mirrored pairs stay in one group."""
    size = 2 if paired else 1
    return [[d for d in range(draws) if d // size % groups == group] for group in range(groups)]


def seed_draw(seed: int, draw: int, batch: int, devices: set[torch.device]) -> None:
    """Seed torch for one draw on one batch."""
    seed_devices(_seed_from(seed, draw, batch), devices)


def seed_devices(seed: int, devices: set[torch.device]) -> None:
    """Seed the generators that a model on these devices draws from, and no others."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def seed_reading(
    numbers: Sequence[int], devices: set[torch.device], generators: Sequence[Generator]
) -> None:
    """Seed all that data may draw from while it is read: torch, numpy, Python, its generators.

    The order of the examples and their random transforms then depend only on the numbers.
    """
    number = _seed_from(*numbers, 2)
    seed_devices(number, devices)
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 # the global state
    for index, generator in enumerate(generators):
        _seed_generator(generator, _seed_from(*numbers, 3 + index))


def _seed_generator(generator: Generator, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed % 2**32)


def find_generators(owner: Any) -> tuple[Generator, ...]:
    """Generators that an object (a loader, a data set) may draw from.

    They are looked for in attributes, short lists, transforms and samplers, in the variables that
    functions enclose, and among the global variables that functions and methods name.
    """
    generators, seen = [], {}
    waiting = deque([owner])
    while waiting and len(seen) < MOST_OBJECTS:
        item = waiting.popleft()
        if id(item) in seen:
            continue
        seen[id(item)] = item  # referenced, so that no other object gets its id
        if isinstance(item, Generator) and not isinstance(item, random.SystemRandom):
            generators.append(item)
        else:
            waiting.extend(_parts_of(item))
    return tuple(generators)


def _parts_of(item: Any) -> Iterable[Any]:
    """Objects inside an object that may hold a generator."""
    if isinstance(item, dict | list | tuple | set):
        parts = item.values() if isinstance(item, dict) else item
        return list(parts) if len(parts) <= MOST_PARTS else ()
    if isinstance(item, MethodType):
        return item.__self__, item.__func__
    if isinstance(item, BuiltinMethodType):  # such as the method `random` of a generator
        return (item.__self__,)
    if isinstance(item, partial):
        return item.func, item.args, item.keywords
    if isinstance(item, FunctionType):
        return _parts_of_function(item)
    if isinstance(item, Tensor | type | ModuleType | torch.Generator):
        return ()
    # A loader's iterator over running worker processes is not a part of the data.
    attributes = [value for name, value in _attributes(item).items() if name != "_iterator"]
    methods = [
        value
        for kind in type(item).__mro__
        for value in vars(kind).values()
        if isinstance(value, FunctionType) and not value.__code__.co_filename.startswith(INSTALLED)
    ]
    return [*attributes, *methods]


def _attributes(item: Any) -> dict[str, Any]:
    attributes = getattr(item, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def _parts_of_function(function: FunctionType) -> Iterable[Any]:
    """What a function encloses, and the generators and functions of its module that it names."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable that has no value yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            same_module = getattr(value, "__globals__", None) is function.__globals__
            if isinstance(value, Generator) or (isinstance(value, FunctionType) and same_module):
                yield value


def _seed_from(*numbers: int) -> int:
    """A seed of 63 bits that depends on all the numbers."""
    state = np.random.SeedSequence(list(numbers)).generate_state(1, np.uint64)
    return int(state[0]) >> 1

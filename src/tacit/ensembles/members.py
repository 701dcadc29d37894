"""M networks of one architecture as one dictionary of stacked parameters."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tacit.ensembles.forward import Forward, forward_of
from tacit.errors import InputError
from tacit.objective.params import Params, trainable


@dataclass(frozen=True, eq=False)
class Ensemble:
    """An architecture and the stacked parameters of its members: entry m of each is member m's.

    The model says what is computed; its own weights are never used.
    """

    model: nn.Module
    params: Params

    def __post_init__(self) -> None:
        _check_architecture(self.model)
        own = trainable(self.model)
        given = {n: tuple(p.shape[1:]) for n, p in self.params.items()}
        if given != {n: tuple(p.shape) for n, p in own.items()} or len(self._sizes) != 1:
            raise InputError(
                f"stacked parameters {given} (without the members' dimension) with "
                f"{sorted(self._sizes)} members do not belong to this {type(self.model).__name__}: "
                "make ensembles with ensembles.stacked(models) or ensembles.initialise(build, "
                "seeds)."
            )

    @property
    def _sizes(self) -> set[int]:
        return {len(p) for p in self.params.values()}

    def __len__(self) -> int:
        return self._sizes.pop()

    @cached_property
    def forward(self) -> Forward:
        """What computes the outputs of all members from stacked parameters, inputs and dropout."""
        return forward_of(self.model)

    @property
    def first(self) -> Tensor:
        """One of the stacked tensors, for its device and dtype."""
        return next(iter(self.params.values()))

    def at(self, params: Mapping[str, Tensor]) -> "Ensemble":
        """The same members with other weights."""
        return Ensemble(self.model, dict(params))

    def chosen(self, members: Sequence[int]) -> "Ensemble":
        """Some of the members, in the order given."""
        return self.at({n: p[list(members)] for n, p in self.params.items()})

    def member(self, index: int) -> Params:
        """The parameters of one member, as views."""
        return {n: p[index] for n, p in self.params.items()}

    def module(self, index: int) -> nn.Module:
        """One member as a module of its own."""
        module = copy.deepcopy(self.model)
        module = module.to(device=self.first.device, dtype=self.first.dtype)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.params[name][index])
        return module

    def to(self, *args: Any, **options: Any) -> "Ensemble":
        """On another device or in another dtype, as `Tensor.to`."""
        return self.at({n: p.to(*args, **options) for n, p in self.params.items()})


def stacked(models: Iterable[nn.Module]) -> Ensemble:
    """An ensemble of trained or initialised modules of one architecture.

    Trap: all but the parameters (constants that a module keeps as attributes) is the first one's.
    """
    models = list(models)
    if not models or not all(isinstance(model, nn.Module) for model in models):
        raise InputError("stacked needs modules of one architecture: pass a list, such as [a, b].")
    shapes = [{n: p.shape for n, p in trainable(model).items()} for model in models]
    for number, own in enumerate(shapes):
        if own != shapes[0] or str(models[number]) != str(models[0]):
            raise InputError(
                f"model {number} is another architecture than model 0: the members of an ensemble "
                f"differ in their weights alone. Got {models[number]} and {models[0]}."
            )
        held = zip(models[number].named_buffers(), models[0].named_buffers(), strict=True)
        for (name, mine), (_, first) in held:
            if not torch.equal(mine, first):
                raise InputError(
                    f"model {number} has another buffer {name!r} than model 0: members of an "
                    "ensemble share all but their parameters. Make it a parameter, or an input."
                )
    every = [trainable(model) for model in models]
    params = {n: torch.stack([own[n] for own in every]) for n in every[0]}
    return Ensemble(copy.deepcopy(models[0]), params)


def initialise(build: Callable[[], nn.Module], seeds: Iterable[int]) -> Ensemble:
    """Members as `build()` makes them under each seed; equal seeds, equal weights.

    The random state of the caller is left as it was.
    """
    seeds = check_seeds(seeds)
    made: dict[int, nn.Module] = {}
    # torch.manual_seed would also seed devices that are not in use yet, and for good.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        for seed in dict.fromkeys(seeds):
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed_all(seed)
            made[seed] = build()
    return stacked(made[seed] for seed in seeds)


def check_seeds(seeds: Iterable[int], count: int | None = None) -> list[int]:
    """Seeds as a list of whole numbers, one a member."""
    if not isinstance(seeds, Iterable):
        raise InputError(f"seeds is {seeds!r}: pass whole numbers, one a member.")
    seeds = list(seeds)
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise InputError(f"a seed is {seed!r}: pass whole numbers, 0 or above, one a member.")
    if not seeds or (count is not None and len(seeds) != count):
        raise InputError(f"{len(seeds)} seeds for {count or 'no'} members: pass one a member.")
    return seeds


def _check_architecture(model: nn.Module) -> None:
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        raise InputError(
            f"parameter {frozen[0]!r} is frozen: all parameters of an ensemble are trained. "
            "Unfreeze it, or make it a constant of the model."
        )
    buffers = [n for n, b in model.named_buffers() if b.is_floating_point()]
    if buffers:
        raise InputError(
            f"{type(model).__name__} has the buffer {buffers[0]!r}, which members would share: "
            "batch normalisation's statistics are not a member's own. Use a model without buffers."
        )

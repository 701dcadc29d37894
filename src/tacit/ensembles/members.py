"""An ensemble: M networks of one architecture as one dictionary of stacked parameters."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tacit.ensembles.forward import Forward, batched_forward
from tacit.errors import InputError
from tacit.objective.params import Params, trainable


@dataclass(frozen=True, eq=False)
class Ensemble:
    """An architecture and the stacked parameters of its members.

    Args:
        model: the architecture. The values of its parameters are never used.
        params: one tensor of shape (members, …) per parameter of the model; entry m belongs to
            member m.
    """

    model: nn.Module
    params: Params

    def __post_init__(self) -> None:
        _check_architecture(self.model)
        expected = {n: tuple(p.shape) for n, p in trainable(self.model).items()}
        shapes = {n: tuple(p.shape[1:]) for n, p in self.params.items()}
        sizes = {len(p) for p in self.params.values()}
        if shapes != expected or len(sizes) != 1:
            raise InputError(
                f"stacked parameters {shapes} (without the dimension of the members) with "
                f"{sorted(sizes)} members do not belong to this {type(self.model).__name__}: "
                "make ensembles with ensembles.from_models(models) or "
                "ensembles.initialise(build, seeds)."
            )

    def __len__(self) -> int:
        return len(self.first_tensor)

    @cached_property
    def forward(self) -> Forward:
        """The function that computes the outputs of all members.

        Called as forward(params, inputs, apply_dropout) with stacked parameters and one batch per
        member; see `tacit.ensembles.forward`.
        """
        return batched_forward(self.model)

    @property
    def first_tensor(self) -> Tensor:
        """One of the stacked tensors, for its device and dtype."""
        return next(iter(self.params.values()))

    def with_params(self, params: Mapping[str, Tensor]) -> "Ensemble":
        """The same architecture with other stacked parameters."""
        return Ensemble(self.model, dict(params))

    def select(self, members: Sequence[int]) -> "Ensemble":
        """The ensemble of some of the members, in this order."""
        return self.with_params({n: p[list(members)] for n, p in self.params.items()})

    def member(self, index: int) -> Params:
        """The parameters of one member, as views."""
        return {n: p[index] for n, p in self.params.items()}

    def module(self, index: int) -> nn.Module:
        """A copy of one member as a module."""
        module = copy.deepcopy(self.model)
        module = module.to(device=self.first_tensor.device, dtype=self.first_tensor.dtype)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.params[name][index])
        return module

    def to(self, *args: Any, **options: Any) -> "Ensemble":
        """The ensemble on another device or in another dtype; arguments are those of Tensor.to."""
        return self.with_params({n: p.to(*args, **options) for n, p in self.params.items()})


def from_models(models: Iterable[nn.Module]) -> Ensemble:
    """Make an ensemble of trained or initialised modules of one architecture.

    Trap: everything except the parameters, such as constants that a module stores as attributes,
    is taken from the first module.
    """
    models = list(models)
    if not models or not all(isinstance(model, nn.Module) for model in models):
        raise InputError(
            "from_models needs modules of one architecture: pass a list, such as [a, b]."
        )
    for index, model in enumerate(models):
        _check_same_architecture(index, model, models[0])
    params = [trainable(model) for model in models]
    stacked = {n: torch.stack([p[n] for p in params]) for n in params[0]}
    return Ensemble(copy.deepcopy(models[0]), stacked)


def _check_same_architecture(index: int, model: nn.Module, first: nn.Module) -> None:
    shapes, expected = ({n: p.shape for n, p in trainable(m).items()} for m in (model, first))
    if shapes != expected or str(model) != str(first):
        raise InputError(
            f"model {index} has another architecture than model 0: the members of an ensemble may "
            f"differ only in their weights. Got {model} and {first}."
        )
    for (name, buffer), (_, expected_buffer) in zip(
        model.named_buffers(), first.named_buffers(), strict=True
    ):
        if not torch.equal(buffer, expected_buffer):
            raise InputError(
                f"model {index} has another buffer {name!r} than model 0: the members of an "
                "ensemble share everything except their parameters. Make the buffer a parameter, "
                "or an input."
            )


def initialise(build: Callable[[], nn.Module], seeds: Iterable[int]) -> Ensemble:
    """Make an ensemble by calling `build()` under each seed; equal seeds give equal weights.

    The caller's random state does not change.
    """
    seeds = check_seeds(seeds)
    models: dict[int, nn.Module] = {}
    # torch.manual_seed would also seed devices that are not in use yet, and not restore them.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        for seed in dict.fromkeys(seeds):
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed_all(seed)
            models[seed] = build()
    return from_models(models[seed] for seed in seeds)


def check_seeds(seeds: Iterable[int], members: int | None = None) -> list[int]:
    """Check that seeds are whole numbers, one per member, and return them as a list."""
    if not isinstance(seeds, Iterable):
        raise InputError(f"seeds is {seeds!r}: pass whole numbers, one per member.")
    seeds = list(seeds)
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise InputError(f"a seed is {seed!r}: pass whole numbers, 0 or above, one per member.")
    if not seeds or (members is not None and len(seeds) != members):
        raise InputError(f"{len(seeds)} seeds for {members or 'no'} members: pass one per member.")
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
            f"{type(model).__name__} has the buffer {buffers[0]!r}, which all members would share: "
            "each member would need separate statistics of batch normalisation. Use a model "
            "without floating-point buffers."
        )

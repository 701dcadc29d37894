"""An ensemble: M networks of one architecture as one dictionary of stacked parameters."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tacit.ensembles.forward import Forward, batched_forward, behaviour, check_backward_hooks
from tacit.errors import InputError, check_whole
from tacit.objective.models import named_parameters, trainable
from tacit.objective.params import Params


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
        frozen = [n for n, p in self.model.named_parameters() if not p.requires_grad]
        buffers = [n for n, b in self.model.named_buffers() if b.is_floating_point()]
        expected = {n: tuple(p.shape) for n, p in trainable(self.model).items()}
        shapes = {n: tuple(p.shape[1:]) for n, p in self.params.items()}
        sizes = {len(p) for p in self.params.values()}
        if frozen:
            raise InputError(
                f"parameter {frozen[0]!r} is frozen: all parameters of an ensemble are trained. "
                "Unfreeze it, or make it a constant of the model."
            )
        if buffers:
            raise InputError(
                f"the model has the buffer {buffers[0]!r}, which all members would share, as "
                "statistics of batch normalisation: use a model without floating-point buffers."
            )
        if shapes != expected or len(sizes) != 1:
            raise InputError(
                f"parameters {shapes} of {sorted(sizes)} members do not belong to this "
                f"{type(self.model).__name__}: use ensembles.from_models or ensembles.initialise."
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
        module = _copy(self.model)
        module = module.to(device=self.first_tensor.device, dtype=self.first_tensor.dtype)
        with torch.no_grad():
            for name, parameter in named_parameters(module).items():
                parameter.copy_(self.params[name][index])
        return module

    def flatten(self, stacked: Params) -> Tensor:
        """Copy tensors of some members into flat rows (members, parameters).

        What acts on single entries (penalties, optimizers, averages) then runs once per step.
        """
        return torch.cat([flatten_members(stacked[n]) for n in self.params], 1)

    def views(self, flat: Tensor) -> Params:
        """The stacked tensors of flat rows (members, parameters), sharing their memory."""
        shapes = {n: p.shape[1:] for n, p in self.params.items()}
        parts = flat.split([shape.numel() for shape in shapes.values()], 1)
        named = zip(shapes.items(), parts, strict=True)
        return {n: part.view(len(flat), *shape) for (n, shape), part in named}

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
        raise InputError("from_models needs modules of one architecture: pass them as a list.")
    first, params = models[0], [trainable(model) for model in models]
    shapes = [{n: p.shape for n, p in tensors.items()} for tensors in params]
    for index, model in enumerate(models):
        check_backward_hooks(model)
        if shapes[index] != shapes[0] or _architecture(model) != _architecture(first):
            raise InputError(
                f"model {index} has another architecture than model 0: the members of an ensemble "
                f"may differ only in their weights. Got {model} and {first}."
            )
        buffers = zip(model.named_buffers(), first.buffers(), strict=True)
        for (name, buffer), expected in buffers:
            if not torch.equal(buffer, expected):
                raise InputError(
                    f"model {index} has another buffer {name!r} than model 0: members differ only "
                    "in their parameters. Make the buffer a parameter, or an input."
                )
    stacked = {n: torch.stack([tensors[n] for tensors in params]) for n in params[0]}
    return Ensemble(_copy(first), stacked)


def _architecture(model: nn.Module) -> tuple[Any, ...]:
    return str(model), [behaviour(module) for module in model.modules()]


def _copy(model: nn.Module) -> nn.Module:
    """A copy of a model, refused if it would still run the original."""
    try:
        copied = copy.deepcopy(model)
    except RuntimeError as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied: {error} Remove tensors with a graph, which "
            "a forward pass left as attributes, or use torch.nn.utils.parametrizations."
        ) from error
    for module, twin in zip(model.modules(), copied.modules(), strict=True):
        forward = vars(module).get("forward")
        if forward is not None and vars(twin).get("forward") is forward:
            raise InputError(
                f"the forward of {type(module).__name__} was replaced by a function, which a copy "
                "of the model would share: patch it with types.MethodType(function, module), "
                "where the function takes the module as its first argument."
            )
    return copied


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
        check_whole("a seed", seed, least=0)
    if not seeds or (members is not None and len(seeds) != members):
        raise InputError(f"{len(seeds)} seeds for {members or 'no'} members: pass one per member.")
    return seeds


def flatten_members(stacked: Tensor) -> Tensor:
    """Reshape a stacked tensor to (members, entries)."""
    return stacked.reshape(len(stacked), -1)


def member_norms(tensors: Params) -> list[float]:
    """Euclidean norm over all tensors, of every member."""
    squares = [flatten_members(t).square().sum(1) for t in tensors.values()]
    return torch.stack(squares).sum(0).sqrt().tolist()

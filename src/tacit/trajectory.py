"""Points that training passed through, where it went from them, and in what flow time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.params import Params, check_finite, trainable, wide


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Points θ_t, displacements θ_{t+1} − θ_t, and the flow time that each displacement took.

    The time is η for a step of gradient descent, η·steps for an epoch, η/(1−β) for momentum β
    after burn-in. Trap: Adam's steps follow no gradient flow of L; see `record`.
    """

    points: Sequence[Params]
    displacements: Sequence[Params]
    times: Sequence[float]

    def __post_init__(self) -> None:
        for part in (self.points, self.displacements, self.times):
            if not isinstance(part, Sequence):
                raise InputError(
                    f"a trajectory was given a {type(part).__name__}: pass three lists, of points, "
                    "displacements and times."
                )
        sizes = (len(self.points), len(self.displacements), len(self.times))
        if len(set(sizes)) > 1:
            raise InputError(
                f"a trajectory of {sizes[0]} points, {sizes[1]} displacements and {sizes[2]} "
                "times: there must be one of each a step. For positions alone use "
                "Trajectory.from_positions."
            )
        if not sizes[0]:
            raise InputError("a trajectory without steps: pass at least one displacement.")
        _check_times(self.times)
        for step, (point, moved) in enumerate(zip(self.points, self.displacements, strict=True)):
            check_alike(point, self.points[0], f"point {step}")
            check_alike(moved, self.points[0], f"displacement {step}")

    def __len__(self) -> int:
        return len(self.points)

    @classmethod
    def from_positions(
        cls, params: Iterable[Params], step_sizes: float | Sequence[float]
    ) -> "Trajectory":
        """Displacements from successive positions, formed in float64; one step size or one each."""
        positions = list(params)
        if len(positions) < 2:
            raise InputError(
                f"a trajectory of {len(positions)} position has no displacement: pass two or more."
            )
        steps = len(positions) - 1
        times = list(step_sizes) if isinstance(step_sizes, Iterable) else [step_sizes] * steps
        if len(times) != steps:
            raise InputError(
                f"{len(positions)} positions make {steps} steps, but {len(times)} step sizes were "
                "given: pass one a step, or a single number."
            )
        for number, position in enumerate(positions):
            check_alike(position, positions[0], f"position {number}")
        pairs = pairwise(positions)
        displacements = []
        for number, (start, end) in enumerate(pairs):
            if any(start[n].data_ptr() == end[n].data_ptr() for n in start if start[n].numel()):
                raise InputError(
                    f"positions {number} and {number + 1} share their memory, so they cannot "
                    "differ: keep copies, as in {n: p.detach().clone() for n, p in "
                    "model.named_parameters()}."
                )
            displacements.append(_difference(end, start))
        return cls(positions[:-1], displacements, times)


class Recorder:
    """Keeps the points and displacements of a training loop as they happen; see `record`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None):
        if optimizer is not None:
            _check_optimizer(optimizer)
        self._model = model
        self._elapsed: float | None = None
        if optimizer is not None:
            self._elapsed = 0.0
            flow_time(optimizer)  # refused here rather than at the first update
            # At the update itself: a schedule may have changed the step size by the next line.
            optimizer.register_step_post_hook(self._count_time)
        self._last = _copy(model)
        self._steps: list[tuple[Params, Params, float]] = []

    def _count_time(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._elapsed = (self._elapsed or 0.0) + flow_time(optimizer)

    def step(self, step_size: float | None = None) -> None:
        """Record where the model is now; the flow time since is `step_size`, or the optimizer's.

        With an optimizer, several updates (an epoch) may lie between two calls.
        """
        if step_size is None:
            if self._elapsed is None:
                raise InputError(
                    "recorder.step() does not know the step size: pass it, or make the recorder "
                    "with tacit.record(model, optimizer)."
                )
            if not self._elapsed:
                raise InputError(
                    "recorder.step() was called before any update: call it after optimizer.step()."
                )
            step_size, self._elapsed = self._elapsed, 0.0
        _check_times([step_size])
        here = _copy(self._model)
        self._steps.append((self._last, _difference(here, self._last), float(step_size)))
        self._last = here

    def trajectory(self) -> Trajectory:
        """What was recorded so far."""
        if not self._steps:
            raise InputError("nothing was recorded: call recorder.step(step_size) after updates.")
        points, displacements, times = zip(*self._steps, strict=True)
        return Trajectory(points, displacements, times)


def record(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Recorder:
    """Start recording a training loop: call `.step(step_size)` after each update.

    With a torch SGD optimizer the step size is read from it: η, or η/(1−β) with momentum β, which
    is right after a burn-in of a few 1/(1−β) steps. Every step keeps two copies of the parameters.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"record was given a {type(model).__name__}: pass a torch.nn.Module.")
    return Recorder(model, optimizer)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"record was given a {type(optimizer).__name__} as optimizer: pass a torch.optim.SGD, "
            "or leave it out and pass the step size to recorder.step."
        )
    if not isinstance(optimizer, torch.optim.SGD):
        raise InputError(
            f"{type(optimizer).__name__} rescales each coordinate by its own history, so its steps "
            "follow no gradient flow of the loss, and what they add cannot be told from the "
            "rescaling. Train with SGD, or use endpoint_equations at the end of training."
        )


def flow_time(optimizer: torch.optim.Optimizer) -> float:
    """Time that a step of SGD takes in the flow: η, or η/(1−β) with momentum β."""
    times = set()
    for group in optimizer.param_groups:
        rate, momentum = float(group["lr"]), group["momentum"]
        if group["maximize"] or not 0 <= momentum < 1:
            raise InputError(
                f"SGD with maximize={group['maximize']} and momentum={momentum} does not follow a "
                "descending flow: use maximize=False and a momentum below 1."
            )
        times.add(rate * (1 - group["dampening"]) / (1 - momentum) if momentum else rate)
    if len(times) > 1:
        raise InputError(
            f"the optimizer's parameter groups have different flow times {sorted(times)}: one time "
            "a step is needed. Use the same lr and momentum, or rows= with one group at a time."
        )
    return float(times.pop())


def _check_times(times: Sequence[float]) -> None:
    for time in times:
        if isinstance(time, bool) or not isinstance(time, Real) or not 0 < time < math.inf:
            raise InputError(
                f"a step took time {time!r}: pass a finite number above zero, such as the step "
                "size η, or η/(1−β) for momentum β."
            )


def check_alike(params: Params, first: Params, what: str) -> None:
    """Refuse parameters with other names or shapes than the first point's, or not finite."""
    if not isinstance(params, Mapping):
        raise InputError(
            f"{what} of the trajectory is a {type(params).__name__}: pass a dictionary of named "
            "tensors, such as copies of dict(model.named_parameters())."
        )
    if any(not isinstance(tensor, Tensor) for tensor in params.values()):
        raise InputError(f"{what} of the trajectory holds no tensors: pass named tensors.")
    if params.keys() != first.keys() or any(params[n].shape != first[n].shape for n in first):
        raise InputError(
            f"{what} of the trajectory has other tensors than the first point: all must be of one "
            "model, with the same names and shapes."
        )
    check_finite(params, what=f"{what} of the trajectory")


def _copy(model: nn.Module) -> Params:
    return {n: p.clone() for n, p in trainable(model).items()}


def _difference(end: Params, start: Params) -> Params:
    return {n: wide(end[n].detach()) - wide(start[n].detach()) for n in start}

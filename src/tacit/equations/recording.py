"""Recording the steps of a training loop as they happen."""

import torch
from torch import nn

from tacit.equations.trajectory import Trajectory, check_time
from tacit.errors import InputError, check_type
from tacit.objective.params import Params, trainable


class Recorder:
    """Records the positions of a training loop; see `record`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None):
        self._model, self._positions = model, [_copy(model)]
        self._times: list[float] = []
        self._elapsed = None if optimizer is None else 0.0
        if optimizer is not None:
            _check_optimizer(optimizer)
            # At the update itself: a schedule may have changed the step size by the next line.
            optimizer.register_step_post_hook(self._count_time)

    def _count_time(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._elapsed = (self._elapsed or 0.0) + flow_time(optimizer)

    def step(self, step_size: float | None = None) -> None:
        """Record the current weights; the flow time since is `step_size`, or the optimizer's.

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
        check_time(step_size)
        self._positions.append(_copy(self._model))
        self._times.append(float(step_size))

    def trajectory(self) -> Trajectory:
        """The trajectory recorded so far."""
        if not self._times:
            raise InputError("nothing was recorded: call recorder.step(step_size) after updates.")
        return Trajectory.from_positions(self._positions, self._times)


def record(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Recorder:
    """Start recording a training loop: call `.step(step_size)` after each update.

    With a torch SGD optimizer the step size is read from it: η, or η/(1−β) with momentum β, which
    is right after a burn-in of a few 1/(1−β) steps. Every step keeps a copy of the parameters.
    """
    check_type("the model to record", model, nn.Module, "a torch.nn.Module")
    return Recorder(model, optimizer)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    needed = "a torch.optim.SGD, or leave it out and pass the step size to recorder.step"
    check_type("optimizer", optimizer, torch.optim.Optimizer, needed)
    if not isinstance(optimizer, torch.optim.SGD):
        raise InputError(
            f"{type(optimizer).__name__} rescales each coordinate by its own history, so its steps "
            "do not follow the gradient flow of the loss. Train with SGD, or use "
            "endpoint_equations at the end of training."
        )
    flow_time(optimizer)  # raises here rather than at the first update


def flow_time(optimizer: torch.optim.Optimizer) -> float:
    """Flow time of one step: η, or η/(1−β) for SGD with momentum β."""
    times = set()
    for group in optimizer.param_groups:
        rate, momentum = float(group["lr"]), group.get("momentum", 0)
        if group["maximize"] or not 0 <= momentum < 1:
            raise InputError(
                f"the optimizer has maximize={group['maximize']} and momentum={momentum}, which do "
                "not follow a descending flow: use maximize=False and a momentum below 1."
            )
        times.add(rate * (1 - group["dampening"]) / (1 - momentum) if momentum else rate)
    if len(times) > 1:
        raise InputError(
            f"the optimizer's groups have different step sizes (flow times {sorted(times)}), but "
            "one time per step is needed: use the same lr and momentum, or rows= with one group "
            "at a time."
        )
    return times.pop()


def _copy(model: nn.Module) -> Params:
    return {n: p.clone() for n, p in trainable(model).items()}

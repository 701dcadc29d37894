"""Recording the steps of a training loop as they happen."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tacit.equations.clipping import GradientSizes, clipped_part, was_skipped
from tacit.equations.step_hooks import StepHooks
from tacit.equations.trajectory import Trajectory, check_time
from tacit.errors import InputError, check_type
from tacit.objective.models import copy_statistics, trainable, used_statistics
from tacit.objective.params import Params, Point, shorten, to_float64
from tacit.objective.ranks import Ranks, on_its_ranks, own_rows, ranks_of
from tacit.regularizers.weight_decay import (
    adam_metric,
    adam_scale,
    parameter_names,
    step_rule,
    unwrap_optimizer,
)

MOST_ENTRIES = 2**15
"""Entries of a parameter that are looked at together after an update."""
Rows = slice | EllipsisType
"""Some rows of a parameter, or all of it."""


class Recorder:
    """Records the positions of a training loop; see `record`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None):
        self._model, self._positions = model, [_copy(model)]
        self.ranks: Ranks = ranks_of(model)
        """The processes that share the model; each records its own rows of the parameters."""
        self._times: list[float] = []
        self._young: list[float] = []
        self.carried: list[Params] = []
        self._elapsed = None if optimizer is None else 0.0
        self._missing, self._buffers = 0.0, MomentumBuffers()
        self._momentum, self._rates = Momentum(model), Rates(model)
        self._metrics: list[tuple[Params, Params]] = []
        self._updates, self._most_updates = 0, 1
        self._wrapper = None if optimizer is None else WrapperWatch(model, optimizer)
        self._sizes: GradientSizes | None = None
        if optimizer is not None:
            optimizer = _check_optimizer(model, optimizer)
            self._sizes = GradientSizes(optimizer)
            optimizer.register_step_pre_hook(self._before_step)
            # At the update itself: a schedule may have changed the step size by the next line.
            optimizer.register_step_post_hook(self._count_time)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self._times and not self._elapsed:
            self._positions = [_copy(self._model)]  # weights may have been loaded since
        self._buffers.before_step(optimizer)
        self._momentum.before_step(optimizer)

    def _count_time(self, optimizer: Optimizer, *_: object) -> None:
        if was_skipped(optimizer):
            return
        time = self._rates.add(optimizer)
        self._elapsed = (self._elapsed or 0.0) + time
        self._missing += time * self._buffers.after_step(optimizer)
        for _update in self._momentum.after_step(optimizer):
            pass  # its force is not needed here
        self._updates += 1

    def step(self, step_size: float | None = None) -> None:
        """Record the current weights; the flow time since is `step_size`, or the optimizer's.

        With an optimizer, several updates (an epoch) may lie between two calls. After an update
        that a GradScaler skipped, nothing is recorded.
        """
        if step_size is None:
            if self._elapsed is None:
                raise InputError(
                    "recorder.step() does not know the step size: pass it, or make the recorder "
                    "with tacit.record(model, optimizer)."
                )
            if not self._elapsed:
                self._check_skipped()
                return
            step_size = self._elapsed
        check_time(step_size)
        self._positions.append(_copy(self._model))
        self._times.append(float(step_size))
        self._young.append(self._missing / self._elapsed if self._elapsed else 0.0)
        self.carried.append(self._momentum.take_carried())
        self._metrics.append(self._rates.take_metric())
        self._most_updates, self._updates = max(self._most_updates, self._updates), 0
        self._elapsed, self._missing = None if self._elapsed is None else 0.0, 0.0

    def _check_skipped(self) -> None:
        """Without an update: the weights must be those recorded last."""
        last = self._positions[-1]
        if any(not p.equal(last[n]) for n, p in trainable(self._model).items()):
            raise InputError(
                "the weights have changed without an update of the optimizer: call recorder.step() "
                "after optimizer.step(), and make the recorder with the optimizer that trains the "
                "model."
            )

    @on_its_ranks
    def trajectory(self) -> Trajectory:
        """The trajectory recorded so far."""
        if not self._times:
            raise InputError("nothing was recorded: call recorder.step(step_size) after updates.")
        if self._wrapper:
            self._wrapper.check()
        trajectory = Trajectory.from_positions(self._positions, self._times)
        first, last = (getattr(self._positions[i], "buffers", {}) for i in (0, -1))
        used = used_statistics(self._model, first, last)
        clipped = clipped_part(self._sizes.last()) if self._sizes else 0.0
        return replace(
            trajectory,
            young_momentum=tuple(self._young),
            batch_norm=used,
            clipped=clipped,
            carried=tuple(self.carried) if any(self.carried) else (),
            momentum=self._momentum.largest,
            updates=self._most_updates,
            **self._in_metric(),
        )

    def _in_metric(self) -> dict[str, list[Params]]:
        """Metrics and Adam's scales of the steps; nothing where all steps are plain."""
        metrics, scales = ([pair[i] for pair in self._metrics] for i in (0, 1))
        if not any(metrics):
            return {}
        return {"metrics": metrics, "scales": scales if any(scales) else []}


def record(model: nn.Module, optimizer: Optimizer | None = None) -> Recorder:
    """Start recording a training loop: call `.step(step_size)` after each update.

    With an optimizer (or a wrapper that holds one as `.optimizer`) the step size is read from it:
    η, or η/(1−β) with momentum β of SGD. Every step keeps a copy of the parameters; after Adam or
    AdamW also of the metric √v̂ + ε, in which their steps follow the gradient flow. Groups of
    parameters may have their own rates, which are a metric too.

    What momentum carries over from earlier gradients is recorded too: `trajectory_equations` leaves
    it out, except against a flow (`rk4`). Trap: there η/(1−β) is right only after a burn-in of a
    few 1/(1−β) steps. A fit says so where recording began with an empty momentum buffer; one that
    is there already counts as filled.

    Trap: steps of clipped gradients do not follow the flow of the loss. A fit says so where the
    recorder has the optimizer; without it, gradients are not seen.
    """
    check_type("the model to record", model, nn.Module, "a torch.nn.Module")
    return Recorder(model, optimizer)


def _check_optimizer(model: nn.Module, optimizer: Any) -> Optimizer:
    """The optimizer inside its wrappers, whose steps must be those of torch's SGD or Adam."""
    optimizer = unwrap_optimizer(optimizer)
    if step_rule(optimizer) not in ("SGD.step", "Adam.step"):
        raise InputError(
            f"{type(optimizer).__name__} has a step of its own, and in which time and metric it "
            "follows the gradient flow of the loss is not known. Train with torch's SGD, Adam or "
            "AdamW; or leave the optimizer out, pass the step size to recorder.step, and the "
            "metric to trajectory_equations; or use endpoint_equations."
        )
    flow_times(model, optimizer, trainable(model))  # raises here rather than at the first update
    return optimizer


class Rates:
    """The rates of updates by parameter, from which the metric of a step follows.

    An update moves a parameter by −r·s⁻¹g, with r its flow time and s = √v̂ + ε of Adam, or 1. Over
    a step of time T it is −T·M⁻¹g with M = T/Σ(r/s). The mean of s is Σr/Σ(r/s).
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._sums: dict[str, tuple[float, Tensor | float]] = {}
        """By parameter, Σr and Σ(r/s)."""
        self._time = 0.0
        self._adam: set[str] = set()
        """Parameters that Adam has moved."""

    def add(self, optimizer: Optimizer) -> float:
        """Count one update, and return the largest flow time of any parameter."""
        times = flow_times(self._model, optimizer, trainable(self._model))
        scales = adam_metric(optimizer, self._model)
        self._adam |= scales.keys()
        for name, rate in times.items():
            rates, reach = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = rates + rate, reach + rate / scales.get(name, 1.0)
        self._time += max(times.values())
        return max(times.values())

    def take_metric(self) -> tuple[Params, Params]:
        """M and the mean of s since the last call, by parameter; both empty for plain steps."""
        (sums, time), self._sums, self._time = (self._sums, self._time), {}, 0.0
        if resting := [n for n, (rates, _) in sums.items() if not rates]:
            raise InputError(
                f"the rate of {shorten(resting)} is zero in this step, so that its displacement "
                "carries no information: set requires_grad=False for it while its rate is zero, "
                "and record those steps by themselves."
            )
        if not self._adam and all(reach == time for _, reach in sums.values()):
            return {}, {}
        metric = {n: torch.as_tensor(time / reach).double() for n, (_, reach) in sums.items()}
        scale = {n: sums[n][0] / sums[n][1] for n in sums if n in self._adam}
        return metric, {n: torch.as_tensor(s).double() for n, s in scale.items()}


class WrapperWatch:
    """Whether a wrapper moves the weights beside the steps of the optimizer that it holds.

    Accelerate's does not; one that averages weights, as Lookahead, does. Norms are compared.
    """

    def __init__(self, model: nn.Module, wrapper: Any, hooks: StepHooks | None = None):
        self._model, self._wrapper = model, wrapper
        self._norms = torch.zeros(0)
        self._moved = torch.zeros((), dtype=torch.bool)
        self.hooks: tuple[RemovableHandle, ...] = ()
        optimizer = unwrap_optimizer(wrapper)
        if optimizer is not wrapper:
            register = hooks or optimizer
            self.hooks = (
                register.register_step_pre_hook(self._before_step),
                register.register_step_post_hook(self._after_step),
            )

    def check(self) -> None:
        """Refuse a wrapper that moved the weights."""
        if self._moved:
            name = type(self._wrapper).__name__
            raise InputError(
                f"the weights changed between the steps of the optimizer that {name} holds, so that"
                f" its step sizes do not say how fast they move. Train without {name}; if "
                "something else changed them on purpose, pass the inner optimizer."
            )

    def _before_step(self, *_: object) -> None:
        norms = self._current_norms()
        if norms.shape == self._norms.shape:  # otherwise parameters were frozen or unfrozen
            self._moved = self._moved.to(norms.device) | (norms != self._norms).any()

    def _after_step(self, *_: object) -> None:
        self._norms = self._current_norms()

    def _current_norms(self) -> Tensor:
        norms = [own_rows(p.detach()).norm() for p in self._model.parameters() if p.requires_grad]
        return torch.stack([number.to(norms[0]) for number in norms])


class MomentumBuffers:
    """How far the momentum buffers that were empty when first seen are from their steady size.

    From a constant gradient g, the k-th step of an empty buffer is η (1 − β^k)/(1 − β) g: it falls
    short of the flow time η/(1−β) by the part β^k. Adam's means are corrected for that, but are
    means over k steps only: what they remember of earlier ones is short by the part β^k.
    """

    def __init__(self) -> None:
        self._ages: dict[Tensor, int] = {}

    def before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Note the parameters whose buffer is empty."""
        for parameter, _group in _with_momentum(optimizer):
            if _buffer(optimizer, parameter) is None:
                self._ages[parameter] = 0

    def after_step(self, optimizer: Optimizer) -> float:
        """The part of the step's flow time that is missing, the largest over the parameters."""
        missing = 0.0
        for parameter, group in _with_momentum(optimizer) if self._ages else ():
            if parameter in self._ages and _buffer(optimizer, parameter) is not None:
                self._ages[parameter] += 1
                missing = max(missing, _missing_part(group, self._ages[parameter]))
        return missing


class Update(NamedTuple):
    """One update of some rows of a parameter, in float64."""

    start: Tensor
    """The weights that it started from."""
    force: Tensor
    """Its gradient with weight decay: g + wθ, or g + (√v̂ + ε) w θ where AdamW decouples it."""
    carried: Tensor | None = None
    """What momentum added to the displacement; None without momentum."""
    scale: Tensor | None = None
    """√v̂ + ε of Adam, by which the force was divided; None of SGD."""


class Momentum:
    """What momentum carries from earlier gradients into the steps of torch's SGD, Adam and AdamW.

    An update with the gradient g fills SGD's buffer b with βb + (1−d)g (with g where it was empty),
    and moves the weights by −ηb, under Nesterov by −η(g + βb). Its own gradient would move them by
    −τg in the flow time τ = η(1−d)/(1−β). Adam fills its mean m with βm + (1−β)g, and moves them by
    −ηm̂/(√v̂ + ε), m̂ = m/(1−βᵗ); its own gradient would move them by −ηg/(√v̂ + ε). The rest of the
    displacement is carried over.
    """

    def __init__(self, model: nn.Module):
        self._model, self._before = model, {}
        self.carried: Params = {}
        """What was carried over since `take_carried` was last called."""
        self.largest = 0.0
        """The largest β of any parameter."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Copy the buffers, which the update changes."""
        buffers = ((p, _buffer(optimizer, p)) for p, _ in _with_momentum(optimizer))
        self._before = {p: own_rows(b).clone() for p, b in buffers if b is not None}

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> Iterator[tuple[str, Rows, Update]]:
        """The update of one parameter after the other, a few rows at a time.

        What each carried over is added up.
        """
        names = parameter_names(self._model)
        for parameter, group in _members(optimizer):
            name, state = names.get(id(parameter)), _own_state(optimizer, parameter)
            if name is None or parameter.grad is None:
                continue  # without a gradient there was no update
            before, momentum = self._before.get(parameter), _momentum(group)
            gradient, parameter = own_rows(parameter.grad).to_dense(), own_rows(parameter.detach())
            for rows in _row_slices(parameter):
                end, earlier = to_float64(parameter[rows]), None if before is None else before[rows]
                if "exp_avg" in state:
                    update = _adam_update(end, group, _rows_of(state, rows, parameter), earlier)
                elif momentum:
                    buffer = state["momentum_buffer"][rows]
                    update = _momentum_update(end, group, buffer, earlier)
                else:
                    update = _plain_update(end, group, gradient[rows])
                if update.carried is not None:
                    self._add_carried(name, rows, update.carried, parameter)
                    self.largest = max(self.largest, momentum)
                yield name, rows, update

    def _add_carried(self, name: str, rows: Rows, carried: Tensor, parameter: Tensor) -> None:
        if name not in self.carried:
            self.carried[name] = carried.new_zeros(parameter.shape)
        self.carried[name][rows] += carried

    def take_carried(self) -> Params:
        """What was carried over since the last call, by name; empty without momentum."""
        carried, self.carried = self.carried, {}
        return carried


def _row_slices(parameter: Tensor) -> list[Rows]:
    """Slices of rows with few entries, which stay in a CPU's cache; all rows on other devices."""
    if not parameter.is_cpu or parameter.numel() <= MOST_ENTRIES or not parameter.ndim:
        return [...]
    height = max(1, MOST_ENTRIES // max(1, parameter[0].numel()))
    return [slice(i, i + height) for i in range(0, len(parameter), height)]


def _rows_of(state: dict[str, Any], rows: Rows, parameter: Tensor) -> dict[str, Any]:
    """An optimizer's state of some rows of a parameter."""
    return {
        key: value[rows] if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for key, value in state.items()
        if key != "step"
    } | {"step": state["step"]}


def _plain_update(end: Tensor, group: dict[str, Any], gradient: Tensor) -> Update:
    """θ′ = θ − η(g + wθ), SGD without momentum."""
    decay, rate = float(group.get("weight_decay") or 0), float(group["lr"])
    gradient = to_float64(gradient)
    start = (end + rate * gradient) / (1 - rate * decay)
    return Update(start, gradient + decay * start)


def _momentum_update(
    end: Tensor, group: dict[str, Any], buffer: Tensor, before: Tensor | None
) -> Update:
    """SGD with momentum."""
    momentum, rate = _momentum(group), float(group["lr"])
    force = moved = to_float64(buffer)
    if before is not None:
        force = (force - momentum * to_float64(before)) / (1 - group["dampening"])
    if group.get("nesterov"):
        moved = force + momentum * moved
    return Update(end + rate * moved, force, _group_flow_time(group) * force - rate * moved)


def _adam_update(
    end: Tensor, group: dict[str, Any], state: dict[str, Any], before: Tensor | None
) -> Update:
    """Adam, whose mean of gradients starts from zero, and AdamW."""
    momentum, rate, mean = _momentum(group), float(group["lr"]), to_float64(state["exp_avg"])
    earlier = 0.0 if before is None else momentum * to_float64(before)
    gradient, scale = (mean - earlier) / (1 - momentum), adam_scale(group, state)
    moved = mean / (1 - momentum ** float(state["step"])) / scale
    decay = float(group["weight_decay"]) if group.get("decoupled_weight_decay") else 0.0
    start = (end + rate * moved) / (1 - rate * decay)
    carried = rate * (gradient / scale - moved)
    return Update(start, gradient + decay * scale * start, carried, scale)


def _own_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """An optimizer's state of the rows of a parameter that this process has."""
    return {key: own_rows(value) for key, value in optimizer.state.get(parameter, {}).items()}


def _members(optimizer: Optimizer) -> Iterable[tuple[Tensor, dict[str, Any]]]:
    """All parameters, each with its group."""
    return ((p, group) for group in optimizer.param_groups for p in group["params"])


def _with_momentum(optimizer: Optimizer) -> Iterable[tuple[Tensor, dict[str, Any]]]:
    return ((p, group) for p, group in _members(optimizer) if _momentum(group))


def _momentum(group: dict[str, Any]) -> float:
    """β of SGD, or the first β of Adam."""
    return float(group.get("momentum") or group.get("betas", (0,))[0])


def _buffer(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    """The momentum buffer of SGD, or Adam's mean of gradients; None before the first update."""
    state = optimizer.state.get(parameter, {})
    return state.get("momentum_buffer", state.get("exp_avg"))


def _missing_part(group: dict[str, Any], age: int) -> float:
    """1 − (step of a buffer of this age)/(step of a full one); torch does not dampen the first."""
    if "betas" in group:
        return max(map(float, group["betas"])) ** age
    momentum, dampening = float(group["momentum"]), float(group.get("dampening", 0))
    first = 1 - (1 - momentum) / (1 - dampening) if dampening < 1 else momentum
    return abs(first) * momentum ** (age if group.get("nesterov") else age - 1)


def flow_times(model: nn.Module, optimizer: Optimizer, params: Params) -> dict[str, float]:
    """The flow time of one step of each parameter; refused if the optimizer does not train one."""
    names = parameter_names(model)
    times = {}
    for group in optimizer.param_groups:
        members = [name for p in group["params"] if (name := names.get(id(p))) in params]
        times |= dict.fromkeys(members, _group_flow_time(group) if members else 0.0)
    missing = [n for n in params if n not in times]
    if missing:
        raise InputError(
            f"the optimizer does not train {missing[0]!r} and {len(missing) - 1} others: their "
            "displacement carries no information. Set requires_grad=False for them."
        )
    return times


def _group_flow_time(group: dict[str, Any]) -> float:
    """Flow time of one step of a parameter group."""
    rate, momentum = float(group["lr"]), float(group.get("momentum") or 0)
    if group.get("maximize") or not 0 <= momentum < 1:
        raise InputError(
            f"the optimizer has maximize={group.get('maximize')} and momentum={momentum}, which do "
            "not follow a descending flow: use maximize=False and a momentum below 1."
        )
    return rate * (1 - group["dampening"]) / (1 - momentum) if momentum else rate


def _copy(model: nn.Module) -> Params:
    """The parameters, with batch norm's running statistics where there are any."""
    params = {n: p.clone() for n, p in trainable(model).items()}
    statistics = copy_statistics(model)
    return Point(params, statistics) if statistics else params

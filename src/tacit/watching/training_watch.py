"""Strengths along training: some parts of it are observed, as often as a budget of time allows."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tacit.display import Format, render
from tacit.display.frames import make_frame
from tacit.equations.candidates import check_candidates
from tacit.equations.clipping import was_skipped
from tacit.equations.epochs import (
    EpochAverages,
    observe_epochs,
    restore_target,
    target_state,
)
from tacit.equations.step_hooks import StepHooks
from tacit.equations.target import Target
from tacit.errors import InputError, Problem, check_number, check_type, check_whole
from tacit.fitting.fits import Fit
from tacit.objective.models import named_parameters, trainable
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import Params, entries, shorten
from tacit.objective.samples import sample, units_of
from tacit.regularizers.family import Regularizer
from tacit.regularizers.weight_decay import unwrap_optimizer
from tacit.watching.changes import find_changes
from tacit.watching.clock import Clock
from tacit.watching.rows import WatchRow, find_obstacle
from tacit.watching.schedule import MOST, Schedule
from tacit.watching.step_errors import step_errors
from tacit.watching.watch_plot import draw_watch
from tacit.watching.watch_text import summarize_watch, watch_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

REMEMBERED, MOST_BYTES, BYTES_PER_PARAMETER = 12, 2**30, 24
"""Windows whose targets are remembered for `Watch.target`, if they take no more than these bytes;
else those of a row. A target is a point, a vector in float64 and the optimizer's metric."""
TRIAL = 4
"""Updates of the first window that are recorded to see what recording takes."""


class Watch:
    """Watches a training loop; made by `watch`. Print it for a table of its rows."""

    def __init__(  # made by `watch`, whose arguments these are
        self,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Objective,
        regularizers: Sequence[Regularizer],
        schedule: Schedule,
        *,
        steps: int | None,
        known: Mapping[Regularizer, float],
        log: Callable[[WatchRow], object] | None,
    ):
        self._model, self._optimizer, self._objective = model, optimizer, objective
        self._regularizers, self._known, self._log = regularizers, known, log
        # The mean of a gradient that is linear in the weights is the gradient at the mean weights.
        self._averaged = [r for r in (*regularizers, *known) if r.entrywise and r.kind != "l2"]
        self._inner, self._units = unwrap_optimizer(optimizer), units_of(objective)
        self._schedule, self._steps = schedule, steps
        self._clock = Clock({p.device for p in model.parameters()})
        self._ranks = objective.ranks
        self.rows: list[WatchRow] = []
        """In order."""
        self.updates = 0
        """Updates of the optimizer since watching began."""
        self.position = 0
        """Updates in the current window."""
        self._recorded: EpochAverages | None = None  # of the current window, if it is observed
        self._obstacle: Problem | None = None  # why the last of these had no equations
        self._is_trial = False
        self._trained: list[bool] = []  # which of the optimizer's parameters, if known
        self._length_matters: set[str] = set()  # of matrices, as far as known since the last row
        self._hooks, self._handles = StepHooks(self._inner), list[Any]()
        self._remembered: deque[_Observed] = deque()
        self._begin_window()

    @property
    def fit(self) -> Fit:
        """The fit of the last row."""
        return self._observed_rows()[-1].fit

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Those of the last fit, a strength that changed, and why a window has no equations."""
        of_rows = (*self.fit.problems, *find_changes(self.rows)) if self.rows else ()
        return (*of_rows, self._obstacle) if self._obstacle else of_rows

    def end_epoch(self) -> None:
        """End the current epoch; call this after the last update of every epoch.

        Not with steps=, where windows end by themselves.
        """
        if self._steps is not None:
            raise InputError(
                f"end_epoch() was called, but a window is steps={self._steps} updates: leave "
                "one of the two out."
            )
        if not self.position:
            raise InputError(
                "end_epoch() was called before any update of the optimizer: call it after the last "
                "optimizer.step() of every epoch."
            )
        self._end_window()

    def target(self) -> Target:
        """What is to be explained over the last observed windows: for `screen`, or more candidates.

        Of large models those of one row, of others the last twelve.
        """
        if not self._remembered:
            raise InputError(f"no window was observed yet: {self._outlook()}")
        return _join([observed.target for observed in self._remembered])

    @property
    def overhead(self) -> float:
        """The time that watching took, as a part of the training's time."""
        return self._clock.watching / self._clock.training if self._clock.training else 0.0

    @property
    def observing(self) -> bool:
        """Whether the updates of now are recorded."""
        return self._recorded is not None

    def summary(self, format: Format = "text") -> str:
        """One line per row, as text, "markdown", "latex" or "html".

        With a budget it also says what part of the time watching took.
        """
        outlook = "" if self.rows else self._outlook()
        overhead = None if self._schedule.budget is None else self.overhead
        return render(summarize_watch(self.rows, self.problems, overhead, outlook), format)

    def _repr_html_(self) -> str:
        return self.summary("html")

    def to_frame(self) -> "DataFrame":
        """One row per row of the watch and strength, as a DataFrame of pandas.

        `window`, `update`, `examples` and `explained`, then the columns of `Fit.to_frame`.
        """
        return make_frame(watch_rows(self._observed_rows()), "verdict")

    def plot(self) -> "Figure":
        """Strengths with their 95 % intervals, and what they explain, along the updates.

        A matplotlib Figure, as wide as a column of a paper.
        """
        return draw_watch(self._observed_rows())

    def _observed_rows(self) -> Sequence[WatchRow]:
        if not self.rows:
            raise InputError(f"the watch has no row yet: {self._outlook()}")
        return self.rows

    def __str__(self) -> str:
        return self.summary()

    def close(self) -> None:
        """Remove all hooks from the optimizer."""
        self._detach()
        self._hooks.close()

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on after a restart, as plain values and tensors.

        Beside the rows, these are the remembered targets and what was recorded of the current
        window: of large models up to thirty times the bytes of the parameters in float64.
        """
        return {
            "made_with": self._made_with(),
            "updates": self.updates,
            "position": self.position,
            "is_trial": self._is_trial,
            "schedule": self._schedule.state_dict(),
            "clock": self._clock.state_dict(),
            "rows": [row.state_dict() for row in self.rows],
            "length_matters": sorted(self._length_matters),
            "recorded": None if self._recorded is None else self._recorded.state_dict(),
            "observed_windows": [
                {
                    "target": target_state(observed.target),
                    "examples": observed.examples,
                    "columns": observed.columns,
                }
                for observed in self._remembered
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, after the model and the optimizer were restored."""
        before, now = state.get("made_with", []), self._made_with()
        if before != now:
            others = [item for item in before if item not in now]
            missing = [item for item in now if item not in before]
            raise InputError(
                f"the state is of a watch with {shorten(others or before) or 'nothing'}, and this "
                f"one has {shorten(missing or now)}: make it for the same model, with the same "
                "regularizers, known penalties and windows."
            )
        self.close()
        self._hooks = StepHooks(self._inner)
        self.updates, self.position = state["updates"], state["position"]
        self._is_trial, self._trained = state["is_trial"], []
        self._schedule.load_state_dict(state["schedule"])
        self._clock.load_state_dict(state["clock"])
        self.rows = [WatchRow.from_state_dict(row) for row in state["rows"]]
        self._remembered = deque(
            _Observed(
                restore_target(
                    observed["target"],
                    self._objective,
                    dict(zip(self._averaged, observed["columns"], strict=True)),
                ),
                observed["examples"],
                observed["columns"],
            )
            for observed in state["observed_windows"]
        )
        self._length_matters = set(state["length_matters"])
        self._attach(recording=state["recorded"] is not None)
        if self._recorded is not None:
            self._recorded.load_state_dict(state["recorded"])

    def _made_with(self) -> list[str]:
        """What a state must be of for this watch to go on with it, in words."""
        parameters = named_parameters(self._model).items()
        return [
            f"steps={self._steps}",
            *(f"{r.name} ({r.definition})" if r.definition else r.name for r in self._regularizers),
            *(f"{strength:g} of {r.name} known" for r, strength in self._known.items()),
            *(f"{name!r} of shape {tuple(p.shape)}" for name, p in parameters),
        ]

    def _begin_window(self) -> None:
        self.position = 0
        times = map(self._agreed, (self._clock.training, self._clock.watching))
        observed = self._schedule.begin(*times)
        first = not (self._schedule.window or self.updates)
        self._is_trial = first and not observed and self._schedule.budget is not None
        self._attach(recording=observed or self._is_trial)

    def _attach(self, *, recording: bool) -> None:
        """Follow the updates, and record them if asked to.

        Hooks are called in the order in which they were registered: the clock's around the others.
        """
        self._detach()
        self._recorded, hooks, clock = None, self._hooks, self._clock
        if recording:
            self._handles = [
                hooks.register_step_pre_hook(self._before_update),
                hooks.register_step_post_hook(clock.start),
            ]
            self._recorded = observe_epochs(
                self._model, self._optimizer, self._averaged, hooks=hooks
            )
            self._recorded.length_matters = self._length_matters
            self._handles.append(hooks.register_step_pre_hook(clock.stop))
        self._handles.append(hooks.register_step_post_hook(self._after_update))

    def _detach(self) -> None:
        """Follow no further updates."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._recorded is not None:
            self._recorded.close()

    def _before_update(self, *_: Any) -> None:
        """Before a recorded update: give up a window where parameters are frozen or unfrozen."""
        self._clock.start()
        trained = [p.requires_grad for g in self._inner.param_groups for p in g["params"]]
        if self.position and self._trained and trained != self._trained:
            self._clock.stop()
            self._attach(recording=False)
        self._trained = trained

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Count an update, and end a trial or a window with its last one."""
        if self._recorded is not None:
            self._clock.stop()
        if was_skipped(optimizer):
            return
        self.updates += 1
        self.position += 1
        if self._is_trial and self.position == TRIAL:
            self._end_trial()
        if self.position == self._steps:
            self._end_window()

    def _end_trial(self) -> None:
        """Stop recording after a few updates, which showed what that takes."""
        self._is_trial = False
        self._schedule.trial = self._agreed(self._clock.watching / self.position)
        self._attach(recording=False)

    def _end_window(self) -> None:
        """Evaluate the window if it was observed, and write a row where one is due."""
        if self._is_trial:  # of few updates
            self._end_trial()
        if not self._schedule.window:
            self._schedule.trial *= self.position
        seconds, recorded = None, self._recorded
        # Nothing is to be seen of a window at rate zero, as at the end of a schedule.
        if recorded is not None and recorded.has_moved:
            self._obstacle = find_obstacle(recorded)
            if self._obstacle is None:
                with self._clock.running():
                    self._evaluate(recorded)
                seconds = self._agreed(self._clock.watching - sum(self._schedule.costs))
        if self._schedule.end(seconds):
            with self._clock.running():
                self._write_row()
        self._begin_window()

    def _evaluate(self, recorded: EpochAverages) -> None:
        """The target of the window that ends, on a sample of its own."""
        recorded.end_epoch()
        recorded.close()
        numbers = self._choose()
        samples = None
        if any(self._ranks.gather_numbers(len(numbers) < self._units.count)):
            chosen = sample(self._objective, self._units, numbers) if len(numbers) else None
            samples = [chosen or self._objective]
        target = recorded.target(self._objective, samples=samples)
        examples = int(sum(self._ranks.gather_numbers(len(numbers))))
        self._remembered.append(_Observed(target, examples, recorded.last_columns()))
        with self._ranks:
            parameters = self._ranks.share * entries(trainable(self._model))
        small = REMEMBERED * BYTES_PER_PARAMETER * parameters <= MOST_BYTES
        while len(self._remembered) > (REMEMBERED if small else MOST):
            self._remembered.popleft()

    def _agreed(self, seconds: float) -> float:
        """The time of the first process, so that all of several take the same decisions."""
        return self._ranks.gather_numbers(seconds)[0]

    def _choose(self) -> Tensor:
        """The numbers of the units that ∇L of a window is taken on, drawn without replacement."""
        units, share = self._units, self._schedule.share
        size = share * units.count
        if self._steps is not None and share < 1:
            # An update is taken to have as many examples as a batch of the objective.
            size = min(size, share * self._steps * units.per_batch)
        batch = units.per_batch if self._objective.batch_norm == "batch" else 1
        size = max(batch, round(size / batch) * batch)
        seed = self._objective.seed + self._schedule.window
        return torch.randperm(units.count, generator=torch.Generator().manual_seed(seed))[:size]

    def _write_row(self) -> None:
        """The row of the last windows, which were observed one after the other."""
        observed = [*self._remembered][-min(MOST, self._schedule.run) :]
        self._length_matters.clear()  # it may not matter any more
        target = _join([o.target for o in observed])
        equations = target.equations(self._regularizers, known=self._known or None)
        examples = sum(o.examples for o in observed)
        batch = self._units.per_batch if self._steps else self._units.count / self.position
        errors = step_errors(
            observed[-1].target, self._regularizers, self._objective, self._units, self._inner,
            batch=batch, updates=self.position,
        )  # fmt: skip
        window = self._schedule.window
        row = WatchRow(self.updates, window, examples, replace(equations, origin=None), errors)
        self.rows.append(row)
        if self._log is not None:
            self._log(row)

    def _outlook(self) -> str:
        """When the first row is to be expected."""
        if self._obstacle is not None:
            return f"{self._obstacle.message} {self._obstacle.remedy}"
        times = self._clock.training, self._clock.watching
        count = self._schedule.windows_to_first_row(*times)
        unit = "epochs" if self._steps is None else f"windows of {self._steps} updates"
        text = f"about {count} more {unit} of training are needed for the first one"
        return f"{text}, fewer with a larger budget=." if self._schedule.budget else f"{text}."


class _Observed(NamedTuple):
    """One observed window."""

    target: Target
    examples: int
    columns: list[dict[str, Params]]
    """Mean gradients of the averaged regularizers."""


def _join(targets: Sequence[Target]) -> Target:
    """The target of several windows, each a source of its own."""
    points = tuple(point for target in targets for point in target.points)
    sampled = any(target.setting.sampled for target in targets)
    return Target(replace(targets[-1].setting, piece=len(points), sampled=sampled), points)


def watch(  # noqa: PLR0913 # what is watched, then keyword options
    model: nn.Module,
    optimizer: Optimizer,
    objective: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    every: int,
    steps: int | None = None,
    budget: float | None = 0.02,
    known: Mapping[Regularizer, float] | None = None,
    log: Callable[[WatchRow], object] | None = None,
) -> Watch:
    """Watch the strengths along training, for a small part of its time.

    Training is divided into windows: epochs, which `Watch.end_epoch()` ends, or `steps` updates.
    Some are observed, in runs of four to six, and each of those has the equations of
    `average_epochs`,

        Σ λ_k ∇R_k = −∇L(θ̄) − Δθ/time,

    with ∇L over a sample of its own of the data. A row is their fit. Their disagreement gives its
    error bars, of kind "sampling" where the samples are parts of the data, and else of "training".
    What large steps add is not in them: a Problem says so.

    Training is bitwise the same as without: nothing of the model, the optimizer, the gradients or
    the random state is changed.

    Trap: small samples make wide intervals. Six windows with 10 % of an epoch's examples each leave
    about 7 % of a strength that whole epochs determine well; read the intervals.

    Args:
        model: the model that is trained.
        optimizer: torch's SGD, Adam or AdamW, or a wrapper that holds it as `.optimizer`.
        objective: the loss over the training data, without any penalty, of this model.
        regularizers: candidates whose strengths are estimated.
        every: a row after so many windows; of their last six at most.
        steps: the number of updates of a window, for runs of less than an epoch or a few; by
            default a window is an epoch.
        budget: the part of the training's time that watching may take: a row that would exceed it
            comes later, and short runs may have none. None: all rows, on all the data. A budget of
            b takes ∇L of a window on b·every/12 of its examples, but at least on 10 %.
        known: penalties that training did apply, with their strengths.
        log: log(row) is called with every new row; `row.metrics()` has names for loggers.

    >>> import tacit
    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch...>
    >>> X = torch.randn(960, 3).double()
    >>> y = X.sum(1, keepdim=True) + 0.1 * torch.randn(960, 1).double()
    >>> model = torch.nn.Linear(3, 1, bias=False).double()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.02, weight_decay=0.2)
    >>> objective = tacit.Objective(model, torch.nn.functional.mse_loss, (X, y))
    >>> watched = watch(model, optimizer, objective, [tacit.l2()], every=10, budget=None)
    >>> for epoch in range(20):
    ...     for rows in torch.randperm(960).split(16):
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.mse_loss(model(X[rows]), y[rows]).backward()
    ...         optimizer.step()
    ...     watched.end_epoch()
    >>> [row.window for row in watched.rows]
    [10, 20]
    >>> round(watched.fit.strengths["l2"], 2)  # weight decay 0.2 is 0.1 ‖θ‖²
    0.1
    """
    check_type("model", model, nn.Module, "the torch.nn.Module that is trained")
    check_objective(objective, what="objective")
    candidates = check_candidates(regularizers, known)
    check_whole("every", every)
    if steps is not None:
        check_whole("steps", steps)
    if budget is not None:
        check_number("budget", budget, above=0)
    check_type("log", log, Callable | None, "a function of a row, or None")
    _check_same_model(model, objective)
    schedule = Schedule(every, budget)
    return Watch(
        model, optimizer, objective, candidates.estimated, schedule,
        steps=steps, known=candidates.known, log=log,
    )  # fmt: skip


def _check_same_model(model: nn.Module, objective: Objective) -> None:
    """Refuse an objective of other weights than those that are trained."""
    trained = {p.data_ptr() for p in trainable(model).values()}
    others = [n for n, p in objective.params.items() if p.data_ptr() not in trained]
    if others:
        raise InputError(
            f"the objective's {others[0]!r} is no parameter of the model that is watched: make "
            "the objective with the model that is trained, not with a copy."
        )

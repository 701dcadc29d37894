"""Which windows of a training loop are observed, and when a row is written."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MOST, FEWEST = 6, 4
"""Windows of a row: their disagreement tells noise from signal."""
LEAST_SHARE = 0.1
"""Part of the examples of a window that ∇L is taken on, at least."""
FOR_EXAMPLES = 0.5
"""Part of the budget that the examples are chosen by; the rest is for recording and solving."""
DEARER = 1.5
"""What ∇L over some examples is taken to cost before it was measured, beside training on them."""


@dataclass
class Schedule:
    """A row after every so many windows, of consecutive ones, as often as a budget allows.

    Windows are observed in a run of 4 to 6 that ends where a row is due, or later if that is when
    the budget has room for it. Where it has room for all windows, the run goes on, and every row
    is of its last six.
    """

    every: int
    budget: float | None
    """The part of the training's time that watching may take; None for no limit."""
    window: int = 0
    """Windows that have ended."""
    since_row: int = 0
    """Those since the last row."""
    run: int = 0
    """Consecutive windows that were observed, up to the last one."""
    left: int = 0
    """Windows that are still to be observed before the next row."""
    trial: float = 0.0
    """Seconds that recording one window takes, from a few updates."""
    costs: list[float] = field(default_factory=list)
    """Seconds that each observed window took."""

    @property
    def share(self) -> float:
        """The part of a window's examples that ∇L is taken on.

        It follows from the arguments alone, so that the numbers of a row do not depend on the speed
        of the machine: only how many rows there are does.
        """
        if self.budget is None:
            return 1.0
        spent = FOR_EXAMPLES * self.budget * self.every / min(MOST, self.every)
        return min(1.0, max(LEAST_SHARE, spent))

    def begin(self, training: float, watching: float) -> bool:
        """Whether to observe the window that begins, after so many seconds of both."""
        # The first window that was observed may have taken more than the guess.
        surprising = self.left and len(self.costs) == 1
        if surprising and not self._is_affordable(self.left, training, watching):
            self.left, self.run = 0, 0
        if not self.left:
            count = self._next_run()
            self.left = count if self._is_affordable(count, training, watching) else 0
        return self.left > 0

    def end(self, seconds: float | None) -> bool:
        """Count a window, and say if a row is due; with the seconds of one that was observed."""
        self.window += 1
        self.since_row += 1
        if seconds is None:
            self.run = self.left = 0
            return False
        self.costs.append(seconds)
        self.run += 1
        self.left -= 1
        if self.left:
            return False
        self.since_row = 0
        return True

    def windows_to_first_row(self, training: float, watching: float) -> int:
        """How many more windows there are until the first row, as far as known."""
        if self.left:
            return self.left
        ahead, count = max(0, self.every - self.since_row - FEWEST), FEWEST
        if self.budget is not None and self.window:
            window = training / self.window
            missing = watching + count * self._cost(window) - self.budget * training
            ahead = max(ahead, round(missing / (self.budget * window)))
        return ahead + count

    def state_dict(self) -> dict[str, Any]:
        """What changes."""
        return {k: v for k, v in asdict(self).items() if k not in ("every", "budget")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        for name, value in state.items():
            setattr(self, name, list(value) if name == "costs" else value)

    def _next_run(self) -> int:
        """How many windows a run that begins now would have; 0 where it is too early."""
        to_row = self.every - self.since_row
        if to_row > MOST:
            return 0
        return to_row if self.run else max(FEWEST, to_row)

    def _is_affordable(self, count: int, training: float, watching: float) -> bool:
        """Whether so many windows, observed from now on, will be within the budget."""
        if self.budget is None or not count:
            return True
        if not self.window:
            return False  # how long a window takes is not known yet
        window = training / self.window
        return watching + count * self._cost(window) <= self.budget * (training + count * window)

    def _cost(self, window: float) -> float:
        """Seconds that observing one window takes, from those before, or as a guess."""
        if self.costs:
            recent = self.costs[-MOST:]
            return sum(recent) / len(recent)
        return self.trial + DEARER * self.share * window

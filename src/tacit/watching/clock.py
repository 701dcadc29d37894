"""How much of a training loop's time watching it takes."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds of training, and the seconds of watching it that lie within them.

    Kernels run on after the call that launched them: both ends of a stretch of watching wait for
    the devices, so that it counts all of its own work and none of the training's.
    """

    def __init__(self, devices: Iterable[torch.device]):
        self._devices = [device for device in devices if device.type == "cuda"]
        self._begin, self._stretch = time.perf_counter(), 0.0
        self._before = 0.0
        self.watching = 0.0
        """Seconds of watching."""

    @property
    def training(self) -> float:
        """Seconds of training, with all that is in the loop but watching."""
        return self._before + time.perf_counter() - self._begin - self.watching

    def start(self, *_: object) -> None:
        """A stretch of watching begins; a hook of optimizers, too."""
        self._wait()
        self._stretch = time.perf_counter()

    def stop(self, *_: object) -> None:
        """It ends."""
        self._wait()
        self.watching += time.perf_counter() - self._stretch

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watching for as long as the context lasts."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def state_dict(self) -> dict[str, float]:
        """Both numbers of seconds."""
        return {"training": self.training, "watching": self.watching}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from there, without the time since."""
        self.watching = state["watching"]
        self._begin, self._before = time.perf_counter(), state["training"] + state["watching"]

    def _wait(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)

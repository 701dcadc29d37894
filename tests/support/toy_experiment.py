"""An experiment of a few short units, and a run of it in a folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

from tacit_paper import store


@dataclass(frozen=True)
class Config:
    pieces: int = 4
    factor: float = 1.0


def toy_experiment(config=None, *, fail_at=None, calls=None):
    """A small experiment. It records its units in `calls`, and is interrupted in `fail_at`."""

    def rows(config, unit, number) -> Iterator[dict]:
        if calls is not None:
            calls.append(unit)
        yield {"k": 0, "value": config.factor * number, "took_seconds": 0.1}
        if unit == fail_at:
            raise KeyboardInterrupt
        yield {"k": 1, "matrix": [1.0, number], "note": "x" if number else None}

    def work(config, device):
        units = {f"piece {i}": i for i in range(config.pieces)}
        return {unit: partial(rows, config, unit, number) for unit, number in units.items()}

    return SimpleNamespace(
        Config=Config, QUICK=config or Config(), PAPER=Config(6), work=work,
        __doc__="Toy", plot=None, check=lambda rows: [],
    )  # fmt: skip


def run(folder, experiment, **options):
    return store.run_experiment("toy", experiment, "quick", folder, **options)

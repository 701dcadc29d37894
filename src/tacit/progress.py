"""A progress bar for passes that take long, on terminals alone."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

PATIENCE = 2.0
"""Seconds of silence before a bar is drawn: short passes stay quiet."""


def track(items: Iterable[Item], *, total: int | None, label: str) -> Iterator[Item]:
    """Yield the items; draw a bar with the time left once they have taken a while."""
    if not sys.stderr.isatty():
        yield from items
        return
    start, bar, task = time.monotonic(), None, None
    try:
        for done, item in enumerate(items):
            if bar is None and time.monotonic() - start > PATIENCE:
                bar = new_bar()
                task = bar.add_task(label, total=total, completed=done)
            yield item
            if bar is not None and task is not None:
                bar.update(task, completed=done + 1)
    finally:
        if bar is not None:
            bar.stop()


def new_bar():  # rich is imported only where a bar is drawn
    """A started bar with the time left, on the error stream; the caller stops it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Left())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    return bar

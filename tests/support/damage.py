"""Random edits of files, and runs that are killed at random moments."""

import os
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace

from tacit_paper import commands, plots, store


def edit_randomly(content, random):
    """The bytes after one random edit, as a bad disk, a bad copy or a hand would make it."""
    start = random.randrange(len(content))
    stop = min(len(content), start + random.randint(1, 40))
    edits = {
        "flip": bytes([content[start] ^ 1 << random.randrange(8)]) + content[start + 1 : stop],
        "delete": b"",
        "double": content[start:stop] * 2,
        "zero": bytes(stop - start),
        "digit": bytes([random.choice(b"0123456789-.e")]) + content[start + 1 : stop],
        "text": random.choice([b"null", b"-1", b"NaN", b"1e999", b"[[[[", b"{}", b'"', b"true"]),
    }
    kind = random.choice([*edits, "cut", "tail"])
    if kind == "cut":
        return content[:start]
    if kind == "tail":
        return content + content[start:stop]
    return content[:start] + edits[kind] + content[stop:]


@dataclass(frozen=True)
class Config:
    units: int = 20


def make_rows(unit):
    """A unit that takes a few milliseconds."""
    seeded = Random(unit)
    for k in range(20):
        time.sleep(0.0002)
        yield {"k": k, "value": seeded.gauss(0, 1), "pair": [k, unit]}


def plot(rows):
    figure = plots.new_figure(3, 2)
    figure.subplots().plot(rows.value)
    return figure


SWEEP = SimpleNamespace(
    QUICK=Config(),
    work=lambda config, device: {f"u{i}": partial(make_rows, i) for i in range(config.units)},
    plot=plot,
    check=lambda rows: [],
)


def use_sweep():
    """Have the commands of this process run the sweep, without torch: importing it is slow."""
    commands.find_experiment = plots.find_experiment = lambda name: SWEEP
    commands._progress_bar = lambda label: nullcontext(lambda done, total: None)


def kill_often(out, kills, seed=0):
    """Run a sweep in `out/whole`; and in `out/killed`, killed many times at random moments."""
    use_sweep()
    started = time.monotonic()
    run_and_kill(out / "whole", 600)
    duration, random, killed, folder = time.monotonic() - started, Random(seed), 0, out / "killed"
    while killed < kills:
        finished = folder.exists() and list(store.finished_folders(folder))
        force = bool(finished) or random.random() < 0.1
        killed += run_and_kill(folder, random.uniform(0, 0.7 * duration), force=force)
    assert not run_and_kill(folder, 600)


def run_together(folder, count):
    """Run the sweep in several processes at once, in one folder; every third starts it again."""
    use_sweep()
    children = [start(folder, force=i % 3 == 2) for i in range(count)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count


def start(folder, *, force=False):
    """Run the sweep in a child process, and return its id."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            commands._reproduce_one("sweep", "quick", folder, "cpu", force)
            os._exit(0)
        except BaseException as error:  # a child must not go on as the test
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    return child


def run_and_kill(folder, seconds, *, force=False):
    """Run the sweep in a child process that is killed after some seconds; True if it was."""
    child = start(folder, force=force)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, "the run failed"
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True

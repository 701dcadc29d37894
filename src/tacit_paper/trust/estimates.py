"""Rows of the trust figure: the strengths and problems of many fits."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from tacit.objective.passes import track
from tacit_paper import Row
from tacit_paper.problem_kinds import join_kinds
from tacit_paper.trust.cases import CASES
from tacit_paper.trust.config import Config

FEW = 50
"""Replicates up to which starting other processes would take longer than the fits."""


def replicate_rows(config: Config, label: str) -> Iterator[Row]:
    """One row per seed of the problem of this label; many seeds are shared among the cores."""
    seeds = range(config.first, config.first + config.replicates)
    if len(seeds) <= FEW:
        yield from _with_bar(label, map(partial(make_row, label), seeds), len(seeds))
        return
    one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(mp_context=get_context("spawn"), **one_thread) as pool:
        rows = pool.map(partial(make_row, label), seeds, chunksize=5)
        yield from _with_bar(label, rows, len(seeds))


def _with_bar(label: str, rows: Iterable[Row], count: int) -> Iterable[Row]:
    return track(rows, total=count, label=label)


def make_row(label: str, seed: int) -> Row:
    """The row of one seed: the first strength, what is explained, and the problems."""
    case = CASES[label]
    fit = case.make_fit(seed)
    return {
        "problem": label,
        "listed": str(case.listed),
        "replicate": seed,
        "truth": case.truth,
        "estimate": next(iter(fit.strengths.values())),
        "explained": fit.explained,
        "problems": join_kinds(fit.problems),
    }

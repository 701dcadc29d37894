"""Rows of the screening figure: what screens of known networks say, and what they cost."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit import Objective, screen
from tacit.identifiability import Screen
from tacit_paper import Row
from tacit_paper.problem_kinds import join_kinds
from tacit_paper.screening.config import Config
from tacit_paper.screening.networks import Case, Maker
from tacit_paper.screening.simulation import METHODS, simulate

BETWEEN = " + "
"""Between the names of several candidates."""
WIDTH, BATCH = 128, 500
"""Units of a layer and examples of a batch, of the network on which the cost is measured."""


def network_rows(config: Config, name: str, make: Maker, count: int) -> Iterator[Row]:
    """One row per seed of one kind of network."""
    for seed in range(config.first, config.first + count):
        case = make(config, seed)
        result = screen(case.target, **case.options)
        yield {"kind": "network", "network": name, "seed": seed, **describe(case, result)}


def describe(case: Case, result: Screen) -> Row:
    """What a screen says, beside the truth."""
    chosen = [row.name for row in result.table if row.chosen]
    fit, first = result.fit, result.groups[0].members[0] if result.groups else ""
    right = bool(chosen) and set(case.truth) <= {*chosen}
    if case.accepted:
        right = bool({first} & {*case.truth, *case.accepted})
    return {
        "truth": BETWEEN.join(case.truth),
        "verdict": result.verdict,
        "chosen": BETWEEN.join(chosen),
        "named": BETWEEN.join(name for group in result.groups for name in group.named),
        "explained": fit.explained if fit is not None else 0.0,
        "p": min((g.p for g in result.groups if g.confirmed), default=1.0),
        "groups": len(result.groups),
        "clusters": result.clusters[1],
        "right": right,
        "problems": "" if fit is None else join_kinds(fit.problems),
    }


def simulation_rows(config: Config) -> Iterator[Row]:
    """One row per method: how often it picks a candidate where none acts."""
    simulated = [simulate(config.first + seed) for seed in range(config.simulations)]
    for name, picks in METHODS.items():
        wrong = sum(map(picks, simulated)) / len(simulated)
        yield {"kind": "simulation", "method": name, "picked": wrong, "runs": len(simulated)}


def cost_rows(config: Config) -> Iterator[Row]:
    """One row: a screen of an endpoint, in passes of all examples through the model and in time."""
    with torch.random.fork_rng():
        torch.manual_seed(config.first)
        layers = [m for _ in range(8) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
        X, y = torch.randn(config.examples, WIDTH), torch.randint(10, (config.examples,))
    seen = 0

    def count(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal seen
        seen += len(inputs[0])

    def plain() -> None:
        for rows in range(0, len(X), BATCH):
            F.cross_entropy(model(X[rows : rows + BATCH]), y[rows : rows + BATCH]).backward()
        model.zero_grad()

    start = {n: 0.9 * p.detach() for n, p in model.named_parameters()}
    objective = Objective(model, F.cross_entropy, (X, y), batch_size=BATCH)
    seconds = {"plain": _seconds(plain)}
    with model.register_forward_pre_hook(count):
        seconds["screen"] = _seconds(lambda: screen(objective, start=start))
    numbers = {f"{name}_seconds": value for name, value in seconds.items()}
    yield {"kind": "cost", "passes": seen / len(X), **numbers}


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start

"""Strengths of `hessian_trace` from 16 probes against those of the exact column, over 100 seeds.

    python benchmarks/probes.py

The networks have about 500 parameters, and neither their seeds nor those of the probes were used to
choose a threshold. Prints, for each case and regularizer, the mean strength over that of the exact
column, and how often 95 % intervals cover it; then the mean strength of `hessian_trace` by plain
least squares with the same columns, and how many fits carry a Problem.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tacit
from tacit.equations.target import Setting, Target, TargetPoint
from tacit.objective.params import Params, norm
from tacit.regularizers import Regularizer, gradient_norm, hessian_trace

NAME = "hessian_trace"


@dataclass(frozen=True)
class Case:
    """A network, what else is fitted, and what the target is like."""

    label: str
    seed: int
    sizes: tuple[int, ...] = (20, 20, 4)
    trained: int = 0
    others: tuple[str, ...] = ()
    points: int = 1
    groups: int = 1
    missing: float = 0.0


CASES = (
    Case("classes, alone", 501),
    Case("classes, joint", 502, others=("l2", "gradient_norm")),
    Case("trained regression, alone", 503, (10, 16, 16, 2), trained=200),
    Case("trained regression, joint", 504, (10, 16, 16, 2), trained=200, others=("l2",)),
    Case("classes, 8 groups of draws", 505, others=("l2",), groups=8),
    Case("classes, 5 steps", 506, others=("l2",), points=5),
    Case("classes, 12 steps", 507, others=("l2",), points=12),
    Case("classes, a part missing", 508, others=("l2",), missing=0.44),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--probes", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'case':30} {'regularizer':14} {'mean':>6} {'covered':>8} {'plain':>6} {'problems':>9}")
    for case in CASES:
        for line in measure(case, options.seeds, options.probes):
            print(line, flush=True)


def measure(case: Case, seeds: int, probes: int) -> Iterator[str]:
    """The lines of one case."""
    objective = make_objective(case)
    others = [{"l2": tacit.l2(), "gradient_norm": gradient_norm(objective)}[n] for n in case.others]
    exact = hessian_trace(objective)
    target = make_target(case, objective, [*others, exact])
    truth = tacit.fit(target.equations([*others, exact])).strengths
    penalties = (hessian_trace(objective, probes, seed=9000 + seed) for seed in range(seeds))
    fits = [tacit.fit(target.equations([*others, penalty])) for penalty in penalties]
    plain = sum(plain_strength(fit) for fit in fits) / seeds / truth[NAME]
    problems = sum(bool(fit.problems) for fit in fits)
    for name, strength in truth.items():
        mean = sum(fit.strengths[name] for fit in fits) / seeds / strength
        intervals = [fit.intervals()["probes"][name] for fit in fits]
        covered = sum(low <= strength <= high for low, high in intervals) / seeds
        shown = f"{plain:6.3f} {problems:9}" if name == NAME else ""
        yield f"{case.label:30} {name:14} {mean:6.3f} {covered:8.0%} {shown}"


def make_objective(case: Case) -> tacit.Objective:
    """A network, initialised or trained a little, on random data."""
    torch.manual_seed(case.seed)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(case.sizes, case.sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    model = nn.Sequential(*layers[:-1]).double()
    X = torch.randn(80, case.sizes[0]).double()
    classes = torch.arange(80) % case.sizes[-1]
    values = X[:, : case.sizes[-1]].sin() + 0.3 * torch.randn(80, case.sizes[-1]).double()
    loss, y = (F.mse_loss, values) if case.trained else (F.cross_entropy, classes)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(case.trained):
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()
    return tacit.Objective(model, loss, (X, y))


def make_target(case: Case, objective: tacit.Objective, penalties: Sequence[Regularizer]) -> Target:
    """Σ λ_k ∇R_k at every point: each has norm 1, other regularizers ½, at the first."""
    start = {n: p.detach().clone() for n, p in objective.point().items()}
    points, strengths = [], []
    for number in range(case.points):
        params = {n: p + 0.1 * number**0.5 * torch.randn_like(p) for n, p in start.items()}
        columns = [r.gradient(params)[r.name] for r in penalties]
        strengths = strengths or [(1 if c is columns[-1] else 0.5) / norm(c) for c in columns]
        rest = random_vector(params, case.missing)
        pairs = list(zip(strengths, columns, strict=True))
        mean = {n: sum((s * c[n] for s, c in pairs), rest[n]) for n in params}
        vectors = [mean]
        if case.groups > 1:
            draws = [random_vector(params, 0.4) for _ in range(case.groups)]
            vectors = [{n: mean[n] + draw[n] for n in params} for draw in draws]
        points.append(TargetPoint(params, vectors, dict.fromkeys(params, 1e-16), 1.0))
    if case.points > 1:
        return Target(Setting("trajectory", objective), tuple(points))
    return Target(Setting("difference", objective, objective, groups=case.groups), tuple(points))


def random_vector(params: Params, size: float) -> dict[str, Tensor]:
    """Gaussian entries, of this norm in all."""
    entries = {n: torch.randn_like(p) for n, p in params.items()}
    scale = size / norm(entries)
    return {n: scale * e for n, e in entries.items()}


def plain_strength(fit: tacit.Fit) -> float:
    """The strength of the last column by least squares with the mean of its probes."""
    factor, count = fit.equations.noisy_factor(), len(fit.strengths)
    targets = factor[:, count:].mean(1, keepdim=True)
    return float(torch.linalg.lstsq(factor[:, :count], targets).solution[-1])


if __name__ == "__main__":
    main()

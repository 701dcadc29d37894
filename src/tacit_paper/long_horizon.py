"""How far gradient descent drifts from the flow of the loss, and from that of the modified loss."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from tacit.equations.flow import rk4
from tacit.objective.objective import Objective
from tacit.objective.params import Params, norm
from tacit_paper import Check, Row, Table, plots, run_small
from tacit_paper import least_squares as ls
from tacit_paper.checking import at_most, within
from tacit_paper.step_size_networks import load, network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Implicit gradient regularization over many steps"

CAPTION = """
Gradient descent, the gradient flow of the loss, and the flow of the modified loss L + (η/4)‖∇L‖²
start at the same weights and run for the same time. Lines are the distances of descent from either
flow. On least squares and in a tanh network the modified flow stays with descent: what separates
descent from the flow of L is this penalty, at every step and not at the first alone. In a ReLU
network it helps little. That is outside the theory, which needs smooth gradients: each time a unit
switches on or off for an example the gradient jumps, and the Hessian sees nothing of it.

As published: the four cases, with their steps and step sizes. The paper lists these runs among its
computations and shows no figure of them, so this picture is new. What it leaves open is chosen
here: least squares starts at zero, the networks at torch's initial weights with hidden layers
without bias, on normalised pixels; all is computed in float64. The quick preset uses scikit-learn's
digits.
""".strip()


@dataclass(frozen=True)
class Config:
    """Sizes and settings; the defaults are the paper's."""

    etas: tuple[float, ...] = (0.01, 0.03)
    """Step sizes on least squares."""
    steps: int = 50
    examples: int = 500
    inputs: int = 10
    noise: float = 0.1
    data: str = "mnist"
    """What the networks are trained on: mnist, or digits, which need no download."""
    normalisation: tuple[float, float] = (0.1307, 0.3081)
    network_eta: float = 0.01
    network_steps: int = 30
    network_examples: int = 1000
    hidden: tuple[int, ...] = (64, 32)
    activations: tuple[str, ...] = ("tanh", "ReLU")
    substeps: int = 5
    """Runge–Kutta steps of a flow in the time of one step of descent."""
    seed: int = 0


PAPER = Config()
QUICK = Config(
    steps=30,
    data="digits",
    normalisation=(0.3053, 0.3761),
    network_steps=12,
    network_examples=500,
    hidden=(32, 16),
    substeps=3,
)

NAMES = {"least squares": "Least squares", "tanh": "tanh network", "ReLU": "ReLU network"}
ACTIVATIONS: Mapping[str, type[nn.Module]] = {"tanh": nn.Tanh, "ReLU": nn.ReLU}


def units(config: Config) -> list[str]:
    """One piece of work a case."""
    return [*(f"least squares, η = {eta:g}" for eta in config.etas), *config.activations]


def run(config: Config, *, finished: Collection[str] = (), device: str = "cpu") -> Iterator[Row]:
    """Both distances at every step, for every case that is not finished."""
    work: dict[str, Any] = {
        f"least squares, η = {eta:g}": lambda eta=eta: _least_squares(config, eta)
        for eta in config.etas
    }
    work |= {name: lambda name=name: _network(config, name, device) for name in config.activations}
    return run_small(work, finished)


def _least_squares(config: Config, eta: float) -> Iterator[Row]:
    """Mean squared error from zero; too small for any device but the CPU."""
    X, _, y = ls.draw(noise=config.noise, examples=config.examples, size=config.inputs)
    objective = ls.objective(X, y)
    start = ls.point(torch.zeros(config.inputs))
    for row in drift(objective, start, eta, steps=config.steps, substeps=config.substeps):
        yield {"case": "least squares", **row}


def _network(config: Config, activation: str, device: str) -> Iterator[Row]:
    """Cross-entropy of a small network from its initial weights."""
    X, y = load(
        config.data, config.normalisation, train=config.network_examples, device=device
    ).train
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = network((X.shape[1], *config.hidden, 10), ACTIVATIONS[activation])
    objective = Objective(
        model.double().to(device), F.cross_entropy, (X.double(), y), batch_size=len(X)
    )
    found = drift(
        objective, objective.params, config.network_eta,
        steps=config.network_steps, substeps=config.substeps,
    )  # fmt: skip
    for row in found:
        yield {"case": activation, **row}


@dataclass(frozen=True)
class Modified:
    """L + (η/4)‖∇L‖², of which a flow needs the gradient alone: ∇L + (η/2)H∇L."""

    objective: Objective
    eta: float

    def gradient(self, params: Params) -> Params:
        """The modified loss's gradient."""
        slope = self.objective.gradient(params)
        force = self.objective.hvp(slope, params)
        return {n: g + self.eta / 2 * force[n] for n, g in slope.items()}


def drift(
    objective: Objective, start: Params, eta: float, *, steps: int, substeps: int
) -> Iterator[Row]:
    """Distances of gradient descent from both flows after every step."""
    flow = rk4(substeps)
    modified = cast(Objective, Modified(objective, eta))  # a flow asks for no more
    descent = plain = penalised = dict(start)
    for step in range(1, steps + 1):
        slope = objective.gradient(descent)
        descent = {n: p - eta * slope[n] for n, p in descent.items()}
        plain = _moved(plain, flow(objective, plain, eta))
        penalised = _moved(penalised, flow(modified, penalised, eta))
        yield {
            "eta": eta,
            "step": step,
            "plain": _distance(descent, plain),
            "modified": _distance(descent, penalised),
            "moved": _distance(descent, start),
        }


def _moved(params: Params, by: Params) -> Params:
    return {n: p + by[n] for n, p in params.items()}


def _distance(a: Params, b: Params) -> float:
    return norm({n: a[n] - b[n] for n in a})


def ratios(rows: Table) -> dict[str, float]:
    """For every case, the last distance from the modified flow over that from the plain one."""
    last = rows.sort_values("step").groupby("unit", sort=False).last()
    return {unit: float(row.modified / row.plain) for unit, row in last.iterrows()}


def check(rows: Table) -> list[Check]:
    """The modified flow is the right one where the loss is smooth, and not for ReLU."""
    label = "modified over plain distance at the end: "
    return [
        within(f"{label}{unit} (outside the theory)", ratio, 0.5, 1.5)
        if unit == "ReLU"
        else at_most(label + unit, ratio, 0.05)
        for unit, ratio in sorted(ratios(rows).items(), key=lambda item: item[0] == "ReLU")
    ]


def plot(rows: Table) -> "Figure":
    """Both distances against the step, one panel a case."""
    cases = sorted(dict.fromkeys(rows.unit), key=lambda unit: unit == "ReLU")
    with plots.style():
        figure = plots.new_figure(3 * len(cases), 3.3)
        axes: Any = figure.subplots(1, len(cases), squeeze=False)[0]
        for letter, axis, unit in zip("ABCDEFGH", axes, cases, strict=False):
            _panel(axis, rows[rows.unit == unit].sort_values("step"))
            axis.set_title(f"{letter}  {axis.get_title(loc='left')}")
        axes[0].set_ylabel("distance of descent from …")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def _panel(axis: Any, part: Table) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.plot(part.step, part.plain, color=plots.ORANGE, label="… the flow of L")
    axis.plot(part.step, part.modified, color=plots.BLUE, label="… the flow of L + (η/4)‖∇L‖²")
    highest, (case, eta) = part[["plain", "modified"]].max().max(), part[["case", "eta"]].iloc[0]
    axis.set_yscale("log")
    # A hundredfold at least, so that two lines which nearly agree look as they are.
    axis.set_ylim(min(part.modified.min() / 2, highest / 100), highest * 3)
    axis.yaxis.set_minor_formatter("")
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    (ratio,) = ratios(part).values()
    axis.set_xlabel(f"steps of gradient descent\nblue / orange at the end: {ratio:.2g}")
    axis.set_title(f"{NAMES[case]}, η = {eta:g}")
    if case == "ReLU":
        axis.text(0.05, 0.05, "outside the theory", color=plots.GREY, transform=axis.transAxes)

"""Minibatch steps in a two-weight network, beside where the full gradient would have gone."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tacit
from tacit_paper import Check, Row, Table, pending, plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Gradient deviations along the trajectory"
CAPTION = (
    "A network tanh(wx + b) with two weights. Grey: gradient flow (full-batch descent in tiny "
    "steps). Black: six steps of minibatch SGD. At each of its points the full gradient would "
    "have gone along the orange arrow; the blue arrow is the deviation that trajectory "
    "equations match with regularizers. Here it is the sampling of the minibatch and nothing "
    "more: with the full batch in its place the deviation is rounding, and the fit says 'no "
    "signal'. The published figure draws the same network and data; its starting point and "
    "batches are not given."
)


@dataclass(frozen=True)
class Config:
    """Two weights, 96 points, and two ways down."""

    points: int = 96
    flow_step: float = 4e-3
    flow_steps: int = 3000
    step: float = 0.4
    batch: int = 8
    steps: int = 6
    start: tuple[float, float] = (-0.35, 0.9)
    grid: int = 60
    seed: int = 0


PAPER = Config()
QUICK = Config(flow_steps=1500, grid=40)


class Network(nn.Module):
    """tanh(wx + b)."""

    def __init__(self, start: tuple[float, float]):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start[0], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(start[1], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """The output for every x."""
        return torch.tanh(self.w * x + self.b)


def units(config: Config) -> list[str]:
    """The ground, the flow, the minibatch steps and their full-batch control."""
    return ["ground", "flow", "minibatch", "full batch"]


def run(config: Config, *, finished: Collection[str] = (), device: str = "cpu") -> Iterator[Row]:
    """The loss on a grid, both paths, and the deviation at every step."""
    x = torch.linspace(-2.5, 2.5, config.points, dtype=torch.float64)
    y = 0.75 * torch.tanh(1.4 * x - 0.35) + 0.12 * torch.sin(2.7 * x)
    data = (x.to(device), y.to(device))
    pieces = {
        "ground": lambda: _ground(config, data),
        "flow": lambda: _flow(config, data),
        "minibatch": lambda: _steps(config, data, config.batch),
        "full batch": lambda: _steps(config, data, config.points),
    }
    for unit in pending(units(config), finished):
        for row in pieces[unit]():
            yield {"unit": unit, **row}


def _ground(config: Config, data: tuple[Tensor, Tensor]) -> Iterator[Row]:
    x, y = data
    for w in torch.linspace(-0.8, 2.0, config.grid, dtype=torch.float64).tolist():
        b = torch.linspace(-1.0, 1.3, config.grid, dtype=torch.float64, device=x.device)
        losses = (torch.tanh(w * x + b[:, None]) - y).square().mean(1)
        yield from (
            {"w": w, "b": b_, "loss": loss}
            for b_, loss in zip(b.tolist(), losses.tolist(), strict=True)
        )


def _flow(config: Config, data: tuple[Tensor, Tensor]) -> Iterator[Row]:
    objective = tacit.Objective(Network(config.start).to(data[0].device), F.mse_loss, data)
    point = dict(objective.params)
    for step in range(config.flow_steps + 1):
        if step % 20 == 0:
            yield {"step": step, "w": float(point["w"]), "b": float(point["b"])}
        slope = objective.gradient(point)
        point = {n: p - config.flow_step * slope[n] for n, p in point.items()}


def _steps(config: Config, data: tuple[Tensor, Tensor], batch: int) -> Iterator[Row]:
    """SGD's positions, and at each the displacement of the full gradient beside its own."""
    model = Network(config.start).to(data[0].device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.step)
    recorder = tacit.record(model, optimizer)
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        chosen = torch.randperm(config.points, generator=generator)[:batch]
        optimizer.zero_grad()
        F.mse_loss(model(data[0][chosen]), data[1][chosen]).backward()
        optimizer.step()
        recorder.step()
    trajectory = recorder.trajectory()
    objective = tacit.Objective(model, F.mse_loss, data)
    found = tacit.fit(tacit.trajectory_equations(objective, trajectory, [tacit.l2()]))
    steps = zip(trajectory.points, trajectory.displacements, trajectory.times, strict=True)
    for step, (point, moved, time) in enumerate(steps):
        expected = tacit.euler(objective, point, time)
        yield {
            "step": step,
            **{n: float(point[n]) for n in ("w", "b")},
            **{f"moved_{n}": float(moved[n]) for n in ("w", "b")},
            **{f"expected_{n}": float(expected[n]) for n in ("w", "b")},
            "ridge": found.strengths["l2"],
            "explained": found.explained,
            "problems": ", ".join(problem.kind for problem in found.problems),
        }


def _deviation(rows: Table) -> float:
    """Largest deviation from the full gradient's step, relative to the largest such step."""
    off = (rows.moved_w - rows.expected_w) ** 2 + (rows.moved_b - rows.expected_b) ** 2
    whole = rows.expected_w**2 + rows.expected_b**2
    return float((off.max() / whole.max()) ** 0.5)


def check(rows: Table) -> list[Check]:
    """Minibatches deviate; the full batch does not, and the fit says that there is no signal."""
    noisy = _deviation(rows[rows.unit == "minibatch"])
    control = rows[rows.unit == "full batch"]
    clean, silent = _deviation(control), bool((control.problems == "no signal").all())
    return [
        Check("largest relative deviation, minibatches", noisy, "≥ 0.1", noisy >= 0.1),
        Check("largest relative deviation, full batch", clean, "≤ 1e-12", clean <= 1e-12),
        Check("full batch is called 'no signal' (1: yes)", float(silent), "1", silent),
    ]


def plot(rows: Table) -> "Figure":
    """Both paths on the loss's contours, with the deviation at every step."""
    ground, flow = rows[rows.unit == "ground"], rows[rows.unit == "flow"]
    sgd = rows[rows.unit == "minibatch"]
    with plots.style():
        figure = plots.new_figure(5.8, 4.4)
        axis = figure.subplots()
        table = ground.pivot_table(index="b", columns="w", values="loss")
        filled = axis.contourf(
            table.columns, table.index, table, levels=18, cmap="Greys", alpha=0.55
        )
        figure.colorbar(filled, ax=axis, label="loss over all 96 points")
        axis.plot(flow.w, flow.b, color=plots.GREY, linewidth=2.5, label="gradient flow")
        end = sgd.iloc[-1]
        axis.plot(
            [*sgd.w, end.w + end.moved_w],
            [*sgd.b, end.b + end.moved_b],
            "o-",
            color="black",
            markersize=4,
            label="minibatch SGD, 6 steps",
        )
        arrow = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.006, "zorder": 3}
        axis.quiver(
            sgd.w, sgd.b, sgd.expected_w, sgd.expected_b, color=plots.ORANGE,
            label="where −η∇L would go", **arrow,
        )  # fmt: skip
        axis.quiver(
            sgd.w + sgd.expected_w, sgd.b + sgd.expected_b, sgd.moved_w - sgd.expected_w,
            sgd.moved_b - sgd.expected_b, color=plots.BLUE, label="deviation", **arrow,
        )  # fmt: skip
        axis.set(xlabel="weight w", ylabel="bias b")
        axis.legend(loc="upper right", frameon=True, framealpha=0.9)
        axis.grid(visible=False)
    return figure

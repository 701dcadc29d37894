"""Rows of the trajectory figure: loss surface, gradient flow, and recorded steps."""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

import tacit
from tacit_paper import Row, Work, on_one_thread
from tacit_paper.problem_kinds import join_kinds
from tacit_paper.trajectory_deviations.config import Config, Data, Network
from tacit_paper.trajectory_deviations.penalties import epoch_rows, redrawn_rows


def work(config: Config, device: str) -> Work:
    """The loss surface ("ground"), the flow, SGD's steps and what penalties explain of them."""
    x = torch.linspace(-2.5, 2.5, config.points, dtype=torch.float64)
    y = 0.75 * torch.tanh(1.4 * x - 0.35) + 0.12 * torch.sin(2.7 * x)
    data = (x.to(device), y.to(device))
    return on_one_thread(
        {
            "ground": lambda: _surface_rows(config, data),
            "flow": lambda: _flow_rows(config, data),
            "minibatch": lambda: _step_rows(config, data, config.batch),
            "full batch": lambda: _step_rows(config, data, config.points),
            "redrawn": lambda: redrawn_rows(config, data, _descend(config, data, config.batch)),
            "epochs": lambda: epoch_rows(config, data, _descend(config, data, config.batch)),
        }
    )


def _surface_rows(config: Config, data: Data) -> Iterator[Row]:
    x, y = data
    biases = torch.linspace(-1.0, 1.3, config.grid, dtype=torch.float64, device=x.device)
    for w in torch.linspace(-0.8, 2.0, config.grid, dtype=torch.float64).tolist():
        losses = (torch.tanh(w * x + biases[:, None]) - y).square().mean(1)
        for b, loss in zip(biases.tolist(), losses.tolist(), strict=True):
            yield {"w": w, "b": b, "loss": loss}


def _flow_rows(config: Config, data: Data) -> Iterator[Row]:
    objective = tacit.Objective(Network(config.start).to(data[0].device), F.mse_loss, data)
    params = dict(objective.params)
    for step in range(config.flow_steps + 1):
        if step % 20 == 0:
            yield {"step": step, "w": float(params["w"]), "b": float(params["b"])}
        gradient = objective.gradient(params)
        params = {name: p - config.flow_step * gradient[name] for name, p in params.items()}


def _descend(config: Config, data: Data, batch_size: int) -> tacit.Trajectory:
    """The recorded steps of SGD with batches of this size."""
    model = Network(config.start).to(data[0].device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.step)
    recorder = tacit.record(model, optimizer)
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        batch = torch.randperm(config.points, generator=generator)[:batch_size]
        optimizer.zero_grad()
        F.mse_loss(model(data[0][batch]), data[1][batch]).backward()
        optimizer.step()
        recorder.step()
    return recorder.trajectory()


def _step_rows(config: Config, data: Data, batch_size: int) -> Iterator[Row]:
    """SGD's positions and displacements, beside the displacement −η∇L of the full gradient."""
    trajectory = _descend(config, data, batch_size)
    objective = tacit.Objective(Network(config.start).to(data[0].device), F.mse_loss, data)
    fit = tacit.fit(tacit.trajectory_equations(objective, trajectory, [tacit.l2()]))
    steps = zip(trajectory.points, trajectory.displacements, trajectory.times, strict=True)
    for step, (point, displacement, time) in enumerate(steps):
        expected = tacit.equations.euler(objective, point, time)
        yield {
            "step": step,
            **{name: float(point[name]) for name in ("w", "b")},
            **{f"moved_{name}": float(displacement[name]) for name in ("w", "b")},
            **{f"expected_{name}": float(expected[name]) for name in ("w", "b")},
            "ridge": fit.strengths["l2"],
            "explained": fit.explained,
            "problems": join_kinds(fit.problems),
        }

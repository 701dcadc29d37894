"""Strengths of ‖∇L‖² estimated from a few steps of gradient descent."""

import time
from collections.abc import Iterator

from torch import nn
from torch.nn import functional as F

from tacit import Objective, Trajectory, fit, rk4, trajectory_equations
from tacit.objective.losses import Loss
from tacit.objective.params import norm
from tacit.regularizers import gradient_norm
from tacit_paper import Row
from tacit_paper import least_squares as ls
from tacit_paper.problem_kinds import join_kinds
from tacit_paper.step_size.config import Config
from tacit_paper.step_size.networks import Examples, Split, accuracy_and_loss, train_networks
from tacit_paper.step_size.next_term import NEXT_TERM, flow_change


def width_rows(config: Config, split: Split, width: int) -> Iterator[Row]:
    """One row per step size for the networks of one width, whether they were trained or not."""
    start = time.perf_counter()
    networks = train_networks(config, split, width)
    test_accuracy, _ = accuracy_and_loss(networks.ensemble, split.test)
    seconds = time.perf_counter() - start
    X, y = (part[: config.probe] for part in split.train)
    for m, eta in enumerate(config.etas):
        model = networks.ensemble.module(m).double()
        row: Row = {
            "kind": "network",
            "width": width,
            "eta": eta,
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained": not networks.reason[m],
            "reason": networks.reason[m],
            "train_accuracy": float(networks.accuracy[m]),
            "train_seconds": seconds,  # of all step sizes together
        }
        if row["trained"]:
            row["epoch"] = int(networks.epoch[m])
            row["validation_accuracy"] = float(networks.validation[m])
            row["test_accuracy"] = float(test_accuracy[m])
            row |= estimate_from_steps(config, model, F.cross_entropy, (X.double(), y), eta)
        yield row


def least_squares_rows(config: Config) -> Iterator[Row]:
    """The same estimates without training: steps on a mean squared error, from zero."""
    X, _, y = ls.draw()
    for eta in config.plain_etas:
        model = nn.Linear(X.shape[1], 1, bias=False, dtype=X.dtype)
        nn.init.zeros_(model.weight)
        estimates = estimate_from_steps(config, model, F.mse_loss, (X, y[:, None]), eta)
        yield {"kind": "least squares", "eta": eta, "parameters": X.shape[1], **estimates}


def estimate_from_steps(
    config: Config, model: nn.Module, loss: Loss, data: Examples, eta: float
) -> Row:
    """The strength of ‖∇L‖² in full-batch steps of size η, with one column and with two.

    (flow − step)/η = (η/2)Hg − (η²/6) D(Hg)[g] + …, where the columns are 2Hg and −D(Hg)[g]: the
    theory's strengths are η/4 and η²/6.
    """
    start = time.perf_counter()
    objective = Objective(model, loss, data, batch_size=len(data[0]))
    point = {n: p.clone() for n, p in objective.params.items()}
    size = sum(p.numel() for p in point.values())
    points, displacements = [], []
    for _ in range(config.steps):
        points.append(point)
        displacements.append({n: g.mul_(-eta) for n, g in objective.gradient(point).items()})
        point = {n: p + displacements[-1][n] for n, p in point.items()}
    equations = trajectory_equations(
        objective,
        Trajectory(points, displacements, [eta] * config.steps),
        [gradient_norm(objective), flow_change(model, loss, data)],
        reference=rk4(config.substeps),
    )
    one_column, two_columns = fit(equations.select_columns([0])), fit(equations)
    ratio = one_column.strengths["gradient_norm"] / (eta / 4)
    return {
        "r_ig": (norm(displacements[0]) / eta) ** 2 / size,
        "ratio_first": ratio,
        "ratio_second": two_columns.strengths["gradient_norm"] / (eta / 4),
        "next_over_theory": two_columns.strengths[NEXT_TERM] / (eta**2 / 6),
        "explained_first": one_column.explained,
        "explained_second": two_columns.explained,
        "condition": two_columns.condition,
        "problems": join_kinds(one_column.problems),
        "problems_second": join_kinds(two_columns.problems),
        "lambda_hat": ratio * eta * size / 4,
        "lambda_theory": eta * size / 4,
        "probe_seconds": time.perf_counter() - start,
    }

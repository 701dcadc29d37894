"""What penalties explain of the deviations: of single steps, and of whole shuffled epochs."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

import tacit
from tacit.objective.params import Params
from tacit.regularizers import Regularizer, gradient_norm, gradient_variance
from tacit_paper import Row
from tacit_paper.problem_kinds import join_kinds
from tacit_paper.trajectory_deviations.config import Config, Data, Network

CANDIDATES = {"ridge": [0], "‖∇L‖²": [1], "‖∇L‖², variance of ∇L": [1, 2]}
"""Candidate sets by name: which of `_regularizers` they consist of."""


def redrawn_rows(config: Config, data: Data, path: tacit.Trajectory) -> Iterator[Row]:
    """One row per candidate set: what it explains where the batches of a path are drawn again.

    At the points of the path, batches are drawn many times. `low`, `median` and `high` are
    quantiles of the fraction that is explained of a single draw; `together` is the fraction if one
    strength has to serve all draws. A batch is an unbiased sample, so the mean deviation is zero.
    """
    objective, regularizers = _objective_and_regularizers(config, data)
    equations = tacit.trajectory_equations(objective, path, regularizers)
    columns = torch.stack([_columns(regularizer, path.points) for regularizer in regularizers], 1)
    deviations = draw_deviations(config, data, path.points)
    quantiles = torch.tensor([0.025, 0.5, 0.975], dtype=torch.float64)
    for name, chosen in CANDIDATES.items():
        fit = tacit.fit(equations.select_columns(chosen))
        basis = torch.linalg.qr(columns[:, chosen]).Q
        explained = (deviations @ basis).square().sum(1) / deviations.square().sum(1)
        together = (deviations.mean(0) @ basis).square().sum() / deviations.square().sum(1).mean()
        low, median, high = explained.quantile(quantiles).tolist()
        yield {
            "candidates": name,
            "explained": fit.explained,
            "problems": join_kinds(fit.problems),
            "draws": len(deviations),
            **{"low": low, "median": median, "high": high, "together": float(together)},
        }


def draw_deviations(config: Config, data: Data, points: Sequence[Params]) -> Tensor:
    """∇L_b − ∇L for fresh batches b at every point, one row per draw of all batches."""
    generator = torch.Generator().manual_seed(config.seed + 1)
    gradients = torch.stack([_example_gradients(*data, _as_vector(point)) for point in points])
    shape = (config.draws, len(points), config.points)
    batches = torch.rand(shape, generator=generator).argsort(-1)[..., : config.batch]
    means = [g[batches[:, k].to(g.device)].mean(1) for k, g in enumerate(gradients)]
    return (torch.stack(means, 1) - gradients.mean(1)).flatten(1).cpu()


def epoch_rows(config: Config, data: Data, path: tacit.Trajectory) -> Iterator[Row]:
    """One row per candidate set: what it explains of the mean of whole epochs, against the flow.

    From every point of the path, epochs of shuffled batches with small steps η are run, each with
    its reverse order. Their mean follows the flow of L + (η/4)(‖∇L‖² + V), where V is the variance
    of a batch's gradient (Smith et al. 2021): V = R₁ (n − B)/(B(n − 1)), where R₁ is the variance
    of one example's gradient. `ratio_norm` and `ratio_variance` are strengths over this prediction.
    """
    objective, regularizers = _objective_and_regularizers(config, data)
    count, step = config.points, config.epoch_step
    displacements = [_mean_epoch(config, data, point) for point in path.points]
    times = [step * (count // config.batch)] * len(path.points)
    epochs = tacit.Trajectory(path.points, displacements, times)
    equations = tacit.trajectory_equations(
        objective, epochs, regularizers, reference=tacit.rk4(config.substeps)
    )
    without_replacement = (count - config.batch) / (config.batch * (count - 1))
    for name, chosen in CANDIDATES.items():
        fit = tacit.fit(equations.select_columns(chosen))
        ratios = {regularizer: s / (step / 4) for regularizer, s in fit.strengths.items()}
        variance = ratios.get("gradient_variance")
        yield {
            "candidates": name,
            "explained": fit.explained,
            "problems": join_kinds(fit.problems),
            "ratio_norm": ratios.get("gradient_norm"),
            "ratio_variance": None if variance is None else variance / without_replacement,
        }


def _mean_epoch(config: Config, data: Data, point: Params) -> Params:
    """The mean displacement of epochs from a point: every order of batches, and its reverse."""
    generator = torch.Generator().manual_seed(config.seed + 2)
    orders = torch.rand(config.orders, config.points, generator=generator).argsort(-1)
    batches = orders.unflatten(1, (-1, config.batch)).to(data[0].device)
    batches = torch.cat([batches, batches.flip(1)])
    start = _as_vector(point)
    theta = start.expand(len(batches), 2)
    for k in range(batches.shape[1]):
        x, y = (part[batches[:, k]] for part in data)
        theta = theta - config.epoch_step * _example_gradients(x, y, theta).mean(1)
    w, b = (theta - start).mean(0)
    return {"w": w, "b": b}


def _example_gradients(x: Tensor, y: Tensor, theta: Tensor) -> Tensor:
    """Gradients of (tanh(wx + b) − y)² with respect to (w, b), one row per example."""
    output = torch.tanh(theta[..., :1] * x + theta[..., 1:])
    outer = 2 * (output - y) * (1 - output.square())
    return torch.stack([outer * x, outer], -1)


def _objective_and_regularizers(
    config: Config, data: Data
) -> tuple[tacit.Objective, list[Regularizer]]:
    model = Network(config.start).to(data[0].device)
    objective = tacit.Objective(model, F.mse_loss, data)
    examples = tacit.Objective(model, F.mse_loss, data, batch_size=1)
    return objective, [tacit.l2(), gradient_norm(objective), gradient_variance(examples)]


def _columns(regularizer: Regularizer, points: Sequence[Params]) -> Tensor:
    """The regularizer's gradients at all points, one below the other."""
    gradients = (next(iter(regularizer.gradient(point).values())) for point in points)
    return torch.cat([_as_vector(gradient) for gradient in gradients]).cpu()


def _as_vector(params: Params) -> Tensor:
    return torch.stack([params["w"], params["b"]])

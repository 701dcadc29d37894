"""Distances of gradient descent from the flow of the loss and from that of the modified loss."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from tacit import Objective, rk4
from tacit.objective.params import Params, norm
from tacit_paper import Row
from tacit_paper import least_squares as ls
from tacit_paper.long_horizon.config import Config
from tacit_paper.step_size.config import Config as StepSizeConfig
from tacit_paper.step_size.networks import build_network, load_data

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"tanh": nn.Tanh, "ReLU": nn.ReLU}


def least_squares_rows(config: Config, eta: float) -> Iterator[Row]:
    """Distances on least squares from zero, on the CPU: the problem is too small for a GPU."""
    X, _, y = ls.draw(noise=config.noise, examples=config.examples, size=config.inputs)
    start = ls.as_params(torch.zeros(config.inputs))
    rows = distances_from_flows(ls.objective(X, y), start, eta, config.steps, config.substeps)
    yield from ({"case": "least squares", **row} for row in rows)


def network_rows(config: Config, activation: str, device: str) -> Iterator[Row]:
    """Distances for the cross-entropy of a small network from its initial weights."""
    settings = StepSizeConfig(
        data=config.data, normalisation=config.normalisation, train=config.network_examples
    )
    X, y = load_data(settings, device).train
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_network((X.shape[1], *config.hidden, 10), ACTIVATIONS[activation])
    data = (X.double(), y)
    objective = Objective(model.double().to(device), F.cross_entropy, data, batch_size=len(X))
    rows = distances_from_flows(
        objective, objective.params, config.network_eta, config.network_steps, config.substeps
    )
    yield from ({"case": activation, **row} for row in rows)


@dataclass(frozen=True)
class ModifiedLoss:
    """L + (η/4)‖∇L‖², whose gradient is ∇L + (η/2)H∇L.

    Trap: it has only a gradient, which is all that a flow needs.
    """

    objective: Objective
    eta: float

    def gradient(self, params: Params) -> Params:
        """The gradient of the modified loss."""
        gradient = self.objective.gradient(params)
        curvature = self.objective.hvp(gradient, params)
        return {n: g + self.eta / 2 * curvature[n] for n, g in gradient.items()}


def distances_from_flows(
    objective: Objective, start: Params, eta: float, steps: int, substeps: int
) -> Iterator[Row]:
    """Distances of gradient descent from both flows, and from the start, after every step."""
    flow = rk4(substeps)
    modified_loss = cast(Objective, ModifiedLoss(objective, eta))  # a flow only asks for gradients
    descent = plain = modified = dict(start)
    for step in range(1, steps + 1):
        gradient = objective.gradient(descent)
        descent = {n: p - eta * gradient[n] for n, p in descent.items()}
        plain = _add(plain, flow(objective, plain, eta, step))
        modified = _add(modified, flow(modified_loss, modified, eta, step))
        yield {
            "eta": eta,
            "step": step,
            "plain": _distance(descent, plain),
            "modified": _distance(descent, modified),
            "moved": _distance(descent, start),
        }


def _add(params: Params, displacement: Params) -> Params:
    return {n: p + displacement[n] for n, p in params.items()}


def _distance(a: Params, b: Params) -> float:
    return norm({n: a[n] - b[n] for n in a})

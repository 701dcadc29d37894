"""Averages of SGD in small networks: estimated pulls towards their start, and retraining."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import tacit
from tacit.objective.params import Params, norm
from tacit.regularizers import Regularizer, distance_to, layerwise
from tacit_paper import Row, data
from tacit_paper.averaging.config import Config
from tacit_paper.minimising import minimise
from tacit_paper.problem_kinds import join_kinds

NORMALISATION = (0.3053, 0.3761)
"""Mean and standard deviation of a pixel of the digits."""


class Averages(NamedTuple):
    """Weights where averaging started, their mean since then, and the last ones."""

    start: Params
    mean: Params
    last: Params


class Problem(NamedTuple):
    """A network with its examples."""

    model: nn.Module
    X: Tensor
    y: Tensor
    test: tuple[Tensor, Tensor]

    def outputs(self, params: Params, X: Tensor) -> Tensor:
        """Logits at these weights."""
        return functional_call(self.model, params, (X,))

    def objective(self) -> tacit.Objective:
        """The training loss."""
        return tacit.Objective(
            self.model, F.cross_entropy, (self.X, self.y), batch_size=len(self.X)
        )


def network_rows(config: Config, seed: int) -> Iterator[Row]:
    """Estimates at the mean and at the last of the iterates, for every number of epochs."""
    problem = make_problem(config, seed)
    objective = problem.objective()
    for epochs, averages in zip(config.epochs, average_sgd(config, problem, seed), strict=True):
        steps = epochs * (config.train // config.batch_size)
        time = config.network_step * steps
        labels = {"seed": seed, "epochs": epochs, "steps": steps, "time": time}
        for kind, params in (("mean", averages.mean), ("last", averages.last)):
            yield {**labels, "kind": kind, **_estimate(objective, params, averages.start)}
        if epochs == config.retrained:
            for row in _retrain(config, problem, averages):
                yield {**labels, "kind": "retrained", **row}


def make_problem(config: Config, seed: int) -> Problem:
    """A tanh network at its initial weights, and a random split of the digits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        width = config.width
        model = nn.Sequential(
            nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, 10),
        ).double()  # fmt: skip
    pixels, labels = data.digits()
    mean, deviation = NORMALISATION
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))
    X, y = ((pixels - mean) / deviation).double()[order], labels[order]
    test = (X[config.train :], y[config.train :])
    return Problem(model, X[: config.train], y[: config.train], test)


def average_sgd(config: Config, problem: Problem, seed: int) -> Iterator[Averages]:
    """SGD with a constant step; after the warm-up, the mean of all iterates, at several epochs."""
    model, X, y = problem.model, problem.X, problem.y
    optimizer = torch.optim.SGD(model.parameters(), lr=config.network_step)
    average = AveragedModel(model)
    generator = torch.Generator().manual_seed(seed + 1)
    start: Params = {}
    for epoch in range(config.warm_up + config.epochs[-1]):
        if epoch == config.warm_up:
            start = _copy(model)
        for batch in torch.randperm(len(X), generator=generator).split(config.batch_size):
            if len(batch) < config.batch_size:
                continue  # every step has a batch of the same size
            optimizer.zero_grad()
            F.cross_entropy(model(X[batch]), y[batch]).backward()
            optimizer.step()
            if epoch >= config.warm_up:
                average.update_parameters(model)
        if epoch + 1 - config.warm_up in config.epochs:
            yield Averages(start, _copy(average.module), _copy(model))


def _estimate(objective: tacit.Objective, params: Params, start: Params) -> Row:
    """The pull towards the start as one strength and layer by layer, ridge, and both together."""
    target = tacit.endpoint_target(objective, params=params)
    pull, ridge = distance_to(start), tacit.l2()
    one, zero = tacit.fit(target.equations(pull)), tacit.fit(target.equations(ridge))
    both = tacit.fit(target.equations([pull, ridge]))
    layers = tacit.fit(target.equations(layerwise(pull)))
    return {
        "explained_start": one.explained,
        "explained_layers": layers.explained,
        "explained_ridge": zero.explained,
        "explained_both": both.explained,
        "strength_start": one.strengths["distance_to"],
        "strength_ridge": zero.strengths["l2"],
        "lowest_layer": min(layers.strengths.values()),
        "highest_layer": max(layers.strengths.values()),
        "both_start": both.strengths["distance_to"],
        "both_ridge": both.strengths["l2"],
        "problems": join_kinds(one.problems),
    }


def _retrain(config: Config, problem: Problem, averages: Averages) -> Iterator[Row]:
    """Networks minimised from the start with each penalty: how far from the mean they end."""
    objective, (start, mean, _) = problem.objective(), averages
    target = tacit.endpoint_target(objective, params=mean)
    pull, ridge = distance_to(start), tacit.l2()
    strengths = {
        "pull to the start": (pull, tacit.fit(target.equations(pull)).strengths["distance_to"]),
        "ridge": (ridge, tacit.fit(target.equations(ridge)).strengths["l2"]),
        "none": (ridge, 0.0),
    }
    for penalty, (regularizer, strength) in strengths.items():
        params = _minimise(problem, start, regularizer, strength, config.iterations)
        yield {
            "penalty": penalty,
            "strength": strength,
            "distance": _distance(params, mean) / _distance(start, mean),
            "divergence": _divergence(problem, mean, params),
            "divergence_of_start": _divergence(problem, mean, start),
            "accuracy": _accuracy(problem, params),
            "accuracy_of_mean": _accuracy(problem, mean),
        }


def _minimise(
    problem: Problem, start: Params, regularizer: Regularizer, strength: float, iterations: int
) -> Params:
    """A minimum of L + λR, by L-BFGS from the start."""
    params = {n: p.clone() for n, p in start.items()}

    def penalised_loss() -> Tensor:
        loss = F.cross_entropy(problem.outputs(params, problem.X), problem.y)
        return loss + strength * regularizer.value(params)

    minimise(penalised_loss, params.values(), iterations=iterations, tolerance=1e-8)
    return {n: p.detach() for n, p in params.items()}


def _copy(model: nn.Module) -> Params:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def _distance(a: Params, b: Params) -> float:
    return norm({n: a[n] - b[n] for n in a})


@torch.no_grad()
def _divergence(problem: Problem, original: Params, params: Params) -> float:
    """Mean Kullback–Leibler divergence of predictions from the original's, on test examples."""
    p, q = (F.log_softmax(problem.outputs(w, problem.test[0]), 1) for w in (original, params))
    return float((p.exp() * (p - q)).sum(1).mean())


@torch.no_grad()
def _accuracy(problem: Problem, params: Params) -> float:
    X, y = problem.test
    return float((problem.outputs(params, X).argmax(1) == y).double().mean())

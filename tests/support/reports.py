"""Results of every kind, with and without problems, to report."""

import math
from functools import cache

import torch
from torch.nn import functional as F

import tacit

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(1)>'&amp;"


def ridge_model():
    """A linear model at the optimum of mse_loss + 0.1 ‖θ‖², with its data."""
    torch.manual_seed(0)
    X = torch.randn(400, 4).double()
    y = X.sum(1, keepdim=True) + 0.1 * torch.randn(400, 1).double()
    model = torch.nn.Linear(4, 1, bias=False).double()
    gram = X.T @ X / 400 + 0.1 * torch.eye(4).double()
    model.weight.data = torch.linalg.solve(gram, X.T @ y / 400).T
    return model, (X, y)


def deep_model(layers=10):
    """A network with random weights, and data."""
    torch.manual_seed(1)
    parts = [torch.nn.Linear(3, 3).double() for _ in range(layers)]
    X = torch.randn(40, 3).double()
    return torch.nn.Sequential(*parts), (X, X.flip(1))


@cache
def good_fit():
    """A fit without problems."""
    model, data = ridge_model()
    return tacit.estimate(
        tacit.Objective(model, F.mse_loss, data), [tacit.l2()], population=math.inf
    )


@cache
def doubtful_fit():
    """A fit of a random network by many candidates, one of them with a hostile name."""
    model, data = deep_model()
    objective = tacit.Objective(model, F.mse_loss, data)
    mine = tacit.regularizer(HOSTILE, lambda params: sum(v.pow(4).sum() for v in params.values()))
    candidates = [
        mine,
        tacit.l2(),
        tacit.l2(name="the_same_with_a_name_that_is_far_too_long_for_a_column"),
        tacit.layerwise(tacit.l1()),
        tacit.regularizers.gradient_norm(objective),
    ]
    return tacit.estimate(objective, candidates)


@cache
def noiseless_fit():
    """A fit of a target that is only rounding."""
    X = torch.eye(3).double()
    model = torch.nn.Linear(3, 1, bias=False).double()
    return tacit.estimate(model, F.mse_loss, (X, X @ model.weight.detach().T), [tacit.l2()])


@cache
def a_screen():
    """A screen in which no candidate is confirmed."""
    model, data = deep_model()
    return tacit.screen(tacit.Objective(model, F.mse_loss, data), cost="weights")


@cache
def an_answer():
    """A screen whose answer is ridge: −∇L is made to be that of ridge in every layer."""
    model, (X, _) = deep_model()
    points = dict(model.named_parameters())

    def loss(model, batch):
        pull = sum((points[name].detach() * p).sum() for name, p in model.named_parameters())
        return -0.02 * pull + 0 * model(*batch).sum(1)

    return tacit.screen(tacit.Objective.from_batch_loss(model, loss, (X,)), cost="weights")


@cache
def a_watch():
    """A watch of SGD with weight decay."""
    model, (X, y) = deep_model(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.02)
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    watch = tacit.watch(model, optimizer, objective, [tacit.l2()], every=10, budget=None)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        for rows in torch.randperm(40, generator=generator).split(10):
            optimizer.zero_grad()
            F.mse_loss(model(X[rows]), y[rows]).backward()
            optimizer.step()
        watch.end_epoch()
    return watch


@cache
def a_validation():
    """A validation of the fit without problems."""
    return tacit.validate(good_fit())


RESULTS = {
    "good": good_fit,
    "doubtful": doubtful_fit,
    "no signal": noiseless_fit,
    "screen": a_screen,
    "answer": an_answer,
    "watch": a_watch,
    "validation": a_validation,
}

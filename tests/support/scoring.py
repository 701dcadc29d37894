"""Fits of endpoints with the scores of their examples, and gradients of single examples."""

import torch

import tacit


def fit_endpoint(objective, regularizers, **options):
    return tacit.fit(tacit.endpoint_equations(objective, regularizers, **options))


def fit_and_score(objective, regularizers, *, population=None, clusters=None, **options):
    """A fit of the endpoint equations, and the scores of the examples."""
    fit = fit_endpoint(objective, regularizers, **options)
    return fit, tacit.score_examples(fit, population=population, clusters=clusters)


def strengths_of(fit):
    return torch.tensor(list(fit.strengths.values()), dtype=torch.float64)


def example_gradients(model, loss, data):
    """The whole gradient of every example, one per row, by a loop."""
    rows = []
    for i in range(len(data[-1])):
        *inputs, target = (part[i : i + 1] for part in data)
        gradients = torch.autograd.grad(loss(model(*inputs), target), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)

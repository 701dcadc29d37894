"""Small ensembles, their data, and short training runs that several test files share."""

import torch
from torch import nn
from torch.nn import functional as F

from support.models import random_data, tanh_mlp
from tacit import ensembles
from tacit.ensembles import SGD, Data, Ensemble, Plan

MEMBERS = 5


def ensemble_and_data():
    """Five members on three data sets, some weights exactly zero; and each member's data."""
    models = [tanh_mlp(seed) for seed in range(MEMBERS)]
    with torch.no_grad():
        models[1][0].weight[0] = 0
        models[2][2].bias[:] = 0
    sets = [random_data(seed) for seed in range(3)]
    assignment = [0, 2, 1, 1, 0]
    data = Data(torch.stack([X for X, _ in sets]), torch.stack([y for _, y in sets]), assignment)
    return ensembles.from_models(models), data, [sets[index] for index in assignment]


def sequential(*layers):
    return nn.Sequential(*layers).double()


def small_networks(members=3) -> Ensemble:
    return ensembles.initialise(
        lambda: sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)), range(members)
    )


def train_briefly(ensemble, data, *, loss=F.mse_loss, plan=None, seeds=None, **options):
    """Train for a few steps, by default with one seed per member."""
    plan = plan or Plan(SGD(0.01), 2, 16)
    seeds = range(len(ensemble)) if seeds is None else seeds
    return ensembles.train(ensemble, loss, data, plan, seeds=seeds, **options)

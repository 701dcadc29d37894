"""Objectives of a part of the data: means over the chosen examples or batches."""

import pytest
import torch
from support.models import random_data, tanh_mlp
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

import tacit
from tacit.objective.samples import sample, units_of

X, Y = random_data(0, count=50)
DATA = TensorDataset(X, Y)
BATCHES = [(X[rows], Y[rows]) for rows in torch.arange(50).split(8)]
NUMBERS = torch.tensor([3, 0, 5])


class Streamed(IterableDataset):
    """Examples without numbers."""

    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Reread:
    """Batches that have no length."""

    def __iter__(self):
        return iter(BATCHES)


EXAMPLES = {
    "tensors": (lambda: (X, Y), 50),
    "a data set": (lambda: DATA, 50),
    "a loader": (lambda: DataLoader(DATA, 8), 50),
    "a loader that drops its last batch": (lambda: DataLoader(DATA, 8, drop_last=True), 48),
}
WHOLE_BATCHES = {
    "a list": lambda: BATCHES,
    "an iterable": Reread,
    "a loader with batches of its own": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 8, drop_last=False)
    ),
    "a streaming loader": lambda: DataLoader(Streamed(), 8),
}


def objective_of(data, **options):
    return tacit.Objective(tanh_mlp(0), F.mse_loss, data, **options)


def gradient_of(objective):
    return torch.cat([g.flatten() for g in objective.gradient().values()])


def expected_gradient(rows, weights=None):
    return gradient_of(objective_of((X[rows], Y[rows]), weights=weights))


@pytest.mark.parametrize(("make", "count"), EXAMPLES.values(), ids=EXAMPLES)
def test_examples_are_chosen_one_by_one(make, count):
    objective = objective_of(make())
    units = units_of(objective)
    assert units.count == count
    chosen = gradient_of(sample(objective, units, NUMBERS))
    assert torch.allclose(chosen, expected_gradient(NUMBERS), rtol=1e-12)
    everything = gradient_of(sample(objective, units, torch.arange(count)))
    assert torch.allclose(everything, gradient_of(objective), rtol=1e-12)


@pytest.mark.parametrize("make", WHOLE_BATCHES.values(), ids=WHOLE_BATCHES)
def test_batches_are_chosen_where_they_are_composed_elsewhere(make):
    objective = objective_of(make())
    units = units_of(objective)
    assert (units.count, units.per_batch) == (7, 1)
    chosen = gradient_of(sample(objective, units, NUMBERS))
    rows = torch.cat([torch.arange(50).split(8)[n] for n in NUMBERS])
    assert torch.allclose(chosen, expected_gradient(rows), rtol=1e-12)


def test_weights_and_dictionaries_follow_the_examples():
    weights = torch.rand(50, generator=torch.Generator().manual_seed(1)).double()
    objective = objective_of((X, Y), weights=weights)
    chosen = gradient_of(sample(objective, units_of(objective), NUMBERS))
    assert torch.allclose(chosen, expected_gradient(NUMBERS, weights[NUMBERS]), rtol=1e-12)

    def losses(model, batch):
        return (model(batch["x"]) - batch["y"]).square().mean(1)

    by_name = tacit.Objective.from_batch_loss(tanh_mlp(0), losses, {"x": X, "y": Y})
    chosen = gradient_of(sample(by_name, units_of(by_name), NUMBERS))
    assert torch.allclose(chosen, expected_gradient(NUMBERS), rtol=1e-12)


def test_the_random_state_and_the_objective_stay_as_they_were():
    generator = torch.Generator().manual_seed(0)
    objective = objective_of(DataLoader(DATA, 8, shuffle=True, generator=generator))
    before, states = gradient_of(objective), (torch.get_rng_state(), generator.get_state())
    sample(objective, units_of(objective), NUMBERS).gradient()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    assert torch.equal(gradient_of(objective), before)
    assert objective.count == 50


def test_an_empty_sample_is_refused():
    objective = objective_of((X, Y))
    with pytest.raises(tacit.InputError, match="without examples"):
        sample(objective, units_of(objective), torch.arange(0))

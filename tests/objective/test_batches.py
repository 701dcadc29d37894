"""Data that gives the same examples at every pass is accepted, other data is refused."""

import random

import numpy as np
import pytest
import torch
from support.bad_calls import INF, MODEL, X, with_value
from support.models import random_data, tanh_mlp
from support.objectives import assert_close, split_batches
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tacit import InputError, Objective


class ReadOnce:
    """Every pass continues where the last one stopped."""

    def __init__(self, batches):
        self.batches = iter(batches)

    def __iter__(self):
        yield from self.batches


class Shuffled:
    """Every pass has all batches in a new order."""

    def __init__(self, batches):
        self.batches, self.generator = batches, torch.Generator().manual_seed(0)

    def __iter__(self):
        for i in torch.randperm(len(self.batches), generator=self.generator).tolist():
            yield self.batches[i]


def test_batches_that_can_be_read_only_once_are_refused_and_shuffled_ones_are_not():
    batches = split_batches(*random_data(1, count=50), size=10)
    with pytest.raises(InputError, match="only once"):
        Objective(tanh_mlp(1), F.mse_loss, ReadOnce(batches))
    shuffled = Objective(tanh_mlp(1), F.mse_loss, Shuffled(batches))
    assert shuffled.count == 50


def make_loader(size, **options):
    X, y = random_data(1, count=12)
    return DataLoader(TensorDataset(X, y), batch_size=size, **options)


def make_batch_loader(sampler, *, size=5, drop_last=True):
    X, y = random_data(1, count=12)
    sampler = BatchSampler(sampler, size, drop_last)
    return DataLoader(TensorDataset(X, y), batch_sampler=sampler)


def make_sampled_loader(sampler):
    return make_loader(4, sampler=sampler)


CHANGING_LOADERS = {
    "shuffles and drops": (lambda: make_loader(5, shuffle=True, drop_last=True), "drop_last=False"),
    "batch sampler shuffles and drops": (
        lambda: make_batch_loader(RandomSampler(range(12))),
        "drop_last=False",
    ),
    "subset sampler shuffles and drops": (
        lambda: make_batch_loader(SubsetRandomSampler(range(12))),
        "drop_last=False",
    ),
    "draws with replacement": (
        lambda: make_sampled_loader(RandomSampler(range(12), replacement=True)),
        "each example once",
    ),
    "draws by weight": (
        lambda: make_sampled_loader(WeightedRandomSampler([1.0] * 12, 12)),
        "each example once",
    ),
    "draws a part": (
        lambda: make_sampled_loader(RandomSampler(range(12), num_samples=8)),
        "each example once",
    ),
}


@pytest.mark.parametrize(("make_data", "words"), CHANGING_LOADERS.values(), ids=CHANGING_LOADERS)
def test_a_loader_whose_examples_change_between_passes_is_refused(make_data, words):
    with pytest.raises(InputError, match=words):
        Objective(tanh_mlp(0), F.mse_loss, make_data())


CONSTANT_LOADERS = {
    "shuffles and drops nothing": lambda: make_loader(4, shuffle=True, drop_last=True),
    "drops without shuffling": lambda: make_loader(5, drop_last=True),
    "shuffles a subset": lambda: make_sampled_loader(SubsetRandomSampler(range(8))),
}


@pytest.mark.parametrize("make_data", CONSTANT_LOADERS.values(), ids=CONSTANT_LOADERS)
def test_a_loader_whose_examples_are_the_same_in_every_pass_is_accepted(make_data):
    torch.manual_seed(0)
    objective = Objective(tanh_mlp(0), F.mse_loss, make_data())
    first = objective.gradient()
    torch.manual_seed(1)
    assert_close(objective.gradient(), first, tolerance=1e-12)


@pytest.mark.parametrize(
    "noise",
    [lambda: torch.rand(()), lambda: np.random.rand(), random.random],  # noqa: NPY002 # the global state
    ids=["torch", "numpy", "python"],
)
def test_a_randomly_augmenting_data_set_is_refused(noise):
    class Augmented(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"pair": (torch.ones(5, dtype=torch.float64) * noise(), torch.ones(1))}

    with pytest.raises(InputError, match=r"items 0, .* differs.*without augmentation"):
        Objective.from_batch_loss(tanh_mlp(0), lambda m, b: m(b["pair"][0])[:, 0], Augmented())


def test_minus_infinity_is_allowed_as_a_mask_in_batches_of_any_structure():
    batch = {"x": X, "mask": with_value(torch.zeros(8, 1), -INF)}
    masked = Objective.from_batch_loss(
        MODEL, lambda m, b: (m(b["x"]) + b["mask"])[:, 0].sigmoid(), batch
    )
    outputs = MODEL(X)[:, 0]
    expected = (outputs + batch["mask"][:, 0]).sigmoid().mean().item()
    assert masked.value() == pytest.approx(expected, rel=1e-12)
    with pytest.raises(InputError, match="NaN"):
        Objective.from_batch_loss(
            MODEL, lambda m, b: b["mask"][:, 0], {**batch, "mask": with_value(batch["mask"], INF)}
        )

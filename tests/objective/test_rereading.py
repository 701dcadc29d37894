"""Data that changes between passes is refused, and in training mode drawn anew for each draw."""

import os
import random
from collections import Counter

import numpy as np
import pytest
import torch
from support.models import random_data, tanh_mlp
from support.objectives import assert_close, split_batches
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    default_collate,
)

import tacit
from tacit import InputError, Objective, reference

X, Y = random_data(1, count=24)
GLOBAL_RNG = np.random.default_rng(3)


def from_torch():
    return torch.rand(()).item()


class Flips(Dataset):
    """Every item is reversed with probability one half."""

    def __init__(self, uniform):
        self.uniform = uniform

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return (X[index].flip(0) if self.uniform() < 0.5 else X[index]), Y[index]


class LoggedFlips(Flips):
    """Flips that are written down."""

    def __init__(self, uniform):
        self.log = []
        super().__init__(uniform)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        self.log.append(x)
        return x, y


class FlipsOfOwn(Flips):
    """Flips from a generator that the data set keeps."""

    def __init__(self, generator):
        self.generator = generator
        super().__init__(self.draw)

    def draw(self):
        if isinstance(self.generator, torch.Generator):
            return torch.rand((), generator=self.generator).item()
        return self.generator.random()


class FlipsInPlace(Flips):
    """Items are changed in their memory, which all readings share."""

    def __init__(self):
        self.X = X.clone()

    def __getitem__(self, index):
        row = self.X[index]
        row.copy_(X[index].flip(0) if random.random() < 0.5 else X[index])
        return row, Y[index]


class Cached(Flips):
    """The first flip of an item is kept."""

    def __init__(self):
        self.items = {}
        super().__init__(random.random)

    def __getitem__(self, index):
        return self.items.setdefault(index, super().__getitem__(index))


class FlippingLoader(DataLoader):
    """A loader that flips whole batches."""

    def __iter__(self):
        for x, y in super().__iter__():
            yield x * random.choice([-1, 1]), y


class RandomList(list):
    """Items of a class that is no data set of torch."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * random.choice([-1, 1]), y


class RowsAtOnce(Dataset):
    """A data set whose index is a list of rows."""

    def __init__(self, *, noise=0.1):
        self.noise = noise

    def __len__(self):
        return len(X)

    def __getitem__(self, rows):
        return X[rows] + self.noise * torch.randn(1), Y[rows]


class HalfOfData(Sampler):
    """Another half of the examples at every pass, from a generator of its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self):
        return iter(torch.randperm(24, generator=self.generator)[:12].tolist())

    def __len__(self):
        return 12


class Shuffles(Sampler):
    """All examples in a new order, from a generator of its own."""

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        order = list(range(24))
        self.generator.shuffle(order)
        return iter(order)

    def __len__(self):
        return 24


class Iterated:
    """make_batches() at every pass."""

    def __init__(self, make_batches):
        self.make_batches = make_batches

    def __iter__(self):
        return iter(self.make_batches())


class IteratedDataset(Iterated, IterableDataset):
    pass


def fresh_batches():
    for x in torch.randn(5, 4, 5, dtype=torch.float64):
        yield x, x.sum(1, keepdim=True)


def flipped_batches():
    for x, y in split_batches(X, Y, size=6):
        yield (x.flip(1) if random.random() < 0.5 else x), y


def regrouped_batches():
    order = torch.randperm(24)
    yield from split_batches(X[order], Y[order], size=5)


def mix(items):
    x, y = default_collate(items)
    other = torch.randperm(len(x))
    return (x + x[other]) / 2, (y + y[other]) / 2


def loader_of(dataset, **options):
    return DataLoader(dataset, **{"batch_size": 8, **options})


PLAIN = TensorDataset(X, Y)
CHANGING = {
    "torch": lambda: Flips(from_torch),
    "numpy": lambda: Flips(np.random.rand),
    "python": lambda: Flips(random.random),
    "urandom": lambda: Flips(lambda: os.urandom(1)[0] / 256),
    "generator of torch": lambda: FlipsOfOwn(torch.Generator().manual_seed(0)),
    "generator of numpy": lambda: FlipsOfOwn(np.random.default_rng(0)),
    "random state of numpy": lambda: FlipsOfOwn(np.random.RandomState(0)),
    "generator of python": lambda: FlipsOfOwn(random.Random(0)),
    "method of a generator": lambda: Flips(np.random.default_rng(0).random),
    "no torch data set": lambda: loader_of(RandomList(PLAIN)),
    "lists of items": lambda: DataLoader(
        RowsAtOnce(), sampler=BatchSampler(RandomSampler(PLAIN), 5, False), batch_size=None
    ),
    "global generator": lambda: Flips(lambda: GLOBAL_RNG.random()),
    "in place": FlipsInPlace,
    "shuffled": lambda: loader_of(Flips(random.random), shuffle=True),
    "second part": lambda: ConcatDataset([PLAIN, Flips(random.random)]),
    "subclass": lambda: FlippingLoader(PLAIN, batch_size=4, shuffle=True),
    "sampler": lambda: loader_of(PLAIN, sampler=HalfOfData()),
    "batch sampler": lambda: DataLoader(PLAIN, batch_sampler=BatchSampler(HalfOfData(), 4, False)),
    "collate": lambda: loader_of(PLAIN, collate_fn=mix),
    "collate, shuffled": lambda: loader_of(PLAIN, collate_fn=mix, shuffle=True),
    "iterable data set": lambda: loader_of(IteratedDataset(fresh_batches), batch_size=None),
    "iterable": lambda: Iterated(flipped_batches),
    "replacement": lambda: loader_of(PLAIN, sampler=RandomSampler(PLAIN, replacement=True)),
    "drops": lambda: loader_of(PLAIN, shuffle=True, drop_last=True, batch_size=5),
}
NOT_REPEATABLE = {"urandom"}


def set_seeds(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 # the global state


def augmented_objective(data, *, model=None, **options):
    return Objective(model or tanh_mlp(0), F.mse_loss, data, training=True, **options)


@pytest.mark.parametrize("make_data", CHANGING.values(), ids=CHANGING)
def test_data_that_changes_between_passes_is_always_refused(make_data):
    for seed in range(6):
        set_seeds(seed)
        with pytest.raises(InputError, match=r"(differ|draws|leaves out|gives).*training=True"):
            Objective(tanh_mlp(0), F.mse_loss, make_data())


@pytest.mark.parametrize("name", [name for name in CHANGING if name not in NOT_REPEATABLE])
def test_in_training_mode_a_draw_is_one_reading_and_can_be_repeated(name):
    set_seeds(0)
    objective = augmented_objective(CHANGING[name](), draws=3, seed=5)
    singles = [objective.value_and_gradient(draws=[draw]) for draw in range(3)]
    set_seeds(1)
    value, gradient = objective.value_and_gradient()
    assert value == pytest.approx(np.mean([v for v, _ in singles]), rel=1e-12)
    gradients = torch.stack([reference.flat(g) for _, g in singles])
    assert len(gradients.unique(dim=0)) == 3
    torch.testing.assert_close(reference.flat(gradient), gradients.mean(0), rtol=1e-10, atol=1e-12)
    assert augmented_objective(CHANGING[name](), draws=3, seed=5).value() == value
    assert augmented_objective(CHANGING[name](), draws=3, seed=6).value() != value


def test_randomness_that_cannot_be_seeded_is_refused_in_training_mode_too():
    with pytest.raises(InputError, match=r"seeds do not repeat it.*os.urandom.*global generator"):
        augmented_objective(CHANGING["urandom"]())


CONSTANT = {
    "shuffles": lambda: loader_of(PLAIN, shuffle=True),
    "own generator": lambda: loader_of(PLAIN, sampler=Shuffles(random.Random(0))),
    "no seed": lambda: loader_of(PLAIN, sampler=Shuffles(random.SystemRandom())),
    "batches": lambda: DataLoader(PLAIN, batch_sampler=BatchSampler(Shuffles(random), 5, False)),
    "regrouped": lambda: Iterated(regrouped_batches),
    "loader of regrouped": lambda: loader_of(IteratedDataset(regrouped_batches), batch_size=None),
    "list": lambda: split_batches(X, Y),
    "cached": Cached,
    "lists of items": lambda: DataLoader(
        RowsAtOnce(noise=0), sampler=BatchSampler(RandomSampler(PLAIN), 5, False), batch_size=None
    ),
    "collate": lambda: loader_of(PLAIN, collate_fn=default_collate, shuffle=True),
    "other collate": lambda: loader_of(PLAIN, collate_fn=lambda items: default_collate(items)),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make_data", CONSTANT.values(), ids=CONSTANT)
def test_data_whose_order_alone_changes_is_accepted(make_data, training):
    objective = Objective(tanh_mlp(0), F.mse_loss, make_data(), training=training)
    set_seeds(1)
    first = objective.gradient()
    set_seeds(2)
    assert_close(objective.gradient(), first, tolerance=1e-12)


def test_fixed_data_is_read_once_per_pass_with_the_same_numbers_in_training_mode():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 1)).double()
    reads = []

    class Counted(TensorDataset):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    objective = augmented_objective(Counted(X, Y), model=model, draws=4, batch_size=7)
    reads.clear()
    gradient = objective.gradient()
    assert sorted(reads) == list(range(24))
    batches = augmented_objective(split_batches(X, Y), model=model, draws=4)
    assert_close(gradient, batches.gradient(), tolerance=0)


def recorded_inputs(objective, draw):
    """The inputs of all examples in one draw of LoggedFlips, read once."""
    objective.data.log.clear()
    objective.value_and_gradient(draws=[draw])
    return torch.stack(objective.data.log)


def mean_loss(model, inputs, targets):
    """The mean loss as a function of the parameters."""
    return lambda params: F.mse_loss(torch.func.functional_call(model, params, (inputs,)), targets)


def test_each_draw_is_the_gradient_of_one_augmentation_and_their_mean_that_of_all_flips():
    model, draws = tanh_mlp(0), 80
    objective = augmented_objective(LoggedFlips(from_torch), model=model, draws=draws)
    gradients, flipped = [], []
    for draw in range(draws):
        inputs = recorded_inputs(objective, draw)
        flips = (inputs == X.flip(1)).all(1)
        assert (flips | (inputs == X).all(1)).all()
        flipped.append(flips)
        _, gradient = objective.value_and_gradient(draws=[draw])
        expected = reference.gradient(mean_loss(model, inputs, Y), dict(objective.params))
        assert_close(reference.flat(gradient), expected, tolerance=1e-10)
        gradients.append(reference.flat(gradient))
    assert torch.stack(flipped).double().mean() == pytest.approx(0.5, abs=2 / (24 * draws) ** 0.5)
    both = mean_loss(model, torch.cat([X, X.flip(1)]), torch.cat([Y, Y]))
    exact = reference.gradient(both, dict(objective.params))
    gradients = torch.stack(gradients)
    errors = gradients.std(0) / draws**0.5
    assert ((gradients.mean(0) - exact).abs() < 5 * errors).all()


def test_what_augmentation_adds_is_one_call():
    model = tanh_mlp(0)
    plain, both = (
        mean_loss(model, X, Y),
        mean_loss(model, torch.cat([X, X.flip(1)]), torch.cat([Y, Y])),
    )
    flips = tacit.regularizer("flips", lambda params: both(params) - plain(params))
    fit = tacit.fit(
        tacit.difference_equations(
            augmented_objective(
                loader_of(Flips(random.random), shuffle=True), model=model, draws=64
            ),
            Objective(model, F.mse_loss, loader_of(PLAIN)),
            [flips],
        )
    )
    error = fit.standard_errors["draws"]["flips"]
    assert fit.strengths["flips"] == pytest.approx(1, abs=4 * error)
    assert error < 0.15
    assert fit.explained > 0.95


def test_the_augmentation_does_not_depend_on_what_the_model_draws():
    plain = tanh_mlp(0)
    dropped = nn.Sequential(nn.Identity(), *plain, nn.Dropout(0.5))
    inputs = [
        recorded_inputs(augmented_objective(LoggedFlips(from_torch), model=model, batch_size=4), 2)
        for model in (plain, dropped)
    ]
    assert torch.equal(*inputs)


def test_mirrored_draws_share_one_augmentation():
    seen = []

    def losses(model, batch, noise):
        seen.append(batch[0])
        return (model(batch[0]) - batch[1]).square()[:, 0] + noise.normal(batch[1][:, 0])

    objective = Objective.from_batch_loss(
        tanh_mlp(0), losses, Flips(random.random), training=True, draws=4
    )
    seen.clear()
    objective.value()
    first, mirrored, third, _ = seen
    assert torch.equal(first, mirrored)
    assert not torch.equal(first, third)


def test_a_draw_may_hold_another_number_of_examples():
    def masked_losses(model, batch):
        return (model(batch[0]) - batch[1]).square()[:, 0][batch[2]]

    class Masked(Flips):
        def __getitem__(self, index):
            return X[index], Y[index], random.random() < 0.3

    objective = Objective.from_batch_loss(
        tanh_mlp(0), masked_losses, Masked(None), training=True, draws=100
    )
    losses = (tanh_mlp(0)(X) - Y).square().detach()
    error = losses.std().item() / (0.3 * 24 * 100) ** 0.5
    assert objective.value() == pytest.approx(losses.mean().item(), abs=4 * error)
    objective.gradient()


def test_generators_of_the_data_are_found_and_keep_their_states():
    generators = [random.Random(0), np.random.default_rng(0), torch.Generator().manual_seed(0)]
    loader = loader_of(
        FlipsOfOwn(generators[0]),
        sampler=Shuffles(generators[1]),
        generator=generators[2],
        collate_fn=lambda items: default_collate(items) if GLOBAL_RNG else None,
    )

    def states():
        rngs = [generators[1], GLOBAL_RNG]
        numpy = [str(rng.bit_generator.state) for rng in rngs]
        torch_states = [generators[2].get_state(), torch.get_rng_state()]
        return [
            *numpy, generators[0].getstate(), random.getstate(),
            *[Counter(state.tolist()) for state in torch_states],
        ]  # fmt: skip

    before = states()
    augmented_objective(loader, draws=2).gradient()
    assert states() == before


def test_scores_of_examples_are_means_over_draws_of_the_same_examples():
    def scored(draws=None, **options):
        objective = augmented_objective(
            loader_of(Flips(random.random), **options), model=model, draws=3
        )
        return objective.directional_derivatives([objective.params], draws=draws).values

    model = tanh_mlp(0)
    singles = torch.stack([scored([draw]) for draw in range(3)])
    assert not torch.allclose(singles[0], singles[1])
    torch.testing.assert_close(scored(), singles.mean(0), rtol=1e-10, atol=1e-12)
    with pytest.raises(InputError, match=r"averaged over draws.*shuffle=False"):
        scored(shuffle=True)


def test_an_endless_sampler_is_refused():
    class Endless(Sampler):
        def __iter__(self):
            while True:
                yield 0

    with pytest.raises(InputError, match=r"no end.*each example once"):
        Objective(tanh_mlp(0), F.mse_loss, loader_of(PLAIN, sampler=Endless()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process")  # that it has threads and forks
def test_workers_draw_from_seeds_unless_they_persist():
    def loader(**options):
        return loader_of(Flips(random.random), num_workers=1, **options)

    with pytest.raises(InputError, match="item"):
        Objective(tanh_mlp(0), F.mse_loss, loader())
    values = [augmented_objective(loader(), draws=2).value() for _ in range(2)]
    assert values[0] == values[1]
    with pytest.raises(InputError, match="persistent_workers=False"):
        augmented_objective(loader(persistent_workers=True))

"""Settling: the strengths that training applied, from a copy, and nothing of the user's changed."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from support.models import random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit.regularizers import optimizer_penalties
from tacit_paper.elastic_net.config import Config
from tacit_paper.elastic_net.training import Member, Sweep, draw_data_set

DATA = random_data(0, count=64)
DECAY = 0.1
"""A weight decay of 0.1 is a ridge of strength 0.05."""


def train_epoch(model, optimizer, data=DATA, size=8):
    model.train()
    inputs, targets = data
    for rows in torch.randperm(len(inputs)).split(size):
        optimizer.zero_grad()
        F.mse_loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()


def trained(make_optimizer=torch.optim.SGD, model=None, epochs=60, **options):
    torch.manual_seed(0)
    model = tanh_mlp(0) if model is None else model
    options = {"lr": 0.05, "weight_decay": DECAY} | options
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(params, **options)
    for _ in range(epochs):
        train_epoch(model, optimizer)
    return model, optimizer


def objective_of(model, **options):
    return tacit.Objective(model, F.mse_loss, DATA, **options)


def state_of(model, optimizer):
    """Everything that must not change, bit by bit."""
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    for state in optimizer.state.values():
        tensors += [torch.as_tensor(value) for value in state.values()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    modes = [module.training for module in model.modules()]
    numbers = [None if t is None else t.detach().clone().numpy().tobytes() for t in tensors]
    randomness = (
        torch.get_rng_state().numpy().tobytes(),
        repr(np.random.get_state()),  # noqa: NPY002 # the global state
        random.getstate(),
    )
    return numbers, repr(groups), modes, randomness


MAKERS = {
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "lr": 0.01}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "lr": 0.01, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
}


@pytest.mark.parametrize(("make", "options"), MAKERS.values(), ids=MAKERS.keys())
def test_strengths_come_back_and_nothing_changes(make, options):
    model, optimizer = trained(make, **options)
    objective, penalties = objective_of(model), optimizer_penalties(optimizer, model)
    (penalty,) = penalties
    before = state_of(model, optimizer)

    def noisy_epoch(model, optimizer):
        random.random()
        np.random.rand()  # noqa: NPY002 # the global state
        train_epoch(model, optimizer)

    fit = tacit.settle(objective, penalty, optimizer, noisy_epoch)
    assert state_of(model, optimizer) == before
    at_last = tacit.estimate(objective, [penalty])
    error, last = (abs(f.strengths[penalty.name] / (DECAY / 2) - 1) for f in (fit, at_last))
    assert error < 0.02
    assert error < last / 2
    assert fit.explained > 0.99
    assert len(fit.sources) == 5
    assert all(source.epoch for source in fit.sources)
    assert "training" in fit.standard_errors


def test_settling_twice_gives_the_same_bits():
    model, optimizer = trained()
    fits = [tacit.settle(objective_of(model), tacit.l2(), optimizer, train_epoch) for _ in "ab"]
    assert fits[0].strengths == fits[1].strengths


def test_it_is_what_average_epochs_gives_of_a_slower_copy():
    model, optimizer = trained()
    fit = tacit.settle(objective_of(model), tacit.l2(), optimizer, train_epoch, epochs=2)
    twin = copy.deepcopy(model)
    slow, fits = torch.optim.SGD(twin.parameters(), lr=0.01, weight_decay=DECAY), []
    for rate, epochs in ((0.01, 3), (0.005, 2)):  # the first of three is burn-in
        slow.param_groups[0]["lr"] = rate
        averages = tacit.average_epochs(twin, slow, epochs=2)
        for _ in range(epochs):
            train_epoch(twin, slow)
            averages.end_epoch()
        averages.close()
        fits.append(tacit.fit(averages.equations(objective_of(twin), tacit.l2())))
    (fast,), (expected,) = (fit.strengths.values() for fit in fits)
    assert fit.strengths["l2"] == pytest.approx(expected, rel=1e-9)
    variance = fits[1].standard_errors["training"]["l2"] ** 2 + (fast - expected) ** 2
    assert fit.standard_errors["training"]["l2"] == pytest.approx(math.sqrt(variance), rel=1e-6)
    assert fit.error_bars["training"].basis.endswith("common shift and their step size")


def seen_rates(optimizer, model, **options):
    rates = []

    def watch(model, optimizer):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        train_epoch(model, optimizer)

    tacit.settle(objective_of(model), tacit.l2(), optimizer, watch, epochs=1, **options)
    assert all(row == rates[0] for row in rates)
    return rates[0]


def test_rates_of_groups_keep_their_proportions():
    model, _ = trained(epochs=1)
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.04)
    assert seen_rates(optimizer, model) == pytest.approx([0.001, 0.004])
    assert seen_rates(optimizer, model, rate=0.02) == pytest.approx([0.005, 0.02])
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.04]
    in_tensor = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.04))
    assert seen_rates(in_tensor, model) == pytest.approx([0.004])
    assert float(in_tensor.param_groups[0]["lr"]) == pytest.approx(0.04)


def test_a_schedule_that_ended_at_zero_needs_a_rate():
    model, optimizer = trained(epochs=1)
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(tacit.InputError, match=r"all learning rates .* are zero.*pass rate="):
        seen_rates(optimizer, model)
    assert seen_rates(optimizer, model, rate=0.01) == [0.01]


def test_tied_and_frozen_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
            self.second.weight = self.first.weight
            self.out = nn.Linear(5, 1)
            self.second.bias.requires_grad_(False)

        def forward(self, x):
            return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))

    torch.manual_seed(1)
    inputs, targets = torch.randn(64, 5).double(), torch.randn(64, 1).double()
    model = Tied().double()
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=DECAY
    )

    def epoch(model, optimizer):
        assert model.second.weight is model.first.weight
        assert not model.second.bias.requires_grad
        train_epoch(model, optimizer, (inputs, targets))

    for _ in range(60):
        epoch(model, optimizer)
    before = state_of(model, optimizer)
    objective = tacit.Objective(model, F.mse_loss, (inputs, targets))
    fit = tacit.settle(objective, tacit.l2(), optimizer, epoch)
    assert state_of(model, optimizer) == before
    assert fit.strengths["l2"] == pytest.approx(DECAY / 2, rel=0.02)
    assert fit.sources[0].tied == 1
    assert fit.sources[0].frozen == 5


def test_batch_norm_of_batches():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    inputs, targets = random_data(2, count=512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=DECAY)

    def epoch(model, optimizer):
        train_epoch(model, optimizer, (inputs, targets), 32)

    for _ in range(100):
        epoch(model, optimizer)
    before = state_of(model, optimizer)
    objective = tacit.Objective(
        model, F.mse_loss, (inputs, targets), batch_size=32, batch_norm="batch", draws=8
    )
    fit = tacit.settle(objective, tacit.l2(), optimizer, epoch)
    assert state_of(model, optimizer) == before
    low, high = fit.intervals()["training"]["l2"]
    # Which examples share a batch is noise that an epoch does not cancel; error bars contain it.
    assert low < DECAY / 2 < high
    assert fit.strengths["l2"] == pytest.approx(DECAY / 2, rel=0.15)


def test_random_states_of_a_loader_are_unchanged():
    model, optimizer = trained()
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(TensorDataset(*DATA), batch_size=8, shuffle=True, generator=generator)

    def epoch(model, optimizer):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    before = generator.get_state()
    tacit.settle(objective_of(model), tacit.l2(), optimizer, epoch, epochs=1)
    assert torch.equal(generator.get_state(), before)


def test_hooks_of_gradients_act_on_the_copy():
    model, optimizer = trained()
    mask = torch.zeros_like(model[0].weight)
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    start = model[0].weight.detach().clone()
    shrunk = []

    def epoch(model, optimizer):
        train_epoch(model, optimizer)
        shrunk.append(model[0].weight.detach().clone())

    tacit.settle(objective_of(model), tacit.l2(), optimizer, epoch, epochs=1)
    factor = (1 - 0.005 * DECAY) ** 8  # only weight decay moves it
    torch.testing.assert_close(shrunk[0], factor * start)


class Wrapper:
    """A wrapper that holds its optimizer, as Accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_the_optimizer_inside_a_wrapper_is_copied():
    model, optimizer = trained()
    fits = [
        tacit.settle(objective_of(model), tacit.l2(), given, train_epoch, epochs=1)
        for given in (optimizer, Wrapper(optimizer))
    ]
    assert fits[0].strengths == fits[1].strengths


def test_known_penalties_are_left_to_the_others():
    model, optimizer = trained()
    known = {tacit.l2(): DECAY / 2}
    fit = tacit.settle(
        objective_of(model), tacit.l2(name="more"), optimizer, train_epoch, known=known
    )
    assert abs(fit.strengths["more"]) < 0.02 * DECAY / 2


def test_training_may_be_unfinished():
    model, optimizer = trained(epochs=2)
    fit = tacit.settle(objective_of(model), tacit.l2(), optimizer, train_epoch)
    assert fit.strengths["l2"] == pytest.approx(DECAY / 2, rel=0.02)


def test_what_is_not_penalised_is_not_called_explained():
    model, optimizer = trained(weight_decay=0.0, epochs=3)
    fit = tacit.settle(objective_of(model), tacit.l2(), optimizer, train_epoch)
    assert any(problem.kind in ("unexplained", "no signal") for problem in fit.problems)


def test_training_the_original_is_refused_and_undone():
    model, optimizer = trained()
    objective, before = objective_of(model), state_of(model, optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = state_of(model, optimizer)

    def with_schedule(model, optimizer):
        train_epoch(model, optimizer)
        schedule.step()

    wrong = {
        "changed your own": lambda *_: train_epoch(model, optimizer),
        "as a schedule does": with_schedule,
        "made no update of the copy": lambda *_: None,
        "made no update of": lambda _, optimizer: train_epoch(model, optimizer),
    }
    for message, epoch in wrong.items():
        with pytest.raises(tacit.InputError, match=message):
            tacit.settle(objective, tacit.l2(), optimizer, epoch)
        assert state_of(model, optimizer) == before


def test_an_epoch_that_sets_its_own_rate_is_refused():
    """The rate would not be the one that error bars are for: they compare two."""
    model, optimizer = trained()

    def with_rate(model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.05
        train_epoch(model, optimizer)

    with pytest.raises(tacit.InputError, match=r"from \[0\.01.*\] to \[0\.05\].*pass rate="):
        tacit.settle(objective_of(model), tacit.l2(), optimizer, with_rate)


def test_nothing_changes_where_an_epoch_fails():
    model, optimizer = trained(torch.optim.AdamW, lr=0.01)
    before = state_of(model, optimizer)

    def failing(model, optimizer):
        train_epoch(model, optimizer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tacit.settle(objective_of(model), tacit.l2(), optimizer, failing)
    assert state_of(model, optimizer) == before


def test_wrong_calls_are_refused():
    model, optimizer = trained(epochs=1)
    objective, ridge = objective_of(model), tacit.l2()
    calls = {
        r"objective is a Sequential": (model, ridge, optimizer, train_epoch),
        r"train_epoch is None: pass a function": (objective, ridge, optimizer, None),
        r"optimizer is None: pass an optimizer": (objective, ridge, None, train_epoch),
        r"RMSprop has a step of its own": (
            objective, ridge, torch.optim.RMSprop(model.parameters()), train_epoch,
        ),
        r"the optimizer does not train": (
            objective, ridge, torch.optim.SGD(tanh_mlp(3).parameters(), 0.1), train_epoch,
        ),
    }  # fmt: skip
    for message, arguments in calls.items():
        with pytest.raises(tacit.InputError, match=message):
            tacit.settle(*arguments)
    for options, message in (({"epochs": 0}, "epochs is 0"), ({"rate": -1.0}, "rate is -1.0")):
        with pytest.raises(tacit.InputError, match=message):
            tacit.settle(objective, ridge, optimizer, train_epoch, **options)
    model.weight_of_last_call = model[0].weight * 2  # a part of a graph cannot be copied
    with pytest.raises(tacit.InputError, match="cannot be copied"):
        tacit.settle(objective, ridge, optimizer, train_epoch)


@pytest.mark.slow
def test_elastic_nets_are_recovered_within_two_percent():
    """Networks of the figure, in cells where the last weights are far from the strengths."""
    config = Config()
    cells = [(0.01, 1.0), (0.1, 0.1), (1.0, 0.1)]
    members = [Member(*cell, seed) for cell in cells for seed in (21, 22)]
    sweep = Sweep(config, members, "cpu")
    run = sweep.train()
    last_errors, errors = [], []
    for index, (member, last) in enumerate(zip(members, sweep.fits(run)[0], strict=True)):
        model = run.last.module(index).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=config.rate)
        data = draw_data_set(config, member.seed)
        epoch = penalised_epoch(member, data, config)
        torch.manual_seed(member.seed)
        objective = tacit.Objective(model, F.mse_loss, data)
        fit = tacit.settle(objective, sweep.regularizers, optimizer, epoch)
        assert not fit.problems
        last_errors.append(relative_errors(last, member))
        errors.append(relative_errors(fit, member))
    assert max(map(max, errors)) < 0.02
    assert min(map(max, last_errors)) > 0.02
    assert max(map(max, last_errors)) > 0.17


def relative_errors(fit, member):
    truth = (member.l1, member.l2)
    return [abs(s / t - 1) for s, t in zip(fit.strengths.values(), truth, strict=True)]


def penalised_epoch(member, data, config):
    inputs, targets = data

    def epoch(model, optimizer):
        for rows in torch.randperm(len(inputs)).split(config.batch_size):
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs[rows]), targets[rows])
            for p in model.parameters():
                smooth = F.smooth_l1_loss(p, torch.zeros_like(p), beta=config.beta, reduction="sum")
                loss = loss + member.l1 * smooth + member.l2 * p.square().sum()
            loss.backward()
            optimizer.step()

    return epoch

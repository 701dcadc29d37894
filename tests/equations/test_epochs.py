"""Epochs of a user's own loop: against a plain average, and against what ensembles write."""

import pytest
import torch
from support.models import random_data
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import ensembles
from tacit.ensembles import Plan
from tacit.ensembles.randomness import order_generator
from tacit.equations.epochs import average_epochs

BETA = 0.05


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(48, 4, generator=generator).double()
    return X, X.sin().sum(1, keepdim=True)


def loop(model, optimizer, X, y, orders, penalty=lambda: 0.0, end=lambda: None):
    """A plain training loop; `end` is called after every epoch."""
    for order in orders:
        for rows in order.split(8):
            optimizer.zero_grad()
            (F.mse_loss(model(X[rows]), y[rows]) + penalty()).backward()
            optimizer.step()
        end()


def orders(epochs, seed=5):
    generator = order_generator(seed)
    return [torch.randperm(48, generator=generator) for _ in range(epochs)]


OPTIMIZERS = {
    "sgd": (
        lambda: ensembles.SGD(0.05, momentum=0.5),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5),
    ),
    "adam": (lambda: ensembles.Adam(0.01), lambda params: torch.optim.Adam(params, lr=0.01)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_epochs_are_those_of_an_ensemble(optimizer):
    theirs, mine = OPTIMIZERS[optimizer]
    X, y = data()
    lasso, ridge = tacit.smooth_l1(BETA), tacit.l2()
    ensemble = ensembles.initialise(network, [3])
    plan = Plan(theirs(), 4, 8, averaged=[lasso], recorded_epochs=2)
    penalties = {lasso: 0.01, ridge: 0.02}
    run = ensembles.train(ensemble, F.mse_loss, (X, y), plan, seeds=[5], penalties=penalties)
    (expected,) = ensembles.epoch_equations(run, F.mse_loss, (X, y), [lasso, ridge])

    model = ensemble.module(0)
    optimizer = mine(model.parameters())
    watch = average_epochs(model, optimizer, averaged=[lasso], epochs=2)
    added = tacit.validation.penalty([lasso, ridge], {"smooth_l1": 0.01, "l2": 0.02})

    def penalty():
        return added(dict(model.named_parameters()))

    loop(model, optimizer, X, y, orders(4), penalty, watch.end_epoch)
    assert len(watch) == 2
    found = watch.equations(tacit.Objective(model, F.mse_loss, (X, y)), [lasso, ridge])
    assert torch.allclose(
        found.factor().T @ found.factor(), expected.factor().T @ expected.factor(), rtol=1e-8
    )
    one, other = tacit.fit(found), tacit.fit(expected)
    assert one.strengths == pytest.approx(other.strengths, rel=1e-8)
    errors = other.standard_errors["training"]
    assert one.standard_errors["training"] == pytest.approx(errors, rel=1e-6)
    assert found.sources[0].unsettled == pytest.approx(expected.sources[0].unsettled, rel=1e-6)


def test_means_and_drift_are_those_of_the_points_stepped_from():
    X, y = data()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    points = [{n: p.detach().clone() for n, p in model.named_parameters()}]
    watch = average_epochs(model, optimizer)
    optimizer.register_step_post_hook(
        lambda *_: points.append({n: p.detach().clone() for n, p in model.named_parameters()})
    )
    loop(model, optimizer, X, y, orders(1), end=watch.end_epoch)
    mean = {n: torch.stack([p[n] for p in points[:-1]]).mean(0) for n in points[0]}
    moved = {n: points[-1][n] - points[0][n] for n in points[0]}
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    path = tacit.Trajectory([mean], [moved], [0.1 * 6])
    expected = tacit.fit(tacit.trajectory_equations(objective, path, [tacit.l2()]))
    found = tacit.fit(watch.equations(objective, [tacit.l2()]))
    assert found.strengths == pytest.approx(expected.strengths, rel=1e-9)
    assert "training" not in found.standard_errors  # one epoch has nothing to disagree with


def test_what_it_refuses():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(tacit.InputError, match="before any update"):
        average_epochs(model, sgd).end_epoch()
    with pytest.raises(tacit.InputError, match="no epoch was closed"):
        average_epochs(model, sgd).equations(
            tacit.Objective(model, F.mse_loss, data()), [tacit.l2()]
        )
    with pytest.raises(tacit.InputError, match="AdamW"):
        average_epochs(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(tacit.InputError, match="AdamW"):
        average_epochs(model, torch.optim.Adam(model.parameters(), amsgrad=True))
    with pytest.raises(tacit.InputError, match=r"does not train '0\.weight'"):
        average_epochs(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    with pytest.raises(tacit.InputError, match="epochs is 0"):
        average_epochs(model, sgd, epochs=0)
    with pytest.raises(tacit.InputError, match=r"pass a torch\.nn\.Module"):
        average_epochs(sgd, sgd)  # pyright: ignore[reportArgumentType]
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters()}]
    with pytest.raises(tacit.InputError, match="different step sizes"):
        average_epochs(model, torch.optim.Adam(groups, lr=1e-2))


def test_a_twin_of_an_averaged_regularizer_is_refused_and_hooks_can_be_removed():
    X, y = data()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = average_epochs(model, optimizer, averaged=[tacit.smooth_l1(BETA)])
    loop(model, optimizer, X, y, orders(1), end=watch.end_epoch)
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    with pytest.raises(tacit.InputError, match="another object of that name"):
        watch.equations(objective, [tacit.smooth_l1(BETA)])
    watch.close()
    loop(model, optimizer, X, y, orders(1))
    with pytest.raises(tacit.InputError, match="before any update"):
        watch.end_epoch()


def step_of(model, optimizer, X, y):
    """One step of the optimizer on the whole data."""
    optimizer.zero_grad()
    F.mse_loss(model(X), y).backward()
    optimizer.step()


@pytest.mark.parametrize("rates", [[0.1] * 20, [0.1 * (1 - t / 20) for t in range(20)]])
def test_points_of_an_epoch_are_weighted_by_their_step_sizes(rates):
    """With the full batch, a quadratic loss and ridge the summed steps are an exact equation."""
    X, y = random_data(2)
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.2)
    averages = average_epochs(model, optimizer)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        step_of(model, optimizer, X, y)
    averages.end_epoch()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    fit = tacit.fit(averages.equations(objective, tacit.l2()))
    assert fit.strengths["l2"] == pytest.approx(0.1, rel=1e-9)


def test_steps_that_a_fused_optimizer_skips_take_no_time():
    """As with GradScaler: step() is called while `found_inf` is set, and nothing moves."""
    X, y = random_data(9)
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.2, fused=True)
    averages = average_epochs(model, optimizer)
    for step in range(10):
        optimizer.found_inf = torch.tensor(float(step % 2))
        step_of(model, optimizer, X, y)
    averages.end_epoch()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    fit = tacit.fit(averages.equations(objective, tacit.l2()))
    assert fit.strengths["l2"] == pytest.approx(0.1, rel=1e-9)


def test_parameters_may_be_unused_and_may_be_frozen_between_epochs_but_not_within_one():
    X, y = random_data(3)
    model = nn.ModuleDict({"used": nn.Linear(5, 1).double(), "unused": nn.Linear(2, 2).double()})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    averages = average_epochs(model, optimizer)
    step_of(model["used"], optimizer, X, y)
    averages.end_epoch()
    assert len(averages) == 1
    model["used"].bias.requires_grad_(False)
    step_of(model["used"], optimizer, X, y)
    averages.end_epoch()
    assert len(averages) == 1  # earlier epochs have other equations and are dropped
    step_of(model["used"], optimizer, X, y)
    model["used"].bias.requires_grad_(True)
    with pytest.raises(tacit.InputError, match="within an epoch"):
        step_of(model["used"], optimizer, X, y)


def test_an_epoch_of_step_size_zero_is_refused():
    X, y = random_data(3)
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    averages = average_epochs(model, optimizer)
    step_of(model, optimizer, X, y)
    with pytest.raises(tacit.InputError, match="step size of zero"):
        averages.end_epoch()

"""Epochs of a training loop: against plain averages, and against the equations of ensembles."""

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


def make_network():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def sine_data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(48, 4, generator=generator).double()
    return X, X.sin().sum(1, keepdim=True)


def train_epochs(model, optimizer, X, y, orders, penalty=lambda: 0.0, end_epoch=lambda: None):
    """A plain training loop; `end_epoch` is called after every epoch."""
    for order in orders:
        for rows in order.split(8):
            optimizer.zero_grad()
            (F.mse_loss(model(X[rows]), y[rows]) + penalty()).backward()
            optimizer.step()
        end_epoch()


def epoch_orders(epochs, seed=5):
    generator = order_generator(seed)
    return [torch.randperm(48, generator=generator) for _ in range(epochs)]


OPTIMIZERS = {
    "sgd": (
        lambda: ensembles.SGD(0.05, momentum=0.5),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5),
    ),
    "adam": (lambda: ensembles.Adam(0.01), lambda params: torch.optim.Adam(params, lr=0.01)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_averaged_epochs_equal_those_of_an_ensemble(name):
    ensemble_optimizer, torch_optimizer = OPTIMIZERS[name]
    X, y = sine_data()
    lasso, ridge = tacit.smooth_l1(BETA), tacit.l2()
    ensemble = ensembles.initialise(make_network, [3])
    plan = Plan(ensemble_optimizer(), 4, 8, averaged=[lasso], recorded_epochs=2)
    penalties = {lasso: 0.01, ridge: 0.02}
    run = ensembles.train(ensemble, F.mse_loss, (X, y), plan, seeds=[5], penalties=penalties)
    (expected,) = ensembles.epoch_equations(run, F.mse_loss, (X, y), [lasso, ridge])

    model = ensemble.module(0)
    optimizer = torch_optimizer(model.parameters())
    averages = average_epochs(model, optimizer, averaged=[lasso], epochs=2)
    added = tacit.validation.penalty([lasso, ridge], {"smooth_l1": 0.01, "l2": 0.02})

    def penalty():
        return added(dict(model.named_parameters()))

    train_epochs(model, optimizer, X, y, epoch_orders(4), penalty, averages.end_epoch)
    assert len(averages) == 2
    equations = averages.equations(tacit.Objective(model, F.mse_loss, (X, y)), [lasso, ridge])
    gram, expected_gram = (e.factor().T @ e.factor() for e in (equations, expected))
    assert torch.allclose(gram, expected_gram, rtol=1e-8)
    fit, expected_fit = tacit.fit(equations), tacit.fit(expected)
    assert fit.strengths == pytest.approx(expected_fit.strengths, rel=1e-8)
    errors = expected_fit.standard_errors["training"]
    assert fit.standard_errors["training"] == pytest.approx(errors, rel=1e-6)
    assert equations.sources[0].unsettled == pytest.approx(expected.sources[0].unsettled, rel=1e-6)


def test_an_epoch_is_the_mean_of_its_points_and_their_whole_displacement():
    X, y = sine_data()
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    points = [{n: p.detach().clone() for n, p in model.named_parameters()}]
    averages = average_epochs(model, optimizer)
    optimizer.register_step_post_hook(
        lambda *_: points.append({n: p.detach().clone() for n, p in model.named_parameters()})
    )
    train_epochs(model, optimizer, X, y, epoch_orders(1), end_epoch=averages.end_epoch)
    mean = {n: torch.stack([p[n] for p in points[:-1]]).mean(0) for n in points[0]}
    displacement = {n: points[-1][n] - points[0][n] for n in points[0]}
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    trajectory = tacit.Trajectory([mean], [displacement], [0.1 * 6])
    expected = tacit.fit(tacit.trajectory_equations(objective, trajectory, [tacit.l2()]))
    fit = tacit.fit(averages.equations(objective, [tacit.l2()]))
    assert fit.strengths == pytest.approx(expected.strengths, rel=1e-9)
    assert "training" not in fit.standard_errors  # one epoch shows no disagreement


def take_step(model, optimizer, X, y):
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
        take_step(model, optimizer, X, y)
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
        take_step(model, optimizer, X, y)
    averages.end_epoch()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    fit = tacit.fit(averages.equations(objective, tacit.l2()))
    assert fit.strengths["l2"] == pytest.approx(0.1, rel=1e-9)


def test_parameters_may_be_unused_and_may_be_frozen_between_epochs_but_not_within_one():
    X, y = random_data(3)
    model = nn.ModuleDict({"used": nn.Linear(5, 1).double(), "unused": nn.Linear(2, 2).double()})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    averages = average_epochs(model, optimizer)
    take_step(model["used"], optimizer, X, y)
    averages.end_epoch()
    assert len(averages) == 1
    model["used"].bias.requires_grad_(False)
    take_step(model["used"], optimizer, X, y)
    averages.end_epoch()
    assert len(averages) == 1  # earlier epochs have other equations and are dropped
    take_step(model["used"], optimizer, X, y)
    model["used"].bias.requires_grad_(True)
    with pytest.raises(tacit.InputError, match="within an epoch"):
        take_step(model["used"], optimizer, X, y)


def test_an_epoch_of_step_size_zero_is_refused():
    X, y = random_data(3)
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    averages = average_epochs(model, optimizer)
    take_step(model, optimizer, X, y)
    with pytest.raises(tacit.InputError, match="step size of zero"):
        averages.end_epoch()


def test_wrong_models_optimizers_and_options_are_refused():
    model = make_network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters()}]
    for arguments, options, words in (
        ((sgd, sgd), {}, r"pass a torch\.nn\.Module"),
        ((model, torch.optim.AdamW(model.parameters())), {}, "AdamW"),
        ((model, torch.optim.Adam(model.parameters(), amsgrad=True)), {}, "amsgrad"),
        (
            (model, torch.optim.SGD(model[2].parameters(), lr=0.1)),
            {},
            r"does not train '0\.weight'.*requires_grad=False",
        ),
        ((model, torch.optim.Adam(groups, lr=1e-2)), {}, "different step sizes.*same lr"),
        ((model, sgd), {"epochs": 0}, "epochs is 0.*at least 1"),
        ((model, sgd), {"averaged": ["l2"]}, "list of regularizers"),
    ):
        with pytest.raises(tacit.InputError, match=words):
            average_epochs(*arguments, **options)


def test_epochs_without_updates_and_equations_without_epochs_are_refused():
    model = make_network()
    averages = average_epochs(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(tacit.InputError, match="before any update"):
        averages.end_epoch()
    objective = tacit.Objective(model, F.mse_loss, sine_data())
    with pytest.raises(tacit.InputError, match=r"no epoch was closed.*end_epoch\(\)"):
        averages.equations(objective, [tacit.l2()])


def test_another_object_with_the_name_of_an_averaged_regularizer_is_refused():
    X, y = sine_data()
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averages = average_epochs(model, optimizer, averaged=[tacit.smooth_l1(BETA)])
    train_epochs(model, optimizer, X, y, epoch_orders(1), end_epoch=averages.end_epoch)
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    with pytest.raises(tacit.InputError, match="another object of that name"):
        averages.equations(objective, [tacit.smooth_l1(BETA)])


def test_closing_removes_the_hook_from_the_optimizer():
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averages = average_epochs(model, optimizer)
    averages.close()
    train_epochs(model, optimizer, *sine_data(), epoch_orders(1))
    with pytest.raises(tacit.InputError, match="before any update"):
        averages.end_epoch()

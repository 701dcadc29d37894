"""Known penalties are recovered at endpoints; targets write the equations of the short forms."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from scipy.optimize import minimize
from support.descent import descend
from support.models import (
    elastic_net,
    image_data,
    load,
    minimise,
    params_of,
    random_data,
    small_cnn,
    tanh_mlp,
)
from support.objectives import CountedBatches, dropout_mlp, split_batches
from support.systems import assert_same_equations
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective


def linear_model(theta):
    model = nn.Linear(len(theta), 1, bias=False).double()
    load(model, {"weight": theta[None]})
    return model


def ridge_optimum(X, y, strength):
    """Closed form for mean squared error + λ‖θ‖²."""
    n, p = X.shape
    return torch.linalg.solve(X.T @ X / n + strength * torch.eye(p).double(), X.T @ y[:, 0] / n)


def elastic_net_optimum(X, y, ridge, lasso):
    """Exact minimiser of mean squared error + λ₂‖θ‖² + λ₁‖θ‖₁: solved on its active set.

    The active set and signs come from a smooth solve in split variables θ = a − b, a, b ≥ 0; the
    optimality conditions of the result are asserted, zeros included.
    """
    n, p = X.shape
    gram, cross = (X.T @ X / n), (X.T @ y[:, 0] / n)

    def value_and_gradient(parts):
        a, b = torch.from_numpy(parts).chunk(2)
        theta = a - b
        value = theta @ gram @ theta - 2 * cross @ theta + ridge * theta @ theta
        gradient = 2 * (gram @ theta - cross + ridge * theta)
        gradients = torch.cat([gradient + lasso, lasso - gradient])
        return float(value + lasso * (a + b).sum()), gradients.numpy()

    start = torch.full((2 * p,), 0.1, dtype=torch.float64).numpy()
    minimum = minimize(
        value_and_gradient, start, jac=True, method="L-BFGS-B", bounds=[(0, None)] * (2 * p),
        options={"maxiter": 10_000, "ftol": 1e-16, "gtol": 1e-12},
    )  # fmt: skip
    a, b = torch.from_numpy(minimum.x).chunk(2)
    approximate = a - b
    active = approximate.abs() > 1e-6
    signs, k = approximate[active].sign(), int(active.sum())
    theta = torch.zeros(p, dtype=torch.float64)
    matrix = gram[active][:, active] + ridge * torch.eye(k).double()
    theta[active] = torch.linalg.solve(matrix, cross[active] - lasso / 2 * signs)
    gradient = 2 * (gram @ theta - cross + ridge * theta)
    assert torch.equal(theta[active].sign(), signs)
    assert bool((gradient[~active].abs() < lasso).all())
    return theta


def sparse_data(seed, inputs=12):
    X, y = random_data(seed, count=80, inputs=inputs)
    relevant = (torch.arange(inputs) % 3 == 0).double()
    return X, (X * relevant) @ torch.ones(inputs, 1).double() + 0.3 * y / y.std()


@pytest.mark.parametrize("strength", [1e-4, 1e-2, 3.0])
def test_ridge_is_recovered_from_its_closed_form(strength):
    X, y = random_data(0)
    fit = tacit.estimate(
        linear_model(ridge_optimum(X, y, strength)), F.mse_loss, (X, y), [tacit.l2()]
    )
    assert fit.strengths["l2"] == pytest.approx(strength, rel=1e-10)
    assert fit.explained == pytest.approx(1, abs=1e-10)
    assert not fit.problems


def test_lasso_is_recovered_and_its_exact_zeros_are_counted():
    X, y = sparse_data(1)
    theta = elastic_net_optimum(X, y, 0.0, 0.3)
    zeros = int((theta == 0).sum())
    assert 0 < zeros < len(theta)
    fit = tacit.estimate(linear_model(theta), F.mse_loss, (X, y), [tacit.l1()])
    assert fit.strengths["l1"] == pytest.approx(0.3, rel=1e-10)
    assert fit.rows == len(theta) - zeros
    assert not fit.problems
    assert f"{zeros} of {len(theta)} rows lie at a kink" in fit.findings[0]


@pytest.mark.parametrize(("ridge", "lasso"), [(0.1, 0.3), (0.5, 0.05), (1e-3, 0.2)])
def test_elastic_net_is_recovered_in_a_linear_model(ridge, lasso):
    X, y = sparse_data(2)
    model = linear_model(elastic_net_optimum(X, y, ridge, lasso))
    fit = tacit.estimate(model, F.mse_loss, (X, y), [tacit.l2(), tacit.l1()])
    assert fit.strengths["l2"] == pytest.approx(ridge, rel=1e-10)
    assert fit.strengths["l1"] == pytest.approx(lasso, rel=1e-10)


def test_zeros_outside_the_scope_of_l1_stay_in_the_equations():
    X, y = random_data(3, inputs=4)
    model = linear_model(torch.tensor([0.0, 1.0, 2.0, 3.0]).double())
    model.register_parameter("extra", nn.Parameter(torch.zeros(2).double()))
    objective = tacit.Objective.from_batch_loss(
        model, lambda model, batch: (model(batch[0]) - batch[1])[:, 0] ** 2 * model.extra[0].exp(),
        (X, y),
    )  # fmt: skip
    lasso = tacit.l1(scope="weight")
    assert tacit.endpoint_equations(objective, [lasso]).rows == 3 + 2
    assert tacit.endpoint_equations(objective, [tacit.l1()]).rows == 3
    # Known penalties have kinks too.
    assert tacit.endpoint_equations(objective, [tacit.l2()], known={lasso: 0.1}).rows == 3 + 2


NETWORKS = {
    "mlp": (tanh_mlp, F.mse_loss, random_data),
    "cnn": (small_cnn, F.cross_entropy, image_data),
}


@pytest.fixture(scope="module", params=NETWORKS)
def trained(request):
    make_model, loss, make_data = NETWORKS[request.param]
    model, data = make_model(4), make_data(5)
    minimise(model, loss, data, elastic_net((2e-2, 1e-2)))
    return model, loss, data


@pytest.fixture(scope="module", params=NETWORKS)
def trained_by_layer(request):
    make_model, loss, make_data = NETWORKS[request.param]
    model, data = make_model(6), make_data(7)
    ridge, lasso = tacit.layerwise(tacit.l2()), tacit.layerwise(tacit.smooth_l1(1e-3))
    count = len(ridge.value(dict(model.named_parameters())))
    strengths = torch.logspace(-2, -1.5, 2 * count, dtype=torch.float64)
    minimise(model, loss, data, {ridge: strengths[:count], lasso: strengths[count:]})
    return model, loss, data, [ridge, lasso], strengths


def test_both_strengths_of_an_elastic_net_are_recovered(trained):
    objective = tacit.Objective(*trained, batch_norm="running")
    fit = tacit.estimate(objective, list(elastic_net()))
    assert fit.strengths == pytest.approx({"l2": 2e-2, "smooth_l1": 1e-2}, rel=1e-6)
    assert fit.explained == pytest.approx(1, abs=1e-10)
    assert not fit.problems


def test_the_strengths_of_every_layer_are_recovered(trained_by_layer):
    *trained_model, regularizers, strengths = trained_by_layer
    objective = tacit.Objective(*trained_model, batch_norm="running")
    fit = tacit.estimate(objective, regularizers)
    assert list(fit.strengths.values()) == pytest.approx(strengths.tolist(), rel=1e-6)
    assert not fit.problems


def test_float32_weights_and_data_give_three_digits(trained):
    model, loss, (X, y) = trained
    narrow = copy.deepcopy(model).float()
    data = (X.float(), y.float() if y.is_floating_point() else y)
    objective = tacit.Objective(narrow, loss, data, batch_norm="running")
    fit = tacit.estimate(objective, list(elastic_net()))
    assert fit.strengths == pytest.approx({"l2": 2e-2, "smooth_l1": 1e-2}, rel=1e-3)
    assert not fit.problems


def test_a_known_strength_is_subtracted_and_the_rest_is_estimated(trained):
    objective = tacit.Objective(*trained, batch_norm="running")
    fit = tacit.estimate(objective, list(elastic_net()), known={tacit.l2(): 5e-3})
    assert fit.strengths == pytest.approx({"l2": 1.5e-2, "smooth_l1": 1e-2}, rel=1e-6)
    assert "l2 = 0.005" in fit.summary()
    assert not fit.problems


def test_layers_of_a_shared_elastic_net_agree(trained):
    fit = tacit.estimate(tacit.Objective(*trained, batch_norm="running"), list(elastic_net()))
    for label, part in fit.layers.items():
        assert part.explained == pytest.approx(1, abs=1e-8), label
        assert part.strengths["l2"] == pytest.approx(2e-2, rel=1e-5), label


def test_rows_restrict_the_equations_and_scopes_only_the_columns(trained):
    model, loss, data = trained
    objective = tacit.Objective(model, loss, data, batch_norm="running")
    equations = tacit.endpoint_equations(objective, list(elastic_net()), rows="*.weight")
    assert tacit.fit(equations).strengths == pytest.approx(
        {"l2": 2e-2, "smooth_l1": 1e-2}, rel=1e-6
    )
    regularizers = [tacit.l2(scope="*.weight"), tacit.smooth_l1(1e-3, scope="*.weight")]
    fit = tacit.fit(tacit.endpoint_equations(objective, regularizers))
    # The rows of the biases stay in the target, and no column explains them.
    assert fit.rows > equations.rows
    assert fit.explained < 1 - 1e-6


def test_params_of_another_point_are_used():
    model, data = tanh_mlp(0), random_data(0)
    objective = tacit.Objective(model, F.mse_loss, data)
    regularizers = [tacit.l2(), tacit.smooth_l1(0.05)]
    doubled = {n: 2 * p for n, p in params_of(model).items()}
    equations = tacit.endpoint_equations(objective, regularizers, params=doubled)
    load(model, doubled)
    current = tacit.endpoint_equations(tacit.Objective(model, F.mse_loss, data), regularizers)
    assert tacit.fit(equations) == tacit.fit(current)


def test_autocast_raises_the_level_of_rounding():
    model = tanh_mlp(6).float()
    data = tuple(part.float() for part in random_data(6))
    objective = tacit.Objective(model, F.mse_loss, data)
    plain = tacit.endpoint_equations(objective, [tacit.l2()]).floor
    with torch.autocast("cpu", torch.bfloat16):
        autocast = tacit.endpoint_equations(objective, [tacit.l2()]).floor
    assert autocast > 1000 * plain


class Case(NamedTuple):
    """A target and the short form of its equations, as functions, and the batches of the data."""

    target: Callable
    equations: Callable
    data: CountedBatches


def counted_objective(model, seed, **options):
    data = CountedBatches(split_batches(*random_data(seed, count=24)))
    return Objective(model, F.mse_loss, data, **options), data


def endpoint_case():
    objective, data = counted_objective(tanh_mlp(0), 0)
    return Case(
        lambda: tacit.endpoint_target(objective),
        lambda *args, **options: tacit.endpoint_equations(objective, *args, **options),
        data,
    )


def endpoint_case_at_a_point():
    model = tanh_mlp(1)
    objective, data = counted_objective(model, 1)
    point = {n: 2 * p for n, p in params_of(model).items()}
    return Case(
        lambda: tacit.endpoint_target(objective, params=point),
        lambda *args, **options: tacit.endpoint_equations(
            objective, *args, params=point, **options
        ),
        data,
    )


def difference_case():
    model = dropout_mlp(2)
    plain, data = counted_objective(model, 2)
    technique = Objective(model, F.mse_loss, data, training=True, draws=7)
    return Case(
        lambda: tacit.difference_target(technique, plain, groups=3),
        lambda *args, **options: tacit.difference_equations(
            technique, plain, *args, groups=3, **options
        ),
        data,
    )


def trajectory_case(**reference):
    model, (X, y) = tanh_mlp(3), random_data(3, count=24)
    objective, data = counted_objective(model, 3)
    path = tacit.Trajectory.from_positions(descend(model, (X, y), 0.1, 3), 0.1)
    return Case(
        lambda: tacit.trajectory_target(objective, path, **reference),
        lambda *args, **options: tacit.trajectory_equations(
            objective, path, *args, **reference, **options
        ),
        data,
    )


RIDGE, LASSO = tacit.l2(), tacit.smooth_l1(0.1)


def epochs_case():
    model = tanh_mlp(4)
    objective, data = counted_objective(model, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    averages = tacit.average_epochs(model, optimizer, averaged=[LASSO], epochs=2)
    for _ in range(2):
        for inputs, target in data.batches:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), target).backward()
            optimizer.step()
        averages.end_epoch()
    return Case(
        lambda: averages.target(objective),
        lambda *args, **options: averages.equations(objective, *args, **options),
        data,
    )


CASES = {
    "endpoint": endpoint_case,
    "endpoint at a point": endpoint_case_at_a_point,
    "difference": difference_case,
    "trajectory": trajectory_case,
    "trajectory beside the flow": lambda: trajectory_case(reference=tacit.rk4(2)),
    "epochs": epochs_case,
}


@pytest.mark.parametrize("name", CASES)
def test_the_equations_of_a_target_are_those_of_the_short_form(name):
    case = CASES[name]()
    target = case.target()
    assert_same_equations(target.equations(RIDGE), case.equations(RIDGE))
    assert_same_equations(target.equations([RIDGE, LASSO]), case.equations([RIDGE, LASSO]))
    weights = target.equations([RIDGE, LASSO], rows="*.weight")
    assert_same_equations(weights, case.equations([RIDGE, LASSO], rows="*.weight"))
    assert weights.rows < case.equations([RIDGE, LASSO]).rows
    if name != "difference":
        known = {RIDGE: 0.3}
        less = target.equations(LASSO, known=known, rows="0")
        assert_same_equations(less, case.equations(LASSO, known=known, rows="0"))
        assert all(source.known == {"l2": 0.3} for source in less.sources)


@pytest.mark.parametrize("name", CASES)
def test_equations_of_a_target_take_no_pass_over_the_data(name):
    case = CASES[name]()
    case.data.passes = 0
    target = case.target()
    assert case.data.passes > 0
    case.data.passes = 0
    for family in (RIDGE, LASSO, tacit.layerwise(tacit.l2()), tacit.regularizers.diagonal()):
        tacit.fit(target.equations(family))
    assert case.data.passes == 0


def test_known_penalties_of_a_difference_are_refused():
    target = difference_case().target()
    with pytest.raises(InputError, match="leave known= out"):
        target.equations(LASSO, known={RIDGE: 0.3})
    assert target.equations(LASSO, known={}).names == ("smooth_l1",)


def test_a_target_refuses_what_are_no_regularizers():
    target = endpoint_case().target()
    for wrong, words in (([], "at least one"), (tacit.l2, "at least one"), (["l2"], "tacit.l2()")):
        with pytest.raises(InputError, match=words):
            target.equations(wrong)


def test_a_target_at_copies_of_the_weights_does_not_change_when_the_model_is_trained_on():
    model, data = tanh_mlp(5), random_data(5)
    objective = Objective(model, F.mse_loss, data)
    target = tacit.endpoint_target(objective, params=params_of(model))
    before = target.equations(RIDGE)
    load(model, {n: 2 * p for n, p in params_of(model).items()})
    assert_same_equations(target.equations(RIDGE), before)


def step_of_sgd(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    X, y = random_data(6)
    F.mse_loss(model(X), y).backward()
    optimizer.step()


def change_in_place(model):
    with torch.no_grad():
        model[2].bias.add_(1e-6)


def load_another_state(model):
    model.load_state_dict(tanh_mlp(99).state_dict())


CHANGES = {
    "a step of SGD": step_of_sgd,
    "a change in place": change_in_place,
    "another state": load_another_state,
}
CALLS = {
    "score_examples": lambda fit: tacit.score_examples(fit),
    "null_distribution": lambda fit: tacit.null_distribution(fit, "l2", shuffles=9),
    "validate": lambda fit: tacit.validate(fit),
}
"""What needs the objective of a fit."""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_fit_at_live_weights_that_have_changed_is_refused(call, change):
    model = tanh_mlp(6)
    objective = Objective(model, F.mse_loss, random_data(6))
    fit = tacit.fit(tacit.endpoint_equations(objective, RIDGE))
    live = tacit.fit(
        tacit.endpoint_equations(objective, RIDGE, params=dict(model.named_parameters()))
    )
    change(model)
    for changed in (fit, live):
        with pytest.raises(InputError, match=r"write the equations again.*params="):
            call(changed)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_fit_at_copies_of_the_weights_is_scored_there_after_the_model_has_changed(change):
    model, (X, y) = tanh_mlp(7), random_data(7)
    point = params_of(model)
    objective = Objective(model, F.mse_loss, (X, y))
    regularizers = [RIDGE, tacit.regularizers.gradient_norm(objective)]
    fit = tacit.fit(tacit.endpoint_equations(objective, regularizers, params=point))
    scores = tacit.score_examples(fit)
    null = tacit.null_distribution(fit, "l2", shuffles=9)
    change(model)
    again = tacit.score_examples(fit)
    assert torch.equal(again.values, scores.values)
    assert again.covariance_trace == scores.covariance_trace
    assert tacit.null_distribution(fit, "l2", shuffles=9) == null


def test_a_target_at_live_weights_that_have_changed_writes_no_equations():
    model = tanh_mlp(31)
    target = tacit.endpoint_target(Objective(model, F.mse_loss, random_data(31)))
    target.equations(tacit.l2())
    step_of_sgd(model)
    with pytest.raises(InputError, match="write the equations again"):
        target.equations(tacit.l2())


def save_and_load(fit):
    path = Path("equations.safetensors")
    fit.equations.save(path)
    return tacit.fit(tacit.Equations.load(path))


WITHOUT_ORIGIN = {
    "a file": save_and_load,
    "pickled equations": lambda fit: tacit.fit(pickle.loads(pickle.dumps(fit.equations))),
    "copied equations": lambda fit: tacit.fit(copy.deepcopy(fit.equations)),
    "a pickled fit": lambda fit: pickle.loads(pickle.dumps(fit)),
    "a copied fit": lambda fit: copy.deepcopy(fit),
    "stacked equations": lambda fit: tacit.fit(tacit.stack([fit.equations, fit.equations])),
    "a layer": lambda fit: fit.layers["0"],
    "a step": lambda fit: tacit.fit(fit.equations.steps()[0]),
    "some columns": lambda fit: tacit.fit(fit.equations.select_columns([0])),
}


@pytest.mark.parametrize("make", WITHOUT_ORIGIN.values(), ids=WITHOUT_ORIGIN)
def test_a_fit_that_does_not_know_its_objective_is_refused(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    objective = Objective(tanh_mlp(8), F.mse_loss, random_data(8))
    fit = make(tacit.fit(tacit.endpoint_equations(objective, [RIDGE, LASSO])))
    assert fit.equations.origin is None
    for call in CALLS.values():
        with pytest.raises(InputError, match="Write the equations again"):
            call(fit)


def test_a_stack_of_one_and_a_nonnegative_fit_know_their_objective():
    objective = Objective(tanh_mlp(8), F.mse_loss, random_data(8))
    equations = tacit.endpoint_equations(objective, RIDGE)
    fit = tacit.fit(equations)
    expected = tacit.score_examples(fit).values
    stacked = tacit.fit(tacit.stack([equations]))
    assert torch.equal(tacit.score_examples(stacked).values, expected)
    unconstrained = tacit.fit(equations, nonnegative=True).unconstrained
    assert torch.equal(tacit.score_examples(unconstrained).values, expected)
    with_bars = fit.with_error_bars(tacit.score_examples(fit).error_bars())
    assert torch.equal(tacit.score_examples(with_bars).values, expected)

"""Retraining with the estimated penalty: recovery relative to a control, and its problems."""

import json
import math
from copy import deepcopy

import pytest
import torch
from support.models import elastic_net, load, minimise, params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.validation import validate
from tacit.validation.certificate import certify_least_squares
from tacit.validation.minimising import minimise as builtin_minimise
from tacit.validation.penalised import PenalisedObjective, penalty


def gradient_descent(X, y, *, steps, step_size=0.05):
    """θ += (η/n) Xᵀ(y − Xθ) from zero, for a number of steps."""
    theta = torch.zeros(X.shape[1], dtype=X.dtype)
    for _ in range(steps):
        theta = theta + step_size * X.T @ (y[:, 0] - X @ theta) / len(X)
    return theta


def linear_objective(theta, X, y):
    model = nn.Linear(len(theta), 1, bias=False).double()
    load(model, {"weight": theta[None]})
    return tacit.Objective(model, F.mse_loss, (X, y))


def early_stopped(seed, steps):
    X, y = random_data(seed, inputs=6, noise=1.0)
    objective = linear_objective(gradient_descent(X, y, steps=steps), X, y)
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.regularizers.diagonal()]))
    return X, y, objective, fit


def problem_kinds(validation):
    return {problem.kind for problem in validation.problems}


@pytest.mark.slow
def test_a_diagonal_from_one_early_stopped_endpoint_recovers_it_wherever_a_minimum_exists():
    verdicts = []
    for seed in range(12):
        X, y, objective, fit = early_stopped(seed, steps=3 + 4 * seed)
        validation = validate(fit, start={"weight": torch.zeros(1, 6)})
        theta = objective.params["weight"].flatten()
        exact = certify_least_squares(X, y, fit.matrix(), params=theta)
        verdicts.append(exact.verdict)
        assert validation.certificate is not None
        assert validation.certificate.verdict == exact.verdict
        if exact.verdict == "strongly convex":
            assert validation.penalised.relative_distance < 1e-12
            assert exact.distance < 1e-12
            assert validation.recovered > 1 - 1e-10
            assert validation.recovered_predictions > 1 - 1e-10
            assert not validation.problems
        else:
            assert "unbounded" in problem_kinds(validation)
            assert validation.recovered == -math.inf
    assert {"strongly convex", "unbounded"} == set(verdicts)


def test_the_control_is_the_optimum_without_regularization():
    X, y, objective, fit = early_stopped(1, steps=7)
    validation = validate(
        fit, objective, [tacit.regularizers.diagonal()], start={"weight": torch.zeros(1, 6)}
    )
    best = torch.linalg.lstsq(X, y).solution[:, 0]
    theta = objective.params["weight"].flatten()
    assert validation.control.distance == pytest.approx(float((best - theta).norm()), rel=1e-10)
    assert validation.control.cosine == pytest.approx(float(F.cosine_similarity(best, theta, 0)))
    error = (X @ (best - theta)).norm() / (X @ theta).norm()
    assert validation.control.prediction_error == pytest.approx(float(error), rel=1e-9)
    assert validation.control.agreement is None
    gap = (y[:, 0] - X @ best).square().mean() - (y[:, 0] - X @ theta).square().mean()
    assert validation.control.loss_difference == pytest.approx(float(gap), rel=1e-9)
    assert validation.control.final_gradient_norm < 1e-13


@pytest.fixture(scope="module")
def elastic_net_fit():
    """A tanh network trained with an elastic net, its initialisation and its fit."""
    # The teacher is a network: with a linear teacher the loss has its optimum at infinity.
    X, noise = random_data(21, count=200)
    teacher = tanh_mlp(22, sizes=(5, 4, 1))
    data = (X, 3 * teacher(X).detach() + 0.1 * noise.sin())
    model = tanh_mlp(21, sizes=(5, 3, 1))
    start = params_of(model)
    penalties = elastic_net()
    objective = tacit.Objective(model, F.mse_loss, data)
    function = PenalisedObjective(objective, penalty_of(penalties))
    theta, _ = builtin_minimise(function, function.flatten(start))
    load(model, function.unflatten(theta))
    fit = tacit.fit(tacit.endpoint_equations(objective, list(penalties)))
    return objective, list(penalties), fit, start


def penalty_of(penalties):
    return penalty(list(penalties), {r.name: s for r, s in penalties.items()})


@pytest.mark.slow
def test_an_elastic_net_is_recovered_from_the_same_initialisation(elastic_net_fit):
    _, _, fit, start = elastic_net_fit
    assert fit.strengths["l2"] == pytest.approx(2e-2, rel=1e-6)
    validation = validate(fit, start=start)
    assert validation.penalised.relative_distance < 1e-6
    assert validation.control.relative_distance > 0.1
    assert validation.recovered > 0.999
    assert validation.recovered_predictions > 0.999
    assert validation.certificate is not None
    assert validation.certificate.verdict == "locally unique"
    assert not validation.problems


@pytest.mark.slow
def test_a_wrong_penalty_does_not_recover(elastic_net_fit):
    objective, regularizers, fit, start = elastic_net_fit
    wrong = {name: 20 * strength for name, strength in fit.strengths.items()}
    validation = validate(wrong, objective, regularizers, start=start)
    assert validation.penalised.relative_distance > 0.1
    assert "not a minimum" in problem_kinds(validation)


@pytest.mark.slow
def test_starting_at_the_trained_weights_is_reported_as_local(elastic_net_fit):
    _, _, fit, _ = elastic_net_fit
    validation = validate(fit)
    assert problem_kinds(validation) == {"local"}
    assert validation.penalised.relative_distance < 1e-8


@pytest.mark.slow
def test_the_summary_and_the_plain_values_agree_with_the_result(elastic_net_fit):
    objective, regularizers, fit, start = elastic_net_fit
    validation = validate(fit, objective, regularizers, start=start)
    text = str(validation)
    for words in ("with the penalty", "control", "recovered", "locally unique", "l2 = 0.02"):
        assert words in text
    assert "No problems found." in text
    assert max(map(len, text.splitlines())) <= 88
    plain = json.loads(json.dumps(validation.to_dict(), allow_nan=False))
    assert plain["recovered"] == validation.recovered
    assert plain["penalised"]["distance"] == validation.penalised.distance
    assert plain["certificate"]["verdict"] == "locally unique"


def test_values_that_are_not_finite_are_printable_and_become_none_in_json():
    X, y = random_data(3)
    objective = linear_objective(torch.ones(5, dtype=torch.float64), X, y)
    validation = validate({"l2": -20.0}, objective, [tacit.l2()])
    assert {"unbounded"} <= problem_kinds(validation)
    assert validation.penalised.distance == math.inf
    assert "−∞" in validation.summary()
    assert json.loads(json.dumps(validation.to_dict(), allow_nan=False))["recovered"] is None


def classifier(seed):
    X, _ = random_data(seed, count=90, inputs=4)
    noise = torch.randn(90, 3, generator=torch.Generator().manual_seed(seed), dtype=X.dtype)
    y = (X[:, :3] + noise).argmax(1)
    torch.manual_seed(seed)
    model = nn.Linear(4, 3).double()
    minimise(model, F.cross_entropy, (X, y), {tacit.l2(): 0.1})
    return X, y, model


@pytest.mark.slow
def test_classes_are_compared_by_agreement_with_tensors_and_with_a_shuffling_loader():
    X, y, model = classifier(5)
    fit = tacit.estimate(model, F.cross_entropy, (X, y), [tacit.l2()])
    start = {n: torch.zeros_like(p) for n, p in params_of(model).items()}
    dataset = torch.utils.data.TensorDataset(X, y)
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
    for data in ((X, y), loader):
        objective = tacit.Objective(model, F.cross_entropy, data)
        validation = validate(fit, objective, [tacit.l2()], start=start)
        assert validation.penalised.agreement == 1
        assert validation.penalised.prediction_error < 1e-9
        assert validation.recovered > 1 - 1e-9
        control = nn.Linear(4, 3).double()
        load(control, params_of(model))
        minimise(control, F.cross_entropy, (X, y), {tacit.l2(): 0.0}, tolerance=math.inf)
        expected = (control(X).argmax(1) == model(X).argmax(1)).double().mean()
        assert validation.control.agreement == pytest.approx(float(expected))
        assert validation.control.agreement < 1


def separable_classifier():
    """Classes that the first input separates, and a classifier trained with 0.05 ‖θ‖² on them."""
    X, _ = random_data(31, count=60, inputs=2)
    y = (X[:, 0] > 0).long()
    X[:, 0] += 2 * y - 1
    torch.manual_seed(31)
    model = nn.Linear(2, 2).double()
    minimise(model, F.cross_entropy, (X, y), {tacit.l2(): 0.05})
    return tacit.Objective(model, F.cross_entropy, (X, y))


def train_to(penalised, control):
    """A training loop that ends at `penalised` for a penalty above zero, else at `control`."""

    def train(penalty):
        return penalised if float(penalty(penalised).detach()) > 0 else control

    return train


def test_nothing_counts_as_recovered_beside_a_control_that_ran_off():
    objective = separable_classifier()
    point = params_of(objective.model)
    control = {n: 67 * p for n, p in point.items()}  # no gradient is left there
    wrong = {n: 1e-2 * p for n, p in point.items()}
    wrong["weight"] = wrong["weight"].roll(1, 1)  # goes by the other input
    validation = validate({"l2": 0.05}, objective, [tacit.l2()], train=train_to(wrong, control))
    distances = validation.penalised.distance, validation.control.distance
    assert 1 - distances[0] / distances[1] > 0.98  # what was reported before
    assert validation.penalised.agreement < 0.6
    assert not validation.settled
    assert math.isnan(validation.recovered)
    assert math.isnan(validation.recovered_predictions)
    assert "not recovered" in problem_kinds(validation)
    text = validation.summary()
    assert text.startswith("The retrained model agrees with the original on ")
    assert "recovered  –" in text
    assert "did not settle" in text
    assert validation.to_dict()["recovered"] is None


def test_the_right_penalty_has_no_problem_beside_a_control_that_ran_off():
    objective = separable_classifier()
    point = params_of(objective.model)
    control = {n: 300 * p for n, p in point.items()}
    validation = validate({"l2": 0.05}, objective, [tacit.l2()], train=train_to(point, control))
    assert validation.penalised.agreement == 1
    assert not validation.settled
    assert not validation.problems


def test_a_control_that_only_stopped_early_does_not_count_either():
    X, y = random_data(8)
    objective = linear_objective(torch.ones(5, dtype=torch.float64), X, y)
    stopped = {"weight": torch.full((1, 5), 0.9).double()}
    validation = validate({"l2": 0.5}, objective, [tacit.l2()], train=lambda _: stopped)
    assert not validation.settled
    assert math.isnan(validation.recovered)
    assert {"unfinished", "not recovered"} <= problem_kinds(validation)


def test_a_batch_loss_needs_outputs_which_may_be_labels():
    X, y, model = classifier(6)
    objective = tacit.Objective.from_batch_loss(
        model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"], reduction="none"), {"x": X, "y": y}
    )
    with pytest.raises(tacit.InputError, match="outputs="):
        validate({"l2": 0.1}, objective, [tacit.l2()])
    validation = validate(
        {"l2": 0.1},
        objective,
        [tacit.l2()],
        outputs=lambda p: torch.func.functional_call(model, p, (X,)).argmax(1),
    )
    assert validation.penalised.prediction_error is None
    assert validation.penalised.agreement == 1
    assert validation.recovered_predictions == pytest.approx(1)


def test_a_custom_loop_trains_both_models_and_the_model_is_restored():
    X, y = random_data(7)
    matrix = X.T @ X / len(X) + 0.5 * torch.eye(5).double()
    theta = torch.linalg.solve(matrix, X.T @ y[:, 0] / len(X))
    objective = linear_objective(theta, X, y)
    before = deepcopy(objective.model.state_dict())
    initial_penalties = []

    def train(penalty):
        model = objective.model  # trained in place, as loops do
        initial_penalties.append(penalty(dict(model.named_parameters())).item())
        nn.init.zeros_(model.weight)
        for _ in range(400):
            model.zero_grad()
            total = F.mse_loss(model(X), y) + penalty(dict(model.named_parameters()))
            total.backward()
            model.weight.data -= 0.1 * model.weight.grad
        return dict(model.named_parameters())

    validation = validate({"l2": 0.5}, objective, [tacit.l2()], train=train)
    assert initial_penalties == pytest.approx([0.5 * float(theta @ theta), 0])
    assert validation.trainer == "your training loop"
    assert validation.penalised.relative_distance < 1e-9
    best = torch.linalg.lstsq(X, y).solution[:, 0]
    assert validation.control.distance == pytest.approx(float((best - theta).norm()), rel=1e-6)
    assert torch.equal(objective.model.weight, before["weight"])
    assert objective.model.weight.grad is None


def test_a_loop_that_stops_early_is_reported_as_unfinished():
    X, y = random_data(8)
    objective = linear_objective(torch.ones(5, dtype=torch.float64), X, y)
    validation = validate(
        {"l2": 0.5}, objective, [tacit.l2()], train=lambda _: {"weight": torch.full((1, 5), 0.9)}
    )
    assert "unfinished" in problem_kinds(validation)


def test_an_optimum_of_the_loss_itself_has_nothing_to_recover():
    X, y = random_data(9)
    objective = linear_objective(torch.linalg.lstsq(X, y).solution[:, 0], X, y)
    validation = validate({"l2": 0.0}, objective, [tacit.l2()])
    assert "nothing to recover" in problem_kinds(validation)


def test_the_control_retains_the_known_penalties():
    X, y = random_data(10)
    eye = torch.eye(5).double()
    ridge, extra = tacit.l2(), tacit.regularizers.distance_to({"weight": torch.ones(1, 5).double()})
    A, b = X.T @ X / len(X), X.T @ y[:, 0] / len(X)
    theta = torch.linalg.solve(A + 0.7 * eye, b + 0.4 * torch.ones(5).double())
    objective = linear_objective(theta, X, y)
    fit = tacit.fit(tacit.endpoint_equations(objective, [extra], known={ridge: 0.3}))
    assert fit.strengths["distance_to"] == pytest.approx(0.4)
    without = torch.linalg.solve(A + 0.3 * eye, b)
    for validation in (validate(fit), validate(fit, objective, [extra, ridge])):
        assert validation.penalised.relative_distance < 1e-12
        distance = float((without - theta).norm())
        assert validation.control.distance == pytest.approx(distance, rel=1e-9)


def test_a_penalty_without_hessian_is_validated_without_a_certificate():
    X, y = random_data(11)
    objective = linear_objective(torch.full((5,), 0.1, dtype=torch.float64), X, y)
    validation = validate(
        {"gradient_norm": 0.05}, objective, [tacit.regularizers.gradient_norm(objective)]
    )
    assert validation.certificate is None
    assert "no certificate" in problem_kinds(validation)


def test_the_built_in_trainer_leaves_a_saddle_at_which_it_starts():
    X, y = random_data(12)
    model = tanh_mlp(12, sizes=(5, 3, 1))
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    saddle = {n: torch.zeros_like(p) for n, p in objective.params.items()}
    saddle["2.bias"] = y.mean().reshape(1)
    function = PenalisedObjective(objective, penalty_of({tacit.l2(): 1e-2}))
    theta, is_minimum = builtin_minimise(function, function.flatten(saddle))
    value, gradient = function.value_and_gradient(theta)
    assert is_minimum
    assert gradient.norm() < 1e-12
    assert torch.linalg.eigvalsh(function.hessian(theta))[0] > 0
    assert value < 0.5 * objective.value(saddle)


def test_a_float32_model_is_recovered_to_single_precision():
    X, y = (t.float() for t in random_data(13))
    model = nn.Linear(5, 1, bias=False)
    A = X.T @ X / len(X) + 0.5 * torch.eye(5)
    load(model, {"weight": torch.linalg.solve(A, X.T @ y / len(X)).T})
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    validation = validate({"l2": 0.5}, objective, [tacit.l2()], start={"weight": torch.zeros(1, 5)})
    assert validation.penalised.relative_distance < 1e-5
    assert validation.certificate.verdict == "strongly convex"
    assert not validation.problems


def assert_same_validation(a, b):
    """Compare everything but the objects that made the two validations."""
    assert a.strengths == b.strengths
    assert (a.penalised, a.control, a.loss) == (b.penalised, b.control, b.loss)
    assert (a.recovered, a.recovered_predictions) == (b.recovered, b.recovered_predictions)
    assert a.certificate == b.certificate
    assert a.problems == b.problems


def test_the_objective_the_regularizers_and_the_point_are_those_of_the_fit():
    X, y, objective, _ = early_stopped(1, steps=7)
    ridge, known = tacit.l2(), {tacit.l2(name="decay"): 0.01}
    fit = tacit.fit(tacit.endpoint_equations(objective, ridge, known=known))
    whole = validate(fit, objective, [ridge, *known])
    assert_same_validation(validate(fit), whole)
    assert_same_validation(validate(fit, objective), whole)
    assert_same_validation(validate(fit, regularizers=[ridge, *known]), whole)
    part = tacit.Objective(objective.model, F.mse_loss, (X[:30], y[:30]))
    assert_same_validation(validate(fit, part), validate(fit, part, [ridge, *known]))


def test_a_difference_is_validated_without_the_technique():
    X, y = random_data(15)
    plain = linear_objective(torch.ones(5, dtype=torch.float64), X, y)
    technique = tacit.Objective(plain.model, F.mse_loss, (X, y + 0.3 * X.sum(1, keepdim=True)))
    fit = tacit.fit(tacit.difference_equations(technique, plain, tacit.l2()))
    validation = validate(fit)
    assert validation.loss == plain.value() != technique.value()
    assert_same_validation(validation, validate(fit, plain, tacit.l2()))


def test_a_fit_at_copies_of_the_weights_is_validated_there_after_training_on():
    _, _, objective, _ = early_stopped(2, steps=7)
    point = params_of(objective.model)
    start = {"weight": torch.zeros(1, 6)}
    fit = tacit.fit(tacit.endpoint_equations(objective, tacit.l2(), params=point))
    before = validate(fit, start=start)
    load(objective.model, {"weight": point["weight"] * 2})
    assert_same_validation(validate(fit, start=start), before)


def test_the_point_is_that_of_the_fit_with_an_explicit_objective_too():
    X, y = random_data(5)
    model = nn.Linear(5, 1, bias=False).double()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    theta = torch.linalg.solve(X.T @ X / len(X) + 0.1 * torch.eye(5), X.T @ y / len(X))
    fit = tacit.fit(tacit.endpoint_equations(objective, tacit.l2(), params={"weight": theta.T}))
    validation = validate(fit, objective, tacit.l2())
    assert validation.loss == pytest.approx(objective.value({"weight": theta.T}), rel=1e-12)
    assert validation.loss == validate(fit).loss


def test_a_fit_whose_weights_have_changed_or_that_has_no_objective_is_refused():
    *_, objective, fit = early_stopped(3, steps=7)
    regularizers = [tacit.regularizers.diagonal()]
    stacked = tacit.fit(tacit.stack([fit.equations, fit.equations]))
    with pytest.raises(tacit.InputError, match="Write the equations again"):
        validate(stacked)
    assert validate(stacked, objective, regularizers).strengths == stacked.strengths
    load(objective.model, {"weight": objective.params["weight"] * 2})
    with pytest.raises(tacit.InputError, match="write the equations again"):
        validate(fit)


def test_wrong_calls_are_refused():
    X, y = random_data(14)
    objective = linear_objective(torch.ones(5, dtype=torch.float64), X, y)
    strengths = {"l2": 0.1}
    loop = {"train": lambda _: objective.params}
    cases = [
        ((objective, strengths, [tacit.l2()]), {}, "what tacit.fit or tacit.estimate return"),
        ((strengths, strengths, [tacit.l2()]), {}, "objective is a dict.*tacit.Objective"),
        ((strengths,), {}, r"validate\(strengths, objective, regularizers\)"),
        ((strengths, objective), {}, r"validate\(strengths, objective, regularizers\)"),
        (("l2", objective, [tacit.l2()]), {}, "strengths by name"),
        ((strengths, objective, [tacit.l1()]), {}, "no strength for l1"),
        ((strengths, objective, [tacit.l2()]), {"train": 3}, "a function train"),
        (
            (strengths, objective, [tacit.l2()]),
            loop | {"start": objective.params},
            "leave start out",
        ),
        ((strengths, objective, [tacit.l2()]), {"start": {"w": X}}, "start"),
        ((strengths, objective, [tacit.l2()]), {"train": lambda _: None}, "train returned None"),
    ]
    for arguments, options, words in cases:
        with pytest.raises(tacit.InputError, match=words):
            validate(*arguments, **options)

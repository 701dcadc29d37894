"""Targets: their equations are the short forms', and fits know what they were written from."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.descent import descend
from support.models import load, params_of, random_data, tanh_mlp
from support.objectives import CountedBatches, dropout_mlp, split_batches
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective
from tacit.uncertainty import stationary_error_bars


def assert_same_equations(a, b):
    """Compare everything but the origin, numbers exactly."""
    assert (a.families, a.names, a.targets) == (b.families, b.names, b.targets)
    assert a.sources == b.sources
    assert len(a.blocks) == len(b.blocks)
    for one, other in zip(a.blocks, b.blocks, strict=True):
        facts, other_facts = dict(vars(one)), dict(vars(other))
        assert torch.equal(facts.pop("factor"), other_facts.pop("factor"))
        assert facts == other_facts


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
    "stationary_error_bars": lambda fit: stationary_error_bars(fit, rate=0.01, batch_size=8),
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


def test_equations_are_pickled_where_the_loss_and_the_loader_cannot_be():
    class LocalBatches:
        def __iter__(self):
            return iter([random_data(9)])

    model = tanh_mlp(9)
    objective = Objective(model, lambda output, target: F.mse_loss(output, target), LocalBatches())
    equations = tacit.endpoint_equations(objective, [RIDGE, LASSO])
    for part in (objective.loss, objective.data):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            pickle.dumps(part)
    assert_same_equations(pickle.loads(pickle.dumps(equations)), equations)
    assert_same_equations(copy.deepcopy(equations), equations)
    fit = tacit.fit(equations)
    assert pickle.loads(pickle.dumps(fit)) == fit
    assert equations.origin is not None  # the copies have none, the original still has


def test_a_small_pickle_has_neither_the_weights_nor_the_data():
    model = nn.Linear(500, 40).double()
    objective = Objective(model, F.mse_loss, random_data(10, count=50, inputs=500, outputs=40))
    equations = tacit.endpoint_equations(objective, RIDGE)
    assert len(pickle.dumps(equations)) < 10_000

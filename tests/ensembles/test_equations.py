"""Columns, equations and fits of all members are those of each member."""

from dataclasses import replace

import pytest
import torch
from support.ensembles import MEMBERS, ensemble_and_data, small_networks, train_briefly
from support.models import UnusedHead, random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit import ensembles
from tacit.ensembles import SGD, Adam, Plan, Stopping

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def candidate_lists():
    return [
        [tacit.l2()],
        [tacit.smooth_l1(0.1), tacit.l2()],
        [tacit.l1(), tacit.l2(scope="*.weight", name="weights")],
        [tacit.layerwise(tacit.l2()), tacit.smooth_l1(0.1)],
        [tacit.l2(scope=tacit.matrices), tacit.smooth_l1(0.1, scope=["0.bias", "2"])],
        [tacit.regularizers.group_l2(), tacit.regularizers.nuclear_norm()],
        [tacit.regularizers.distance_to(dict(tanh_mlp(9).named_parameters())), tacit.l2()],
        [tacit.regularizers.diagonal()],
        [cubed_norm()],
    ]


def cubed_norm():
    return tacit.regularizer("cubed", lambda p: sum(t.abs().pow(3).sum() for t in p.values()))


def assert_same_equations(actual, expected):
    assert actual.names == expected.names
    assert actual.families == expected.families
    assert actual.rows == expected.rows
    for a, b in zip(actual.blocks, expected.blocks, strict=True):
        assert (a.layer, a.columns, a.rows, a.left_out) == (b.layer, b.columns, b.rows, b.left_out)
        gram = b.factor.T @ b.factor
        atol = 1e-12 * float(gram.abs().max())
        assert torch.allclose(a.factor.T @ a.factor, gram, rtol=1e-10, atol=atol)
    a, b = actual.sources[0], expected.sources[0]
    assert (a.mode, a.loss, a.examples, a.parameters) == (b.mode, b.loss, b.examples, b.parameters)
    assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-12)
    assert a.known == b.known


@pytest.mark.parametrize("index", range(len(candidate_lists())))
def test_endpoint_equations_are_those_of_each_member(index):
    ensemble, data, member_sets = ensemble_and_data()
    regularizers = candidate_lists()[index]
    equations = ensembles.endpoint_equations(ensemble, F.mse_loss, data, regularizers)
    for m, member_set in enumerate(member_sets):
        objective = tacit.Objective(ensemble.module(m), F.mse_loss, member_set)
        assert_same_equations(equations[m], tacit.endpoint_equations(objective, regularizers))
    for member_fit, member_equations in zip(ensembles.fits(equations), equations, strict=True):
        assert member_fit.strengths == tacit.fit(member_equations).strengths


def test_known_penalties_may_have_one_strength_per_member():
    ensemble, data, member_sets = ensemble_and_data()
    lasso, ridge, strengths = tacit.smooth_l1(0.1), tacit.l2(), [0.1, 0.2, 0.0, 0.3, 0.05]
    kinked = tacit.l1(scope="*.bias", name="l1 of biases")
    equations = ensembles.endpoint_equations(
        ensemble, F.mse_loss, data, lasso, known={ridge: strengths, kinked: 0.5}
    )
    for m, member_set in enumerate(member_sets):
        objective = tacit.Objective(ensemble.module(m), F.mse_loss, member_set)
        known = {ridge: strengths[m], kinked: 0.5}
        expected = tacit.endpoint_equations(objective, lasso, known=known)
        assert_same_equations(equations[m], expected)


def train_on_three_sets(optimizer, *, penalties=None, batch_size=64, averaged=(), epochs=3):
    """The run, its data, and each member's data."""
    ensemble, data, member_sets = ensemble_and_data()
    plan = Plan(optimizer, epochs, batch_size, averaged=averaged)
    return train_briefly(ensemble, data, plan=plan, penalties=penalties), data, member_sets


def test_epoch_equations_are_one_step_of_a_trajectory():
    run, data, member_sets = train_on_three_sets(SGD(0.01), batch_size=16)
    regularizers = [tacit.smooth_l1(0.1), tacit.l2()]
    equations = ensembles.epoch_equations(run, F.mse_loss, data, regularizers)
    epoch = run.recorded_epochs[-1]
    for m, member_set in enumerate(member_sets):
        objective = tacit.Objective(run.average.module(m), F.mse_loss, member_set)
        trajectory = tacit.Trajectory(
            [run.average.member(m)],
            [{n: displacement[m] for n, displacement in epoch.displacement.items()}],
            [float(epoch.time[m])],
        )
        expected = tacit.trajectory_equations(objective, trajectory, regularizers)
        assert_same_equations(equations[m], expected)


def test_a_full_batch_epoch_recovers_penalties_far_from_any_optimum():
    """With one step per epoch, Δθ = −η(∇L + Σ λ∇R) holds exactly at the point stepped from."""
    lasso, ridge = tacit.smooth_l1(0.1), tacit.l2()
    penalties = {lasso: 0.3, ridge: 0.05}
    run, data, _ = train_on_three_sets(SGD(0.02), penalties=penalties, averaged=[lasso])
    for fit in ensembles.fits(ensembles.epoch_equations(run, F.mse_loss, data, [lasso, ridge])):
        assert fit.strengths == pytest.approx({"smooth_l1": 0.3, "l2": 0.05}, rel=1e-9)
        assert not fit.problems
    # The endpoint equations ignore Δθ, and the last weights are not an optimum.
    last = ensembles.fits(ensembles.endpoint_equations(run.last, F.mse_loss, data, [lasso, ridge]))
    assert max(abs(fit.strengths["l2"] / 0.05 - 1) for fit in last) > 0.5


def test_epoch_equations_account_for_the_flow_time_of_momentum():
    run, data, _ = train_on_three_sets(
        SGD(0.002, momentum=0.5), penalties={tacit.l2(): 0.2}, epochs=400
    )
    for fit in ensembles.fits(ensembles.epoch_equations(run, F.mse_loss, data, tacit.l2())):
        assert fit.strengths["l2"] == pytest.approx(0.2, rel=1e-2)


def test_the_metric_of_adam_makes_its_epoch_equations_ten_times_more_accurate():
    run, data, _ = train_on_three_sets(Adam(1e-4), penalties={tacit.l2(): 0.2}, epochs=600)
    epoch = run.recorded_epochs[-1]
    assert epoch.metric is not None
    without_metric = replace(run, recorded_epochs=(replace(epoch, metric=None),))
    errors, errors_without_metric = (
        [
            abs(fit.strengths["l2"] - 0.2)
            for fit in ensembles.fits(ensembles.epoch_equations(r, F.mse_loss, data, tacit.l2()))
        ]
        for r in (run, without_metric)
    )
    for error, error_without_metric in zip(errors, errors_without_metric, strict=True):
        assert error < 0.1 * error_without_metric


def test_averaged_columns_are_means_over_the_points_of_the_epoch():
    """Compared with a naive mean over the points that a recording optimizer stepped from."""
    points = []

    class RecordingSGD(SGD):
        def step(self, theta, gradient, state, rate, count):
            points.append(theta.clone())
            super().step(theta, gradient, state, rate, count)

    lasso, cubed = tacit.smooth_l1(0.1), cubed_norm()
    run, _, _ = train_on_three_sets(RecordingSGD(0.05), batch_size=16, averaged=[lasso, cubed])
    last = torch.stack(points[-4:])
    expected = {lasso: (last / 0.1).clamp(-1, 1).mean(0), cubed: (3 * last * last.abs()).mean(0)}
    for regularizer, columns in run.recorded_epochs[-1].columns.items():
        flat = torch.cat([column.flatten(1) for column in columns.values()], 1)
        assert torch.allclose(flat, expected[regularizer], rtol=0, atol=1e-12)


def test_weights_that_oscillate_across_a_kink_are_reported_as_unsettled():
    """η λ/β = 5: every step overshoots, but the mean gradient still recovers the strength."""
    lasso = tacit.smooth_l1(1e-3)
    run, data, _ = train_on_three_sets(
        SGD(0.005), penalties={lasso: 1.0}, averaged=[lasso], batch_size=8, epochs=200
    )
    for fit in ensembles.fits(ensembles.epoch_equations(run, F.mse_loss, data, lasso)):
        assert "unsettled" in {problem.kind for problem in fit.problems}
        assert fit.strengths["smooth_l1"] == pytest.approx(1.0, rel=0.02)
    last = ensembles.fits(ensembles.endpoint_equations(run.last, F.mse_loss, data, lasso))
    assert all("unexplained" in {problem.kind for problem in fit.problems} for fit in last)


def test_known_penalties_use_their_averaged_gradient():
    """Steps overshoot the kink: at the mean point the known penalty would be far off."""
    lasso, ridge = tacit.smooth_l1(1e-3), tacit.l2()
    plan, data = Plan(SGD(0.01), 60, 8, averaged=[lasso]), random_data(0)
    run = train_briefly(small_networks(), data, plan=plan, penalties={lasso: 0.3, ridge: 0.2})
    epoch = replace(run.recorded_epochs[-1], columns={})
    without_means = replace(run, recorded_epochs=(epoch,))
    averaged, at_mean_point = (
        ensembles.fits(ensembles.epoch_equations(r, F.mse_loss, data, ridge, known={lasso: 0.3}))
        for r in (run, without_means)
    )
    for fit, other in zip(averaged, at_mean_point, strict=True):
        assert fit.explained > 0.99
        assert fit.strengths["l2"] == pytest.approx(0.2, rel=0.1)
        assert other.residual_ratio > 5 * fit.residual_ratio
        assert "unsettled" in {problem.kind for problem in fit.problems}


def test_another_object_with_the_name_of_an_averaged_regularizer_is_refused():
    plan, data = Plan(SGD(0.01), 2, 16, averaged=[tacit.smooth_l1(1e-3)]), random_data(0)
    run = train_briefly(small_networks(), data, plan=plan)
    with pytest.raises(tacit.InputError, match="pass the object that was averaged"):
        ensembles.epoch_equations(run, F.mse_loss, data, [tacit.smooth_l1(1e-3), tacit.l2()])


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_agrees_with_the_cpu_and_repeats_its_bytes(device):
    ensemble, data, _ = ensemble_and_data()
    plan = Plan(Adam(0.01), 3, 16, Stopping(2))
    options = {"seeds": range(MEMBERS), "penalties": {tacit.l2(): 0.1}}
    on_cpu = ensembles.train(ensemble, F.mse_loss, data, plan, **options)
    on_device = ensembles.train(ensemble.to(device), F.mse_loss, data, plan, **options)
    repeated = ensembles.train(ensemble.to(device), F.mse_loss, data, plan, **options)
    for name, expected in on_cpu.last.params.items():
        assert torch.allclose(on_device.last.params[name].cpu(), expected, rtol=0, atol=1e-10)
        assert torch.equal(on_device.last.params[name], repeated.last.params[name])
    regularizers = [tacit.smooth_l1(0.1), tacit.l2()]
    equations = ensembles.endpoint_equations(on_device.last, F.mse_loss, data, regularizers)
    expected = ensembles.endpoint_equations(on_cpu.last, F.mse_loss, data, regularizers)
    for a, b in zip(equations, expected, strict=True):
        assert torch.allclose(tacit.fit(a).equations.factor().abs(), b.factor().abs(), rtol=1e-6)


REFUSED = {
    "an ensemble instead of a run": (
        lambda ensemble, data: ensembles.epoch_equations(ensemble, F.mse_loss, data, tacit.l2()),
        "run is an Ensemble",
    ),
    "the equations of one member": (
        lambda ensemble, data: ensembles.fits(
            ensembles.endpoint_equations(ensemble, F.mse_loss, data, tacit.l2())[0]
        ),
        "equations of one member",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_arguments_are_refused_with_a_remedy(call, message):
    with pytest.raises(tacit.InputError, match=message):
        call(small_networks(), random_data(0))


def test_parameters_that_the_loss_does_not_reach_have_no_equations():
    models = [UnusedHead(tanh_mlp(seed), seed) for seed in range(3)]
    ensemble, data = ensembles.from_models(models), random_data(5)
    equations = ensembles.endpoint_equations(ensemble, F.mse_loss, data, tacit.l2())
    run = train_briefly(ensemble, data, plan=Plan(SGD(0.01), 1, 16))
    epochs = ensembles.epoch_equations(run, F.mse_loss, data, tacit.l2())
    for m, model in enumerate(models):
        objective = tacit.Objective(model, F.mse_loss, data)
        expected = tacit.endpoint_equations(objective, tacit.l2())
        assert_same_equations(equations[m], expected)
        assert equations[m].sources[0].unreached == expected.sources[0].unreached
        assert epochs[m].sources[0].unreached == ("head.weight", "head.bias")
        assert epochs[m].layers == ("body.0", "body.2")

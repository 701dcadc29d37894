"""Batched gradients, columns, equations and fits are those of each member on its own."""

from dataclasses import replace

import pytest
import torch
from support.problems import loss_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import ensembles, reference
from tacit.ensembles import SGD, Adam, Data, Plan, Stopping

MEMBERS = 5
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def ensemble_and_data():
    """Members with their own data, and some weights exactly zero."""
    models = [tanh_mlp(seed) for seed in range(MEMBERS)]
    with torch.no_grad():
        models[1][0].weight[0] = 0
        models[2][2].bias[:] = 0
    sets = [random_data(seed) for seed in range(3)]
    owner = [0, 2, 1, 1, 0]
    data = Data(torch.stack([X for X, _ in sets]), torch.stack([y for _, y in sets]), owner)
    return ensembles.stacked(models), data, [sets[number] for number in owner]


def families():
    return [
        [tacit.l2()],
        [tacit.smooth_l1(0.1), tacit.l2()],
        [tacit.l1(), tacit.l2(scope="*.weight", name="weights")],
        [tacit.layerwise(tacit.l2()), tacit.smooth_l1(0.1)],
        [tacit.regularizers.group_l2(), tacit.regularizers.nuclear_norm()],
        [tacit.regularizers.distance_to(dict(tanh_mlp(9).named_parameters())), tacit.l2()],
        [tacit.regularizers.diagonal()],
        [tacit.regularizer("cubed", lambda p: sum(t.abs().pow(3).sum() for t in p.values()))],
    ]


def same(mine, theirs):
    assert mine.names == theirs.names
    assert mine.families == theirs.families
    assert mine.rows == theirs.rows
    for a, b in zip(mine.blocks, theirs.blocks, strict=True):
        assert (a.layer, a.columns, a.rows, a.left_out) == (b.layer, b.columns, b.rows, b.left_out)
        gram = a.factor.T @ a.factor
        expected = b.factor.T @ b.factor
        assert torch.allclose(gram, expected, rtol=1e-10, atol=1e-12 * float(expected.abs().max()))
    a, b = mine.sources[0], theirs.sources[0]
    assert (a.mode, a.loss, a.examples, a.parameters) == (b.mode, b.loss, b.examples, b.parameters)
    assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-12)
    assert a.known == b.known


@pytest.mark.parametrize("number", range(len(families())))
def test_endpoint_equations_are_those_of_each_member(number):
    ensemble, data, sets = ensemble_and_data()
    regularizers = families()[number]
    found = ensembles.endpoint_equations(ensemble, F.mse_loss, data, regularizers)
    for m, own in enumerate(sets):
        objective = tacit.Objective(ensemble.module(m), F.mse_loss, own)
        same(found[m], tacit.endpoint_equations(objective, regularizers))
    for mine, alone in zip(ensembles.fits(found), found, strict=True):
        assert mine.strengths == tacit.fit(alone).strengths


def test_known_penalties_of_each_member():
    ensemble, data, sets = ensemble_and_data()
    lasso, ridge, known = tacit.smooth_l1(0.1), tacit.l2(), [0.1, 0.2, 0.0, 0.3, 0.05]
    kinked = tacit.l1(scope="*.bias", name="l1 of biases")
    found = ensembles.endpoint_equations(
        ensemble, F.mse_loss, data, lasso, known={ridge: known, kinked: 0.5}
    )
    for m, own in enumerate(sets):
        objective = tacit.Objective(ensemble.module(m), F.mse_loss, own)
        alone = tacit.endpoint_equations(objective, lasso, known={ridge: known[m], kinked: 0.5})
        same(found[m], alone)


def test_gradients_match_the_dense_reference():
    ensemble, data, sets = ensemble_and_data()
    values, gradients = ensembles.gradients(ensemble, F.mse_loss, data)
    for m, own in enumerate(sets):
        model = ensemble.module(m)
        dense = loss_of(model, F.mse_loss, own)
        expected = reference.gradient(dense, dict(model.named_parameters()))
        flat = torch.cat([gradients[n][m].flatten() for n in gradients])
        assert torch.allclose(flat, expected, rtol=0, atol=1e-12)
        objective = tacit.Objective(model, F.mse_loss, own)
        assert float(values[m]) == pytest.approx(objective.value(), rel=1e-12)


def test_slices_do_not_matter(monkeypatch):
    ensemble, data, _ = ensemble_and_data()
    whole = ensembles.gradients(ensemble, F.mse_loss, data)
    monkeypatch.setattr("tacit.ensembles.evaluation.ENTRIES", 7 * 8 * MEMBERS)
    sliced = ensembles.gradients(ensemble, F.mse_loss, data)
    for name, expected in whole.gradients.items():
        assert torch.allclose(sliced.gradients[name], expected, rtol=0, atol=1e-14)


def trained(optimizer, *, penalties=None, batch_size=64, averaged=(), epochs=3):
    ensemble, data, sets = ensemble_and_data()
    plan = Plan(optimizer, epochs, batch_size, averaged=averaged)
    run = ensembles.train(
        ensemble, F.mse_loss, data, plan, seeds=range(MEMBERS), penalties=penalties
    )
    return run, data, sets


def test_epoch_equations_are_one_step_of_a_trajectory():
    run, data, sets = trained(SGD(0.01), batch_size=16)
    regularizers = [tacit.smooth_l1(0.1), tacit.l2()]
    found = ensembles.epoch_equations(run, F.mse_loss, data, regularizers)
    for m, own in enumerate(sets):
        objective = tacit.Objective(run.average.module(m), F.mse_loss, own)
        trajectory = tacit.Trajectory(
            [run.average.member(m)],
            [{n: moved[m] for n, moved in run.tail[-1].displacement.items()}],
            [float(run.tail[-1].time[m])],
        )
        same(found[m], tacit.trajectory_equations(objective, trajectory, regularizers))


def test_a_full_batch_epoch_recovers_penalties_far_from_any_optimum():
    """One step an epoch: Δθ = −η(∇L + Σ λ∇R) holds exactly at the point stepped from."""
    lasso, ridge = tacit.smooth_l1(0.1), tacit.l2()
    run, data, _ = trained(SGD(0.02), penalties={lasso: 0.3, ridge: 0.05}, averaged=[lasso])
    for found in ensembles.fits(ensembles.epoch_equations(run, F.mse_loss, data, [lasso, ridge])):
        assert found.strengths == pytest.approx({"smooth_l1": 0.3, "l2": 0.05}, rel=1e-9)
        assert not found.problems
    # Not so without the drift: the point is no optimum.
    last = ensembles.fits(ensembles.endpoint_equations(run.last, F.mse_loss, data, [lasso, ridge]))
    assert max(abs(own.strengths["l2"] / 0.05 - 1) for own in last) > 0.5


def test_momentum_and_its_flow_time():
    run, data, _ = trained(SGD(0.002, momentum=0.5), penalties={tacit.l2(): 0.2}, epochs=400)
    for found in ensembles.fits(ensembles.epoch_equations(run, F.mse_loss, data, tacit.l2())):
        assert found.strengths["l2"] == pytest.approx(0.2, rel=1e-2)


def test_the_metric_of_adam_turns_its_drift_into_a_force():
    run, data, _ = trained(Adam(1e-4), penalties={tacit.l2(): 0.2}, epochs=600)
    assert run.tail[-1].metric is not None
    for m, found in enumerate(
        ensembles.fits(ensembles.epoch_equations(run, F.mse_loss, data, tacit.l2()))
    ):
        bare = replace(run, tail=(replace(run.tail[-1], metric=None),))
        plain = ensembles.epoch_equations(bare, F.mse_loss, data, tacit.l2())[m]
        with_metric = abs(found.strengths["l2"] - 0.2)
        assert with_metric < 0.1 * abs(tacit.fit(plain).strengths["l2"] - 0.2)


def test_mean_columns_are_those_of_the_points():
    """Averaged columns against a naive mean over the points that a recording optimizer saw."""
    points = []

    class Recording(SGD):
        def step(self, theta, slope, state, rate, count):
            points.append(theta.clone())
            super().step(theta, slope, state, rate, count)

    lasso, cubed = tacit.smooth_l1(0.1), families()[-1][0]
    run, _, _ = trained(Recording(0.05), batch_size=16, averaged=[lasso, cubed])
    last = torch.stack(points[-4:])
    expected = {lasso: (last / 0.1).clamp(-1, 1).mean(0), cubed: (3 * last * last.abs()).mean(0)}
    for regularizer, columns in run.tail[-1].columns.items():
        flat = torch.cat([column.flatten(1) for column in columns.values()], 1)
        assert torch.allclose(flat, expected[regularizer], rtol=0, atol=1e-12)


def test_weights_that_jump_across_a_bend_are_called_unsettled():
    """η λ/β = 5: every step overshoots; the mean gradient still tells the strength."""
    lasso = tacit.smooth_l1(1e-3)
    run, data, _ = trained(
        SGD(0.005), penalties={lasso: 1.0}, averaged=[lasso], batch_size=8, epochs=200
    )
    for found in ensembles.fits(ensembles.epoch_equations(run, F.mse_loss, data, lasso)):
        assert "unsettled" in {problem.kind for problem in found.problems}
        assert found.strengths["smooth_l1"] == pytest.approx(1.0, rel=0.02)
    last = ensembles.fits(ensembles.endpoint_equations(run.last, F.mse_loss, data, lasso))
    assert all("unexplained" in {p.kind for p in found.problems} for found in last)


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_gives_the_answer_of_the_cpu_and_the_same_bytes_again(device):
    ensemble, data, _ = ensemble_and_data()
    plan = Plan(Adam(0.01), 3, 16, Stopping(2))
    options = {"seeds": range(MEMBERS), "penalties": {tacit.l2(): 0.1}}
    here = ensembles.train(ensemble, F.mse_loss, data, plan, **options)
    there = ensembles.train(ensemble.to(device), F.mse_loss, data, plan, **options)
    again = ensembles.train(ensemble.to(device), F.mse_loss, data, plan, **options)
    for name, expected in here.last.params.items():
        assert torch.allclose(there.last.params[name].cpu(), expected, rtol=0, atol=1e-10)
        assert torch.equal(there.last.params[name], again.last.params[name])
    regularizers = [tacit.smooth_l1(0.1), tacit.l2()]
    found = ensembles.endpoint_equations(there.last, F.mse_loss, data, regularizers)
    expected = ensembles.endpoint_equations(here.last, F.mse_loss, data, regularizers)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(
            tacit.fit(mine).equations.factor().abs(), theirs.factor().abs(), rtol=1e-6
        )


BAD = [
    (lambda e, d: ensembles.stacked([]), "modules of one architecture"),
    (lambda e, d: ensembles.stacked([nn.Linear(1, 2), nn.Linear(2, 1)]), "another architecture"),
    (
        lambda e, d: ensembles.stacked([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))]),
        "buffer",
    ),
    (lambda e, d: ensembles.stacked([nn.Linear(2, 2).requires_grad_(False)]), "no trainable"),
    (lambda e, d: ensembles.initialise(lambda: nn.Linear(1, 1), [-1]), "a seed is -1"),
    (lambda e, d: ensembles.Ensemble(nn.Linear(1, 1), {"weight": torch.ones(2, 1, 1)}), "do not"),
    (lambda e, d: train(e, d, seeds=[1]), "1 seeds for 5 members"),
    (lambda e, d: train(e, "x"), "data is a str"),
    (lambda e, d: train(e, (torch.ones(0, 5), torch.ones(0, 1))), "data is empty"),
    (lambda e, d: train(e, Data(d.inputs, d.targets, [0, 1])), "3 sets and owners of shape (2,)"),
    (lambda e, d: train(e, Data(d.inputs, d.targets, [0, 1, 2, 3, 0])), "pass owner="),
    (lambda e, d: train(e, (d.inputs[0] * torch.nan, d.targets[0])), "NaN"),
    (lambda e, d: Data(d.inputs, d.targets[:, :3]), "must begin with (sets, examples)"),
    (lambda e, d: train(e, d, penalties={tacit.l2(): [1.0, 2.0]}), "strengths of 'l2'"),
    (lambda e, d: train(e, d, penalties={tacit.l2: 1.0}), "Call it, as in tacit.l2()"),
    (lambda e, d: train(e, d, penalties=[tacit.l2()]), "pass a dictionary"),
    (lambda e, d: train(e, d, dropout=1.0), "dropout is 1.0"),
    (lambda e, d: train(e, d, SGD(-1.0)), "rate is -1.0"),
    (lambda e, d: train(e, d, SGD([1.0, 2.0])), "one for each of the 5 members"),
    (lambda e, d: SGD(0.1, momentum=1.0), "momentum is 1.0"),
    (lambda e, d: Plan(SGD(0.1), 0, 1), "epochs is 0"),
    (lambda e, d: Plan(SGD(0.1), 1, 0), "batch_size is 0"),
    (lambda e, d: Stopping(0), "patience is 0"),
    (lambda e, d: Stopping(1, monitor="loss", validation=d), "neither"),
    (lambda e, d: Stopping(1, monitor="validation"), "validation data missing"),
    (lambda e, d: Stopping(1, monitor="accuracy"), "monitor is 'accuracy'"),
    (
        lambda e, d: ensembles.train(e, F.mse_loss, d, SGD(0.1), seeds=range(5)),
        "plan is a SGD",
    ),
    (
        lambda e, d: ensembles.endpoint_equations(
            e, F.mse_loss, d, tacit.l2(), known={tacit.layerwise(tacit.l2()): 1.0}
        ),
        "coefficients; pass penalties of one strength",
    ),
]


def train(ensemble, data, optimizer=None, *, seeds=range(MEMBERS), **options):
    plan = Plan(optimizer or SGD(0.1), 1, 8)
    return ensembles.train(ensemble, F.mse_loss, data, plan, seeds=seeds, **options)


@pytest.mark.parametrize(("call", "said"), BAD)
def test_bad_input_is_refused_with_what_to_do(call, said):
    ensemble, data, _ = ensemble_and_data()
    with pytest.raises(tacit.InputError) as caught:
        call(ensemble, data)
    assert said in str(caught.value)


def test_dropout_outside_a_chain_is_refused():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop = nn.Linear(5, 1), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.layer(x))

    ensemble = ensembles.initialise(lambda: Odd().double(), range(MEMBERS))
    _, data, _ = ensemble_and_data()
    with pytest.raises(tacit.InputError, match="no chain of linear layers"):
        train(ensemble, data)

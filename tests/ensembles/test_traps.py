"""What would give a plausible wrong number is right, or refused."""

from dataclasses import replace

import pytest
import torch
from support.problems import random_data
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import ensembles
from tacit.ensembles import SGD, Plan


def chain(*layers):
    return nn.Sequential(*layers).double()


def shared_activation():
    act = nn.ReLU()
    return chain(nn.Linear(5, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 1))


def shared_dropout():
    drop = nn.Dropout(0.5)
    return chain(nn.Linear(5, 4), nn.Tanh(), drop, nn.Linear(4, 4), drop, nn.Linear(4, 1))


def hooked():
    model = chain(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].register_forward_hook(lambda module, inputs, output: 3 * output)
    return model


def unused():
    model = chain(nn.Linear(5, 1))
    model[0].register_parameter("extra", nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    return model


@pytest.mark.parametrize("build", [shared_activation, shared_dropout, hooked, unused])
def test_outputs_are_those_of_the_module(build):
    X, y = random_data(0)
    ensemble = ensembles.initialise(build, [0, 1])
    found = ensembles.endpoint_equations(ensemble, F.mse_loss, (X, y), tacit.l2())
    for m in range(2):
        objective = tacit.Objective(ensemble.module(m), F.mse_loss, (X, y))
        alone = tacit.fit(tacit.endpoint_equations(objective, tacit.l2()))
        assert tacit.fit(found[m]).strengths == pytest.approx(alone.strengths, rel=1e-9)


@pytest.mark.parametrize("ends", [(1, -1), (-2, -1), (2, 3), (2, -1), (1, 2)])
def test_flatten_counts_dimensions_as_the_module_does(ends):
    X = torch.randn(6, 2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ensemble = ensembles.initialise(
        lambda: chain(nn.Flatten(*ends), nn.Identity(), Scale()), [0, 1]
    )
    inputs = X.expand(2, *X.shape)
    found = ensemble.forward(ensemble.params, inputs, None)
    assert torch.equal(found[1], ensemble.module(1)(X))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return self.scale * x


LOSSES = {
    "sum-reduced": lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum"),
    "not a mean over examples": lambda outputs, targets: F.cross_entropy(
        outputs, targets, weight=torch.tensor([1.0, 5.0]).to(outputs)
    ),
    "reduction='mean'": lambda outputs, targets: F.cross_entropy(
        outputs, targets, reduction="none"
    ),
}


@pytest.mark.parametrize("said", LOSSES)
def test_losses_that_are_no_means_are_refused(said):
    X, _ = random_data(0)
    y = (X[:, 0] > 0).long()
    ensemble = ensembles.initialise(lambda: chain(nn.Linear(5, 2), nn.Dropout(0.1)), [0, 1])
    calls = (
        lambda: ensembles.gradients(ensemble, LOSSES[said], (X, y)),
        lambda: ensembles.endpoint_equations(ensemble, LOSSES[said], (X, y), tacit.l2()),
        lambda: train(ensemble, (X, y), LOSSES[said]),
        lambda: ensembles.dropout_equations(
            ensemble, LOSSES[said], (X, y), tacit.l2(), dropout=0.1, seeds=[0, 1]
        ),
    )
    for call in calls:
        with pytest.raises(tacit.InputError, match=said):
            call()


def test_targets_that_broadcast_are_refused():
    X, y = random_data(0)
    ensemble = ensembles.initialise(lambda: chain(nn.Linear(5, 1)), [0])
    with (
        pytest.warns(UserWarning, match="size"),
        pytest.raises(tacit.InputError, match="broadcast"),
    ):
        train(ensemble, (X, y[:, 0]), F.mse_loss)


def train(ensemble, data, loss=F.mse_loss, *, plan=None, **options):
    plan = plan or Plan(SGD(0.01), 2, 16)
    return ensembles.train(ensemble, loss, data, plan, seeds=range(len(ensemble)), **options)


def networks(members=3):
    return ensembles.initialise(
        lambda: chain(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)), range(members)
    )


def test_a_batch_penalty_must_have_one_value_a_member():
    with pytest.raises(tacit.InputError, match="one value a member"):
        train(
            networks(), random_data(0),
            batch_penalty=lambda params, *_: params["0.weight"].square().sum(),
        )  # fmt: skip


def test_known_penalties_use_their_averaged_gradient():
    """Steps that overshoot the bend: at the mean point the known penalty would be far off."""
    lasso, ridge = tacit.smooth_l1(1e-3), tacit.l2()
    plan = Plan(SGD(0.01), 60, 8, averaged=[lasso])
    data = random_data(0)
    run = train(networks(), data, plan=plan, penalties={lasso: 0.3, ridge: 0.2})
    known = ensembles.fits(
        ensembles.epoch_equations(run, F.mse_loss, data, ridge, known={lasso: 0.3})
    )
    elsewhere = ensembles.fits(
        ensembles.epoch_equations(
            replace(run, tail=(replace(run.tail[-1], columns={}),)),
            F.mse_loss,
            data,
            ridge,
            known={lasso: 0.3},
        )
    )
    for mine, other in zip(known, elsewhere, strict=True):
        assert mine.explained > 0.99
        assert mine.strengths["l2"] == pytest.approx(0.2, rel=0.1)
        assert other.residual_ratio > 5 * mine.residual_ratio
        assert "unsettled" in {problem.kind for problem in mine.problems}


def test_a_twin_of_an_averaged_regularizer_is_refused():
    plan = Plan(SGD(0.01), 2, 16, averaged=[tacit.smooth_l1(1e-3)])
    data = random_data(0)
    run = train(networks(), data, plan=plan)
    with pytest.raises(tacit.InputError, match="another object of that name"):
        ensembles.epoch_equations(run, F.mse_loss, data, [tacit.smooth_l1(1e-3), tacit.l2()])


def test_families_that_cannot_be_averaged_are_refused():
    with pytest.raises(tacit.InputError, match="several coefficients on one tensor"):
        train(
            networks(),
            random_data(0),
            plan=Plan(SGD(0.1), 1, 8, averaged=[tacit.regularizers.diagonal()]),
        )


def test_averages_stay_within_the_scope():
    biases = tacit.smooth_l1(0.1, scope="*.bias", name="biases")
    run = train(networks(), random_data(0), plan=Plan(SGD(0.1), 1, 8, averaged=[biases]))
    assert float(run.tail[-1].columns[biases]["0.weight"].abs().max()) == 0
    assert float(run.tail[-1].columns[biases]["0.bias"].abs().max()) > 0


def test_a_diverged_member_does_not_break_families_that_cannot_hold_nan():
    nuclear, data = tacit.regularizers.nuclear_norm(), random_data(0)
    plan = Plan(SGD([1e200, 0.01, 0.01]), 4, 16, averaged=[nuclear])
    run = train(networks(), data, plan=plan, penalties={nuclear: 0.1})
    assert run.diverged.tolist() == [True, False, False]
    alone = ensembles.train(
        networks().chosen([1]), F.mse_loss, data, Plan(SGD(0.01), 4, 16), seeds=[1],
        penalties={nuclear: 0.1},
    )  # fmt: skip
    for name, expected in alone.last.params.items():
        assert torch.allclose(run.last.params[name][1], expected[0], rtol=0, atol=1e-12)
    with pytest.raises(tacit.InputError, match="members 0 are not finite"):
        ensembles.epoch_equations(run, F.mse_loss, data, tacit.l2())
    rest = run.chosen([1, 2])
    assert len(ensembles.epoch_equations(rest, F.mse_loss, data, tacit.l2())) == 2


def test_buffers_that_differ_are_refused():
    def masked(kept):
        model = nn.Linear(3, 1)
        model.register_buffer("mask", torch.tensor(kept))
        return model

    with pytest.raises(tacit.InputError, match="another buffer 'mask'"):
        ensembles.stacked([masked([True, False]), masked([True, True])])


WRONG = [
    (lambda e, d: train(e, d, penalties={tacit.l2(): "strong"}), "strength of 'l2' is 'strong'"),
    (lambda e, d: train(e, d, penalties=[]), "pass a dictionary"),
    (lambda e, d: train(e, d, dropout=0.1), "no nn.Dropout layer"),
    (lambda e, d: train(e, d, plan=Plan(SGD("fast"), 1, 8)), "rate is 'fast'"),
    (lambda e, d: Plan(torch.optim.SGD, 1, 8), "pass ensembles.SGD(rate)"),
    (lambda e, d: Plan(SGD(0.1), 1, 8, 5), "pass ensembles.Stopping"),
    (lambda e, d: Plan(SGD(0.1), 1, 8, averaged=tacit.l2()), "pass a list of regularizers"),
    (lambda e, d: SGD(0.1, milestones=3), "milestones is 3"),
    (lambda e, d: SGD(0.1, factor=-1), "factor is -1"),
    (lambda e, d: ensembles.Stopping(3, min_delta=float("nan")), "min_delta is nan"),
    (lambda e, d: ensembles.train(e, F.mse_loss, d, Plan(SGD(0.1), 1, 8), seeds=3), "seeds is 3"),
    (lambda e, d: train(e, d, None), "the loss is a NoneType"),
    (lambda e, d: ensembles.gradients(nn.Linear(2, 1), F.mse_loss, d), "an ensemble is a Linear"),
    (lambda e, d: ensembles.epoch_equations(e, F.mse_loss, d, tacit.l2()), "run is a Ensemble"),
    (
        lambda e, d: ensembles.fits(
            ensembles.endpoint_equations(e, F.mse_loss, d, tacit.l2())[0]
        ),
        "equations of one member",
    ),
    (lambda e, d: train(e, (d[0][:, :3], d[1])), "model and loss fail on inputs of shape (64, 3)"),
    (
        lambda e, d: train(e, ensembles.Data(d[0][None], d[1][None], [0.0, 0.0, 0.0])),
        "pass owner=",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "said"), WRONG)
def test_bad_input_is_refused_with_what_to_do(call, said):
    with pytest.raises(tacit.InputError) as caught:
        call(networks(), random_data(0))
    assert said in str(caught.value)

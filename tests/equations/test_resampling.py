"""Resampling, retraining and stacking; and one fit a checkpoint."""

import re

import pytest
import torch
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import reference, theory
from tacit.equations.resampling import bootstrap
from tacit.estimating import time_varying

STEP, STEPS = 0.05, 40


def linear(size=5):
    return nn.Linear(size, 1, bias=False).double()


def descend(data, seed=0):
    """Early-stopped descent from zero, with θ += (η/n) Xᵀ(y − Xθ)."""
    X, y = data
    theta = torch.zeros(X.shape[1], 1, dtype=X.dtype)
    for _ in range(STEPS):
        theta = theta + STEP / len(X) * X.T @ (y - X @ theta)
    return {"weight": theta.T}


class Recording:
    """A trainer that keeps what it was given and what it gave."""

    def __init__(self, train=descend):
        self.train, self.calls = train, []

    def __call__(self, data, seed):
        found = self.train(data, seed)
        copies = {n: p.detach().clone() for n, p in found.items()}
        self.calls.append((data, seed, copies))
        return found


def dense(model, loss, seen, families):
    """The stacked system, held whole."""
    designs = [reference.design(families, params) for _, _, params in seen]
    targets = [
        reference.endpoint_target(loss_of(model, loss, data), params) for data, _, params in seen
    ]
    return reference.fit(torch.cat(designs), torch.cat(targets))


@pytest.mark.parametrize("kind", ["pairs", "residual"])
@pytest.mark.parametrize("replicates", [1, 3, 12])
def test_it_equals_the_dense_stack_of_what_was_trained(kind, replicates):
    data, train, model = random_data(0), Recording(), linear()
    families = [tacit.regularizers.symmetric()]
    stacked = bootstrap(
        model, F.mse_loss, data, train, families, replicates=replicates, kind=kind, seed=3
    )
    assert len(stacked.sources) == len(train.calls) == replicates + 1
    assert all(a is b for a, b in zip(train.calls[0][0], data, strict=True))  # canonical, first
    found = torch.tensor(list(tacit.fit(stacked).strengths.values()), dtype=torch.float64)
    wanted = dense(model, F.mse_loss, train.calls, families)
    assert (found - wanted).norm() <= 1e-8 * wanted.norm()


def test_pairs_are_whole_examples_drawn_with_replacement():
    (X, y), train = random_data(1), Recording()
    bootstrap(linear(), F.mse_loss, (X, y), train, tacit.l2(), replicates=4)
    rows = {tuple(row): float(target) for row, target in zip(X.tolist(), y, strict=True)}
    for (Xs, ys), _, _ in train.calls[1:]:
        assert Xs.shape == X.shape
        drawn = [tuple(row) for row in Xs.tolist()]
        assert [rows[row] for row in drawn] == ys[:, 0].tolist()
        assert 0.5 < len(set(drawn)) / len(drawn) < 0.8  # 1 − 1/e of them, about


def test_residuals_are_those_of_the_endpoint_and_inputs_stay():
    (X, y), train = random_data(2), Recording()
    bootstrap(linear(), F.mse_loss, (X, y), train, tacit.l2(), replicates=3, kind="residual")
    fitted = X @ train.calls[0][2]["weight"].T
    residuals = (y - fitted)[:, 0]
    for (Xs, ys), _, _ in train.calls[1:]:
        assert Xs is X
        gaps = ((ys - fitted) - residuals).abs()
        assert gaps.shape == (len(X), len(X))
        assert gaps.min(1).values.max() < 1e-12


def test_only_the_residual_bootstrap_keeps_the_regularizer_shared():
    X, y = random_data(3, noise=2.0)
    truth = theory.early_stopping(X, STEP, STEPS)
    errors = {}
    for kind in ("pairs", "residual"):
        stacked = bootstrap(
            linear(),
            F.mse_loss,
            (X, y),
            descend,
            tacit.regularizers.symmetric(),
            replicates=12,
            kind=kind,
        )
        errors[kind] = float((tacit.fit(stacked).matrix() - truth).norm() / truth.norm())
    assert errors["residual"] < 1e-10
    assert errors["pairs"] > 1e-2


def test_fitted_values_come_from_eval_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 1)).double()
    (X, y), train = random_data(4), Recording(lambda data, seed: params_of(model))
    bootstrap(model.train(), F.mse_loss, (X, y), train, tacit.l2(), replicates=1, kind="residual")
    with torch.no_grad():
        fitted = model.eval()(X)
    targets = train.calls[1][0][1]
    assert ((targets - fitted) - (y - fitted).T).abs().min(1).values.max() < 1e-12


def test_the_same_seed_gives_the_same_bytes_and_more_replicates_only_add():
    def stacked(replicates, seed):
        return bootstrap(
            linear(), F.mse_loss, random_data(5), descend, tacit.l2(), replicates=replicates,
            seed=seed,
        )  # fmt: skip

    def content(equations):
        return [block.factor.numpy().tobytes() for block in equations.blocks]

    assert content(stacked(4, 0)) == content(stacked(4, 0))
    assert content(stacked(2, 0)) == content(stacked(4, 0))[:3]
    assert content(stacked(2, 0))[0] == content(stacked(2, 1))[0]  # the data itself
    assert content(stacked(2, 0))[1:] != content(stacked(2, 1))[1:]


def test_training_is_seeded_and_the_model_comes_back_as_it_was():
    model, data = tanh_mlp(0).train(), random_data(6)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, state = params_of(model), torch.get_rng_state()

    def train(sample, seed):
        """Goes on from the model's weights, with torch's own randomness."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.eval()
        for _ in range(3):
            optimizer.zero_grad()
            noise = 0.1 * torch.randn_like(sample[0])
            F.mse_loss(model(sample[0] + noise), sample[1]).backward()
            optimizer.step()
        return dict(model.named_parameters())

    def trained(replicates):
        recording = Recording(train)
        bootstrap(model, F.mse_loss, data, recording, tacit.l2(), replicates=replicates, seed=9)
        return recording.calls

    long, short = trained(3), trained(2)
    for (_, seed, params), (_, same, again) in zip(short, long, strict=False):
        assert seed == same
        assert all(torch.equal(params[n], again[n]) for n in params)
    assert len({seed for _, seed, _ in long}) == 4
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_are_sampling_probabilities():
    X, y = random_data(7, count=200)
    weights = torch.zeros(200)
    weights[:50], weights[50:100] = 3.0, 1.0
    train = Recording()
    bootstrap(linear(), F.mse_loss, (X, y), train, tacit.l2(), replicates=30, weights=weights)
    place = {value: k for k, value in enumerate(X[:, 0].tolist())}
    drawn = [place[v] for (Xs, _), _, _ in train.calls[1:] for v in Xs[:, 0].tolist()]
    assert max(drawn) < 100
    assert sum(k < 50 for k in drawn) / len(drawn) == pytest.approx(0.75, abs=0.03)
    assert torch.equal(train.calls[0][0][0], X)


def test_known_penalties_and_classes_go_through():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 2, (60,), generator=generator)
    model = nn.Linear(3, 2).double()

    def train(data, seed):
        params = {n: torch.zeros_like(p).requires_grad_() for n, p in model.named_parameters()}
        optimizer = torch.optim.LBFGS(
            params.values(), max_iter=400, tolerance_grad=1e-13, line_search_fn="strong_wolfe"
        )

        def closure():
            optimizer.zero_grad()
            logits = data[0] @ params["weight"].T + params["bias"]
            penalty = 0.02 * sum(p.square().sum() for p in params.values())
            total = F.cross_entropy(logits, data[1]) + penalty
            total.backward()
            return total

        optimizer.step(closure)
        return params

    def strength(known):
        stacked = bootstrap(
            model, F.cross_entropy, (X, labels), train, tacit.l2(), replicates=3, known=known
        )
        return tacit.fit(stacked).strengths["l2"]

    assert strength(None) == pytest.approx(0.02, rel=1e-4)
    assert strength({tacit.l2(): 0.015}) == pytest.approx(0.005, rel=1e-3)


REFUSED = [
    ({"replicates": 0}, "replicates is 0"),
    ({"replicates": True}, "replicates is True"),
    ({"seed": -1}, "seed is -1"),
    ({"kind": "block"}, "kind is 'block'"),
    ({"train": None}, "train is a NoneType"),
    ({"train": lambda data, seed: None}, "what train returned is a NoneType"),
    ({"train": lambda data, seed: {"w": torch.ones(1)}}, "missing weight, unknown w"),
    ({"train": lambda data, seed: {"weight": torch.ones(1, 4)}}, "shape (1, 4)"),
    ({"train": lambda data, seed: {"weight": torch.full((1, 5), torch.nan)}}, "NaN"),
    ({"data": list(random_data(0))}, "a list of 2 (Tensor)"),
    ({"data": (random_data(0)[0],)}, "a tuple of 1 (Tensor)"),
    ({"data": ([1.0], [2.0])}, "a tuple of 2 (list)"),
    ({"data": (random_data(0)[0], random_data(0)[1][:9])}, "[9, 64] rows"),
    ({"data": (torch.zeros(0, 5), torch.zeros(0, 1))}, "[0] rows"),
    ({"data": (random_data(0)[0], torch.ones(64, 1).long()), "kind": "residual"}, "torch.int64"),
    ({"weights": torch.ones(3)}, "shape (3,) for 64 examples"),
    ({"weights": -torch.ones(64)}, "not negative"),
    ({"weights": torch.zeros(64)}, "one above zero"),
    ({"weights": torch.full((64,), torch.inf)}, "finite"),
    ({"weights": "uniform"}, "weights is a str: pass a tensor"),
    ({"regularizers": []}, "pass at least one"),
    ({"model": None}, "model is a NoneType"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_wrong_calls_are_refused(change, message):
    call = {
        "model": linear(), "loss": F.mse_loss, "data": random_data(0), "train": descend,
        "regularizers": tacit.l2(), "replicates": 2,
    } | change  # fmt: skip
    with pytest.raises(tacit.InputError, match=re.escape(message)):
        bootstrap(**call)


def test_residuals_need_outputs_like_the_targets():
    X, y = random_data(0)

    def loss(output, target):
        return (output[:, 0] - target).square().mean()

    with pytest.raises(tacit.InputError, match="residuals need the two alike"):
        bootstrap(
            linear(), loss, (X, y[:, 0]), descend_flat, tacit.l2(), replicates=1, kind="residual"
        )


def descend_flat(data, seed):
    return descend((data[0], data[1][:, None]))


def test_nothing_is_trained_when_the_objective_is_refused():
    train = Recording()
    with pytest.raises(tacit.InputError, match="sum-reduced"):
        bootstrap(
            linear(), nn.MSELoss(reduction="sum"), random_data(0), train, tacit.l2(), replicates=1
        )
    assert not train.calls


def test_time_varying_is_one_fit_a_checkpoint():
    X, y = random_data(8)
    objective = tacit.Objective(linear(), F.mse_loss, (X, y))
    theta, path = torch.zeros(5, 1, dtype=torch.float64), {}
    for t in range(1, 31):
        theta = theta + STEP / len(X) * X.T @ (y - X @ theta)
        if t in (1, 10, 30):
            path[t] = {"weight": theta.T}
    fits = time_varying(objective, path, tacit.l2())
    assert list(fits) == [1, 10, 30]
    for t, found in fits.items():
        truth, at = theory.early_stopping(X, STEP, t), path[t]["weight"][0]
        assert found.strengths["l2"] == pytest.approx(float(at @ truth @ at / (at @ at)), rel=1e-9)
    less = time_varying(objective, path, tacit.l2(), known={tacit.l2(): 0.1})
    assert less[10].strengths["l2"] == pytest.approx(fits[10].strengths["l2"] - 0.1)


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        ({}, "checkpoints is empty"),
        ([{}], "checkpoints is a list"),
        ({3: None}, "checkpoint 3 is a NoneType"),
        ({"end": {"weight": torch.ones(1, 2)}}, "checkpoint 'end'"),
    ],
)
def test_wrong_checkpoints_are_refused(checkpoints, message):
    objective = tacit.Objective(linear(), F.mse_loss, random_data(0))
    with pytest.raises(tacit.InputError, match=re.escape(message)):
        time_varying(objective, checkpoints, tacit.l2())
    with pytest.raises(tacit.InputError, match="an objective is a NoneType"):
        time_varying(None, {1: {}}, tacit.l2())

"""Resampling, retraining and stacking, against dense systems of what was trained."""

import re

import pytest
import torch
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import InputError, reference, theory
from tacit.equations.resampling import bootstrap, less_collinear
from tacit.regularizers import gradient_norm

STEP, STEPS = 0.05, 40


def linear_model(size=5):
    return nn.Linear(size, 1, bias=False).double()


def early_stopping(data, seed=0):
    """Some steps θ += (η/n) Xᵀ(y − Xθ) from zero."""
    X, y = data
    theta = torch.zeros(X.shape[1], 1, dtype=X.dtype)
    for _ in range(STEPS):
        theta = theta + STEP / len(X) * X.T @ (y - X @ theta)
    return {"weight": theta.T}


class RecordingTrainer:
    """A trainer that records its data, its seed and the parameters that it returned."""

    def __init__(self, train=early_stopping):
        self.train, self.calls = train, []

    def __call__(self, data, seed):
        params = self.train(data, seed)
        copies = {n: p.detach().clone() for n, p in params.items()}
        self.calls.append((data, seed, copies))
        return params


def solve_dense(model, loss, calls, regularizers):
    """Strengths of the stacked system as one dense matrix."""
    designs = [reference.design(regularizers, params) for _, _, params in calls]
    targets = [
        reference.endpoint_target(loss_of(model, loss, data), params) for data, _, params in calls
    ]
    return reference.fit(torch.cat(designs), torch.cat(targets))


@pytest.mark.parametrize("kind", ["pairs", "residual"])
@pytest.mark.parametrize("replicates", [1, 3, 12])
def test_strengths_equal_those_of_the_dense_stack(kind, replicates):
    data, train, model = random_data(0), RecordingTrainer(), linear_model()
    regularizers = [tacit.regularizers.symmetric()]
    stacked = bootstrap(
        model, F.mse_loss, data, train, regularizers, replicates=replicates, kind=kind, seed=3
    )
    assert len(stacked.sources) == len(train.calls) == replicates + 1
    assert all(
        a is b for a, b in zip(train.calls[0][0], data, strict=True)
    )  # the data itself comes first
    strengths = torch.tensor(list(tacit.fit(stacked).strengths.values()), dtype=torch.float64)
    expected = solve_dense(model, F.mse_loss, train.calls, regularizers)
    assert (strengths - expected).norm() <= 1e-8 * expected.norm()


def test_pairs_are_whole_examples_drawn_with_replacement():
    (X, y), train = random_data(1), RecordingTrainer()
    bootstrap(linear_model(), F.mse_loss, (X, y), train, tacit.l2(), replicates=4)
    target_of = {tuple(row): float(target) for row, target in zip(X.tolist(), y, strict=True)}
    for (X_drawn, y_drawn), _, _ in train.calls[1:]:
        assert X_drawn.shape == X.shape
        rows = [tuple(row) for row in X_drawn.tolist()]
        assert [target_of[row] for row in rows] == y_drawn[:, 0].tolist()
        assert 0.5 < len(set(rows)) / len(rows) < 0.8  # about 1 − 1/e


def test_the_residual_bootstrap_resamples_residuals_of_the_endpoint():
    (X, y), train = random_data(2), RecordingTrainer()
    bootstrap(linear_model(), F.mse_loss, (X, y), train, tacit.l2(), replicates=3, kind="residual")
    fitted = X @ train.calls[0][2]["weight"].T
    residuals = (y - fitted)[:, 0]
    for (X_drawn, y_drawn), _, _ in train.calls[1:]:
        assert X_drawn is X
        distances = ((y_drawn - fitted) - residuals).abs()
        assert distances.shape == (len(X), len(X))
        assert distances.min(1).values.max() < 1e-12


def test_only_replicates_of_the_residual_bootstrap_share_one_regularizer():
    X, y = random_data(3, noise=2.0)
    truth = theory.early_stopping(X, STEP, STEPS)
    errors = {}
    for kind in ("pairs", "residual"):
        stacked = bootstrap(
            linear_model(),
            F.mse_loss,
            (X, y),
            early_stopping,
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
    (X, y), train = random_data(4), RecordingTrainer(lambda data, seed: params_of(model))
    bootstrap(model.train(), F.mse_loss, (X, y), train, tacit.l2(), replicates=1, kind="residual")
    with torch.no_grad():
        fitted = model.eval()(X)
    targets = train.calls[1][0][1]
    assert ((targets - fitted) - (y - fitted).T).abs().min(1).values.max() < 1e-12


def test_the_same_seed_gives_the_same_bytes_and_more_replicates_extend_fewer():
    def stacked(replicates, seed):
        return bootstrap(
            linear_model(), F.mse_loss, random_data(5), early_stopping, tacit.l2(),
            replicates=replicates, seed=seed,
        )  # fmt: skip

    def bytes_of(equations):
        return [block.factor.numpy().tobytes() for block in equations.blocks]

    assert bytes_of(stacked(4, 0)) == bytes_of(stacked(4, 0))
    assert bytes_of(stacked(2, 0)) == bytes_of(stacked(4, 0))[:3]
    assert bytes_of(stacked(2, 0))[0] == bytes_of(stacked(2, 1))[0]  # the data itself
    assert bytes_of(stacked(2, 0))[1:] != bytes_of(stacked(2, 1))[1:]


def test_training_is_seeded_and_the_model_is_restored():
    model, data = tanh_mlp(0).train(), random_data(6)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, state = params_of(model), torch.get_rng_state()

    def train(sample, seed):
        """Train on from the model's weights, with torch's random state."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.eval()
        for _ in range(3):
            optimizer.zero_grad()
            noise = 0.1 * torch.randn_like(sample[0])
            F.mse_loss(model(sample[0] + noise), sample[1]).backward()
            optimizer.step()
        return dict(model.named_parameters())

    def calls_of(replicates):
        recording = RecordingTrainer(train)
        bootstrap(model, F.mse_loss, data, recording, tacit.l2(), replicates=replicates, seed=9)
        return recording.calls

    longer, shorter = calls_of(3), calls_of(2)
    for (_, seed, params), (_, longer_seed, longer_params) in zip(shorter, longer, strict=False):
        assert seed == longer_seed
        assert all(torch.equal(params[n], longer_params[n]) for n in params)
    assert len({seed for _, seed, _ in longer}) == 4
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_are_sampling_probabilities():
    X, y = random_data(7, count=200)
    weights = torch.zeros(200)
    weights[:50], weights[50:100] = 3.0, 1.0
    train = RecordingTrainer()
    bootstrap(linear_model(), F.mse_loss, (X, y), train, tacit.l2(), replicates=30, weights=weights)
    index_of = {value: index for index, value in enumerate(X[:, 0].tolist())}
    drawn = [
        index_of[value]
        for (X_drawn, _), _, _ in train.calls[1:]
        for value in X_drawn[:, 0].tolist()
    ]
    assert max(drawn) < 100
    assert sum(index < 50 for index in drawn) / len(drawn) == pytest.approx(0.75, abs=0.03)
    assert torch.equal(train.calls[0][0][0], X)


def test_known_penalties_and_class_targets_are_supported():
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

    def estimate(known):
        stacked = bootstrap(
            model, F.cross_entropy, (X, labels), train, tacit.l2(), replicates=3, known=known
        )
        return tacit.fit(stacked).strengths["l2"]

    assert estimate(None) == pytest.approx(0.02, rel=1e-4)
    assert estimate({tacit.l2(): 0.015}) == pytest.approx(0.005, rel=1e-3)


OF_OLD_DATA = gradient_norm(tacit.Objective(linear_model(), F.mse_loss, random_data(0)))
REFUSED = [
    ({"replicates": 0}, "replicates is 0"),
    ({"replicates": True}, "replicates is True"),
    ({"seed": -1}, "seed is -1"),
    ({"kind": "block"}, "kind is 'block'"),
    ({"train": None}, "train is None"),
    ({"train": lambda data, seed: None}, "what train returned is None"),
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
    ({"regularizers": tacit.l2}, "cannot be called with an objective"),
    ({"regularizers": lambda _: [OF_OLD_DATA]}, "has the data of an earlier call"),
    ({"model": None}, "model is None"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_wrong_calls_are_refused(changes, message):
    arguments = {
        "model": linear_model(), "loss": F.mse_loss, "data": random_data(0),
        "train": early_stopping, "regularizers": tacit.l2(), "replicates": 2,
    } | changes  # fmt: skip
    with pytest.raises(tacit.InputError, match=re.escape(message)):
        bootstrap(**arguments)


def test_residuals_need_outputs_in_the_shape_of_the_targets():
    X, y = random_data(0)

    def loss(output, target):
        return (output[:, 0] - target).square().mean()

    def train(data, seed):
        return early_stopping((data[0], data[1][:, None]))

    with pytest.raises(tacit.InputError, match=r"residuals need equal shapes.*kind='pairs'"):
        bootstrap(
            linear_model(), loss, (X, y[:, 0]), train, tacit.l2(), replicates=1, kind="residual"
        )


def test_nothing_is_trained_when_the_objective_is_refused():
    train = RecordingTrainer()
    with pytest.raises(tacit.InputError, match="sum-reduced"):
        bootstrap(
            linear_model(),
            nn.MSELoss(reduction="sum"),
            random_data(0),
            train,
            tacit.l2(),
            replicates=1,
        )
    assert not train.calls


def test_candidates_that_depend_on_data_follow_the_resamples():
    """Training minimises L + 0.3·R, R a penalty of its own data: exact from every resample."""
    X, y = random_data(3, count=30, inputs=3)
    model = torch.nn.Linear(3, 1, bias=False).double()

    def penalty(model, batch):
        return (model(batch[0]).square().sum(1)) * batch[0][:, 0].square()

    def train(data, seed):
        X, y = data
        weighted = X * X[:, :1].square()
        H = (2 * X.T @ X + 0.6 * X.T @ weighted) / len(X)
        return {"weight": torch.linalg.solve(H, 2 * X.T @ y / len(X)).T}

    def candidates(objective):
        on_data = tacit.Objective.from_batch_loss(model, penalty, objective.data)
        return [tacit.regularizers.mean_of(on_data, name="R")]

    stacked = tacit.bootstrap(model, F.mse_loss, (X, y), train, candidates, replicates=5)
    fit = tacit.fit(stacked)
    assert len(fit.sources) == 6
    assert fit.strengths["R"] == pytest.approx(0.3, rel=1e-9)
    assert fit.explained == pytest.approx(1, abs=1e-9)
    old = candidates(tacit.Objective(model, F.mse_loss, (X, y)))
    with pytest.raises(InputError, match=r"R would keep the data.*as a function of the objective"):
        tacit.bootstrap(model, F.mse_loss, (X, y), train, old, replicates=2)
    known = {old[0]: 0.3}
    with pytest.raises(InputError, match="R would keep the data"):
        tacit.bootstrap(model, F.mse_loss, (X, y), train, tacit.l2(), replicates=2, known=known)


def test_weights_of_less_collinear_examples_separate_penalties():
    """Most examples have only those inputs that both penalties see; the rest tell them apart."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    X[:180, 2:] = 0
    y = torch.randn(200, 1, generator=generator, dtype=torch.float64)
    model = torch.nn.Linear(4, 1, bias=False).double()

    first, second = (
        tacit.regularizers.mean_of(
            tacit.Objective.from_batch_loss(model, loss, (X, y)), name=loss.__name__
        )
        for loss in (left, right)
    )
    weights = less_collinear([first, second])
    assert weights.mean() == pytest.approx(1)
    assert weights[180:].mean() > 5 * weights[:180].mean()

    def both(objective):
        return [
            tacit.regularizers.mean_of(
                tacit.Objective.from_batch_loss(model, loss, objective.data), name=loss.__name__
            )
            for loss in (left, right)
        ]

    def train(data, seed):
        return {"weight": model.weight}

    conditions = [
        tacit.fit(
            tacit.bootstrap(model, F.mse_loss, (X, y), train, both, replicates=5, weights=chosen)
        ).condition
        for chosen in (None, weights)
    ]
    assert conditions[1] < conditions[0] / 2
    with pytest.raises(InputError, match="two or more penalties"):
        less_collinear([first, tacit.l2()])


def left(model, batch):
    """Of the first two inputs."""
    return (batch[0] * torch.tensor([1.0, 1, 0, 0]).double() @ model.weight.T)[:, 0].square()


def right(model, batch):
    """Of all four inputs."""
    return (batch[0] @ model.weight.T)[:, 0].square()

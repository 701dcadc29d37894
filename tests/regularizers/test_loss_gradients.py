"""Penalties of the loss gradient against dense Hessians and gradients of single batches."""

import pytest
import torch
from support.models import loss_of, params_of, random_data, tanh_mlp
from support.objectives import dropout_objective
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit import InputError, Objective, reference
from tacit.regularizers import gradient_l1, gradient_norm, gradient_variance
from tacit.techniques import weight_noise

MODEL, DATA = tanh_mlp(0, sizes=(3, 4, 2)), random_data(1, count=9, inputs=3, outputs=2)
OBJECTIVE, PARAMS = Objective(MODEL, F.mse_loss, DATA), params_of(MODEL)
MEAN_LOSS = loss_of(MODEL, F.mse_loss, DATA)


def column_of(regularizer, params=PARAMS):
    (column,) = regularizer.gradient(params).values()
    return reference.flat(column)


def dense(function, params=PARAMS):
    return reference.hessian(function, params), reference.gradient(function, params)


LAST_LAYER = torch.arange(26) >= 16
COLUMNS = {
    "squared": (lambda **o: gradient_norm(OBJECTIVE, **o), lambda g: 2 * g),
    "norm": (lambda **o: gradient_norm(OBJECTIVE, power=1, **o), lambda g: g / g.norm()),
    "of a layer": (
        lambda **o: gradient_norm(OBJECTIVE, of="2", **o),
        lambda g: 2 * g * LAST_LAYER,
    ),
    "norm of a layer": (
        lambda **o: gradient_norm(OBJECTIVE, power=1, of="2", **o),
        lambda g: g * LAST_LAYER / g[LAST_LAYER].norm(),
    ),
    "l1": (lambda **o: gradient_l1(OBJECTIVE, eps=0.01, **o), lambda g: g / (g**2 + 0.01).sqrt()),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_the_column_is_the_hessian_times_the_derivative_by_the_gradient(name):
    make, derivative = COLUMNS[name]
    hessian, gradient = dense(MEAN_LOSS)
    expected = hessian @ derivative(gradient)
    torch.testing.assert_close(column_of(make()), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("given_by", ["known=", "with_known"])
@pytest.mark.parametrize("name", COLUMNS)
def test_known_penalties_are_in_the_gradient_and_in_the_hessian(name, given_by):
    make, derivative = COLUMNS[name]
    known = {tacit.l2(): 0.1, tacit.regularizer("cubes", lambda p: (p["0.bias"] ** 3).sum()): 0.2}

    def penalised(params):
        return MEAN_LOSS(params) + sum(s * r.value(params)[0] for r, s in known.items())

    hessian, gradient = dense(penalised)
    family = make(known=known) if given_by == "known=" else make().with_known(known)
    expected = hessian @ derivative(gradient)
    torch.testing.assert_close(column_of(family), expected, rtol=1e-10, atol=1e-12)
    assert family.with_known is None


def test_a_scope_limits_the_column_but_not_the_norm():
    whole, scoped = gradient_norm(OBJECTIVE), gradient_norm(OBJECTIVE, scope="2")
    assert torch.equal(whole.value(PARAMS), scoped.value(PARAMS))
    assert set(scoped.bind(PARAMS).active) == {"2.weight", "2.bias"}


def test_norms_of_layers_sum_to_the_whole():
    layers = [gradient_norm(OBJECTIVE, of=layer, name=layer) for layer in ("0", "2")]
    total = sum(map(column_of, layers))
    torch.testing.assert_close(total, column_of(gradient_norm(OBJECTIVE)))


def test_the_norm_has_no_column_where_the_gradient_is_zero_up_to_rounding():
    X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).double()
    y = torch.randn(20, 1, generator=torch.Generator().manual_seed(1)).double()
    optimum = {"weight": torch.linalg.lstsq(X, y).solution.T.contiguous()}
    model = nn.Linear(3, 1, bias=False).double()
    norm = gradient_norm(Objective(model, F.mse_loss, (X, y)), power=1)
    assert float(norm.value(optimum)) < 1e-14
    with pytest.raises(InputError, match=r"has no derivative here.*power=2"):
        norm.bind(optimum)
    near = {"weight": optimum["weight"] + 1e-9}
    assert column_of(norm, near).isfinite().all()


def gradients_of(parts):
    return torch.stack([dense(loss_of(MODEL, F.mse_loss, part))[1] for part in parts])


@pytest.mark.parametrize("form", ["tensors", "list", "loader"])
def test_variance_and_its_column_are_those_of_the_batches(form):
    X, y = DATA
    batches = list(zip(X.split(4), y.split(4), strict=True))
    objective = {
        "tensors": lambda: Objective(MODEL, F.mse_loss, DATA, batch_size=4),
        "list": lambda: Objective(MODEL, F.mse_loss, batches),
        "loader": lambda: Objective(MODEL, F.mse_loss, DataLoader(TensorDataset(X, y), 4)),
    }[form]()
    weights, parts = torch.tensor([4, 4, 1]).double() / 9, [dense_batch(b) for b in batches]
    gradients = torch.stack([g for _, g in parts])
    deviations = gradients - weights @ gradients
    penalty = gradient_variance(objective)
    torch.testing.assert_close(penalty.value(PARAMS)[0], weights @ deviations.square().sum(1))
    products = torch.stack([h @ d for (h, _), d in zip(parts, deviations, strict=True)])
    torch.testing.assert_close(column_of(penalty), 2 * weights @ products)


def dense_batch(batch):
    return dense(loss_of(MODEL, F.mse_loss, batch))


def test_variance_over_equal_batches_is_what_the_mean_squared_norm_exceeds():
    X, y = (part[:8] for part in DATA)
    objective = Objective(MODEL, F.mse_loss, (X, y), batch_size=2)
    mean_square = gradients_of(zip(X.split(2), y.split(2), strict=True)).square().sum(1).mean()
    both = gradient_variance(objective).value(PARAMS) + gradient_norm(objective).value(PARAMS)
    torch.testing.assert_close(both[0], mean_square)


class ByTask(nn.Module):
    """A head for each task; a batch has one task."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)]).double()

    def forward(self, x):
        return torch.tanh(self.heads[int(x[0, 0] > 0)](x))


def test_a_parameter_that_a_batch_does_not_use_deviates_by_the_mean():
    model = ByTask()
    X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).double()
    X[:, 0] = torch.tensor([1.0] * 4 + [-1.0] * 4)
    y = torch.ones(8, 1).double()
    batches = [(X[:4], y[:4]), (X[4:], y[4:])]
    penalty = gradient_variance(Objective(model, F.mse_loss, batches))
    params = params_of(model)
    rows = torch.stack([dense(loss_of(model, F.mse_loss, b), params)[1] for b in batches])
    expected = (rows - rows.mean(0)).square().sum(1).mean()
    torch.testing.assert_close(penalty.value(params)[0], expected)
    column = column_of(penalty, params)
    torch.testing.assert_close(column, reference.design([penalty], params)[:, 0])
    assert column.all()


def shuffling(**options):
    return DataLoader(TensorDataset(*DATA), batch_size=4, shuffle=True, **options)


NOT_THE_BATCHES = {
    "batches of tacit's own size": (lambda: OBJECTIVE, "pass batch_size="),
    "a random loss": (lambda: dropout_objective(random_data(0), batch_size=8), "training=True"),
    "a technique": (
        lambda: weight_noise(Objective(MODEL, F.mse_loss, DATA, batch_size=3), 0.3),
        r"has a technique \(mse_loss with weight_noise",
    ),
    "a shuffling loader": (lambda: Objective(MODEL, F.mse_loss, shuffling()), "batch_size=1"),
    "a shuffling loader with a generator": (
        lambda: Objective(MODEL, F.mse_loss, shuffling(generator=torch.Generator())),
        "is shuffled",
    ),
    "one batch": (lambda: Objective(MODEL, F.mse_loss, [DATA]), "one batch"),
    "one batch of tensors": (
        lambda: Objective(MODEL, F.mse_loss, DATA, batch_size=9),
        "pass the batches of training",
    ),
}


@pytest.mark.parametrize("name", NOT_THE_BATCHES)
def test_variance_is_refused_where_the_batches_are_not_those_of_training(name):
    make, message = NOT_THE_BATCHES[name]
    objective = make()
    with pytest.raises(InputError, match=message):
        gradient_variance(objective).bind(objective.point())


def test_variance_of_batch_norm_is_over_the_groupings_of_its_draws():
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)
    model = nn.Sequential(*layers).double()
    options = {"batch_size": 3, "batch_norm": "batch", "draws": 4}
    penalty = gradient_variance(Objective(model, F.mse_loss, DATA, **options))
    params = params_of(model)
    column = column_of(penalty, params)
    torch.testing.assert_close(column, reference.design([penalty], params)[:, 0])
    direction = {n: torch.ones_like(p) for n, p in params.items()}
    ahead, behind = (
        penalty.value({n: p + h * direction[n] for n, p in params.items()}) for h in (1e-5, -1e-5)
    )
    assert float(column.sum()) == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-6)

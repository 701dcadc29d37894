"""L(θ) and its derivatives against dense oracles, for every form of data and dtype."""

import pytest
import torch
from support.columns import random_params
from support.models import image_data, loss_of, params_of, random_data, small_cnn, tanh_mlp
from support.objectives import assert_close, split_batches, squared_errors
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tacit import Objective, reference

CASES = {
    "mlp": (lambda: tanh_mlp(0), F.mse_loss, random_data(1)),
    "cnn": (lambda: small_cnn(0), F.cross_entropy, image_data(1)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_value_gradient_and_hessian_product_equal_the_dense_oracle(case):
    make_model, loss, data = case
    model = make_model()
    objective = Objective(model, loss, data, batch_size=7, batch_norm="running")
    params, dense_loss = params_of(model), loss_of(model, loss, data)
    direction = random_params(params, seed=2)
    assert objective.value() == pytest.approx(float(dense_loss(params)), rel=1e-12)
    assert_close(objective.gradient(), reference.gradient(dense_loss, params), tolerance=1e-12)
    product = reference.hessian(dense_loss, params) @ reference.flat(direction)
    assert_close(objective.hvp(direction), product, tolerance=1e-12)


def test_derivatives_are_evaluated_at_the_parameters_that_are_passed():
    model, data = tanh_mlp(0), random_data(1)
    objective = Objective(model, F.mse_loss, data)
    dense_loss = loss_of(model, F.mse_loss, data)
    point, direction = (random_params(params_of(model), seed=seed) for seed in (2, 3))
    assert objective.value(point) == pytest.approx(float(dense_loss(point)), rel=1e-12)
    assert_close(objective.gradient(point), reference.gradient(dense_loss, point), tolerance=1e-12)
    product = reference.hessian(dense_loss, point) @ reference.flat(direction)
    assert_close(objective.hvp(direction, point), product, tolerance=1e-12)


def test_a_ragged_last_batch_counts_by_its_size():
    X, y = random_data(1, count=4)
    model = tanh_mlp(0)
    ragged = Objective(model, F.mse_loss, [(X[:3], y[:3]), (X[3:], y[3:])])
    losses = (model(X) - y).detach().square()[:, 0]
    assert ragged.value() == pytest.approx(float(losses.mean()), rel=1e-12)
    assert ragged.value() != pytest.approx(float(losses[:3].mean() + losses[3]) / 2, rel=1e-3)
    assert ragged.count == 4


class PairDataset(Dataset):
    def __init__(self, X, y):
        self.X, self.y = X, y

    def __len__(self):
        return len(self.X)

    def __getitem__(self, index):
        return self.X[index].clone(), self.y[index].clone()


class DictDataset(PairDataset):
    def __getitem__(self, index):
        return {"x": self.X[index], "y": self.y[index]}


FORMS = {
    "loader": lambda X, y: DataLoader(TensorDataset(X, y), batch_size=7),
    "shuffling loader": lambda X, y: DataLoader(TensorDataset(X, y), batch_size=7, shuffle=True),
    "list of batches": split_batches,
    "lists as batches": lambda X, y: [[a, b] for a, b in split_batches(X, y)],
    "map-style data set": PairDataset,
}
DICT_FORMS = {
    "dict of tensors": lambda X, y: {"x": X, "y": y},
    "list of dicts": lambda X, y: [{"x": a, "y": b} for a, b in split_batches(X, y)],
    "loader of dicts": lambda X, y: DataLoader(DictDataset(X, y), batch_size=7),
}


@pytest.mark.parametrize("form", [*FORMS, *DICT_FORMS])
def test_every_form_of_data_gives_the_same_objective(form):
    torch.manual_seed(0)
    model, (X, y) = tanh_mlp(0, sizes=(5, 8, 2)), random_data(1, count=60, outputs=2)
    expected = Objective(model, F.mse_loss, (X, y))
    if form in FORMS:
        objective = Objective(model, F.mse_loss, FORMS[form](X, y))
    else:
        data = DICT_FORMS[form](X, y)
        objective = Objective.from_batch_loss(model, squared_errors, data, batch_size=7)
    direction = random_params(params_of(model), seed=2)
    assert objective.value() == pytest.approx(expected.value(), rel=1e-12)
    assert_close(objective.gradient(), expected.gradient(), tolerance=1e-12)
    assert_close(objective.hvp(direction), expected.hvp(direction), tolerance=1e-12)
    assert objective.count == 60


def test_several_inputs_go_to_the_model_in_order():
    torch.manual_seed(0)
    model = nn.Bilinear(3, 5, 1).double()
    (A, _), (B, y) = random_data(1, inputs=3), random_data(2)
    objective = Objective(model, F.mse_loss, (A, B, y), batch_size=10)
    dense_loss = loss_of(model, F.mse_loss, (A, B, y))
    expected = reference.gradient(dense_loss, params_of(model))
    assert_close(objective.gradient(), expected, tolerance=1e-12)


def test_an_input_without_rows_is_passed_to_the_model_whole():
    class Scaled(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale

    torch.manual_seed(0)
    model, (X, y) = Scaled(5, 1).double(), random_data(1)
    objective = Objective(model, F.mse_loss, [(X, torch.tensor(3.0), y)])
    expected = F.mse_loss(model(X, 3.0), y).item()
    assert objective.value() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 2**24), (torch.bfloat16, 2**8)])
def test_sums_over_batches_are_in_float64_for_any_dtype(dtype, large):
    model = nn.Linear(1, 1, bias=False).to(dtype)
    batches = [torch.full((1, 1), x, dtype=dtype) for x in (large, *[1] * 64)]
    objective = Objective.from_batch_loss(model, lambda m, x: m(x)[:, 0], batches)
    gradient = objective.gradient({"weight": torch.ones(1, 1)})["weight"]
    assert gradient.dtype == torch.float64
    assert gradient.item() == (large + 64) / 65  # in the model's dtype large + 1 is large
    assert objective.value({"weight": torch.ones(1, 1)}) == (large + 64) / 65


def test_a_bfloat16_model_gives_nearly_the_float32_answer():
    X, y = random_data(1)
    gradients = [
        Objective(tanh_mlp(0).to(dtype), F.mse_loss, (X.to(dtype), y.to(dtype))).gradient()
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert all(t.dtype == torch.float64 and t.isfinite().all() for t in gradients[0].values())
    assert_close(*gradients, tolerance=3e-2)


def test_autocast_is_respected():
    model = tanh_mlp(0).float()
    X, y = (t.float() for t in random_data(1))
    objective = Objective(model, F.mse_loss, (X, y), batch_size=16)
    plain = reference.flat(objective.gradient())
    expected = torch.zeros_like(plain)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = reference.flat(objective.gradient())
        for inputs, targets in split_batches(X, y, size=16):
            parts = torch.autograd.grad(
                F.mse_loss(model(inputs), targets), list(model.parameters())
            )
            expected += (
                torch.cat([part.double().flatten() for part in parts]) * len(inputs) / len(X)
            )
    assert_close(autocast, expected, tolerance=1e-12)
    assert 1e-4 < float((autocast - plain).norm() / plain.norm()) < 3e-2


def test_count_is_the_number_of_examples_not_of_batches_or_weights():
    model, (X, y) = tanh_mlp(0), random_data(1, count=10)
    assert Objective(model, F.mse_loss, (X, y), weights=torch.full((10,), 3.0)).count == 10
    positive = Objective.from_batch_loss(
        model, lambda m, b: m(b[0])[b[1] > 0].square(), split_batches(X, y, size=1)
    )
    assert positive.count == int((y > 0).sum()) < 10
    expected = model(X)[y > 0].square().mean()  # batches without such an example have weight 0
    assert positive.value() == pytest.approx(expected.item(), rel=1e-12)

"""L(θ) and its derivatives against dense oracles, whatever holds the data."""

import io
import sys

import pytest
import torch
from support.models import image_data, loss_of, params_of, random_data, small_cnn, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import tacit
from tacit import Objective, reference
from tacit.objective import passes as progress


def assert_close(found, expected, *, tolerance):
    found, expected = (reference.flat(t) if isinstance(t, dict) else t for t in (found, expected))
    error = float((found - expected).norm() / expected.norm())
    assert error <= tolerance, f"relative error {error:.1e}"


def random_like(params, seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator).to(p) for n, p in params.items()}


def squares(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean(1)


PROBLEMS = {
    "mlp": (lambda: tanh_mlp(0), F.mse_loss, random_data(1)),
    "cnn": (lambda: small_cnn(0), F.cross_entropy, image_data(1)),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_value_gradient_and_hessian_product_equal_the_dense_oracle(problem):
    make, loss, data = problem
    model = make()
    objective = Objective(model, loss, data, batch_size=7)
    params, dense = params_of(model), loss_of(model, loss, data)
    along = random_like(params, seed=2)
    assert objective.value() == pytest.approx(float(dense(params)), rel=1e-12)
    assert_close(objective.gradient(), reference.gradient(dense, params), tolerance=1e-12)
    product = reference.hessian(dense, params) @ reference.flat(along)
    assert_close(objective.hvp(along), product, tolerance=1e-12)


def test_params_say_where_to_evaluate():
    model, data = tanh_mlp(0), random_data(1)
    objective, dense = Objective(model, F.mse_loss, data), loss_of(model, F.mse_loss, data)
    there, along = random_like(params_of(model), seed=2), random_like(params_of(model), seed=3)
    assert objective.value(there) == pytest.approx(float(dense(there)), rel=1e-12)
    assert_close(objective.gradient(there), reference.gradient(dense, there), tolerance=1e-12)
    product = reference.hessian(dense, there) @ reference.flat(along)
    assert_close(objective.hvp(along, there), product, tolerance=1e-12)


def test_the_hessian_of_a_loss_that_is_linear_in_the_parameters_is_zero():
    model = nn.Linear(5, 1).double()
    objective = Objective.from_batch_loss(model, lambda m, b: m(b[0])[:, 0], random_data(0))
    assert all(not t.any() for t in objective.hvp(random_like(params_of(model), 1)).values())


def test_a_ragged_last_batch_counts_by_its_size():
    X, y = random_data(1, count=4)
    model = tanh_mlp(0)
    ragged = Objective(model, F.mse_loss, [(X[:3], y[:3]), (X[3:], y[3:])])
    each = (model(X) - y).detach().square()[:, 0]
    assert ragged.value() == pytest.approx(float(each.mean()), rel=1e-12)
    assert ragged.value() != pytest.approx(float(each[:3].mean() + each[3]) / 2, rel=1e-3)
    assert ragged.count == 4


class Pairs(Dataset):
    def __init__(self, X, y):
        self.X, self.y = X, y

    def __len__(self):
        return len(self.X)

    def __getitem__(self, index):
        return self.X[index].clone(), self.y[index].clone()


class Named(Pairs):
    def __getitem__(self, index):
        return {"x": self.X[index], "y": self.y[index]}


def cut(X, y, size=7):
    return list(zip(X.split(size), y.split(size), strict=True))


FORMS = {
    "loader": lambda X, y: DataLoader(TensorDataset(X, y), batch_size=7),
    "shuffling loader": lambda X, y: DataLoader(TensorDataset(X, y), batch_size=7, shuffle=True),
    "list of batches": cut,
    "lists as batches": lambda X, y: [[a, b] for a, b in cut(X, y)],
    "map-style data set": Pairs,
}
DICT_FORMS = {
    "dict of tensors": lambda X, y: {"x": X, "y": y},
    "list of dicts": lambda X, y: [{"x": a, "y": b} for a, b in cut(X, y)],
    "loader of dicts": lambda X, y: DataLoader(Named(X, y), batch_size=7),
}


@pytest.mark.parametrize("form", [*FORMS, *DICT_FORMS])
def test_whatever_holds_the_data_gives_the_same(form):
    torch.manual_seed(0)
    model, (X, y) = tanh_mlp(0, sizes=(5, 8, 2)), random_data(1, count=60, outputs=2)
    expected = Objective(model, F.mse_loss, (X, y))
    if form in FORMS:
        objective = Objective(model, F.mse_loss, FORMS[form](X, y))
    else:
        objective = Objective.from_batch_loss(model, squares, DICT_FORMS[form](X, y), batch_size=7)
    along = random_like(params_of(model), seed=2)
    assert objective.value() == pytest.approx(expected.value(), rel=1e-12)
    assert_close(objective.gradient(), expected.gradient(), tolerance=1e-12)
    assert_close(objective.hvp(along), expected.hvp(along), tolerance=1e-12)
    assert objective.count == 60


def test_several_inputs_go_to_the_model_in_order():
    torch.manual_seed(0)
    model = nn.Bilinear(3, 5, 1).double()
    (A, _), (B, y) = random_data(1, inputs=3), random_data(2)
    objective = Objective(model, F.mse_loss, (A, B, y), batch_size=10)
    dense = loss_of(model, F.mse_loss, (A, B, y))
    oracle = reference.gradient(dense, params_of(model))
    assert_close(objective.gradient(), oracle, tolerance=1e-12)


def test_an_input_without_rows_is_handed_on_whole():
    class Scaled(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale

    torch.manual_seed(0)
    model, (X, y) = Scaled(5, 1).double(), random_data(1)
    objective = Objective(model, F.mse_loss, [(X, torch.tensor(3.0), y)])
    expected = F.mse_loss(model(X, 3.0), y).item()
    assert objective.value() == pytest.approx(expected, rel=1e-12)


WEIGHTED = {
    "weights of tensors": lambda model, X, y, w: Objective(
        model, F.mse_loss, (X, y), weights=w, batch_size=5
    ),
    "weights beside a batch loss": lambda model, X, y, w: Objective.from_batch_loss(
        model, squares, {"x": X, "y": y}, weights=w, batch_size=5
    ),
    "weights from a batch loss": lambda model, X, y, w: Objective.from_batch_loss(
        model, lambda m, b: (squares(m, b), b["w"]), {"x": X, "y": y, "w": w}, batch_size=5
    ),
}


@pytest.mark.parametrize("make", WEIGHTED.values(), ids=WEIGHTED)
def test_weights_make_a_weighted_mean(make):
    model, (X, y) = tanh_mlp(0), random_data(1, count=32)
    w = torch.rand(32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    w[5:10] = 0  # a whole batch
    objective = make(model, X, y, w)

    def formula(output, target):
        return (w * (output - target).square()[:, 0]).sum() / w.sum()

    dense = loss_of(model, formula, (X, y))
    assert objective.value() == pytest.approx(float(dense(params_of(model))), rel=1e-12)
    oracle = reference.gradient(dense, params_of(model))
    assert_close(objective.gradient(), oracle, tolerance=1e-12)


@pytest.mark.parametrize("make", WEIGHTED.values(), ids=WEIGHTED)
def test_whole_weights_equal_duplicated_data(make):
    model, (X, y) = tanh_mlp(0), random_data(1, count=32)
    times = torch.arange(32) % 4
    twice = (X.repeat_interleave(times, 0), y.repeat_interleave(times, 0))
    duplicated = Objective(model, F.mse_loss, twice).gradient()
    assert_close(make(model, X, y, times).gradient(), duplicated, tolerance=1e-12)


def test_weights_go_with_classes_as_targets():
    model, (X, y) = small_cnn(0), image_data(1)
    w = torch.arange(1, 61).double() / 7
    found = Objective(model, F.cross_entropy, (X, y), weights=w, batch_size=16)
    losses = F.cross_entropy(model(X), y, reduction="none")
    expected = ((w * losses).sum() / w.sum()).item()
    assert found.value() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("dtype", "big"), [(torch.float32, 2**24), (torch.bfloat16, 2**8)])
def test_sums_are_kept_in_float64_whatever_the_dtype(dtype, big):
    model = nn.Linear(1, 1, bias=False).to(dtype)
    batches = [torch.full((1, 1), x, dtype=dtype) for x in (big, *[1] * 64)]
    objective = Objective.from_batch_loss(model, lambda m, x: m(x)[:, 0], batches)
    gradient = objective.gradient({"weight": torch.ones(1, 1)})["weight"]
    assert gradient.dtype == torch.float64
    assert gradient.item() == (big + 64) / 65  # in the model's dtype big + 1 is big
    assert objective.value({"weight": torch.ones(1, 1)}) == (big + 64) / 65


def test_a_bfloat16_model_gives_nearly_the_float32_answer():
    X, y = random_data(1)
    found = [
        Objective(tanh_mlp(0).to(dtype), F.mse_loss, (X.to(dtype), y.to(dtype))).gradient()
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert all(t.dtype == torch.float64 and t.isfinite().all() for t in found[0].values())
    assert_close(*found, tolerance=3e-2)


def test_autocast_is_respected():
    model = tanh_mlp(0).float()
    X, y = (t.float() for t in random_data(1))
    objective = Objective(model, F.mse_loss, (X, y), batch_size=16)
    plain = reference.flat(objective.gradient())
    loop = torch.zeros_like(plain)
    with torch.autocast("cpu", torch.bfloat16):
        found = reference.flat(objective.gradient())
        for a, b in cut(X, y, size=16):
            parts = torch.autograd.grad(F.mse_loss(model(a), b), list(model.parameters()))
            loop += torch.cat([part.double().flatten() for part in parts]) * len(a) / len(X)
    assert_close(found, loop, tolerance=1e-12)
    assert 1e-4 < float((found - plain).norm() / plain.norm()) < 3e-2


def test_count_is_of_units_not_of_batches_or_weights():
    model, (X, y) = tanh_mlp(0), random_data(1, count=10)
    assert Objective(model, F.mse_loss, (X, y), weights=torch.full((10,), 3.0)).count == 10
    positive = Objective.from_batch_loss(
        model, lambda m, b: m(b[0])[b[1] > 0].square(), cut(X, y, size=1)
    )
    assert positive.count == int((y > 0).sum()) < 10
    expected = model(X)[y > 0].square().mean()  # batches without any such unit weigh nothing
    assert positive.value() == pytest.approx(expected.item(), rel=1e-12)


class Attention(nn.Module):
    """Reads its tokens through torch's attention function, or through its module."""

    def __init__(self, module):
        super().__init__()
        self.heads = nn.MultiheadAttention(4, 2, batch_first=True) if module else None
        self.project, self.out = nn.Linear(4, 12), nn.Linear(4, 1)

    def forward(self, x):
        q, k, v = self.project(x).split(4, dim=-1)
        if self.heads is None:
            mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        else:
            mixed = self.heads(q, k, v, need_weights=False)[0]
        return self.out(mixed.mean(1))


@pytest.mark.parametrize("module", [False, True], ids=["function", "module"])
def test_hessian_products_go_through_attention(module):
    torch.manual_seed(0)
    model = Attention(module).double()
    X = torch.randn(12, 3, 4, dtype=torch.float64)
    data = X, torch.sin(X.sum((1, 2)))[:, None]
    along = random_like(params_of(model), seed=1)
    with sdpa_kernel(SDPBackend.MATH):
        H = reference.hessian(loss_of(model, F.mse_loss, data), params_of(model))
    product = Objective(model, F.mse_loss, data, batch_size=5).hvp(along)
    assert_close(product, H @ reference.flat(along), tolerance=1e-10)


def loader_of(size, **options):
    X, y = random_data(1, count=12)
    return DataLoader(TensorDataset(X, y), batch_size=size, **options)


def batches_of(sampler, *, size=5, drop_last=True):
    X, y = random_data(1, count=12)
    sampler = BatchSampler(sampler, size, drop_last)
    return DataLoader(TensorDataset(X, y), batch_sampler=sampler)


def draws_from(sampler):
    return loader_of(4, sampler=sampler)


UNSTEADY = {
    "drops some": (lambda: loader_of(5, shuffle=True, drop_last=True), "drop_last=False"),
    "batch sampler drops": (lambda: batches_of(RandomSampler(range(12))), "drop_last=False"),
    "subset drops": (lambda: batches_of(SubsetRandomSampler(range(12))), "drop_last=False"),
    "replaces": (lambda: draws_from(RandomSampler(range(12), replacement=True)), "each example"),
    "weighs": (lambda: draws_from(WeightedRandomSampler([1.0] * 12, 12)), "each example once"),
    "picks": (lambda: draws_from(RandomSampler(range(12), num_samples=8)), "each example once"),
}


@pytest.mark.parametrize(("make", "words"), UNSTEADY.values(), ids=UNSTEADY)
def test_a_loader_that_reads_other_examples_every_time_is_refused(make, words):
    with pytest.raises(tacit.InputError, match=words):
        Objective(tanh_mlp(0), F.mse_loss, make())


STEADY = {
    "shuffles and drops nothing": lambda: loader_of(4, shuffle=True, drop_last=True),
    "drops the same": lambda: loader_of(5, drop_last=True),
    "shuffles a subset": lambda: draws_from(SubsetRandomSampler(range(8))),
}


@pytest.mark.parametrize("make", STEADY.values(), ids=STEADY)
def test_a_loader_that_reads_the_same_examples_every_time_is_accepted(make):
    torch.manual_seed(0)
    objective = Objective(tanh_mlp(0), F.mse_loss, make())
    first = objective.gradient()
    torch.manual_seed(1)
    assert_close(objective.gradient(), first, tolerance=1e-12)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_long_pass_draws_a_bar_on_terminals_alone(monkeypatch):
    def gradient(stream):
        monkeypatch.setattr(sys, "stderr", stream)
        return objective.gradient(), stream.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    objective = Objective(tanh_mlp(0), F.mse_loss, random_data(1), batch_size=4)
    expected, quick = gradient(Terminal())
    monkeypatch.setattr(progress, "PATIENCE", 0)
    found, drawn = gradient(Terminal())
    assert (quick, gradient(io.StringIO())[1]) == ("", "")
    assert "mse_loss" in drawn
    assert "16/16" in drawn
    assert_close(found, expected, tolerance=0)

"""Directional derivatives of single examples, against the gradient of each example."""

import pytest
import torch
from support.hard_to_differentiate import (
    Attention,
    Checkpointed,
    Custom,
    DetachedSquare,
    OnceSquare,
    Recurrent,
)
from support.models import image_data, params_of, random_data, small_cnn, tanh_mlp
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tacit import InputError, Objective
from tacit.objective import per_example


def random_directions(params, count=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in params.items()}
        for _ in range(count)
    ]


def loop_over_examples(model, loss, data, directions):
    """⟨∇ℓ_i, v_j⟩ from the whole gradient of each example."""
    model.eval()
    leaves = {n: p.requires_grad_() for n, p in params_of(model).items()}
    rows = []
    for i in range(len(data[-1])):
        *inputs, target = (part[i : i + 1] for part in data)
        value = loss(functional_call(model, leaves, tuple(inputs)), target)
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        rows.append(
            [
                sum(
                    float((g * v[n]).sum())
                    for n, g in zip(leaves, gradients, strict=True)
                    if g is not None
                )
                for v in directions
            ]
        )
    return torch.tensor(rows, dtype=torch.float64)


def token_data(seed, count=24):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 7, (count, 6), generator=generator)
    return tokens, torch.randint(0, 7, (count,), generator=generator)


def sequence_data(seed, count=20):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(count, 4, 3, generator=generator, dtype=torch.float64)
    return X, torch.randint(0, 2, (count,), generator=generator)


def make_model(make, *args, **options):
    torch.manual_seed(0)
    return make(*args, **options).double()


CASES = {
    "mlp": lambda: (tanh_mlp(0), F.mse_loss, random_data(0)),
    "cnn with batch norm": lambda: (small_cnn(0), F.cross_entropy, image_data(0)),
    "lstm": lambda: (make_model(Recurrent), F.cross_entropy, sequence_data(0)),
    "attention": lambda: (make_model(Attention), F.cross_entropy, token_data(0)),
    "attention, norm first": lambda: (
        make_model(Attention, norm_first=True, activation="gelu"), F.cross_entropy, token_data(0)
    ),
    "checkpointed": lambda: (make_model(Checkpointed), F.mse_loss, random_data(1)),
    "no double backward": lambda: (make_model(Custom, OnceSquare), F.mse_loss, random_data(2)),
    "detached backward": lambda: (make_model(Custom, DetachedSquare), F.mse_loss, random_data(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_derivatives_agree_with_gradients_of_single_examples(name):
    model, loss, data = CASES[name]()
    objective = Objective(model, loss, data, batch_size=10, batch_norm="running")
    directions = random_directions(objective.params)
    result = objective.directional_derivatives(directions)
    assert result.weights is None
    assert result.values.dtype == torch.float64
    torch.testing.assert_close(
        result.values, loop_over_examples(model, loss, data, directions), rtol=1e-10, atol=1e-11
    )


@pytest.mark.parametrize("name", ["mlp", "attention", "no double backward", "detached backward"])
def test_the_signed_sum_of_gradients_agrees_with_single_examples(name):
    """By reverse mode and by forward mode."""
    model, loss, data = CASES[name]()
    objective = Objective(model, loss, data, batch_size=7)
    directions = random_directions(objective.params)
    signs = torch.randn(objective.count, generator=torch.Generator().manual_seed(3)).double()
    result = objective.directional_derivatives(directions, signs=signs)
    assert result.signed_sum is not None
    products = [
        sum(float((g * v[n]).sum()) for n, g in result.signed_sum.items()) for v in directions
    ]
    expected = signs @ loop_over_examples(model, loss, data, directions)
    assert products == pytest.approx(expected.tolist(), rel=1e-9)
    torch.testing.assert_close(result.values, objective.directional_derivatives(directions).values)
    assert objective.directional_derivatives(directions).signed_sum is None


def test_the_signed_sum_averages_draws_and_uses_weights():
    X, y = random_data(4, count=20)
    weights = torch.rand(20, generator=torch.Generator().manual_seed(4)).double() + 0.1
    signs = torch.where(torch.arange(20) % 3 == 0, 1.0, -1.0).double()
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1)).double()
    options = {"weights": weights, "training": True, "draws": 3, "batch_size": 6}
    objective = Objective(model, F.mse_loss, (X, y), **options)
    directions = random_directions(objective.params, count=1)
    result = objective.directional_derivatives(directions, signs=signs)
    assert result.signed_sum is not None
    product = sum(float((g * directions[0][n]).sum()) for n, g in result.signed_sum.items())
    assert product == pytest.approx(float((signs * weights) @ result.values[:, 0]), rel=1e-9)


def test_weights_batches_loaders_and_batch_losses_do_not_change_the_derivatives():
    model, data = tanh_mlp(0, (5, 8, 2)), random_data(3, outputs=2)
    plain = Objective(model, F.mse_loss, data)
    directions = random_directions(plain.params)
    expected = plain.directional_derivatives(directions).values
    weights = torch.rand(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weighted = Objective(model, F.mse_loss, data, weights=weights, batch_size=7)
    result = weighted.directional_derivatives(directions)
    torch.testing.assert_close(result.weights, weights)
    by_batch_loss = Objective.from_batch_loss(
        model, lambda m, b: (m(b[0]) - b[1]).square().mean(1), data, batch_size=9
    )
    loader = Objective(model, F.mse_loss, DataLoader(TensorDataset(*data), batch_size=11))
    for other in (
        result,
        by_batch_loss.directional_derivatives(directions),
        loader.directional_derivatives(directions),
    ):
        torch.testing.assert_close(other.values, expected, rtol=1e-12, atol=1e-13)
    gradient = weighted.gradient()
    products = [sum(float((gradient[n] * v[n]).sum()) for n in v) for v in directions]
    mean = weights @ result.values / weights.sum()
    torch.testing.assert_close(mean, torch.tensor(products, dtype=torch.float64))


def test_a_batch_loss_may_return_weights_and_leave_out_padding():
    model, (X, y) = tanh_mlp(0), random_data(4)

    def batch_loss(model, batch):
        x, target, mask = batch
        losses = (model(x) - target).square()[:, 0]
        return losses[mask], torch.full((int(mask.sum()),), 2.0).double()

    mask = torch.arange(64) >= 20
    objective = Objective.from_batch_loss(model, batch_loss, (X, y, mask), batch_size=10)
    directions = random_directions(objective.params)
    result = objective.directional_derivatives(directions)
    assert len(result.values) == 44
    assert result.weights.tolist() == [2.0] * 44
    expected = loop_over_examples(model, F.mse_loss, (X[20:], y[20:]), directions)
    torch.testing.assert_close(result.values, expected, rtol=1e-10, atol=1e-12)


def test_draws_average_to_the_gradient_of_the_objective():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.4), nn.Linear(9, 1)).double()
    data = random_data(5)
    objective = Objective(model, F.mse_loss, data, training=True, draws=3, seed=5, batch_size=20)
    directions = random_directions(objective.params)
    for draws in (None, [1], [0, 2]):
        gradient = objective.value_and_gradient(draws=draws)[1]
        expected = [sum(float((gradient[n] * v[n]).sum()) for n in v) for v in directions]
        mean = objective.directional_derivatives(directions, draws=draws).values.mean(0)
        torch.testing.assert_close(mean, torch.tensor(expected, dtype=torch.float64))


def test_noise_of_a_batch_loss_is_the_same_as_in_the_gradient():
    model, data = tanh_mlp(0), random_data(6)

    def noisy_inputs(model, batch, noise):
        return (model(batch[0] + 0.3 * noise.normal(batch[0])) - batch[1]).square()[:, 0]

    objective = Objective.from_batch_loss(model, noisy_inputs, data, training=True, draws=4)
    directions, gradient = random_directions(objective.params), objective.gradient()
    expected = [sum(float((gradient[n] * v[n]).sum()) for n in v) for v in directions]
    mean = objective.directional_derivatives(directions).values.mean(0)
    torch.testing.assert_close(mean, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", ["mlp", "cnn with batch norm", "attention", "lstm"])
@pytest.mark.parametrize("by_batch_loss", [False, True])
def test_second_derivatives_agree_with_finite_differences_of_first_derivatives(name, by_batch_loss):
    model, loss, data = CASES[name]()

    def example_losses(model, batch):
        *inputs, target = batch
        losses = loss(model(*inputs), target, reduction="none")
        return losses if losses.ndim == 1 else losses.mean(1)

    objective = (
        Objective.from_batch_loss(model, example_losses, data, batch_norm="running")
        if by_batch_loss
        else Objective(model, loss, data, batch_norm="running")
    )
    *directions, base = random_directions(objective.params)
    second = objective.directional_derivatives(directions, base=base).values
    step, point = 1e-5, objective.params
    ahead, behind = (
        objective.directional_derivatives(
            directions,
            {n: p + s * base[n] for n, p in point.items()} | dict(model.named_buffers()),
        ).values
        for s in (step, -step)
    )
    torch.testing.assert_close(second, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-7)


def test_names_left_out_of_a_direction_are_zero_in_every_precision():
    model, data = tanh_mlp(0), random_data(7)
    directions = random_directions(params_of(model))
    partial = [{n: t for n, t in v.items() if n.startswith("0")} for v in directions]
    zeroed = [{n: t if n.startswith("0") else t * 0 for n, t in v.items()} for v in directions]
    objective = Objective(model, F.mse_loss, data)
    expected = objective.directional_derivatives(zeroed).values
    torch.testing.assert_close(objective.directional_derivatives(partial).values, expected)
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        narrow = Objective(model.to(dtype), F.mse_loss, tuple(t.to(dtype) for t in data))
        derivatives = narrow.directional_derivatives(partial).values
        assert (derivatives - expected).norm() < rtol * expected.norm()
        model.double()
    narrow = Objective(model.float(), F.mse_loss, tuple(t.float() for t in data))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        derivatives = narrow.directional_derivatives(partial).values
    assert (derivatives - expected).norm() < 0.1 * expected.norm()


def test_outputs_may_be_nested_and_partly_unused():
    class TwoNetworks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = tanh_mlp(0), tanh_mlp(1)

        def forward(self, x):
            return {"a": self.a(x), "more": [self.b(x), torch.arange(3)], "unused": x.sum()}

    def loss(output, target):
        return F.mse_loss(output["a"] * output["more"][0], target)

    data, model = random_data(8), TwoNetworks()
    objective = Objective(model, loss, data, batch_size=17)
    directions = random_directions(objective.params)
    expected = loop_over_examples(model, loss, data, directions)
    torch.testing.assert_close(objective.directional_derivatives(directions).values, expected)


def test_wrong_directions_and_transposed_outputs_are_refused():
    model, (X, y) = tanh_mlp(0), random_data(9)
    objective = Objective(model, F.mse_loss, (X, y))
    with pytest.raises(InputError, match="directions is empty"):
        objective.directional_derivatives([])
    with pytest.raises(InputError, match="a direction has 'nothing'"):
        objective.directional_derivatives([{"nothing": X}])

    class TransposedOutput(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5).double())

        def forward(self, x):
            return (x * self.weight).T

    transposed = Objective(
        TransposedOutput(), lambda out, t: (out.T - t).square().mean(), (X[:5], y[:5])
    )
    with pytest.raises(InputError, match="one row per example"):
        transposed.directional_derivatives([transposed.params])


def test_operators_without_second_derivatives_in_batches_of_bags_are_refused_with_a_remedy():
    """Bags of different lengths, one after the other: batches that cannot be cut into rows."""
    torch.manual_seed(0)
    bags, out = nn.EmbeddingBag(7, 4), nn.Linear(4, 3)
    model = nn.ModuleList([bags, out]).double()
    words, starts = torch.randint(7, (9,)), torch.tensor([0, 2, 3, 7])

    def losses(_, batch):
        return F.cross_entropy(out(bags(*batch[:2])), batch[2], reduction="none")

    objective = Objective.from_batch_loss(model, losses, [(words, starts, torch.arange(4) % 3)])
    with pytest.raises(
        InputError, match=r"need neither where batches are tensors of three or more"
    ):
        objective.directional_derivatives([objective.params])


def token_objective(**options):
    """A language model with one loss per token, some of them without weight."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(
        nn.Embedding(11, 8),
        nn.Dropout(0.1),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.LayerNorm(8),
        nn.Linear(8, 11),
    ).double()
    batches = list(torch.randint(11, (22, 7)).split(5))

    def losses_and_weights(model, ids):
        losses = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none").flatten()
        return losses, ids[:, 1:].flatten() % 3

    return Objective.from_batch_loss(model, losses_and_weights, batches, **options)


def test_weights_from_the_models_outputs_are_right_by_forward_mode(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)).double()

    def losses_and_weights(model, ids):
        logits = model(ids[:, :-1]).flatten(0, 1)
        losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
        return losses, logits.detach().softmax(1).amax(1)

    batches = list(torch.randint(11, (9, 4)).split(4))
    objective = Objective.from_batch_loss(model, losses_and_weights, batches)
    directions = random_directions(objective.params)
    expected = objective.directional_derivatives(directions)
    monkeypatch.setattr(per_example, "FORWARD_ON", ("cpu",))
    monkeypatch.setattr(per_example, "_local_derivatives", lambda *_: None)
    computed = objective.directional_derivatives(directions)
    torch.testing.assert_close(computed.values, expected.values, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(computed.weights, expected.weights, rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{}, {"training": True, "draws": 3}], ids=["eval", "draws"])
def test_all_directions_by_forward_mode_are_those_of_reverse_mode(options, monkeypatch):
    """As on a GPU."""
    objective = token_objective(**options)
    directions = random_directions(objective.params)
    del directions[1][next(iter(directions[1]))]
    signs = torch.zeros(objective.count, dtype=torch.float64)
    signs[:20], signs[20:25], signs[-9:] = 1.0, -4.0, 0.5  # in the first and the last batch
    expected = objective.directional_derivatives(directions, signs=signs)
    monkeypatch.setattr(per_example, "FORWARD_ON", ("cpu",))
    together, results = per_example.AllDirections.of_batch, []

    def seen(self, *arguments):
        results.append(together(self, *arguments))
        return results[-1]

    monkeypatch.setattr(per_example.AllDirections, "of_batch", seen)
    computed = objective.directional_derivatives(directions, signs=signs)
    assert len(results) == 5 * objective.draws
    assert all(result is not None for result in results)
    torch.testing.assert_close(computed.values, expected.values, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(computed.weights, expected.weights)
    for name, total in expected.signed_sum.items():
        torch.testing.assert_close(computed.signed_sum[name], total, rtol=1e-10, atol=1e-12)


def test_forward_mode_that_is_wrong_or_impossible_falls_back(monkeypatch):
    monkeypatch.setattr(per_example, "FORWARD_ON", ("cpu",))
    objective = token_objective()
    directions = random_directions(objective.params)
    expected = objective.directional_derivatives(directions).values
    jvp = torch.func.jvp

    def wrong(*arguments):
        value, tangent = jvp(*arguments)
        return value, 1.01 * tangent

    def impossible(*arguments):
        raise RuntimeError("no rule")

    signs = torch.zeros(objective.count, dtype=torch.float64)
    signs[-3:] = 1.0  # none in the first batch, whose derivatives are compared all the same
    for replacement in (wrong, impossible):
        monkeypatch.setattr(torch.func, "jvp", replacement)
        for options in ({}, {"signs": signs}):
            computed = objective.directional_derivatives(directions, **options).values
            torch.testing.assert_close(computed, expected, rtol=1e-11, atol=1e-13)

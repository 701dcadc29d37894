"""Plausible wrong numbers that must not come out: each was one once."""

import pytest
import torch
from support.problems import params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tacit


class Checkpointed(nn.Module):
    """Runs its first half once more during backward."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        first, activation, last = self.model
        return last(checkpoint(lambda z: activation(first(z)), x, use_reentrant=False))


def test_activation_checkpointing_finds_the_same_parameters_in_backward():
    model, data = tanh_mlp(0), random_data(0)
    plain = tacit.Objective(model, F.mse_loss, data)
    again = tacit.Objective(Checkpointed(model), F.mse_loss, data)
    other = {n: p + 0.5 for n, p in params_of(model).items()}
    wrapped = {f"model.{n}": p for n, p in other.items()}
    for name, expected in plain.gradient(other).items():
        torch.testing.assert_close(again.gradient(wrapped)[f"model.{name}"], expected)
    product = again.hvp(wrapped, wrapped)
    for name, expected in plain.hvp(other, other).items():
        torch.testing.assert_close(product[f"model.{name}"], expected)


class OneShot:
    """A new iterator every time, over batches that are there only once."""

    def __init__(self, batches):
        self.batches = iter(batches)

    def __iter__(self):
        yield from self.batches


class Shuffled:
    """Starts anew every time, in an order of its own."""

    def __init__(self, batches):
        self.batches, self.generator = batches, torch.Generator().manual_seed(0)

    def __iter__(self):
        for i in torch.randperm(len(self.batches), generator=self.generator).tolist():
            yield self.batches[i]


def test_batches_that_are_there_only_once_are_refused_and_shuffled_ones_are_not():
    X, y = random_data(1, count=50)
    batches = list(zip(X.split(10), y.split(10), strict=True))
    with pytest.raises(tacit.InputError, match="only once"):
        tacit.Objective(tanh_mlp(1), F.mse_loss, OneShot(batches))
    shuffled = tacit.Objective(tanh_mlp(1), F.mse_loss, Shuffled(batches))
    assert shuffled.count == 50


def test_a_sum_reduced_loss_is_refused_with_weights_too():
    X, y = random_data(2, outputs=3)
    model = tanh_mlp(2, (5, 8, 3))
    with pytest.raises(tacit.InputError, match=r"not a mean over examples|sum-reduced"):
        tacit.Objective(
            model, nn.MSELoss(reduction="sum"), (X, y), weights=torch.ones(len(X))
        )  # fmt: skip


def sorted_classes(count=900):
    X, _ = random_data(3, count=count)
    return X, torch.arange(3).repeat_interleave(count // 3)


CLASS_WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double())


def test_class_weights_are_refused_however_the_labels_are_sorted():
    model, (X, y) = tanh_mlp(3, (5, 8, 3)), sorted_classes()
    with pytest.raises(tacit.InputError, match="class weights"):
        tacit.Objective(model, CLASS_WEIGHTED, (X, y))
    batches = list(zip(X.split(100), y.split(100), strict=True))
    objective = tacit.Objective(model, CLASS_WEIGHTED, batches)  # each batch is of one class
    with pytest.raises(tacit.InputError, match="class weights"):
        objective.gradient()


def test_padding_that_shows_in_later_batches_alone_is_refused():
    model, (X, y) = tanh_mlp(4, (5, 8, 3)), sorted_classes()
    y = torch.where((torch.arange(900) > 400) & (torch.arange(900) % 2 == 0), -100, y)
    batches = list(zip(X.split(100), y.split(100), strict=True))
    objective = tacit.Objective(model, F.cross_entropy, batches)
    with pytest.raises(tacit.InputError, match="ignored tokens"):
        objective.value()


def test_a_good_fit_in_bfloat16_is_not_called_silent():
    torch.manual_seed(5)
    X, y = random_data(5, count=400, inputs=300)
    strength = 0.3
    gram = X.T @ X / 400 + strength * torch.eye(300).double()
    theta = torch.linalg.solve(gram, X.T @ y / 400).T
    model = nn.Linear(300, 1, bias=False).bfloat16()
    objective = tacit.Objective(model, F.mse_loss, (X.bfloat16(), y.bfloat16()))
    found = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()], params={"weight": theta}))
    assert found.explained > 0.95
    assert "no signal" not in {problem.kind for problem in found.problems}
    assert found.strengths["l2"] == pytest.approx(strength, rel=0.05)


def test_autocast_raises_the_level_of_rounding():
    model = tanh_mlp(6).float()
    data = tuple(part.float() for part in random_data(6))
    objective = tacit.Objective(model, F.mse_loss, data)
    plain = tacit.endpoint_equations(objective, [tacit.l2()]).floor
    with torch.autocast("cpu", torch.bfloat16):
        cast = tacit.endpoint_equations(objective, [tacit.l2()]).floor
    assert cast > 1000 * plain


def test_names_of_single_coordinates_are_readable():
    params = {"l.weight": torch.ones(2, 2), "scale": torch.ones(())}
    assert tacit.regularizers.diagonal().bind(params).names == (
        "diagonal[l.weight[0,0]]", "diagonal[l.weight[0,1]]", "diagonal[l.weight[1,0]]",
        "diagonal[l.weight[1,1]]", "diagonal[scale]",
    )  # fmt: skip
    assert (
        "symmetric[l.weight[0,0],l.weight[0,1]]"
        in tacit.regularizers.symmetric().bind(params).names
    )


def test_a_summary_of_stacked_sources_says_where_they_differ():
    small = tacit.Objective(tanh_mlp(7), F.mse_loss, random_data(7, count=10))
    large = tacit.Objective(tanh_mlp(7), F.mse_loss, random_data(8, count=64))
    first = tacit.endpoint_equations(small, [tacit.l2()])
    second = tacit.endpoint_equations(large, [tacit.l2()], known={tacit.l1(): 0.1})
    text = tacit.fit(tacit.stack([first, second])).summary()
    assert "differ: 10, 64" in text
    assert "differ: no penalties, l1 = 0.1" in text
    assert "layer 2" in tacit.fit(first).layers["2"].summary()


def test_other_names_of_tied_weights_may_be_given_if_they_agree():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    model[2].weight = model[0].weight
    X, _ = random_data(9)
    objective = tacit.Objective(model, F.mse_loss, (X, X))
    moved = {n: p + 0.1 for n, p in model.state_dict().items()}
    assert "2.weight" in moved
    assert objective.value(moved) != objective.value()
    moved["2.weight"] = moved["2.weight"] + 1
    with pytest.raises(tacit.InputError, match=r"unknown 2\.weight"):
        objective.value(moved)


def test_parametrised_weights_belong_to_their_layer():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), nn.Linear(3, 1))
    objective = tacit.Objective(model.double(), F.mse_loss, random_data(10))
    assert tacit.endpoint_equations(objective, [tacit.l2()]).layers == ("0", "1")


def test_batches_of_any_size_are_probed_on_a_few_examples():
    seen = []
    model, (X, y) = tanh_mlp(11), random_data(11, count=5000)
    model.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    tacit.Objective(model, F.mse_loss, [(X, y)])
    assert max(seen) <= 256

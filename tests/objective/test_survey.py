"""What a mean over examples is: losses that are none are refused, and all others are computed.

Every refusal is compared with what the user's own loop over the data would compute.
"""

import warnings
from typing import NamedTuple

import pytest
import torch
from support.models import random_data, tanh_mlp
from support.objectives import IGNORED, assert_close, fit_l2, gradient_of, split_batches, strength
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective, ensembles
from tacit.objective import checks

RARE = 4


def classifier(seed, dtype=torch.float64):
    return tanh_mlp(seed, (5, 8, 5)).to(dtype)


def class_data(seed, count=600, rare=2):
    """Four frequent classes, and a few examples of a fifth."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (count,), generator=generator)
    y[torch.randperm(count, generator=generator)[:rare]] = RARE
    return X, y


def class_weights(dtype=torch.float64):
    return torch.tensor([1.0, 1, 1, 1, 20], dtype=dtype)


def weighted_cross_entropy(output, target):
    return F.cross_entropy(output, target, weight=class_weights(output.dtype))


def refused(make):
    """Whether an objective is refused, at the latest with its first gradient."""
    try:
        make().gradient()
    except InputError:
        return True
    return False


@pytest.mark.parametrize("size", [None, 32], ids=["tensors", "batches of 32"])
def test_class_weights_are_refused_however_rare_the_class_is(size):
    def make(seed):
        X, y = class_data(seed)
        data = (X, y) if size is None else split_batches(X, y, size=size)
        return Objective(classifier(seed), weighted_cross_entropy, data)

    assert all(refused(lambda seed=seed: make(seed)) for seed in range(100))


def test_class_weights_are_refused_among_a_hundred_classes():
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        X = torch.randn(3000, 5, generator=generator)
        y = torch.randint(0, 99, (3000,), generator=generator)
        y[torch.randperm(3000, generator=generator)[:2]] = 99
        weights = torch.cat([torch.ones(99), torch.tensor([20.0])])
        model = tanh_mlp(seed, (5, 8, 100)).float()

        def loss(output, target, weights=weights):
            return F.cross_entropy(output, target, weight=weights.to(output))

        batches = split_batches(X, y, size=64)
        assert refused(lambda m=model, f=loss, b=batches: Objective(m, f, b))
        Objective(model, F.cross_entropy, batches).gradient()
        if seed < 3:
            ensemble = ensembles.initialise(lambda: tanh_mlp(0, (5, 8, 100)).float(), [0, 1])
            ensembles.gradients(ensemble, F.cross_entropy, (X, y))
            with pytest.raises(InputError, match="class weights"):
                ensembles.gradients(ensemble, loss, (X, y))


def test_class_weights_are_computed_by_the_ways_that_the_refusal_names():
    model, (X, y) = classifier(0), class_data(0)
    expected = strength(model, weighted_cross_entropy(model(X), y))
    batches = split_batches(X, y, size=32)

    def losses(model, batch):
        weights = class_weights()[batch[1]]
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none"), weights

    objectives = {
        "losses and weights": Objective.from_batch_loss(model, losses, batches),
        "means and their weights": Objective.from_mean_loss(
            model,
            lambda model, batch: weighted_cross_entropy(model(batch[0]), batch[1]),
            batches,
            count=lambda batch: class_weights()[batch[1]].sum(),
        ),
    }
    for objective in objectives.values():
        assert fit_l2(objective).strengths["l2"] == pytest.approx(expected, rel=1e-10)
    wrong = Objective.from_batch_loss(model, lambda m, b: losses(m, b)[0], batches)
    assert abs(fit_l2(wrong).strengths["l2"] / expected - 1) > 0.01


@pytest.mark.parametrize("size", [16, 64])
def test_ignored_tokens_in_one_batch_are_refused_and_counted_by_from_mean_loss(size):
    model, (X, y) = classifier(1), class_data(1)
    y[300:310:2] = IGNORED
    batches = split_batches(X, y, size=size)
    with pytest.raises(InputError, match="ignored tokens"):
        Objective(model, F.cross_entropy, batches).gradient()
    objective = Objective.from_mean_loss(
        model,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches,
        count=lambda batch: (batch[1] != IGNORED).sum(),
    )
    whole = F.cross_entropy(model(X), y)
    assert objective.value() == pytest.approx(whole.item(), rel=1e-12)
    assert_close(objective.gradient(), gradient_of(model, whole), tolerance=1e-12)
    assert objective.count == len(batches)
    assert f"batches    {len(batches)}" in fit_l2(objective).summary()


def test_padding_in_one_batch_of_a_large_vocabulary_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 6), nn.Linear(6, 1000)).double()
    tokens = torch.randint(1, 1000, (160, 12))
    labels = tokens.roll(-1, 1)
    labels[104:112, 6:] = IGNORED
    batches = split_batches(tokens, labels, size=8)

    def loss(output, target):
        return F.cross_entropy(output.movedim(-1, 1), target)

    def batch_mean(model, batch):
        return loss(model(batch[0]), batch[1])

    with pytest.raises(InputError, match="ignored tokens"):
        Objective(model, loss, batches).gradient()
    with pytest.raises(InputError, match=r"mean over its two parts|losses \(tokens"):
        Objective.from_mean_loss(
            model, batch_mean, batches, count=lambda batch: batch[1].numel()
        ).gradient()
    right = Objective.from_mean_loss(
        model, batch_mean, batches, count=lambda batch: (batch[1] != IGNORED).sum()
    )
    assert right.value() == pytest.approx(loss(model(tokens), labels).item(), rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 33, 65])
def test_outputs_may_be_squeezed(count):
    """The shape of a single example is then (), which broadcasts without harm."""
    X, y = random_data(0, count=count)
    model = tanh_mlp(0).float()
    batches = split_batches(X.float(), y[:, 0].float(), size=16)

    def loss(output, target):
        return F.mse_loss(output.squeeze(), target)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = F.mse_loss(model(X.float())[:, 0], y[:, 0].float())
        for data in (batches, (X.float(), y[:, 0].float())):
            objective = Objective(model, loss, data)
            assert objective.value() == pytest.approx(whole.item(), rel=1e-5)


def plain_square(output, target):
    return (output - target).square().mean()


@pytest.mark.parametrize("loss", [F.mse_loss, plain_square, F.smooth_l1_loss, F.l1_loss])
def test_outputs_n_1_against_targets_n_are_refused(loss):
    def make(seed):
        X, y = random_data(seed, count=(64, 256, 2000)[seed % 3])
        return Objective(tanh_mlp(seed).float(), loss, (X.float(), y[:, 0].float()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in a user's script
        assert all(refused(lambda seed=seed: make(seed)) for seed in range(50))


def test_torchs_broadcast_warning_is_the_error_in_all_constructors():
    model, (X, y) = tanh_mlp(0), random_data(0)
    data, message = (X, y[:, 0]), r"differ in shape.*unsqueeze"

    def batch_mean(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    with pytest.raises(InputError, match=message):
        Objective(model, F.mse_loss, data)
    with pytest.raises(InputError, match=message):
        Objective(model, F.mse_loss, data, weights=torch.ones(len(X)))
    with pytest.raises(InputError, match=message):
        Objective.from_mean_loss(model, batch_mean, data, count=len)
    with pytest.raises(InputError, match=message):
        Objective.from_batch_loss(model, batch_mean, data, interacting=True, batch_size=8)


def interpolating(seed, noise=1e-4):
    """A wide network in float32 whose outputs are its targets, to within a loss of noise²."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh())
    model.append(nn.Linear(512, 1))
    with torch.no_grad():
        model[-1].weight *= 30
        X = 3 * torch.randn(100, 5)
        return model, (X, model(X) + noise * torch.randn(100, 1))


def test_interpolating_networks_are_accepted_in_float32():
    for seed in range(20):
        model, data = interpolating(seed)
        assert 0 < Objective(model, F.mse_loss, data).value() < 1e-7


def test_a_sum_is_refused_at_a_loss_near_zero_too():
    for seed in range(5):
        model, data = interpolating(seed)
        with pytest.raises(InputError, match=r"sum-reduced|not a mean"):
            Objective(model, nn.MSELoss(reduction="sum"), data)


class TwoTowers(nn.Module):
    """Images and texts, compared within a batch as in CLIP."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.images, self.texts = nn.Linear(6, 4), nn.Linear(5, 4)
        self.double()

    def forward(self, images, texts):
        return self.images(images) @ self.texts(texts).T


def contrastive(model, batch, reduction="mean"):
    similarities = model(*batch)
    pairs = torch.arange(len(similarities))
    sides = [F.cross_entropy(s, pairs, reduction=reduction) for s in (similarities, similarities.T)]
    return sum(sides) / 2


def pairs_of_views():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(128, 3, generator=generator, dtype=torch.float64)
    maps = [torch.randn(3, size, generator=generator, dtype=torch.float64) for size in (6, 5)]
    return tuple(hidden @ matrix for matrix in maps)


@pytest.mark.parametrize("size", [128, 32, 8])
def test_a_contrastive_loss_has_batches_as_its_examples(size):
    model, data = TwoTowers(), pairs_of_views()
    with pytest.raises(InputError, match=r"examples that interact.*interacting=True"):
        Objective.from_batch_loss(
            model, lambda m, b: contrastive(m, b, "none"), data, batch_size=size
        )
    objective = Objective.from_batch_loss(
        model, contrastive, data, interacting=True, batch_size=size
    )
    batches = list(zip(*(tensor.split(size) for tensor in data), strict=True))
    mean = sum(contrastive(model, batch) for batch in batches) / len(batches)
    fit = fit_l2(objective)
    assert objective.count == len(batches) == 128 // size
    assert fit.strengths["l2"] == pytest.approx(strength(model, mean), rel=1e-10)
    if len(batches) > 1:
        scores = tacit.score_examples(fit)
        each = torch.tensor([strength(model, contrastive(model, batch)) for batch in batches])
        torch.testing.assert_close(
            scores.values[:, 0], each.double() - each.double().mean(), rtol=1e-6, atol=1e-9
        )
        assert f"{len(batches)} batches" in scores.error_bars().basis


def test_the_strength_of_a_contrastive_loss_depends_on_the_batch():
    model, data = TwoTowers(), pairs_of_views()
    strengths = [
        fit_l2(
            Objective.from_batch_loss(model, contrastive, data, interacting=True, batch_size=size)
        ).strengths["l2"]
        for size in (128, 32, 8)
    ]
    assert max(strengths) - min(strengths) > 0.2 * abs(strengths[0])
    with pytest.raises(InputError, match=r"batch_size is missing.*batch size of training"):
        Objective.from_batch_loss(model, contrastive, data, interacting=True)


def test_one_number_per_batch_is_refused_with_both_remedies():
    data = pairs_of_views()
    for loss in (contrastive, lambda model, batch: contrastive(model, batch)[None]):
        with pytest.raises(InputError, match=r"interacting=True.*from_mean_loss"):
            Objective.from_batch_loss(TwoTowers(), loss, data, batch_size=32)
    with pytest.raises(InputError, match="one number per batch is needed"):
        Objective.from_batch_loss(
            TwoTowers(), lambda m, b: contrastive(m, b, "none"), data,
            interacting=True, batch_size=32,
        )  # fmt: skip
    with pytest.raises(InputError, match="interacting is 1: pass True or False"):
        Objective.from_batch_loss(TwoTowers(), contrastive, data, interacting=1, batch_size=32)
    with pytest.raises(InputError, match="apply the weights inside"):
        Objective.from_batch_loss(
            TwoTowers(), contrastive, data,
            interacting=True, batch_size=32, weights=torch.ones(128),
        )  # fmt: skip


class Graph(NamedTuple):
    """A batch that cannot be cut into rows."""

    nodes: torch.Tensor
    edges: torch.Tensor
    y: torch.Tensor


def test_one_number_per_batch_is_refused_where_batches_cannot_be_cut():
    X, y = random_data(0)
    model = tanh_mlp(0)
    graphs = [Graph(x, torch.zeros(2, 3), t) for x, t in split_batches(X, y)]
    lists = [list(zip(x, t, strict=True)) for x, t in split_batches(X, y)]

    def of_graph(model, batch):
        return (model(batch.nodes) - batch.y).square()[:, 0]

    def of_list(model, batch):
        return torch.stack([(model(x) - t).square().sum() for x, t in batch])

    for losses, data in ((of_graph, graphs), (of_list, lists)):
        objective = Objective.from_batch_loss(model, losses, data)
        assert objective.value() == pytest.approx(F.mse_loss(model(X), y).item(), rel=1e-12)
        with pytest.raises(InputError, match=r"one number for.*interacting=True"):
            Objective.from_batch_loss(
                model, lambda m, b, f=losses: f(m, b).mean()[None], data
            ).gradient()


def test_losses_that_interact_with_equal_values_are_refused_by_their_gradient():
    """Outputs that are all equal: broadcasting changes the gradient, but not the loss."""
    model = nn.Linear(5, 1).double()
    nn.init.zeros_(model.weight)
    X, y = random_data(0)
    with pytest.raises(InputError, match=r"gradient of a batch.*broadcast"):
        Objective(model, plain_square, (X, y[:, 0]))


class Recurrent(nn.Module):
    """Classes of every step, from inputs (time, examples, features)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.memory, self.readout = nn.LSTM(3, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x):
        return self.readout(self.memory(x)[0]).movedim(-1, 1)


def time_major_batches():
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(12, size, 3, generator=generator, dtype=torch.float64),
            torch.randint(0, 4, (12, size), generator=generator),
        )
        for size in (16, 16, 5)
    ]


def test_time_before_examples_is_refused_or_named():
    batches = time_major_batches()
    with pytest.raises(InputError, match="time before examples"):
        Objective(Recurrent(), F.cross_entropy, batches)
    by_token = tanh_mlp(0, (3, 8, 4))

    def mean_over_tokens(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    fit = fit_l2(Objective(by_token, mean_over_tokens, batches))
    assert any(p.kind == "objective" and "targets per row" in p.message for p in fit.problems)
    right = Objective.from_mean_loss(
        by_token,
        lambda model, batch: mean_over_tokens(model(batch[0]), batch[1]),
        batches,
        count=lambda batch: batch[1].numel(),
    )
    tokens = torch.cat([x.flatten(0, 1) for x, _ in batches])
    targets = torch.cat([y.flatten() for _, y in batches])
    expected = strength(by_token, F.cross_entropy(by_token(tokens), targets))
    assert fit_l2(right).strengths["l2"] == pytest.approx(expected, rel=1e-10)


def test_losses_of_tokens_may_come_from_batches_with_time_before_examples():
    model, batches = Recurrent(), time_major_batches()
    objective = Objective.from_batch_loss(
        model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none").flatten(), batches
    )
    losses = [F.cross_entropy(model(x), y, reduction="none").flatten() for x, y in batches]
    whole = torch.cat(losses).mean()
    assert_close(objective.gradient(), gradient_of(model, whole), tolerance=1e-12)


def gradient_penalty(model, batch):
    inputs = batch[0].detach().clone().requires_grad_()
    outputs = model(inputs)
    (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return (outputs - batch[1]).square()[:, 0] + 0.1 * slopes.square().sum(1)


def sharpness_aware(model, batch):
    """The loss after a step uphill of length 0.1, as SAM minimises it, to first order."""
    loss = F.mse_loss(model(batch[0]), batch[1])
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * torch.cat([g.flatten() for g in gradients]).norm()


def test_losses_may_differentiate_in_themselves():
    model, (X, y) = tanh_mlp(0), random_data(0)
    objective = Objective.from_batch_loss(model, gradient_penalty, (X, y), batch_size=16)
    whole = gradient_penalty(model, (X, y)).mean()
    assert objective.value() == pytest.approx(whole.item(), rel=1e-12)
    assert_close(objective.gradient(), gradient_of(model, whole), tolerance=1e-12)
    assert len(tacit.score_examples(fit_l2(objective)).values) == len(X)

    steps = Objective.from_batch_loss(
        model, sharpness_aware, (X, y), interacting=True, batch_size=16
    )
    batches = list(zip(X.split(16), y.split(16), strict=True))
    whole = sum(sharpness_aware(model, batch) for batch in batches) / len(batches)
    assert_close(steps.gradient(), gradient_of(model, whole), tolerance=1e-12)
    frozen = {name: p.detach() for name, p in model.named_parameters()}
    assert steps.value(frozen) == pytest.approx(whole.item(), rel=1e-12)


class Forces(nn.Module):
    """−∂E/∂x of a scalar network, as in force fields."""

    def __init__(self):
        super().__init__()
        self.energy = tanh_mlp(0)

    def forward(self, x):
        x = x.detach().clone().requires_grad_()
        return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def test_models_may_differentiate_in_themselves():
    model, (X, _) = Forces(), random_data(0)
    objective = Objective(model, F.mse_loss, (X, X.flip(0)), batch_size=16)
    whole = F.mse_loss(model(X), X.flip(0))
    assert objective.value() == pytest.approx(whole.item(), rel=1e-12)
    fit = fit_l2(objective)
    assert fit.strengths["l2"] == pytest.approx(strength(model, whole), rel=1e-10)
    assert len(tacit.score_examples(fit).values) == len(X)
    (outputs,), _ = objective.predictions(objective.params)
    torch.testing.assert_close(outputs, model(X).detach())


@pytest.mark.parametrize(("batches", "most"), [(10, 2), (320, 10)])
def test_at_most_one_batch_in_32_and_at_least_two_are_compared_with_their_parts(
    monkeypatch, batches, most
):
    compared = []
    check = checks.check_parts

    def counted(*arguments, **options):
        compared.append(1)
        return check(*arguments, **options)

    monkeypatch.setattr(checks, "check_parts", counted)
    X, y = random_data(0, count=2 * batches)
    objective = Objective(tanh_mlp(0), F.mse_loss, split_batches(X, y, size=2))
    for _ in range(2):
        objective.gradient()
    assert 2 <= len(compared) <= most


def test_members_of_an_ensemble_are_checked_with_rare_classes():
    X, y = class_data(0)
    ensemble = ensembles.initialise(lambda: classifier(0), [0, 1])
    with pytest.raises(InputError, match="class weights"):
        ensembles.gradients(ensemble, weighted_cross_entropy, (X, y))

"""Noise on inputs, augmentation and mixup: against naive versions, and what is refused."""

import numpy as np
import pytest
import torch
from support.models import params_of, random_data, small_cnn, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit import techniques
from tacit.objective import Noise
from tacit.techniques.examples import _symmetric_beta

X, Y = random_data(1, count=24, inputs=3)
CLASSES = torch.arange(24) % 3
MODEL, CLASSIFIER = tanh_mlp(0, (3, 4, 1)), tanh_mlp(1, (3, 4, 3))
with torch.no_grad():
    CLASSIFIER[2].weight.mul_(4)
OBJECTIVE = tacit.Objective(MODEL, F.mse_loss, (X, Y), batch_size=10)
CLASS_OBJECTIVE = tacit.Objective(CLASSIFIER, F.cross_entropy, (X, CLASSES))


def assert_gradient(objective, loss, model):
    """The value and gradient are those of loss(), computed naively."""
    value = loss()
    gradients = torch.autograd.grad(value, list(model.parameters()))
    assert objective.value() == pytest.approx(float(value.detach()), rel=1e-12)
    for ours, theirs in zip(objective.gradient().values(), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_input_noise_is_the_mean_over_noisy_copies_of_the_data():
    technique = techniques.input_noise(OBJECTIVE, 0.3, draws=4, seed=5)

    def naive():
        losses = []
        for draw in range(4):
            parts = [
                x + 0.3 * Noise(5, draw, index).normal(x) for index, x in enumerate(X.split(10))
            ]
            losses.append(F.mse_loss(MODEL(torch.cat(parts)), Y))
        return torch.stack(losses).mean()

    assert_gradient(technique, naive, MODEL)


def spread(objective, groups):
    gradients = [
        torch.cat([g.flatten() for g in objective.value_and_gradient(draws=draws)[1].values()])
        for draws in groups
    ]
    return float(torch.stack(gradients).var(0).sum())


@pytest.mark.parametrize("name", ["input_noise", "weight_noise"])
def test_mirrored_pairs_have_less_noise(name):
    technique = getattr(techniques, name)(OBJECTIVE, 0.05, draws=128)
    pairs = [[2 * j, 2 * j + 1] for j in range(64)]
    strangers = [[2 * j, (2 * j + 3) % 128] for j in range(64)]
    assert 20 * spread(technique, pairs) < spread(technique, strangers)


def test_pairs_of_mixup_have_less_noise_than_independent_partners():
    def independent(model, batch, noise):
        like = torch.empty(24, dtype=torch.float64)
        generator = noise.generator(like.device)
        share = torch.rand(24, 1, generator=generator).double()
        rows = torch.randint(24, (24,), generator=generator)
        x, y = (share * part + (1 - share) * part[rows] for part in batch)
        return (model(x) - y).square().flatten()

    naive = tacit.Objective.from_batch_loss(MODEL, independent, (X, Y), training=True, draws=128)
    mixed = techniques.mixup(tacit.Objective(MODEL, F.mse_loss, (X, Y)), draws=128)
    pairs = [[2 * j, 2 * j + 1] for j in range(64)]
    assert 2 * spread(mixed, pairs) < spread(naive, pairs)


def test_dropout_stays_inactive_and_batch_norm_stays_as_it_was():
    model = nn.Sequential(MODEL, nn.Dropout(0.5))
    objective = tacit.Objective(model, F.mse_loss, (X, Y), batch_size=10)
    noisy = techniques.input_noise(objective, 0.3, draws=4)
    assert noisy.value() == techniques.input_noise(OBJECTIVE, 0.3, draws=4).value()
    cnn = small_cnn(0)
    images = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    before = {n: b.clone() for n, b in cnn.named_buffers()}
    for kind in ("batch", "running"):
        plain = tacit.Objective(
            cnn, F.cross_entropy, (images, torch.arange(12) % 4), batch_norm=kind, batch_size=6,
            **({"draws": 16} if kind == "batch" else {}),
        )  # fmt: skip
        noisy = techniques.input_noise(plain, 1e-9)
        close = {"rel": 1e-6} if kind == "running" else {"rel": 0.2}  # batches are grouped anew
        assert noisy.value() == pytest.approx(plain.value(), **close)
        assert noisy.count == plain.count
    assert all(torch.equal(b, before[n]) for n, b in cnn.named_buffers())


def test_batches_of_any_form_name_their_inputs():
    def losses(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")

    def mean(model, batch):
        return losses(model, batch).mean()

    batches = [{"x": X[:14], "labels": CLASSES[:14]}, {"x": X[14:], "labels": CLASSES[14:]}]
    by_example = tacit.Objective.from_batch_loss(CLASSIFIER, losses, batches)
    by_batch = tacit.Objective.from_mean_loss(
        CLASSIFIER, mean, batches, count=lambda batch: len(batch["x"])
    )
    loader = DataLoader(TensorDataset(X, CLASSES), batch_size=14)
    in_pairs = tacit.Objective(CLASSIFIER, F.cross_entropy, loader)
    values = [
        techniques.input_noise(by_example, 0.2, inputs="x").value(),
        techniques.input_noise(by_batch, 0.2, inputs=["x"]).value(),
        techniques.input_noise(in_pairs, 0.2).value(),
    ]
    assert values == pytest.approx([values[0]] * 3, rel=1e-12)
    for objective in (by_example, by_batch):
        with pytest.raises(tacit.InputError, match="pass inputs="):
            techniques.input_noise(objective, 0.2)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(4, 3).double(), nn.Linear(3, 1).double()

    def forward(self, tokens, features):
        return self.linear(self.embedding(tokens) + features)


TOKENS = torch.arange(24) % 4
TWO = tacit.Objective(TwoInputs(), F.mse_loss, (TOKENS, X, Y))
EMBEDDED = tacit.Objective(
    nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 1)).double(), F.mse_loss, (TOKENS, Y)
)
LIST = tacit.Objective(MODEL, F.mse_loss, [(X, Y)])


def draws_globally(x, generator):
    return x + torch.randn_like(x)


def draws_from_numpy(x, generator):
    return x + float(np.random.rand())  # noqa: NPY002 # the global state


def by_entry(model, batch):
    return (model(batch[0]) - F.one_hot(batch[1], 3)).square().flatten()


def weighted(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none"), 1.0 + batch[1]


def from_losses(batch_loss):
    return tacit.Objective.from_batch_loss(CLASSIFIER, batch_loss, (X, CLASSES))


REFUSED = {
    "losses of entries": (
        lambda: techniques.mixup(from_losses(by_entry), inputs=0),
        "72 losses for 24",
    ),
    "weights of its own": (
        lambda: techniques.mixup(from_losses(weighted), inputs=0),
        "weights of its own",
    ),
    "integers": (lambda: techniques.input_noise(EMBEDDED, 0.1), "integers"),
    "integers of several": (lambda: techniques.input_noise(TWO, 0.1, inputs=0), "integers"),
    "several inputs": (lambda: techniques.input_noise(TWO, 0.1), "pass inputs="),
    "target as input": (lambda: techniques.input_noise(OBJECTIVE, 0.1, inputs=1), "no input"),
    "half a position": (
        lambda: techniques.input_noise(OBJECTIVE, 0.1, inputs=0.5),
        "inputs is 0.5: pass the name",
    ),
    "negative": (lambda: techniques.input_noise(OBJECTIVE, -0.1), "sigma"),
    "odd draws": (lambda: techniques.input_noise(OBJECTIVE, 0.1, draws=3), "even"),
    "not an objective": (lambda: techniques.input_noise(MODEL, 0.1), "tacit.Objective"),
    "mixup in batches": (lambda: techniques.mixup(LIST), "tuple"),
    "mixup of tokens": (lambda: techniques.mixup(EMBEDDED), "integers"),
    "alpha": (lambda: techniques.mixup(OBJECTIVE, 0.0), "alpha"),
    "global": (lambda: techniques.augment(OBJECTIVE, draws_globally), "global generator"),
    "numpy": (lambda: techniques.augment(OBJECTIVE, draws_from_numpy), "global generator"),
    "fewer": (lambda: techniques.augment(OBJECTIVE, lambda x, g: x[:-1]), "as many examples"),
    "function": (lambda: techniques.augment(OBJECTIVE, 3), "function"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_the_meaning_is_refused(case):
    call, words = REFUSED[case]
    with pytest.raises(tacit.InputError, match=words):
        call()


def test_one_of_several_inputs_can_have_noise():
    noisy = techniques.input_noise(TWO, 0.1, inputs=1)
    assert noisy.value() != TWO.value()
    assert noisy.count == 24


def test_augment_may_write_into_its_inputs():
    before = X.clone()

    def in_place(x, generator):
        return x.mul_(1 + torch.rand(len(x), 1, generator=generator, dtype=x.dtype))

    assert techniques.augment(OBJECTIVE, in_place).value() != OBJECTIVE.value()
    assert torch.equal(X, before)
    identity = techniques.augment(TWO, lambda inputs, generator: inputs)
    assert identity.value() == pytest.approx(TWO.value(), rel=1e-12)


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0, 4.0])
def test_shares_are_from_a_symmetric_beta_distribution(alpha):
    like = torch.empty(200_000, dtype=torch.float64)
    share, mirror = (_symmetric_beta(alpha, like, Noise(3, draw, 0)) for draw in (0, 1))
    assert torch.allclose(share + mirror, torch.ones_like(like))
    assert float(share.mean()) == pytest.approx(0.5, abs=5e-3)
    assert float(share.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.02)
    fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))
    assert float((share - 0.5).pow(4).mean()) == pytest.approx(fourth, rel=0.03)


@pytest.mark.parametrize("weighted", [False, True])
def test_mixed_classes_are_mixed_losses(weighted):
    """Against the mean over all pairs of examples, by quadrature over λ."""
    labels = CLASSIFIER(X).argmax(1)
    weights = torch.linspace(0.2, 3, 24, dtype=torch.float64) if weighted else None
    objective = tacit.Objective(CLASSIFIER, F.cross_entropy, (X, labels), weights=weights)
    mixed = techniques.mixup(objective, draws=128)
    shares = torch.ones(24).double() if weights is None else weights
    nodes, areas = np.polynomial.legendre.leggauss(9)
    right, swapped = 0.0, 0.0
    for node, area in zip((nodes + 1) / 2, areas / 2, strict=True):
        inputs = node * X[:, None] + (1 - node) * X
        outputs = CLASSIFIER(inputs).detach()
        own = F.cross_entropy(outputs.mT, labels[:, None].expand(24, 24), reduction="none")
        other = F.cross_entropy(outputs.mT, labels.expand(24, 24), reduction="none")
        pairs = shares[:, None] * shares / shares.sum() ** 2
        right += area * float((pairs * (node * own + (1 - node) * other)).sum())
        swapped += area * float((pairs * ((1 - node) * own + node * other)).sum())
    assert abs(swapped / right - 1) > 0.06
    assert mixed.value() == pytest.approx(right, rel=0.01)


def test_mixed_probabilities_and_mixed_classes_have_the_same_gradient():
    one_hot = F.one_hot(CLASSES, 3).double()
    soft = tacit.Objective(CLASSIFIER, F.cross_entropy, (X, one_hot))
    by_class, by_target = (techniques.mixup(o, 0.4).gradient() for o in (CLASS_OBJECTIVE, soft))
    for name, gradient in by_class.items():
        torch.testing.assert_close(gradient, by_target[name])


def test_scores_of_examples_follow_the_noise_and_refuse_mixed_examples():
    noisy = techniques.input_noise(OBJECTIVE, 0.3)
    fit = tacit.fit(tacit.difference_equations(noisy, OBJECTIVE, tacit.l2(scope="0.weight")))
    scores = tacit.score_examples(fit)
    assert scores.values.shape == (24, 1)
    mixed = techniques.mixup(OBJECTIVE)
    fit = tacit.fit(tacit.difference_equations(mixed, OBJECTIVE, tacit.l2()))
    with pytest.raises(tacit.InputError, match="mixes examples"):
        tacit.score_examples(fit)


def test_other_points_and_the_summary_name_the_technique():
    noisy = techniques.input_noise(OBJECTIVE, 0.3)
    point = {n: 1.1 * p for n, p in params_of(MODEL).items()}
    assert noisy.value(point) != noisy.value()
    fit = tacit.fit(tacit.difference_equations(noisy, OBJECTIVE, tacit.l2(), params=point))
    assert "mse_loss with input_noise(0.3)" in fit.summary()
    assert "no error of the finite sigma: Fit.with_halved() estimates" in fit.summary()


def test_the_same_dropout_masks_cancel_from_every_group_of_draws():
    model = nn.Sequential(nn.Dropout(0.5), MODEL)
    plain = tacit.Objective(model, F.mse_loss, (X, Y), training=True, draws=16)
    noisy = techniques.input_noise(plain, 1e-9, seed=3)
    target = tacit.difference_target(noisy, plain)
    vectors = target.points[0].vectors
    assert len(vectors) == 8
    assert all(tensor.abs().max() < 1e-6 for vector in vectors for tensor in vector.values())


def test_an_augmentation_without_a_generator_is_refused():
    objective = tacit.Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    with pytest.raises(tacit.InputError, match="take the generator as its second argument"):
        techniques.augment(objective, lambda inputs: inputs + 1)

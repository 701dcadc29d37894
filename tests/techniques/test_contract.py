"""One contract for every technique, over several forms of objectives, and what it catches."""

import numpy as np
import pytest
import torch
from support.models import random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import techniques
from tacit.techniques import check_contract

X, Y = random_data(1, count=12, inputs=3)
CLASSES = torch.arange(12) % 3
WEIGHTS = torch.linspace(0.5, 2, 12, dtype=torch.float64)


class Residual(nn.Module):
    """Two residual blocks, dropout, and a linear head."""

    def __init__(self, outputs):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = tanh_mlp(3, (3, 4, 3)), tanh_mlp(4, (3, 4, 3))
        self.head, self.dropout = nn.Linear(3, outputs).double(), nn.Dropout(0.3)

    def forward(self, x):
        x = x + self.first(x)
        return self.head(self.dropout(x + self.second(x)))


def losses_of(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


def batch_normed():
    body = Residual(3)
    body.dropout = nn.BatchNorm1d(3).double()
    return body


def objectives():
    regression, classifier = Residual(1), Residual(3)
    return {
        "regression": tacit.Objective(regression, F.mse_loss, (X, Y)),
        "classes": tacit.Objective(classifier, F.cross_entropy, (X, CLASSES)),
        "weights": tacit.Objective(classifier, F.cross_entropy, (X, CLASSES), weights=WEIGHTS),
        "dropout": tacit.Objective(
            classifier, F.cross_entropy, (X, CLASSES), training=True, draws=4
        ),
        "batch norm": tacit.Objective(
            batch_normed(), F.cross_entropy, (X, CLASSES), batch_norm="batch", batch_size=4, draws=4
        ),
        "mapping": tacit.Objective.from_batch_loss(
            classifier, losses_of, {"x": X, "labels": CLASSES}
        ),
    }


def jitter(inputs, generator):
    """Scales every input of (input, target), or the inputs of a mapping."""
    tensor = inputs["x"] if isinstance(inputs, dict) else inputs
    scale = 1 + 0.2 * torch.rand(len(tensor), 1, generator=generator, dtype=tensor.dtype)
    return {**inputs, "x": tensor * scale} if isinstance(inputs, dict) else tensor * scale


def options(objective):
    return {"draws": 8, **({"inputs": "x"} if objective.loss is None else {})}


TECHNIQUES = {
    "input_noise": lambda o: techniques.input_noise(o, 0.2, **options(o)),
    "weight_noise": lambda o: techniques.weight_noise(o, 0.1, draws=8),
    "relative": lambda o: techniques.weight_noise(o, 0.1, scope="first", relative=True, draws=8),
    "sam": lambda o: techniques.sam(o, 0.1),
    "unnormalised": lambda o: techniques.sam(o, 0.1, normalised=False),
    "mixup": lambda o: techniques.mixup(o, 0.5, **options(o)),
    "label_smoothing": lambda o: techniques.label_smoothing(o, 0.1),
    "augment": lambda o: techniques.augment(o, jitter, draws=8),
    "stochastic_depth": lambda o: techniques.stochastic_depth(
        o, 0.3, layers=["first", "second"], draws=8
    ),
}
SAM = ("sam", "unnormalised")
FORMS = {
    "classes": [*TECHNIQUES],
    "regression": ["input_noise", "mixup", "sam"],
    "weights": ["weight_noise", "mixup", "label_smoothing"],
    "dropout": ["input_noise", "mixup", "stochastic_depth"],
    "batch norm": ["input_noise"],
    "mapping": ["input_noise", "mixup", "augment"],
}
REFUSED = [
    ("sam", "dropout"),
    ("unnormalised", "dropout"),
    ("label_smoothing", "regression"),
    ("label_smoothing", "mapping"),
]


@pytest.mark.parametrize(("form", "name"), [(f, name) for f in FORMS for name in FORMS[f]])
def test_every_technique_satisfies_its_contract(form, name):
    check_contract(TECHNIQUES[name], objectives()[form], derivative=name not in SAM)


@pytest.mark.parametrize(("name", "form"), REFUSED)
def test_what_has_no_meaning_is_refused(name, form):
    with pytest.raises(tacit.InputError, match=r"cross_entropy|loss.output, target|random"):
        TECHNIQUES[name](objectives()[form])


@pytest.mark.parametrize("name", ["mixup", "label_smoothing"])
def test_techniques_apply_to_the_results_of_others(name):
    objective = techniques.weight_noise(objectives()["classes"], 0.05, draws=8)
    check_contract(TECHNIQUES[name], objective)


def from_loss(batch_loss, objective):
    return tacit.Objective.from_batch_loss(
        objective.model,
        batch_loss,
        objective.data,
        batch_size=objective.batch_size,
        training=True,
        draws=8,
    )


def wrong_seed(objective):
    calls = np.random.default_rng(int(torch.randint(2**31, ())))
    return techniques.weight_noise(objective, 0.1, seed=int(calls.integers(100)))


def detached(objective):
    def loss(model, batch, noise):
        output = model(batch[0] + 0.2 * noise.normal(batch[0]))
        return ((output - batch[1]) * (output.detach() - batch[1])).flatten()

    return from_loss(loss, objective)


def by_batch_size(objective):
    def loss(model, batch, noise):
        residual = model(batch[0]) - batch[1]
        return (residual - 0.2 * residual.mean()).square().flatten() * (1 + 0 * noise.normal(Y[0]))

    return from_loss(loss, objective)


def fewer(objective):
    return tacit.Objective(objective.model, F.mse_loss, (X[:10], Y[:10]))


def mode_changing(objective):
    objective.model[0].train(not objective.model[0].training)
    return objective


def seeding(objective):
    torch.manual_seed(0)
    return objective


def with_gradients(objective):
    F.mse_loss(objective.model(X), Y).backward()
    return objective


BROKEN = {
    "another gradient": wrong_seed,
    "difference quotient": detached,
    "other batches": by_batch_size,
    "10 examples": fewer,
    "its mode": mode_changing,
    "the global random state": seeding,
    "changes the model": with_gradients,
}


def test_the_contract_catches_a_change_that_a_second_call_takes_back():
    objective = tacit.Objective(tanh_mlp(0, (3, 4, 1)), F.mse_loss, (X, Y))

    def toggling(plain, sigma=0.1):
        plain.model.train(not plain.model.training)
        return techniques.weight_noise(plain, sigma)

    with pytest.raises(tacit.InputError, match="its mode"):
        check_contract(toggling, objective, at_zero=lambda plain: toggling(plain, 0.0))


def test_the_contract_catches_parameters_that_are_frozen():
    objective = tacit.Objective(tanh_mlp(0, (3, 4, 1)), F.mse_loss, (X, Y))

    def freezing(plain):
        plain.model[0].weight.requires_grad_(False)
        return plain

    with pytest.raises(tacit.InputError, match="changes the model"):
        check_contract(freezing, objective)


@pytest.mark.parametrize("words", BROKEN)
def test_the_contract_catches_what_is_broken(words):
    torch.manual_seed(7)
    with pytest.raises(tacit.InputError, match=words):
        check_contract(BROKEN[words], tacit.Objective(tanh_mlp(0, (3, 4, 1)), F.mse_loss, (X, Y)))


def test_the_contract_catches_a_scale_whose_zero_is_something_else():
    with pytest.raises(tacit.InputError, match="at scale zero"):
        check_contract(
            lambda o: techniques.weight_noise(o, 0.1),
            objectives()["regression"],
            at_zero=lambda o: techniques.weight_noise(o, 0.02),
        )


def test_sams_gradient_is_not_the_derivative_of_its_value():
    with pytest.raises(tacit.InputError, match="difference quotient"):
        check_contract(TECHNIQUES["sam"], objectives()["regression"])

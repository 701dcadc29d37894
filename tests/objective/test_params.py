"""Tied parameters count once, frozen parameters are constants, and scopes select among them."""

import re
from fnmatch import fnmatch
from functools import partial

import pytest
import torch
from support.models import loss_of, minimise, params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import Objective, reference
from tacit.objective.params import fingerprint, select


class TiedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 3), nn.Linear(3, 6)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.embedding(x)))


def test_tied_weights_count_once():
    torch.manual_seed(0)
    model, x = TiedEmbedding().double(), torch.arange(18) % 6
    gradient = Objective(model, F.cross_entropy, (x, (x + 1) % 6), batch_size=5).gradient()
    F.cross_entropy(model(x), (x + 1) % 6).backward()
    assert list(gradient) == ["embedding.weight", "head.bias"]
    for name, tensor in gradient.items():
        torch.testing.assert_close(tensor, model.get_parameter(name).grad, rtol=1e-12, atol=1e-15)


def test_tied_weights_may_be_passed_under_all_their_names_if_these_agree():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    model[2].weight = model[0].weight
    X, _ = random_data(9)
    objective = Objective(model, F.mse_loss, (X, X))
    params = {n: p + 0.1 for n, p in model.state_dict().items()}
    assert "2.weight" in params
    assert objective.value(params) != objective.value()
    params["2.weight"] = params["2.weight"] + 1
    with pytest.raises(tacit.InputError, match=r"unknown 2\.weight"):
        objective.value(params)


def test_frozen_parameters_have_no_gradient_but_take_part_in_the_model():
    model, data = tanh_mlp(0), random_data(1)
    model[0].weight.requires_grad_(False)
    gradient = Objective(model, F.mse_loss, data).gradient()
    assert list(gradient) == ["0.bias", "2.weight", "2.bias"]
    expected = reference.gradient(loss_of(model, F.mse_loss, data), params_of(model))
    torch.testing.assert_close(reference.flat(gradient), expected, rtol=1e-12, atol=1e-15)


def test_frozen_parameters_may_be_passed_only_with_the_models_values():
    model = tanh_mlp(1)
    model[0].requires_grad_(False)
    objective = Objective(model, F.mse_loss, random_data(31))
    params = {n: p.clone() for n, p in model.named_parameters()}
    assert objective.value(params) == objective.value()
    params["0.bias"] += 1
    with pytest.raises(tacit.InputError, match=r"unknown 0\.bias"):
        objective.value(params)


NORMED = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2))
NAMED = dict(NORMED.named_parameters())


class Prefixed:
    def __call__(self, name):
        return name.startswith("0.")


@pytest.mark.parametrize(
    ("scope", "names"),
    {
        "two patterns": (["0", "*.bias"], ["0.weight", "0.bias", "1.bias", "2.bias"]),
        "a tuple": (("2.bias", "0.bias"), ["0.bias", "2.bias"]),
        "a set": ({"1", "1.bias"}, ["1.weight", "1.bias"]),
        "names of a dictionary": ({"2.bias": 0}.keys(), ["2.bias"]),
        "matrices": (tacit.matrices, ["0.weight", "2.weight"]),
        "a predicate of both": (lambda n, p: p.ndim < 2 and n[0] == "1", ["1.weight", "1.bias"]),
        "a predicate of the name": (lambda name: name == "2.bias", ["2.bias"]),
        "a default argument": (lambda n, last="2": n.startswith(last), ["2.weight", "2.bias"]),
        "any arguments": (lambda *names: names == ("0.bias",), ["0.bias"]),
        "a method": ("1.bias 2.bias".__contains__, ["1.bias", "2.bias"]),
        "a regular expression": (re.compile("[01].w").match, ["0.weight", "1.weight"]),
        "a partial function": (partial(fnmatch, pat="1*"), ["1.weight", "1.bias"]),
        "a callable object": (Prefixed(), ["0.weight", "0.bias"]),
    }.values(),
)
def test_a_scope_is_a_pattern_a_list_or_a_predicate(scope, names):
    assert list(select(NAMED, scope, what="scope")) == names


def test_the_signature_of_a_predicate_decides_and_not_an_error_inside_it():
    def wrong(name):
        raise TypeError("from inside")

    with pytest.raises(TypeError, match="from inside"):
        select(NAMED, wrong, what="scope")


@pytest.mark.parametrize(
    ("scope", "message"),
    {
        "an unmatched pattern": (["*.bias", "head.*"], "'head.*' of the list matches no parameter"),
        "an empty list": ([], "rows=[] covers no parameter"),
        "parameters": (list(NORMED.parameters()), "an entry of rows is a Parameter"),
        "a generator": ((n for n in NAMED), "rows is a generator"),
        "a module": (NORMED[0], "rows is the module or class Linear"),
        "a class": (nn.Linear, "rows is the module or class Linear"),
        "three arguments": (lambda a, b, c: True, "cannot be called with ('name', 'tensor')"),
        "no argument": (lambda: True, "cannot be called with ('name',)"),
    }.values(),
)
def test_wrong_scopes_are_refused(scope, message):
    with pytest.raises(tacit.InputError, match=re.escape(message)):
        select(NAMED, scope, what="rows")


def test_weights_decay_and_biases_do_not():
    model, data, penalty = tanh_mlp(4), random_data(4), tacit.l2(scope=tacit.matrices)
    minimise(model, F.mse_loss, data, {penalty: 0.01})
    objective = Objective(model, F.mse_loss, data)
    assert tacit.estimate(objective, penalty).strengths["l2"] == pytest.approx(0.01, rel=1e-6)
    everywhere = tacit.estimate(objective, tacit.l2())
    assert everywhere.strengths["l2"] < 0.009
    rows = tacit.endpoint_equations(objective, tacit.l2(), rows=tacit.matrices)
    assert tacit.fit(rows).strengths["l2"] == pytest.approx(0.01, rel=1e-6)
    named = tacit.endpoint_equations(objective, tacit.l2(), rows=["0.weight", "2.weight"])
    assert torch.equal(named.factor(), rows.factor())


def test_a_fingerprint_changes_with_any_entry_and_with_their_order():
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(2**16 + 5, generator=generator)
    before = fingerprint({"w": tensor})
    assert fingerprint({"w": tensor.clone()}) == before
    changed, permuted, across = tensor.clone(), tensor.clone(), tensor.clone()
    changed[-1] += 1e-3
    permuted[[0, 1]] = permuted[[1, 0]]
    across[[0, 2**14]] = across[[2**14, 0]]  # between two slices
    for other in (changed, permuted, across):
        assert fingerprint({"w": other}) != before


def test_a_fingerprint_does_not_depend_on_the_number_of_threads():
    tensor = torch.randn(300_001, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    fingerprints = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            fingerprints.add(fingerprint({"w": tensor}))
    finally:
        torch.set_num_threads(threads)
    assert len(fingerprints) == 1

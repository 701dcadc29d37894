"""The catalogue names every family, with its arguments and its cost."""

import inspect
import re

import pytest
from support.families import FAMILIES, FROM_DATA

import tacit
from tacit.regularizers.overview import CATALOGUE, Entry

NO_FAMILIES = {
    *("Columns", "Regularizer", "TensorGradient", "catalogue", "check_contract", "join_columns"),
    *("optimizer_penalties", "separable"),
}
"""Public names of tacit.regularizers that are no family."""


def test_the_catalogue_has_every_family_once():
    names = [entry.name for entry in CATALOGUE]
    assert len(set(names)) == len(names)
    assert set(names) == set(tacit.regularizers.__all__) - NO_FAMILIES


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_the_arguments_are_those_of_the_function(entry):
    listed = set(re.findall(r"\w+", entry.call.partition("(")[2]))
    parameters = inspect.signature(getattr(tacit.regularizers, entry.name)).parameters
    assert listed <= parameters.keys()
    assert {n for n, p in parameters.items() if p.default is p.empty} <= listed


def test_the_costs_are_those_of_the_regularizers():
    costs = {entry.name: entry.cost for entry in CATALOGUE}
    instances = {n.partition(" of ")[0]: make for n, make in (FAMILIES | FROM_DATA).items()}
    instances["regularizer"] = instances.pop("custom")
    instances["layerwise"] = lambda: tacit.layerwise(tacit.l2)
    assert instances.keys() == {entry.name for entry in CATALOGUE}
    assert {name: make().cost for name, make in instances.items()} == {
        n: costs[n] for n in instances
    }


def test_error_bars_follow_the_examples_where_the_catalogue_says_so():
    bars = {entry.name: entry.bars for entry in CATALOGUE}
    for name, make in FROM_DATA.items():
        if "score_examples follows" in bars[name.partition(" of ")[0]]:
            assert make().influence is not None, name


def test_the_catalogue_is_printed_whole_and_not_too_wide(capsys):
    assert tacit.regularizers.catalogue() is None
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    assert len(paragraphs) == len(CATALOGUE)
    for entry, paragraph in zip(CATALOGUE, paragraphs, strict=True):
        for words in (entry.call, entry.formula, entry.cost, entry.bars, entry.like):
            assert words in paragraph


def test_an_entry_is_named_after_its_call():
    assert Entry("power(p, zero_width)", "", "weights", "", "").name == "power"

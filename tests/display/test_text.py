"""A summary as text: 88 columns, aligned, and all of its parts."""

from dataclasses import replace

import pytest
from support.summaries import CONTENT

from tacit.display import FORMATS, Column, Summary, Table, render
from tacit.display.text import RULE, WIDTH, fit_name, fit_names
from tacit.errors import InputError


def test_parts_are_between_rules_and_no_line_is_too_long():
    lines = render(CONTENT).splitlines()
    assert lines.count(RULE) == 5
    assert max(map(len, lines)) <= WIDTH
    assert lines[-1].startswith("  ") or lines[-1].startswith("Finding")
    assert "explained 0.5   cosine 0.7" in lines
    assert "rank 1 of 2" in lines
    assert "  95 % intervals: l2 [-1, 2]" in lines


def test_columns_are_aligned_and_remarks_go_across():
    columns = (Column("name", 6, "left"), Column("value", 8), Column("text", align="left"))
    rows = (("a", "1.5", "one"), (), ("longer", "-22", "two"), ("a remark",))
    text = render(Summary("t", tables=(Table(columns, rows),)))
    assert text.splitlines()[2:] == [
        "name     value   text",
        "a          1.5   one",
        "",
        "longer     -22   two",
        "a remark",
    ]


@pytest.mark.parametrize(("kinds", "shown"), [(1, 1), (4, 4), (7, 5)])
def test_optional_columns_are_left_out_from_the_last_one_where_there_is_no_room(kinds, shown):
    optional = tuple(Column(f"±{k}", 11, optional=True) for k in range(kinds))
    columns = (Column("name", 11, "left"), Column("strength", 11), *optional, Column("end", 11))
    row = ("r0", "1", *("2" * kinds), "3")
    text = render(Summary("t", tables=(Table(columns, (row,)),)))
    head, line = text.splitlines()[2:]
    assert head.split() == ["name", "strength", *(f"±{k}" for k in range(shown)), "end"]
    assert line.split() == ["r0", "1", *("2" * shown), "3"]


def test_long_names_are_cut_in_the_middle():
    name = "l2[transformer.blocks.11.attention.projection.weight]"
    assert len(fit_name(name, 34)) == 34
    assert fit_name(name, 34).startswith("l2[transformer")
    assert fit_name(name, 34).endswith("weight]")
    columns = (Column("name", 11, "left"), Column("value", 12))
    (line,) = render(Summary("t", tables=(Table(columns, ((name, "1"),)),))).splitlines()[3:]
    assert line == f"{fit_name(name, 34)}{'1':>12}"


LAYERS = {
    "llama": ("model.layers.{}.{}", ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")),
    "bert": (
        "bert.encoder.layer.{}.{}",
        ("attention.self.query", "attention.output.dense", "output.dense", "intermediate.dense"),
    ),
    "gpt2": ("transformer.h.{}.{}", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    "adapters": (
        "base_model.model.model.layers.{}.self_attn.{}.default",
        ("q_proj.lora_A", "q_proj.lora_B", "v_proj.lora_A", "v_proj.lora_B"),
    ),
    "words": ("encoder_block_{}_self_attention_output_projection_{}_with_a_long_name", ("x", "y")),
}


@pytest.mark.parametrize("width", [34, 26, 20, 16])
@pytest.mark.parametrize("pattern", ["{}", "l2[{}]"])
@pytest.mark.parametrize(("layer", "parts"), LAYERS.values(), ids=LAYERS)
def test_names_of_layers_stay_different_where_they_are_cut(layer, parts, pattern, width):
    names = [pattern.format(layer.format(i, part)) for i in range(40) for part in parts]
    cut = fit_names(names, width)
    assert len({*cut}) == len(names)
    assert max(map(len, cut)) <= width
    short = [name for name in names if len(name) <= width]
    assert {*short} <= {*cut}


def test_names_that_are_different_when_cut_in_the_middle_are_cut_there():
    names = [
        "first_layer_of_the_encoder",
        "last_layer_of_the_decoder",
        "first_layer_of_the_encoder",
    ]
    assert fit_names(names, 20) == [fit_name(name, 20) for name in names]


def test_long_names_in_any_column_and_in_heads_leave_the_numbers_aligned():
    columns = (Column("name", 6, "left"), Column("of", 12, "left"), Column("a long head", 8))
    rows = (("a", "l2[model.layers.10.q]", "1"), ("b", "l2[model.layers.11.q]", "22"))
    head, *lines = render(Summary("t", tables=(Table(columns, rows),))).splitlines()[2:]
    assert len({len(line) for line in (head, *lines)}) == 1
    assert [line.split()[-1] for line in lines] == ["1", "22"]
    assert lines[0].split()[1] != lines[1].split()[1]


def test_no_problems_are_stated_only_where_they_were_looked_for():
    assert render(replace(CONTENT, problems=(), findings=())).endswith("No problems found.")
    assert "problems" not in render(Summary("t"))


def test_an_unknown_format_is_refused_with_those_there_are():
    with pytest.raises(InputError, match="'text', 'markdown', 'latex', 'html'"):
        render(CONTENT, "pdf")
    assert all(isinstance(render(CONTENT, format), str) for format in FORMATS)

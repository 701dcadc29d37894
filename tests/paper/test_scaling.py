"""The scaling figure: its decoder and naive strengths, its rows, checks and drawing."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.experiments import run
from torch.nn import functional as F

import tacit
from tacit.objective.options import ObjectiveOptions
from tacit_paper import plots, scaling
from tacit_paper.scaling.checks import GIB, LARGE, MODEL_BYTES, SUM_BYTES, check, select
from tacit_paper.scaling.config import Size
from tacit_paper.scaling.estimates import candidates, size_rows
from tacit_paper.scaling.measuring import Computation, measure_in_turn
from tacit_paper.scaling.networks import build_decoder, random_batches, token_losses
from tacit_paper.scaling.workload import open_workload

ROOT = Path(__file__).parents[2]
SMALL = Size("small", 2, 64, vocabulary=16)
TINY = replace(
    scaling.QUICK, sizes=(SMALL,), fixed="small", batches=3, few=1, sequences=2, positions=6,
    batch_counts=(1, 3), candidate_counts=(1, 3), repeats=1,
)  # fmt: skip
OPTIONS = {"positions": 6, "dropout": 0.1, "dtype": torch.float64, "device": "cpu"}


@pytest.fixture(scope="module")
def rows():
    return pd.DataFrame(list(run(scaling, TINY)))


def gpu_rows():
    """Rows of the paper's preset in which every computation costs what it should."""
    config, rows = scaling.PAPER, []
    for unit in [*config.sizes, config.largest]:
        parameters = 12 * unit.layers * unit.width**2 + unit.vocabulary * unit.width
        largest = unit is config.largest
        dtypes, sums = (config.dtypes[-1:], config.sums[-1:]) if largest else (
            config.dtypes, config.sums)  # fmt: skip
        for dtype in dtypes:
            for precision in sums:
                kind = "largest" if largest else "parameters"
                rows.append(gpu_row(kind, unit.name, parameters, dtype, precision))
    fixed = ("124 million", 124e6, "float32", "float64")
    rows += [gpu_row("batches", *fixed, batches=n) for n in config.batch_counts]
    for count in config.candidate_counts:
        row = gpu_row("candidates", *fixed, candidates=count)
        rows.append(row | {"estimate_seconds": row["plain_seconds"] * (1.04 + 0.01 * count)})
    rows += [gpu_row("difference", *fixed[:2], dtype, "float64") for dtype in config.dtypes]
    return pd.DataFrame(rows)


def gpu_row(kind, size, parameters, dtype, sums, *, batches=None, candidates=2):
    """A row of a GPU that multiplies at a constant rate and is never fast for small models."""
    batches = batches or (4 if kind == "largest" else 64)
    batch = 0.008 + 6 * parameters * 4096 / (2e14 if dtype == "float32" else 4e14)
    plain, fixed = batches * batch, 1.5 * batch + 0.4 * parameters / 1e9
    activations = 3e4 * parameters**0.6 + 2**28
    peaks = {"plain": MODEL_BYTES[dtype], "estimate": SUM_BYTES[sums]}
    return {
        "kind": kind, "device_name": "a GPU", "torch": "2.0", "dtype": dtype, "sums": sums,
        "size": size, "parameters": int(parameters), "batches": batches,
        "tokens_per_batch": 4096, "candidates": candidates, "plain_seconds": plain,
        "gradient_seconds": 1.02 * plain, "estimate_seconds": 1.02 * plain + fixed,
        "layerwise_seconds": 1.03 * plain + fixed, "fixed_seconds": fixed,
        "difference_seconds": 9.3 * plain, "score_seconds": 2.5 * plain,
        "l2_part": -0.01, "naive_distance": 1e-7,
        **{f"{name}_bytes": activations + size * parameters for name, size in peaks.items()},
    }  # fmt: skip


def test_the_decoder_predicts_from_earlier_tokens_only():
    model = build_decoder(SMALL, **OPTIONS)
    ids = random_batches(1, sequences=1, positions=5, vocabulary=16, device="cpu")[0]
    changed = ids.clone()
    changed[:, 3] = (ids[:, 3] + 1) % 16
    difference = (model(ids) - model(changed)).abs().amax((0, 2))
    assert (difference[:3] == 0).all()
    assert (difference[3:] > 0).all()
    logits = model(ids[:, :-1])
    by_hand = -logits[0].log_softmax(-1)[torch.arange(5), ids[0, 1:]]
    torch.testing.assert_close(token_losses(model, ids), by_hand.float())


def test_the_paper_has_models_up_to_seven_billion_parameters():
    with torch.device("meta"):
        counts = [
            sum(
                p.numel()
                for p in build_decoder(
                    size, positions=512, dropout=0.1, dtype=torch.float32, device="meta"
                ).parameters()
            )
            for size in [*scaling.PAPER.sizes, scaling.PAPER.largest]
        ]
    named = (1e5, 1e6, 1e7, 124e6, 354e6, 1.3e9, 7e9)
    assert counts == [pytest.approx(count, rel=0.1) for count in named]
    assert counts[-1] >= 7e9


def test_recomputed_activations_give_the_same_gradient_and_strengths():
    batches = random_batches(2, sequences=2, positions=6, vocabulary=16, device="cpu")
    fits = []
    for size in (SMALL, replace(SMALL, checkpointed=True)):
        model = build_decoder(size, **OPTIONS)
        objective = tacit.Objective.from_batch_loss(model, token_losses, batches)
        fits.append(tacit.fit(tacit.endpoint_equations(objective, tacit.l2())))
    assert fits[0].strengths == pytest.approx(fits[1].strengths, rel=1e-6)


def test_weights_and_data_come_from_their_own_seeds():
    state = torch.random.get_rng_state()
    models = [build_decoder(SMALL, **OPTIONS) for _ in range(2)]
    with open_workload(TINY, SMALL, "float32", "cpu", batches=2) as workload:
        assert not workload.model.training
    assert torch.equal(state, torch.random.get_rng_state())
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first, second)


def test_every_computation_is_measured_in_turn():
    calls = []
    computations = {
        name: Computation(calls.append, lambda name=name: f"{name} prepared") for name in "ab"
    }
    costs = measure_in_turn(computations, repeats=2, device="cpu")
    assert calls == ["a prepared", "b prepared"] * 2
    assert all(cost.seconds > 0 and cost.peak_bytes is None for cost in costs.values())


def test_memory_is_the_peak_above_what_was_allocated(monkeypatch):
    counters = {"memory_allocated": 100, "max_memory_allocated": 175}
    for name, value in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    computations = {"a": Computation(lambda _: None, lambda: None)}
    costs = measure_in_turn(computations, repeats=2, device="cuda")
    assert costs["a"].peak_bytes == 75


@pytest.mark.skipif(
    "accumulate" not in ObjectiveOptions.__annotations__,
    reason="objectives add up gradients in float64 only",
)
def test_there_is_one_row_per_precision_of_sums():
    config = replace(TINY, sums=("float64", "float32"))
    models = pd.DataFrame(list(size_rows(config, SMALL, "float32", "cpu")))
    assert list(models.sums) == ["float64", "float32"]
    assert models.plain_seconds.nunique() == 1
    assert models.l2_part[0] != models.l2_part[1]
    assert models.l2_part[0] == pytest.approx(models.l2_part[1], rel=1e-4)


def test_strengths_are_those_of_the_normal_equations(rows):
    models = select(rows, "parameters")
    assert (models.naive_distance < 1e-6).all()
    assert (models.l2_part.abs() > 1e-4).all()
    with open_workload(TINY, SMALL, "float32", "cpu", batches=TINY.batches) as workload:
        data, model = torch.cat(list(workload.batches)), workload.model
    loss = F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    b = -torch.cat([g.flatten() for g in gradients]).double()
    theta = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    columns = torch.stack([2 * theta, (theta / 1e-3).clamp(-1, 1)], 1)
    strengths = torch.linalg.lstsq(columns, b[:, None]).solution[:, 0]
    parts = strengths * columns.norm(dim=0) / b.norm()
    assert models.iloc[0][["l2_part", "smooth_l1_part"]].tolist() == pytest.approx(
        parts.tolist(), rel=1e-4
    )


def test_rows_have_the_costs_of_their_unit(rows):
    assert list(rows.unit.unique()) == [
        "small, float32", "batches", "candidates", "difference, float32",
    ]  # fmt: skip
    assert set(rows.parameters) == {select(rows, "parameters").parameters.iloc[0]}
    assert list(select(rows, "batches").batches) == [1, 3]
    assert list(select(rows, "candidates").candidates) == [1, 3]
    for kind, names in {
        "parameters": ("objective", "gradient", "estimate", "layerwise", "few"),
        "batches": ("gradient", "estimate"), "candidates": ("estimate",),
        "difference": ("difference", "score"),
    }.items():  # fmt: skip
        for name in ("plain", *names):
            assert (select(rows, kind)[f"{name}_seconds"] > 0).all()
    models = select(rows, "parameters")
    slope = (models.estimate_seconds - models.few_seconds) / 2
    assert models.fixed_seconds.tolist() == pytest.approx((models.few_seconds - slope).tolist())
    assert not any(name.endswith("_bytes") for name in rows.columns)


def test_what_is_not_measured_is_the_same_in_every_run(rows):
    again = list(run(scaling, TINY, finished=[u for u in rows.unit.unique() if u != "batches"]))
    json.dumps(again)  # plain values
    subset = pd.DataFrame(again)
    fixed = [name for name in subset.columns if not name.endswith("_seconds")]
    expected = rows[rows.unit == "batches"].reset_index(drop=True)[fixed]
    pd.testing.assert_frame_equal(subset[fixed], expected, check_dtype=False)


def test_candidates_have_different_names_and_begin_with_ridge():
    for count in (1, 2, 64):
        names = [candidate.name for candidate in candidates(count)]
        assert len(set(names)) == count
        assert names[0] == "l2"


def test_the_models_of_the_paper_preset_are_refused_on_a_cpu():
    with pytest.raises(tacit.InputError, match="--device cuda"):
        list(size_rows(scaling.PAPER, scaling.PAPER.sizes[0], "float32", "cpu"))
    json.dumps([asdict(scaling.PAPER), asdict(scaling.QUICK)])


def test_the_checks_of_a_cpu_are_about_strengths(rows):
    assert not any("pass" in result.label for result in check(rows))
    wrong = [result.holds for result in check(rows.assign(naive_distance=0.1))]
    assert False in wrong


CONTRADICTIONS = {
    "gradient": lambda rows: rows.assign(gradient_seconds=1.2 * rows.plain_seconds),
    "estimate": lambda rows: rows.assign(estimate_seconds=1.5 * rows.plain_seconds),
    "layerwise": lambda rows: rows.assign(layerwise_seconds=float("nan")),
    "difference": lambda rows: rows.assign(difference_seconds=11 * rows.plain_seconds),
    "scores": lambda rows: rows.assign(score_seconds=4 * rows.plain_seconds),
    "fixed part": lambda rows: rows.assign(fixed_seconds=rows.plain_seconds),
    "GiB above": lambda rows: rows.assign(
        estimate_bytes=rows.estimate_bytes + 4 * rows.parameters + GIB
    ),
    "largest distance": lambda rows: rows.assign(naive_distance=0.1),
    "largest difference": lambda rows: rows.assign(
        l2_part=rows.l2_part.where(rows.sums == "float64", 0.01)
    ),
    "parameters of the largest": lambda rows: rows[rows.kind != "largest"],
}


@pytest.mark.parametrize("label", CONTRADICTIONS)
def test_checks_hold_until_rows_contradict_them(label):
    rows = gpu_rows()
    assert [result for result in check(rows) if not result.holds] == []
    broken = check(CONTRADICTIONS[label](rows))
    assert [result for result in broken if not result.holds and result.label.startswith(label)]


def test_small_models_are_not_judged_by_time():
    rows = gpu_rows()
    slow = rows.estimate_seconds.where(rows.parameters >= LARGE, 10 * rows.estimate_seconds)
    assert all(result.holds for result in check(rows.assign(estimate_seconds=slow)))


@pytest.mark.parametrize("make_rows", [gpu_rows, None], ids=["GPU", "CPU"])
def test_the_figure_is_drawn_from_rows(make_rows, rows, tmp_path):
    figure = scaling.plot(make_rows() if make_rows else rows)
    titles = [axes.get_title(loc="left")[:1] for axes in figure.get_axes()]
    assert titles == list("ABCD")
    for path in plots.save(figure, tmp_path):
        assert path.stat().st_size > 10_000


def test_the_stored_rows_say_what_the_documentation_says():
    stored = pd.read_parquet(ROOT / "results/paper/scaling/rows.parquet")
    exact = select(stored, "parameters", sums="float64").set_index("parameters")
    page = (ROOT / "docs/method.md").read_text()
    for millions, size in {
        "124 million": 124e6,
        "354 million": 354e6,
        "1.3 billion": 1.3e9,
    }.items():
        near = exact[abs(exact.index / size - 1) < 0.02].set_index("dtype")
        ratios = near.estimate_seconds / near.plain_seconds
        fixed = near.fixed_seconds.max()
        line = f"| {millions} | {ratios.float32:.2f} | {ratios.bfloat16:.2f} | "
        assert line + f"{fixed:.1f} s |" in page
    scores = select(stored, "difference", dtype="float32")
    assert f"take {float((scores.score_seconds / scores.plain_seconds).iloc[0]):.1f} " in page


def test_the_stored_rows_have_the_memory_and_the_strengths_that_are_promised():
    stored = pd.read_parquet(ROOT / "results/paper/scaling/rows.parquet")
    promised = [c for c in check(stored) if "GiB above" in c.label or "naive" in c.label]
    assert len(promised) == 6
    assert all(result.holds for result in promised)


def test_the_stored_rows_have_the_times_that_are_promised():
    stored = pd.read_parquet(ROOT / "results/paper/scaling/rows.parquet")
    promised = [c for c in check(stored) if "plain gradient pass, " in c.label]
    assert len(promised) == 8
    assert all(result.holds for result in promised)
    assert stored.parameters.max() > 7e9

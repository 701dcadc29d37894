"""What finite steps add to strengths: against the law, and named where it is large."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import tanh_mlp
from torch.nn import functional as F

import tacit
from tacit.objective.samples import units_of
from tacit.regularizers import gradient_variance, optimizer_penalties
from tacit.watching.step_errors import step_errors

COUNT, BATCH = 640, 16


def watch_at(rate, *, seed=0, make: Any = torch.optim.SGD, rates=(1.0,), batch=BATCH, **options):
    """A watch of a noisy regression, whose rate is multiplied by each of these for 20 epochs."""
    torch.manual_seed(1000 + seed)
    inputs = torch.randn(COUNT, 6).double()
    targets = torch.sin(inputs.sum(1, keepdim=True)) + 0.3 * torch.randn(COUNT, 1).double()
    model = tanh_mlp(seed, (6, 12, 12, 1))
    optimizer = make(model.parameters(), lr=rate, weight_decay=0.02, **options)
    objective = tacit.Objective(model, F.mse_loss, (inputs, targets))
    penalties = optimizer_penalties(optimizer, model)
    watch = tacit.watch(model, optimizer, objective, [*penalties], every=20, budget=None)
    orders = torch.Generator().manual_seed(seed)
    for factor in rates:
        optimizer.param_groups[0]["lr"] = rate * factor
        for _ in range(20):
            for rows in torch.randperm(COUNT, generator=orders).split(batch):
                optimizer.zero_grad()
                F.mse_loss(model(inputs[rows]), targets[rows]).backward()
                optimizer.step()
            watch.end_epoch()
    run = {"objective": objective, "optimizer": optimizer, "penalties": [*penalties]}
    return SimpleNamespace(watch=watch, data=(inputs, targets), model=model, **run)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}], ids=["SGD", "momentum"])
def test_step_errors_are_what_the_variance_of_gradients_adds(options):
    """τ/4 · (n−B)/(B(n−1)) · the variance over examples, for batches that are drawn anew."""
    run = watch_at(0.05 * (1 - options.get("momentum", 0)), **options)
    (error,) = run.watch.rows[-1].step_errors.values()
    single = tacit.Objective(run.model, F.mse_loss, run.data, batch_size=1)
    strength = 0.05 / 4 * (COUNT - BATCH) / (BATCH * (COUNT - 1))
    known = {gradient_variance(single): strength}
    target = run.watch.target()
    without, with_law = (
        tacit.fit(target.equations(run.penalties, known=k)).strengths["weight_decay"]
        for k in (None, known)
    )
    assert error == pytest.approx(without - with_law, rel=0.35)
    assert abs(with_law - 0.01) < 0.7 * abs(without - 0.01)


def test_large_steps_are_a_problem_and_small_ones_are_not():
    run = watch_at(0.1, rates=(1.0, 1.0, 0.03, 0.03))
    large, small = run.watch.rows[1], run.watch.rows[-1]
    (problem,) = [p for p in large.fit.problems if "steps are large" in p.message]
    assert (problem.kind, problem.names) == ("unsettled", ("weight_decay",))
    low, high = large.fit.intervals()["training"]["weight_decay"]
    assert not low < 0.01 < high
    assert not small.fit.problems
    assert small.fit.strengths["weight_decay"] == pytest.approx(0.01, rel=0.02)


def test_the_steps_of_adam_and_a_state():
    run = watch_at(0.003, make=torch.optim.AdamW)
    row = run.watch.rows[-1]
    state = row.state_dict()
    assert type(row).from_state_dict(state).step_errors == row.step_errors
    assert type(row).from_state_dict(state).fit.problems == row.fit.problems


@pytest.mark.parametrize("batch", [COUNT, COUNT // 4])
def test_whole_batches_have_no_noise_and_few_do_not_show_it(batch):
    run = watch_at(0.1, batch=batch)
    assert not run.watch.rows[-1].step_errors


def test_data_that_are_not_indexed_are_not_read_many_times():
    run = watch_at(0.1)
    assert run.watch.rows[-1].step_errors
    batches = [tuple(t[i : i + BATCH] for t in run.data) for i in range(0, COUNT, BATCH)]

    class Stream:
        def __iter__(self):
            return iter(batches)

    for data, shown in ((batches, True), (Stream(), False)):
        objective = tacit.Objective(run.model, F.mse_loss, data)
        errors = step_errors(
            run.watch.target(), run.penalties, objective, units_of(objective), run.optimizer,
            batch=1, updates=len(batches),
        )  # fmt: skip
        assert bool(errors) == shown

"""Windows without equations are passed over; dropout that the objective lacks is named."""

import pytest
import torch
from support.loops import DATA, SGD, Loop
from support.models import tanh_mlp
from support.systems import reports
from torch import nn
from torch.nn import functional as F

import tacit


@pytest.mark.parametrize("still", [{6}, {7}, {8}, {10, 11, 12}])
def test_windows_at_rate_zero_are_passed_over(still):
    """As at the end of a schedule; a row is of windows that follow each other."""
    loop = Loop()
    watch = loop.watch([tacit.l2()], every=4, budget=None)
    for epoch in range(1, 15):
        loop.optimizer.param_groups[0]["lr"] = 0.0 if epoch in still else 0.05
        loop.train(1, watch.end_epoch)
    assert len(watch.rows) >= 2
    for row in watch.rows:
        observed = {*range(row.window - row.examples // 96 + 1, row.window + 1)}
        assert len(observed) >= 4
        assert not observed & still
        assert row.fit.strengths["l2"] == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("how", [{}, {"steps": 7}])
def test_training_that_diverges_goes_on_as_without(how):
    loop, loss = Loop(), F.mse_loss
    watch = loop.watch([tacit.l2()], every=4, budget=None, **how)
    loop.train(5, (lambda: None) if how else watch.end_epoch)
    rows, summary = len(watch.rows), watch.summary()
    assert "diverged" not in summary
    for count in (2, 3):  # weights that are finite, but not their loss, come first
        loop.optimizer.param_groups[0]["lr"] = 1e200 if count == 2 else 0.05
        loop.train(count, (lambda: None) if how else watch.end_epoch)
    assert not torch.isfinite(loss(loop.model(DATA[0]), DATA[1]))
    assert len(watch.rows) == rows
    assert watch.problems[-1].kind == "no signal"
    assert "Training has diverged: weights became NaN" in watch.summary()
    none = Loop(options={"lr": float("inf")})
    unseen = none.watch([tacit.l2()], every=4, budget=None)
    none.train(5, unseen.end_epoch)
    assert "no row yet: Training has diverged" in unseen.summary()


def test_a_group_at_rate_zero_is_named_and_training_goes_on():
    loop = Loop()
    first, last = loop.model[0].parameters(), loop.model[-1].parameters()
    loop.optimizer = torch.optim.SGD([{"params": first, "lr": 0.0}, {"params": last}], **SGD)
    watch = loop.watch([tacit.l2()], every=4, budget=None)
    loop.train(5, watch.end_epoch)
    assert "no row yet: The learning rate of '0.weight' was zero" in watch.summary()
    loop.optimizer.param_groups[0]["lr"] = 0.05
    loop.train(4, watch.end_epoch)
    assert [row.window for row in watch.rows] == [9]
    assert "no signal" not in [problem.kind for problem in watch.problems]


def test_a_window_in_which_parameters_are_frozen_or_unfrozen_is_passed_over():
    """Windows of updates end by themselves: nobody could end one before."""
    loop = Loop()
    watch = loop.watch([tacit.l2()], every=5, steps=7, budget=None)
    for frozen in (False, True, False):  # after 60 and 120 updates, within windows 9 and 18
        loop.model[0].requires_grad_(not frozen)
        loop.train(5)
    assert [row.window for row in watch.rows] == [5, 13, 22]
    for row in watch.rows:
        observed = {*range(row.window - len(row.fit.sources) + 1, row.window + 1)}
        assert not observed & {9, 18}
        tensors = {source.tensors for source in row.fit.sources}
        assert tensors == ({2} if 9 < row.window < 18 else {4})


@pytest.mark.parametrize(
    ("rate", "mode", "options", "named"),
    [
        (0.1, True, {}, True),
        (0.1, True, {"training": True, "draws": 2}, False),
        (0.1, False, {}, False),
        (0.0, True, {}, False),
    ],
)
def test_dropout_that_the_objective_lacks_is_a_problem(rate, mode, options, named):
    """Decay comes out larger by half, and the fit explains nearly all."""

    layers = tanh_mlp(0)
    loop = Loop(make_model=lambda _: nn.Sequential(layers[:2], nn.Dropout(rate), layers[2]))
    watch = loop.watch([tacit.l2()], objective=loop.objective(**options), every=4, budget=None)
    loop.model.train = lambda: nn.Module.train(loop.model, mode)
    for epoch in range(4):
        if epoch == 2:  # the fact is a part of the state
            watch.load_state_dict(watch.state_dict())
        loop.train(1, watch.end_epoch)
    assert reports(watch.fit, "without_dropout") == named
    own = tacit.regularizer("own", lambda p: p["0.0.weight"].pow(4).sum())  # may be that of dropout
    beside = watch.target().equations([tacit.l2(), own])
    assert not reports(tacit.fit(beside), "without_dropout")

"""Watching: the equations of averaged epochs, within a budget, and training as without it."""

import io

import pytest
import torch
from support.loops import DATA, Loop
from support.models import random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import tacit
from tacit.display.numbers import show_with_interval
from tacit.regularizers import metric_ridge, optimizer_penalties


def dropout_network(seed):
    """With layers that change in training mode, and draw from the random state."""
    torch.manual_seed(seed)
    layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)
    return nn.Sequential(*layers).double()


LOOPS = {
    "SGD": {},
    "momentum": {"options": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}},
    "AdamW": {"make_optimizer": torch.optim.AdamW, "options": {"lr": 0.01, "weight_decay": 0.1}},
}
LASSO = tacit.smooth_l1(0.05)


@pytest.fixture
def any_time(monkeypatch):
    """Samples as a budget has them, without its limit of time, which depends on the machine."""
    monkeypatch.setattr("tacit.watching.schedule.Schedule._is_affordable", lambda *_: True)


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("known", [False, True])
def test_a_row_is_the_fit_of_the_epochs_that_it_observed(options, known):
    watched, averaged = Loop(**options), Loop(**options)
    (decay,) = optimizer_penalties(watched.optimizer, watched.model)
    candidates, subtracted = ([LASSO], {decay: 0.05}) if known else ([decay, LASSO], None)
    watch = watched.watch(candidates, every=4, budget=None, known=subtracted)
    watched.train(9, watch.end_epoch)

    network = averaged.model, averaged.optimizer
    averages, expected = tacit.average_epochs(*network, averaged=[LASSO], epochs=6), {}

    def end_epoch():
        averages.end_epoch()
        equations = averages.equations(averaged.objective(), candidates, known=subtracted)
        expected[len(expected) + 1] = tacit.fit(equations)

    averaged.train(9, end_epoch)
    assert [row.window for row in watch.rows] == [4, 8]
    assert [row.update for row in watch.rows] == [4 * 12, 8 * 12]
    assert [row.examples for row in watch.rows] == [4 * 96, 6 * 96]
    for row in watch.rows:
        fit = expected[row.window]
        assert row.fit.strengths == pytest.approx(fit.strengths, rel=1e-12)
        assert row.fit.explained == pytest.approx(fit.explained, rel=1e-12)
        errors = fit.standard_errors["training"]
        assert row.fit.standard_errors["training"] == pytest.approx(errors, rel=1e-9)
    assert watch.fit is watch.rows[-1].fit


def test_windows_of_steps_are_epochs_of_as_many_updates():
    by_epochs, by_steps = Loop(), Loop()
    first = by_epochs.watch([tacit.l2()], every=5, budget=None)
    second = by_steps.watch([tacit.l2()], every=5, budget=None, steps=12)
    by_epochs.train(10, first.end_epoch)
    by_steps.train(10)
    assert [row.window for row in second.rows] == [5, 10]
    for row, other in zip(first.rows, second.rows, strict=True):
        assert row.update == other.update
        assert row.metrics() == other.metrics()


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
@pytest.mark.usefixtures("any_time")
@pytest.mark.parametrize("how", [{"budget": None}, {"budget": 5.0}, {"budget": 5.0, "steps": 7}])
def test_training_is_the_same_bit_by_bit(options, how):
    states = []
    for watched in (True, False):
        torch.manual_seed(1)
        loop, end_epoch = Loop(**options, make_model=dropout_network), lambda: None
        if watched:
            objective = loop.objective(batch_norm="batch", batch_size=8)
            watch = loop.watch([tacit.l2(), LASSO], objective=objective, every=4, **how)
            end_epoch = end_epoch if "steps" in how else watch.end_epoch
        loop.train(12, end_epoch)
        states.append(loop.state())
    assert watch.rows
    assert states[0] == states[1]


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("stop", [3, 5, 8])
@pytest.mark.parametrize("budget", [None, 0.5])
def test_a_resumed_run_has_the_rows_of_one_that_was_not_interrupted(
    options, stop, budget, monkeypatch
):
    def after_the_first(schedule, *_):
        return schedule.budget is None or schedule.window > 0

    monkeypatch.setattr("tacit.watching.schedule.Schedule._is_affordable", after_the_first)

    def start():
        loop = Loop(**options)
        (decay,) = optimizer_penalties(loop.optimizer, loop.model)
        return loop, loop.watch([decay, LASSO], every=5, steps=8, budget=budget)

    through, expected = start()
    through.train(10)
    first, watch = start()
    first.train(stop)  # within a window, and within one that is observed
    file = io.BytesIO()
    checkpoint = {
        "model": first.model.state_dict(),
        "optimizer": first.optimizer.state_dict(),
        "orders": first.orders.get_state(),
        "watch": watch.state_dict(),
    }
    torch.save(checkpoint, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    second, watch = start()
    second.model.load_state_dict(loaded["model"])
    second.optimizer.load_state_dict(loaded["optimizer"])
    second.orders.set_state(loaded["orders"])
    watch.load_state_dict(loaded["watch"])
    second.train(10 - stop)
    assert second.state() == through.state()
    assert (
        [row.window for row in watch.rows] == [row.window for row in expected.rows] == [5, 10, 15]
    )
    for row, other in zip(watch.rows, expected.rows, strict=True):
        assert (row.update, row.examples) == (other.update, other.examples)
        assert row.metrics() == other.metrics()
    assert torch.equal(
        watch.target().equations([tacit.l2()]).factor(),
        expected.target().equations([tacit.l2()]).factor(),
    )


def test_a_state_of_another_watch_is_refused():
    loop = Loop()
    watch = loop.watch([tacit.l2()], every=4, budget=None)
    loop.train(2, watch.end_epoch)
    with pytest.raises(tacit.InputError, match="regularizers"):
        Loop().watch([LASSO], every=4, budget=None).load_state_dict(watch.state_dict())
    with pytest.raises(tacit.InputError, match="steps=None, and this one has steps=6"):
        Loop().watch([tacit.l2()], every=4, steps=6).load_state_dict(watch.state_dict())
    wider = Loop(make_model=lambda _: tanh_mlp(0, (5, 9, 1))).watch([tacit.l2()], every=4)
    with pytest.raises(tacit.InputError, match=r"shape \(\d+, 5\).*has.*shape \(9, 5\)"):
        wider.load_state_dict(watch.state_dict())
    with pytest.raises(tacit.InputError, match=r"nothing, and this one has steps=None, l2"):
        watch.load_state_dict({})


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (([LASSO],), ([tacit.smooth_l1(0.2)],), r"beta=0\.05.*beta=0\.2"),
        (([tacit.l2()], LASSO, 0.1), ([tacit.l2(), LASSO],), r"0\.1 of smooth_l1 known"),
        (([tacit.l2()], LASSO, 0.1), ([tacit.l2()], LASSO, 0.2), r"0\.1 of .* 0\.2 of"),
        (([tacit.l2(), LASSO],), ([LASSO, tacit.l2()],), r"l2, smooth_l1.*smooth_l1.*, l2"),
    ],
)
def test_a_state_of_other_penalties_is_refused(before, after, words):
    """Of the same names, too."""

    def watch(regularizers, known=None, strength=0.0):
        subtracted = None if known is None else {known: strength}
        return Loop().watch(regularizers, known=subtracted, every=4, budget=None)

    with pytest.raises(tacit.InputError, match=words):
        watch(*after).load_state_dict(watch(*before).state_dict())


@pytest.mark.parametrize("budget", [None, 0.02])
def test_other_hooks_of_the_optimizer_may_come_after(budget):
    """torch goes through all of them when a window of updates ends, or the first few updates."""
    loop, seen = Loop(), []
    watch = loop.watch([tacit.l2()], every=5, steps=6, budget=budget)
    loop.optimizer.register_step_post_hook(lambda *_: seen.append(watch.updates))
    second = loop.watch([tacit.l2()], every=4, steps=5, budget=None)
    loop.train(5)
    assert seen == list(range(1, 61))
    assert [row.window for row in watch.rows] == ([] if budget else [5, 10])
    assert [row.window for row in second.rows] == [4, 8, 12]


def test_the_first_few_updates_are_recorded_once_also_in_a_resumed_run():
    loop = Loop()
    watch = loop.watch([tacit.l2()], every=20, steps=40)
    loop.train(1)  # twelve updates, of which the first four are a trial
    trial = watch.state_dict()["schedule"]["trial"]
    resumed = Loop().watch([tacit.l2()], every=20, steps=40)
    resumed.load_state_dict(watch.state_dict())
    assert not resumed.observing
    assert resumed.state_dict()["schedule"]["trial"] == trial
    assert resumed.state_dict()["is_trial"] is False


@pytest.mark.usefixtures("any_time")
def test_a_sampled_row_has_error_bars_of_sampling_and_says_how_many_examples():
    loop = Loop()
    watch = loop.watch([tacit.l2()], every=12, budget=0.25)  # a quarter of the examples
    loop.train(12, watch.end_epoch)
    (row,) = watch.rows
    assert row.examples == 6 * 24
    assert list(row.fit.standard_errors) == ["sampling", "layers"]
    assert "each with a sample of its own" in row.fit.error_bars["sampling"].basis


def test_the_target_of_a_watch_is_screened_and_takes_more_candidates():
    loop = Loop(make_optimizer=torch.optim.AdamW, options={"lr": 0.01, "weight_decay": 0.2})
    watch = loop.watch([tacit.l2()], every=12, budget=None)
    loop.train(24, watch.end_epoch)
    target = watch.target()
    assert len(target.points) == 12
    ridge = metric_ridge(loop.optimizer, loop.model)
    assert tacit.fit(target.equations([ridge])).explained > 0.5
    assert tacit.screen(watch).clusters == ("endpoints", 12)


def test_rows_are_logged_and_printed():
    loop, logged = Loop(), []
    watch = loop.watch([tacit.l2()], every=4, budget=None, log=logged.append)
    assert "4 more epochs" in str(watch)
    with pytest.raises(tacit.InputError, match="4 more epochs"):
        _ = watch.fit
    loop.train(8, watch.end_epoch)
    assert logged == watch.rows
    low, high = watch.rows[-1].fit.intervals()["training"]["l2"]
    assert show_with_interval(watch.rows[-1].fit.strengths["l2"], low, high) in str(watch)
    assert watch.rows[0].metrics("decay/")["decay/strength/l2"] == logged[0].fit.strengths["l2"]


def watch_linear(seed, decays):
    """A watch of ridge in a linear regression, whose weight decay is changed after 40 epochs."""
    torch.manual_seed(seed)
    inputs = torch.randn(240, 4).double()
    targets = inputs.sum(1, keepdim=True) + 0.1 * torch.randn(240, 1).double()
    loop = Loop(
        options={"lr": 0.02},
        make_model=lambda _: nn.Linear(4, 1, bias=False).double(),
        data=(inputs, targets),
        seed=seed,
    )
    watch = loop.watch([tacit.l2()], every=10, budget=None)
    for decay in decays:
        loop.optimizer.param_groups[0]["weight_decay"] = decay
        loop.train(40, watch.end_epoch)
    return watch


@pytest.mark.slow
def test_a_strength_that_changes_along_training_is_a_problem():
    watch = watch_linear(0, [0.1, 0.4])
    assert not watch.rows[0].fit.problems
    (problem,) = watch.problems
    assert (problem.kind, problem.names) == ("drifting", ("l2",))
    assert "at window 80, further apart than their error bars allow" in problem.message
    assert "[1] drifting" in watch.summary()


@pytest.mark.slow
def test_a_constant_strength_is_hardly_ever_called_a_change():
    changed = sum(bool(watch_linear(seed, [0.2, 0.2]).problems) for seed in range(200, 210))
    assert changed <= 1


def test_updates_that_a_scaler_skips_do_not_count():
    loop = Loop(make_model=lambda seed: tanh_mlp(seed).float(), data=tuple(t.float() for t in DATA))
    scaler = torch.amp.GradScaler("cpu")
    watch = loop.watch([tacit.l2()], every=4, steps=5, budget=None)
    inputs, targets = loop.data
    steps = 0
    while not watch.rows:
        loop.optimizer.zero_grad()
        overflow = float("inf") if steps % 3 == 0 else 1.0
        scaler.scale(overflow * F.mse_loss(loop.model(inputs), targets)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        steps += 1
    assert watch.updates == watch.rows[0].update == 20
    assert steps == 30


def test_a_closed_watch_follows_no_further_updates():
    loop = Loop()
    watch = loop.watch([tacit.l2()], every=4, budget=None)
    loop.train(4, watch.end_epoch)
    watch.close()
    loop.train(1)
    assert watch.updates == 4 * 12
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert not loop.optimizer._optimizer_step_post_hooks


class CountedData(torch.utils.data.Dataset):
    """Which of its examples are read."""

    def __init__(self, tensors):
        self.tensors, self.read = tensors, []

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        self.read.append(index)
        return tuple(t[index] for t in self.tensors)


@pytest.mark.usefixtures("any_time")
def test_only_the_examples_of_the_samples_are_read():
    data = CountedData(DATA)
    loop = Loop()
    objective = tacit.Objective(loop.model, F.mse_loss, DataLoader(data, 16))
    watch = loop.watch([tacit.l2()], objective=objective, every=12, budget=0.25)
    loop.train(6, watch.end_epoch)
    data.read.clear()
    loop.train(6, watch.end_epoch)
    assert watch.rows[0].examples == 6 * 24
    assert len(set(data.read)) > 24  # the windows have different examples
    assert len(data.read) < 6 * 24 * 3  # one pass each, and checks


MISTAKES = {
    "no loop": (lambda loop, other: loop.watch([tacit.l2()], every=0), "every"),
    "no budget": (lambda loop, other: loop.watch([tacit.l2()], every=1, budget=0.0), "budget"),
    "no steps": (lambda loop, other: loop.watch([tacit.l2()], every=1, steps=0), "steps"),
    "a copy": (
        lambda loop, other: loop.watch([tacit.l2()], every=1, objective=other),
        "with a copy",
    ),
    "no candidate": (lambda loop, other: loop.watch([], every=1), "regularizer"),
    "no log": (lambda loop, other: loop.watch([tacit.l2()], every=1, log="tensorboard"), "log"),
    "no update": (
        lambda loop, other: loop.watch([tacit.l2()], every=1).end_epoch(),
        "before any update",
    ),
    "both": (
        lambda loop, other: loop.watch([tacit.l2()], every=1, steps=3).end_epoch(),
        "leave one of the",
    ),
    "no target": (
        lambda loop, other: loop.watch([tacit.l2()], every=9).target(),
        "no window was observed",
    ),
}


@pytest.mark.parametrize(("call", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_explained(call, words):
    with pytest.raises(tacit.InputError, match=words):
        call(Loop(), Loop().objective())


@pytest.mark.slow
@pytest.mark.usefixtures("any_time")
def test_intervals_of_sampled_rows_contain_the_strength():
    """Of 48 rows with 25 % of the examples; of 120 others, 113 contained it."""
    inside = []
    for seed in range(100, 112):
        loop = Loop(data=random_data(seed, count=640), seed=seed)
        watch = loop.watch([tacit.l2()], every=10, budget=0.3)
        loop.train(40, watch.end_epoch)
        intervals = [row.fit.intervals()["sampling"]["l2"] for row in watch.rows]
        inside += [low <= 0.05 <= high for low, high in intervals]
    assert len(inside) == 48
    assert sum(inside) >= 41

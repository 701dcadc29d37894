"""One pass over the data: draws are averaged, counts are compared, progress is shown."""

import io
import sys
import time

import numpy as np
import pytest
import torch
from support.models import random_data, tanh_mlp
from support.objectives import assert_close, dropout_objective, random_batches
from torch.nn import functional as F

import tacit
from tacit import Objective, reference
from tacit.objective import passes
from tacit.objective.passes import track


def test_several_draws_average_to_the_mean_of_single_draws():
    objective = dropout_objective(random_data(1), draws=4, seed=5, batch_size=9)
    value, gradient = objective.value_and_gradient()
    singles = [objective.value_and_gradient(draws=[i]) for i in range(4)]
    assert value == pytest.approx(np.mean([v for v, _ in singles]), rel=1e-12)
    gradients = torch.stack([reference.flat(g) for _, g in singles])
    assert len(gradients.unique(dim=0)) == 4
    torch.testing.assert_close(reference.flat(gradient), gradients.mean(0), rtol=1e-12, atol=1e-15)
    assert value == objective.value()


def test_data_that_changes_length_between_passes_is_refused():
    data = random_batches(1)
    objective = Objective(tanh_mlp(0), F.mse_loss, data)
    objective.gradient()
    data.pop()
    with pytest.raises(tacit.InputError, match=r"gave 18 examples.*earlier pass gave 20.*the same"):
        objective.gradient()
    data.clear()
    with pytest.raises(tacit.InputError, match=r"gave 0 examples.*read repeatedly"):
        objective.value()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_long_pass_draws_a_progress_bar_only_on_terminals(monkeypatch):
    def gradient_and_output(stream):
        monkeypatch.setattr(sys, "stderr", stream)
        return objective.gradient(), stream.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    objective = Objective(tanh_mlp(0), F.mse_loss, random_data(1), batch_size=4)
    expected, quick_output = gradient_and_output(Terminal())
    monkeypatch.setattr(passes, "PATIENCE", 0)
    gradient, output = gradient_and_output(Terminal())
    assert (quick_output, gradient_and_output(io.StringIO())[1]) == ("", "")
    assert "mse_loss" in output
    assert "16/16" in output
    assert_close(gradient, expected, tolerance=0)


def use_terminal(monkeypatch):
    """Make the error stream a terminal on which progress bars are drawn at once.

    Not a fixture, because pytest replaces the error stream between set-up and test.
    """
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(passes, "PATIENCE", -1)
    return terminal


def test_without_rich_items_are_yielded_without_a_progress_bar(monkeypatch):
    terminal = use_terminal(monkeypatch)
    for module in [name for name in sys.modules if name.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert passes.new_bar() is None
    assert list(track("abc", total=3, label="letters")) == ["a", "b", "c"]
    assert terminal.getvalue() == ""


def test_a_progress_bar_is_stopped_when_its_reader_stops_early(monkeypatch):
    terminal = use_terminal(monkeypatch)
    items = track("abc", total=3, label="letters")
    assert [next(items), next(items)] == ["a", "b"]
    items.close()
    assert "letters" in terminal.getvalue()
    length = len(terminal.getvalue())
    time.sleep(0.3)  # a bar that still runs would be drawn again
    assert len(terminal.getvalue()) == length

"""One pass over the data: draws are averaged, counts are compared, progress is shown.

Objectives that are not deterministic, or not means over examples, are refused early.
"""

import io
import random
import sys
import time

import numpy as np
import pytest
import torch
from support.models import random_data, tanh_mlp
from support.objectives import assert_close, dropout_objective, random_batches, split_batches
from torch import nn
from torch.nn import functional as F

from tacit import InputError, Objective, reference
from tacit.objective import passes
from tacit.objective.passes import track

CLASS_WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double())


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
    with pytest.raises(InputError, match=r"gave 18 examples.*earlier pass gave 20.*the same"):
        objective.gradient()
    data.clear()
    with pytest.raises(InputError, match=r"gave 0 examples.*read repeatedly"):
        objective.value()


def sorted_classes(count=900):
    X, _ = random_data(3, count=count)
    return X, torch.arange(3).repeat_interleave(count // 3)


def test_a_sum_reduced_loss_is_refused_with_weights_too():
    X, y = random_data(2, outputs=3)
    model = tanh_mlp(2, (5, 8, 3))
    with pytest.raises(InputError, match=r"not a mean over examples|sum-reduced"):
        Objective(model, nn.MSELoss(reduction="sum"), (X, y), weights=torch.ones(len(X)))


def test_class_weights_are_refused_however_the_labels_are_sorted():
    model, (X, y) = tanh_mlp(3, (5, 8, 3)), sorted_classes()
    with pytest.raises(InputError, match="class weights"):
        Objective(model, CLASS_WEIGHTED, (X, y))
    batches = split_batches(X, y, size=100)
    objective = Objective(model, CLASS_WEIGHTED, batches)  # each batch is of one class
    with pytest.raises(InputError, match="class weights"):
        objective.gradient()


def test_padding_that_occurs_only_in_later_batches_is_refused():
    model, (X, y) = tanh_mlp(4, (5, 8, 3)), sorted_classes()
    y = torch.where((torch.arange(900) > 400) & (torch.arange(900) % 2 == 0), -100, y)
    batches = split_batches(X, y, size=100)
    objective = Objective(model, F.cross_entropy, batches)
    with pytest.raises(InputError, match="ignored tokens"):
        objective.value()


def test_large_batches_are_probed_on_a_few_examples():
    batch_sizes = []
    model, (X, y) = tanh_mlp(11), random_data(11, count=5000)
    model.register_forward_hook(lambda module, inputs, output: batch_sizes.append(len(output)))
    Objective(model, F.mse_loss, [(X, y)])
    assert max(batch_sizes) <= 256


def test_dropout_called_as_a_function_is_refused_in_eval_and_averaged_in_training():
    class FunctionalDropout(nn.Linear):
        def forward(self, x):
            return super().forward(F.dropout(x))

    torch.manual_seed(0)
    model, data = FunctionalDropout(5, 1).double(), random_data(1)
    with pytest.raises(InputError, match=r"not deterministic.*dropout.*training=True"):
        Objective(model, F.mse_loss, data)
    values = [dropout_objective(data, model=model).value() for _ in range(2)]
    assert values[0] == values[1]


def test_noise_that_torchs_seed_does_not_control_is_refused_in_training_too():
    class PythonNoise(nn.Linear):
        def forward(self, x):
            return super().forward(x) + random.random()

    with pytest.raises(InputError, match=r"not deterministic.*torch's seed does not control"):
        dropout_objective(random_data(1), model=PythonNoise(5, 1).double())


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

"""What several processes that share a model refuse, and that the error of one ends them all."""

import time

import pytest
import torch
from support.models import random_data, tanh_mlp
from support.processes import mesh_of, number, own, run_processes, share
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import tacit
from tacit import regularizers

pytestmark = pytest.mark.slow

DATA = random_data(0, count=40)


def message_of(call):
    """The message of the error that a call raises."""
    try:
        call()
    except tacit.InputError as error:
        return str(error)
    return ""


def refusals(kind):
    """What is refused, each in all processes."""
    model = share(tanh_mlp(0), kind)
    rows = own(40, kind)
    part = DATA[0][rows], DATA[1][rows]
    objective = tacit.Objective(model, F.mse_loss, part, batch_size=8)
    target = tacit.endpoint_target(objective)
    square = tacit.regularizer(
        "square", lambda params: sum(p.square().sum() for p in params.values())
    )
    broken = (part[0].clone(), part[1])
    if number(kind) == 1:
        broken[0][3] = float("nan")
    kept = tanh_mlp(1)
    other = share(tanh_mlp(0), kind)
    if not kind.startswith("fully_shard"):
        with torch.no_grad():
            other.module[0].weight[0, 0] += number(kind)
    norm = share(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double(), kind)
    norm(part[0])
    calls = {
        "statistics": lambda: tacit.Objective(norm, F.mse_loss, part, batch_norm="running"),
        "same data": lambda: tacit.Objective(model, F.mse_loss, DATA),
        "nan in one": lambda: tacit.Objective(model, F.mse_loss, broken, batch_size=8).gradient(),
        "predictions": lambda: objective.predictions({}),
        "variance": lambda: regularizers.gradient_variance(objective),
    }
    if kind.startswith("copies"):
        calls["copies"] = lambda: tacit.Objective(other, F.mse_loss, part)
    else:
        calls |= {
            "whole parameters": lambda: target.equations(square),
            "reference": lambda: target.equations(
                regularizers.distance_to(dict(kept.named_parameters()))
            ),
            "file": lambda: target.save("nowhere.safetensors"),
            "curvature of matrices": lambda: target.equations(
                regularizers.gradient_norm(objective, known={regularizers.nuclear_norm(): 0.1})
            ),
            "other candidates": lambda: target.equations(tacit.smooth_l1(0.1 + number(kind))),
            "other known": lambda: target.equations(tacit.l1(), known={tacit.l2(): number(kind)}),
            "diagonal": lambda: target.equations(regularizers.diagonal(scope="0.bias")),
        }
    return {name: message_of(call) for name, call in calls.items()}


@pytest.mark.parametrize("kind", ["copies on 2", "fully_shard on 2"])
def test_what_cannot_be_shared_is_refused_in_every_process(kind, tmp_path):
    first, second = run_processes(refusals, kind, tmp_path)
    for name in first:
        assert first[name], name
        assert second[name], name
    assert "own part of the data" in first["same data"]
    assert "torch.distributed.broadcast" in second["statistics"]
    assert "NaN" in second["nan in one"]
    assert "process 1 of 2 stopped with" in first["nan in one"]
    if "whole parameters" in first:
        assert "square is a function of all parameters" in first["whole parameters"]
        assert "save equations" in first["file"]
        assert "whole matrices" in first["curvature of matrices"]
        assert "process 1 has ['smooth_l1 (smooth_l1(beta=1.1))']" in first["other candidates"]
        assert "known=['l2 (l2): 1']" in second["other known"]


def same_and_other_examples(kind):
    """Data that two processes each have, and other data of equal sums in each."""
    model, pair = share(tanh_mlp(0), kind), number(kind) // 2
    rows = slice(20 * pair, 20 * pair + 20)
    same = message_of(lambda: tacit.Objective(model, F.mse_loss, (DATA[0][rows], DATA[1][rows])))
    model = share(tanh_mlp(0, sizes=(4, 3, 1)), kind)
    one_hot = torch.eye(4).double().roll(number(kind), 0)
    ones = torch.ones(4, 1).double()
    return same, message_of(lambda: tacit.Objective(model, F.mse_loss, (one_hot, ones)))


def test_examples_of_two_processes_are_refused_and_equal_sums_are_not(tmp_path):
    for same, other in run_processes(same_and_other_examples, "hybrid on 4", tmp_path):
        assert "4 processes have 2 different first batches" in same
        assert not other


def after_an_evaluation(kind):
    """What one process writes of a model whose rows were whole before: a report in process 0."""
    model = (
        fully_shard(tanh_mlp(0), mesh=mesh_of(kind))
        if "shard" in kind
        else share(tanh_mlp(0), kind)
    )
    rows = own(40, kind)
    part = DATA[0][rows], DATA[1][rows]
    model(part[0])
    fit = tacit.fit(tacit.endpoint_equations(tacit.Objective(model, F.mse_loss, part), tacit.l2()))
    if number(kind) == 0:
        tacit.report(fit, "report.html")
    return fit.strengths


@pytest.mark.parametrize("kind", ["copies on 2", "fully_shard on 2"])
def test_a_report_is_written_by_one_process_of_a_model_that_was_just_run(
    kind, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    first, second = run_processes(after_an_evaluation, kind, tmp_path)
    assert first == second
    alone = tacit.estimate(tanh_mlp(0), F.mse_loss, DATA, tacit.l2())
    assert first == pytest.approx(alone.strengths, rel=1e-10)
    assert "is computed by one process" in (tmp_path / "report.html").read_text()


def fail_in_one(kind):
    """Process 1 fails within its third batch."""
    model = share(tanh_mlp(0), kind)
    rows = slice(number(kind) * 20, number(kind) * 20 + 20)
    calls = []

    def loss(output, target):
        calls.append(1)
        if number(kind) == 1 and len(calls) > 30:
            raise ZeroDivisionError("the loss of process 1")
        return F.mse_loss(output, target)

    objective = tacit.Objective(model, loss, (DATA[0][rows], DATA[1][rows]), batch_size=1)
    for _ in range(10):
        objective.gradient()


@pytest.mark.parametrize("kind", ["copies on 2", "fully_shard on 2"])
def test_a_process_that_fails_ends_the_others_with_its_error(kind, tmp_path):
    start = time.monotonic()
    with pytest.raises(Exception, match="the loss of process 1"):
        run_processes(fail_in_one, kind, tmp_path)
    assert time.monotonic() - start < 45


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5).double())
        self.body = tanh_mlp(0)

    def forward(self, x):
        return self.body(self.scale * x)


def ways_of_sharding(kind):
    """Models that are sharded in ways that are not followed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    partly = Odd()
    fully_shard(partly.body, mesh=mesh)
    columns = fully_shard(
        tanh_mlp(0, (6, 8, 2)), mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1)
    )
    tensors = tanh_mlp(0)
    weight = distribute_tensor(tensors[0].weight.detach(), mesh, [Shard(0)])
    tensors[0].weight = nn.Parameter(weight)
    rows = own(40, kind)
    part = DATA[0][rows], DATA[1][rows]
    late = tanh_mlp(0)
    made_before = tacit.Objective(late, F.mse_loss, part)
    share(late, kind)
    models = {"partly": partly, "columns": columns, "tensors": tensors}
    messages = {
        name: message_of(lambda m=model: tacit.Objective(m, F.mse_loss, part))
        for name, model in models.items()
    }
    return messages | {"late": message_of(made_before.gradient)}


def test_other_ways_of_sharding_are_refused(tmp_path):
    for messages in run_processes(ways_of_sharding, "fully_shard on 2", tmp_path):
        assert "'scale' is not sharded" in messages["partly"]
        assert "only rows" in messages["columns"]
        assert "fully_shard" in messages["tensors"]
        assert "after fully_shard" in messages["late"]

"""Targets on disk: what is written from a file equals what is written from memory."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.descent import descend
from support.models import batch_norm_mlp, params_of, random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit import InputError
from tacit.regularizers import gradient_norm

MODEL, DATA = tanh_mlp(2), random_data(2)
OBJECTIVE = tacit.Objective(MODEL, F.mse_loss, DATA)
PATH = tacit.Trajectory.from_positions(descend(MODEL, DATA, 1e-2, 12), 1e-2)


def difference():
    with_noise = tacit.Objective.from_batch_loss(
        MODEL,
        lambda model, batch, noise: (
            (model(batch[0] + 0.1 * noise.normal(batch[0])) - batch[1]).square().mean(1)
        ),
        DATA,
        training=True,
        draws=16,
    )
    return tacit.difference_target(with_noise, OBJECTIVE)


TARGETS = {
    "endpoint": lambda: tacit.endpoint_target(OBJECTIVE),
    "difference": difference,
    "trajectory": lambda: tacit.trajectory_target(OBJECTIVE, PATH, step_weights=range(1, 13)),
    "flow": lambda: tacit.trajectory_target(OBJECTIVE, PATH, reference=tacit.rk4(2)),
    "integral": lambda: tacit.equations.accumulated_target(OBJECTIVE, PATH),
}
CANDIDATES = [tacit.l2(), tacit.smooth_l1(0.1), gradient_norm(OBJECTIVE)]


@pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS)
def test_a_loaded_target_gives_the_same_fit(make, tmp_path):
    target = make()
    target.save(tmp_path / "target.safetensors")
    loaded = tacit.Target.load(tmp_path / "target.safetensors")
    expected, got = (tacit.estimate(t, CANDIDATES) for t in (target, loaded))
    assert got.strengths == expected.strengths
    assert got.sources == expected.sources
    assert got.problems == expected.problems
    assert got.equations.origin is None
    loaded.save(tmp_path / "again.safetensors")
    again = tacit.Target.load(tmp_path / "again.safetensors")
    assert tacit.estimate(again, CANDIDATES).strengths == expected.strengths


def test_what_needs_the_objective_is_refused(tmp_path):
    TARGETS["endpoint"]().save(tmp_path / "t")
    fit = tacit.estimate(tacit.Target.load(tmp_path / "t"), tacit.l2())
    for call in (
        lambda: tacit.score_examples(fit),
        lambda: tacit.validate(fit, train=lambda *_: None),
        lambda: tacit.null_distribution(fit, "l2"),
    ):
        with pytest.raises(InputError, match="needs the objective"):
            call()


def test_known_penalties_of_a_flow_stay_in_its_file(tmp_path):
    ridge, flow = tacit.l2(name="ridge"), tacit.rk4(2)
    target = tacit.trajectory_target(OBJECTIVE, PATH, reference=flow, known={ridge: 0.1})
    target.save(tmp_path / "t")
    loaded = tacit.Target.load(tmp_path / "t")
    assert tacit.estimate(loaded, tacit.l1()).sources[0].known == {"ridge": 0.1}
    with pytest.raises(InputError, match=r"part of the flow.*ridge"):
        loaded.equations(tacit.l1(), known={ridge: 0.2})
    with pytest.raises(InputError, match=r"gradient_norm\(objective, known="):
        loaded.equations(gradient_norm(OBJECTIVE))
    explicit = gradient_norm(OBJECTIVE, known={ridge: 0.1})
    expected = tacit.estimate(target, gradient_norm(OBJECTIVE)).strengths
    assert tacit.estimate(loaded, explicit).strengths == expected


def test_half_precision_and_running_statistics_are_kept(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).bfloat16()
    X = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    objective = tacit.Objective(
        model, F.mse_loss, (X, X[:, :1].expand(-1, 4)), batch_norm="running"
    )
    tacit.endpoint_target(objective, params=model.state_dict()).save(tmp_path / "t")
    (point,) = tacit.Target.load(tmp_path / "t").points
    assert point.params["0.weight"].dtype == torch.bfloat16
    assert point.params.buffers["1.running_var"].equal(model[1].running_var)


def test_running_statistics_of_both_ends_of_a_path_are_kept(tmp_path):
    model, (X, y) = batch_norm_mlp(3), random_data(3)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(X)
    model.eval()
    recorder = tacit.record(model, sgd)
    for _ in range(5):
        sgd.zero_grad()
        F.mse_loss(model(X), y).backward()
        sgd.step()
        recorder.step()
    objective = tacit.Objective(model, F.mse_loss, (X, y), batch_norm="running")
    target = tacit.equations.accumulated_target(objective, recorder.trajectory())
    target.save(tmp_path / "t")
    model.train()(3 * X)
    candidates = [tacit.l2(), tacit.regularizers.gradient_norm(objective)]
    loaded, computed = (
        tacit.fit(t.equations(candidates)).strengths
        for t in (tacit.Target.load(tmp_path / "t"), target)
    )
    assert loaded == computed


def test_averaged_columns_are_not_stored(tmp_path):
    model, (X, y) = tanh_mlp(3), random_data(3)
    optimizer, ridge = torch.optim.SGD(model.parameters(), lr=0.01), tacit.l2()
    averages = tacit.average_epochs(model, optimizer, averaged=[ridge])
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(X), y).backward()
        optimizer.step()
    averages.end_epoch()
    target = averages.target(tacit.Objective(model, F.mse_loss, (X, y)))
    with pytest.raises(InputError, match="averaged while training"):
        target.save(tmp_path / "t")


def test_weights_that_moved_are_refused(tmp_path):
    model = tanh_mlp(4)
    target = tacit.endpoint_target(tacit.Objective(model, F.mse_loss, DATA))
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(InputError, match="weights have changed"):
        target.save(tmp_path / "t")
    assert not (tmp_path / "t").exists()


def rewrite(path, change):
    """The file with another head, and the right checksum for it."""
    from tacit.equations import files

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    head = json.loads(metadata["head"])
    change(head, tensors)
    text = json.dumps(head)
    ordered = [tensors[str(i)] for i in range(len(tensors))]
    checksum = files._checksum(text, ordered)
    save_file(tensors, path, {**metadata, "head": text, "sha256": checksum})


CHANGES = {
    "another mode": lambda head, _: head.update(mode="guess"),
    "no points": lambda head, _: head.update(points=[]),
    "more groups than tensors": lambda head, _: head.update(groups=10**15),
    "less than no groups": lambda head, _: head.update(groups=-1),
    "an unknown part": lambda head, _: head["points"][0]["tensors"].update({"more": ["x"]}),
    "a missing tensor": lambda head, _: head["points"][0]["tensors"].pop("vector 0"),
    "more tensors": lambda _, tensors: tensors.update({str(len(tensors)): torch.zeros(1)}),
    "another shape": lambda _, tensors: tensors.update({"0": tensors["0"][:1].clone()}),
    "not finite": lambda _, tensors: tensors.update({"0": tensors["0"] / 0}),
    "a negative floor": lambda head, _: head["points"][0]["floors"].update({"0.weight": -1.0}),
    "another fact": lambda head, _: head["points"][0]["facts"].update({"trusted": True}),
    "a text for a number": lambda head, _: head["points"][0].update(gradient_norm="large"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_made_up_files_are_refused(change, tmp_path):
    path = tmp_path / "t"
    TARGETS["endpoint"]().save(path)
    rewrite(path, change)
    with pytest.raises(InputError, match="is damaged"):
        tacit.Target.load(path)


def test_other_files_are_refused(tmp_path):
    target, path = TARGETS["endpoint"](), tmp_path / "t"
    target.equations(tacit.l2()).save(path)
    with pytest.raises(InputError, match=r"not written by Target\.save"):
        tacit.Target.load(path)
    target.save(path)
    with pytest.raises(InputError, match=r"not written by Equations\.save"):
        tacit.Equations.load(path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="checksum"):
        tacit.Target.load(path)
    with pytest.raises(InputError, match=r"Target\.save"):
        tacit.Target.load(tmp_path / "nothing")


def test_the_point_of_a_loaded_target_is_its_own(tmp_path):
    """Another machine has no model: candidates are bound at the stored parameters."""
    TARGETS["endpoint"]().save(tmp_path / "t")
    (point,) = tacit.Target.load(tmp_path / "t").points
    assert all(torch.equal(p, params_of(MODEL)[n]) for n, p in point.params.items())

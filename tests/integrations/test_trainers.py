"""Trainers of other packages: the numbers of a plain loop, logged, and training as without."""

import re
from contextlib import nullcontext

import pytest
import torch
from lightning import pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from support.trainers import BATCH, LOOPS, Module, Run
from torch.utils.data import DataLoader, IterableDataset

import tacit
from tacit.integrations import lightning

pytestmark = [
    # Lightning advises more workers and a larger log, and uses what torch has deprecated.
    pytest.mark.filterwarnings("ignore::UserWarning:lightning_utilities.core.rank_zero"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning"),
]
TRAINERS = {name: loop for name, loop in LOOPS.items() if name != "plain"}
RUNS = {
    "epochs": {},
    "windows of updates": {"every": 5, "steps": 7},
    "SGD with momentum": {
        "optimizer": torch.optim.SGD,
        "options": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
    },
    "accumulation": {"accumulate": 3},
    "clipping": {"clip": 0.3},
    "float32": {"dtype": torch.float32},
    "mixed precision": {"dtype": torch.float32, "bf16": True},
    "a schedule": {"schedule": True},
    "batch norm, and evaluation in between": {"batch_norm": True, "evaluate": True},
    "stopped early": {"stop": 100},
    "stopped early, windows of updates": {"stop": 75, "every": 5, "steps": 7},
    "all": {"dtype": torch.float32, "bf16": True, "accumulate": 2, "clip": 0.3, "steps": 5},
}


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def plain(request, tmp_path_factory):
    """Options, and the result of a plain loop, which both trainers are compared with."""
    folder = tmp_path_factory.mktemp("plain")
    return request.param, LOOPS["plain"](Run(**request.param), folder)


@pytest.mark.parametrize("loop", TRAINERS.values(), ids=TRAINERS)
def test_a_trainer_gives_the_numbers_of_a_plain_loop(loop, plain, tmp_path):
    options, expected = plain
    result = loop(Run(**options), tmp_path / "trainer")
    assert result.weights == expected.weights
    assert len(expected.rows) >= 2
    for (update, window, metrics), other in zip(result.rows, expected.rows, strict=True):
        assert (update, window) == other[:2]
        assert metrics == pytest.approx(other[2], rel=1e-10)


def test_lightning_must_not_end_an_epoch_with_a_gradient_that_is_too_small(tmp_path):
    """Of 12 batches, 5 + 5 + 2 are accumulated, and each sum is divided by 5: 0.8 on average."""
    with pytest.raises(tacit.InputError, match=r"25% too large.* limit_train_batches=10"):
        LOOPS["Lightning"](Run(accumulate=5), tmp_path)
    with pytest.raises(tacit.InputError, match="100% too large"):
        LOOPS["Lightning"](Run(accumulate=24), tmp_path)
    assert not LOOPS["Lightning"](Run(accumulate=5, watched=False), tmp_path).rows


class WithoutLength(IterableDataset):
    """Data whose number of batches is not known before an epoch ends."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return zip(*self.data, strict=True)


@pytest.mark.parametrize(
    ("accumulate", "match"),
    [(5, "does not divide the 12 .* 25% too large"), (4, None), ({0: 1, 2: 5}, "25% too large")],
)
def test_lightning_sees_at_the_end_of_an_epoch_what_it_accumulated(accumulate, match):
    """Where data have no length, and where a callback changes it."""
    run = Run(epochs=4)
    positional, options = run.watching()
    scheduled = isinstance(accumulate, dict)
    callbacks = [lightning.Callback(*positional, **options)]
    callbacks += [GradientAccumulationScheduler(accumulate)] if scheduled else []
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=4, accumulate_grad_batches=1 if scheduled else accumulate,
        callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(WithoutLength(run.data), BATCH)
    with pytest.raises(tacit.InputError, match=match) if match else nullcontext():
        trainer.fit(Module(run), loader)


@pytest.mark.parametrize("loop", TRAINERS.values(), ids=TRAINERS)
def test_an_optimizer_without_weight_decay_has_no_candidates(loop, tmp_path):
    with pytest.raises(tacit.InputError, match=r"returned none.*without weight decay.*\[tacit"):
        loop(Run(options={"lr": 0.01, "weight_decay": 0.0}), tmp_path)


def without_time(logged):
    """What is logged, but for the speed of the machine."""
    return {n: v for n, v in logged.items() if not re.search("second|runtime|flos|epoch", n)}


@pytest.mark.parametrize("windows", [{}, {"every": 5, "steps": 5}], ids=["epochs", "updates"])
@pytest.mark.parametrize("loop", TRAINERS.values(), ids=TRAINERS)
def test_event_files_have_the_rows_and_training_is_as_without(loop, windows, tmp_path):
    options = {"dtype": torch.float32, "dropout": 0.2, "accumulate": 2, "clip": 0.3, **windows}
    options |= {"batch_norm": True, "schedule": True, "evaluate": True}
    result = loop(Run(**options), tmp_path / "watched")
    plain = loop(Run(**options, watched=False), tmp_path / "unwatched")
    assert result.weights == plain.weights
    own = {name: values for name, values in result.logged.items() if "tacit/" in name}
    others = {name: values for name, values in result.logged.items() if name not in own}
    assert without_time(others) == without_time(plain.logged)
    assert any("loss" in name for name in others)  # so that the comparison says something
    (prefix,) = {name.partition("tacit/")[0] for name in own}
    expected: dict[str, list[tuple[int, float]]] = {}
    for update, _, metrics in result.rows:
        for name, value in metrics.items():
            expected.setdefault(prefix + name, []).append((update, pytest.approx(value, rel=1e-6)))
    assert own == expected
    assert f"{prefix}tacit/strength/weight_decay" in own


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_run_with_fewer_windows_than_every_has_no_row_and_no_other_weights(loop, tmp_path):
    for windows in ({"every": 10}, {"every": 10, "steps": 12}):
        result = loop(Run(**windows, epochs=2), tmp_path / "watched")
        assert not result.rows
        assert not [name for name in result.logged if "tacit/" in name]
        plain = loop(Run(watched=False, epochs=2), tmp_path / "unwatched")
        assert result.weights == plain.weights


RESUMED = {
    "of epochs": ({}, 60),
    "written at an update": ({"checkpoints": 12}, 60),  # before the trainer ends the epoch
    "within a window": ({"every": 5, "steps": 7}, 60),
    "within an epoch": ({"checkpoints": 6}, 54),
}
"""Options, and the update of the checkpoint."""


def resume(loop, options, update, folder):
    """The results of a run, and of one that goes on from its checkpoint after an update."""
    through = loop(Run(**options), folder)
    (checkpoint,) = [path for path in folder.rglob("*") if path.stem in checkpoint_names(update)]
    return through, loop(Run(**options), folder, resume=str(checkpoint))


def checkpoint_names(update):
    return f"checkpoint-{update}", str(update)


@pytest.mark.parametrize(("options", "update"), RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize("loop", TRAINERS.values(), ids=TRAINERS)
def test_a_resumed_run_goes_on_with_its_rows(loop, options, update, tmp_path):
    through, resumed = resume(loop, options, update, tmp_path)
    assert resumed.weights == through.weights
    assert resumed.rows == through.rows
    assert any(row[0] <= update for row in through.rows)
    assert any(row[0] > update for row in through.rows)

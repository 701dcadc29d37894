"""Trainers of other packages: the numbers of a plain loop, logged, and training as without."""

import pytest
import torch
from support.trainers import LOOPS, Run

pytestmark = [
    # Lightning advises more workers and a larger log, and uses what torch has deprecated.
    pytest.mark.filterwarnings("ignore::UserWarning:lightning_utilities.core.rank_zero"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
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
    "all": {"dtype": torch.float32, "bf16": True, "accumulate": 2, "clip": 0.3, "steps": 5},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("loop", TRAINERS.values(), ids=TRAINERS)
def test_a_trainer_gives_the_numbers_of_a_plain_loop(loop, options, tmp_path):
    expected = LOOPS["plain"](Run(**options), tmp_path / "plain")
    result = loop(Run(**options), tmp_path / "trainer")
    assert result.weights == expected.weights
    assert len(expected.rows) >= 2
    for (update, window, metrics), other in zip(result.rows, expected.rows, strict=True):
        assert (update, window) == other[:2]
        assert metrics == pytest.approx(other[2], rel=1e-10)

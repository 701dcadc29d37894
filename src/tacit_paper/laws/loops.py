"""Training loops that the laws of steps share."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tacit import Objective, Trajectory, record
from tacit.objective.params import Params
from tacit_paper.laws.small_models import half_squares, move, regression_data, tanh_network


def record_steps(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    count: int,
    *,
    skip: int = 0,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
) -> Trajectory:
    """Steps of torch's optimizer on all examples: `count` of them are recorded, after `skip`."""

    def update() -> None:
        optimizer.zero_grad()
        loss_of(objective).backward()
        before_step()
        optimizer.step()
        after_step()

    for _ in range(skip):
        update()
    recorder = record(objective.model, optimizer)
    for _ in range(count):
        update()
        recorder.step()
    return recorder.trajectory()


def loss_of(objective: Objective) -> Tensor:
    """½(f − y)² over all examples of an objective, at the weights of its model."""
    inputs, target = objective.data
    return half_squares(objective.model(inputs), target)


def in_batches(seed: int, count: int = 3, size: int = 16) -> tuple[Objective, list[Objective]]:
    """The squared loss of a tanh network on all batches, and that of each batch."""
    X, y = regression_data(seed, examples=count * size)
    model = tanh_network(seed)
    batches = list(zip(X.split(size), y.split(size), strict=True))
    whole = Objective(model, half_squares, (X, y), batch_size=size)
    return whole, [Objective(model, half_squares, batch) for batch in batches]


def step_on_each(start: Params, batches: Sequence[Objective], step: float) -> Params:
    """Where one step on each of these batches, in their order, leads."""
    for batch in batches:
        start = move(start, batch.gradient(start), -step)
    return start


def mean_path(start: Params, ends: Sequence[Params], time: float) -> Trajectory:
    """The mean of all paths there are, which began at one point and took the same time."""
    paths = [Trajectory.from_positions([start, end], time) for end in ends]
    return Trajectory.mean(paths, sampled=False)

"""`estimate` against one plain pass over the data: everything beyond the gradient, in time."""

import math
from statistics import median

from table import Row
from torch import Tensor, nn
from torch.nn import functional as F
from workload import EXAMPLES, classes, elastic_net, mlp, seconds

import tacit

BOUND = 1.25
BATCH = 1024
"""The batch size of `estimate` for data held in tensors."""
DISTURBED = 1.3
"""Median over fastest time beyond which the machine was busy with something else."""


def gradient_pass(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """The full-data gradient of the mean loss, left in `.grad`, as a training loop takes it."""
    model.zero_grad(set_to_none=True)
    for x, y in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        loss = F.cross_entropy(model(x), y) * (len(x) / len(inputs))
        loss.backward()


def measure(*, quick: bool) -> list[Row]:
    """The ratio of median times, the two taking turns in one run."""
    repeats = 2 if quick else 11
    model = mlp()
    inputs, targets = classes(EXAMPLES // 25 if quick else EXAMPLES)
    _check_same_gradient(model, inputs, targets)  # warms both up as well
    plain: list[float] = []
    exact: list[float] = []
    for _ in range(repeats):
        plain.append(seconds(lambda: gradient_pass(model, inputs, targets)))
        exact.append(seconds(lambda: _estimate(model, inputs, targets)))
    ratio = median(exact) / median(plain)
    turns = [e / p for e, p in zip(exact, plain, strict=True)]
    return [
        Row(
            "estimate with l2 + smooth_l1 / one plain gradient pass",
            f"{ratio:.3f}× (single turns {min(turns):.3f} to {max(turns):.3f})",
            value=ratio,
            bound=BOUND,
        ),
        _spread(f"the pass, {len(inputs):,} examples", plain),
        _spread("estimate", exact),
        Row("  ratio within a turn", f"{median(turns):.3f}× (median of {repeats})"),
        *_warning(plain, exact),
    ]


def _estimate(model: nn.Module, inputs: Tensor, targets: Tensor) -> tacit.Fit:
    return tacit.estimate(model, F.cross_entropy, (inputs, targets), elastic_net())


def _spread(label: str, times: list[float]) -> Row:
    return Row(
        f"  {label}",
        f"{median(times):.3f} s (median of {len(times)}; {min(times):.3f} to {max(times):.3f})",
    )


def _warning(*kinds: list[float]) -> list[Row]:
    """Say so where other work on the machine makes the ratio meaningless, a good one too."""
    if all(median(times) <= DISTURBED * min(times) for times in kinds):
        return []
    return [Row("  other load disturbed these times", "measure again on an idle machine")]


def _check_same_gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Refuse to compare two computations of which one does less."""
    gradient_pass(model, inputs, targets)
    squares = [
        float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None
    ]
    plain, exact = math.sqrt(sum(squares)), _estimate(model, inputs, targets).gradient_norm
    if not math.isclose(plain, exact, rel_tol=1e-4):
        raise RuntimeError(
            f"the two gradients differ in norm: plain {plain!r}, estimate {exact!r}."
        )

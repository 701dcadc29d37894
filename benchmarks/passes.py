"""Time of `estimate` relative to one plain gradient pass over the data."""

import math
from functools import partial
from statistics import median

from table import Row
from torch import Tensor, nn
from torch.nn import functional as F
from workload import EXAMPLES, classification_data, elastic_net, mlp, seconds

import tacit

BOUND = 1.25
SECOND_BOUND = 0.05
CANDIDATE_BOUND = 0.02
MANY = 9
"""Number of candidates from which the cost of one more is measured."""
BATCH = 1024
"""The batch size that `estimate` uses for data in tensors."""
DISTURBED = 1.3
"""If the median time exceeds the fastest by this factor, the machine was busy."""


def gradient_pass(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Compute the full-data gradient of the mean loss in `.grad`, as a training loop does."""
    model.zero_grad(set_to_none=True)
    for x, y in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        loss = F.cross_entropy(model(x), y) * (len(x) / len(inputs))
        loss.backward()


def measure(*, quick: bool) -> list[Row]:
    """The ratio of median times; the two computations alternate."""
    repeats = 2 if quick else 11
    model = mlp()
    inputs, targets = classification_data(EXAMPLES // 25 if quick else EXAMPLES)
    _check_same_gradient(model, inputs, targets)  # also a warm-up of both
    pass_times: list[float] = []
    estimate_times: list[float] = []
    for _ in range(repeats):
        pass_times.append(seconds(lambda: gradient_pass(model, inputs, targets)))
        estimate_times.append(seconds(lambda: _estimate(model, inputs, targets)))
    ratio = median(estimate_times) / median(pass_times)
    ratios = [e / p for e, p in zip(estimate_times, pass_times, strict=True)]
    return [
        Row(
            "estimate with l2 + smooth_l1 / one plain gradient pass",
            f"{ratio:.3f}× (single repeats {min(ratios):.3f} to {max(ratios):.3f})",
            value=ratio,
            bound=BOUND,
        ),
        _times_row(f"gradient pass, {len(inputs):,} examples", pass_times),
        _times_row("estimate", estimate_times),
        Row("  ratio within a repeat", f"{median(ratios):.3f}× (median of {repeats})"),
        _second_family_row(model, inputs, targets, median(estimate_times), repeats),
        _candidate_row(model, inputs, targets, median(pass_times), repeats),
        *_load_warning(pass_times, estimate_times),
    ]


def _second_family_row(
    model: nn.Module, inputs: Tensor, targets: Tensor, estimate_time: float, repeats: int
) -> Row:
    """Another family fitted to a stored target, which takes no pass over the data."""
    target = tacit.endpoint_target(tacit.Objective(model, F.cross_entropy, (inputs, targets)))
    family = [tacit.l2(), tacit.smooth_l1(1e-2)]
    times = [seconds(lambda: tacit.fit(target.equations(family))) for _ in range(repeats)]
    ratio = median(times) / estimate_time
    return Row(
        "second family on a stored target / first estimate",
        f"{ratio:.3f}× ({median(times):.3f} s over {estimate_time:.3f} s)",
        value=ratio,
        bound=SECOND_BOUND,
    )


def _candidate_row(
    model: nn.Module, inputs: Tensor, targets: Tensor, pass_time: float, repeats: int
) -> Row:
    """One more elementwise candidate, in equations that are written from a stored target."""
    target = tacit.endpoint_target(tacit.Objective(model, F.cross_entropy, (inputs, targets)))
    many = [tacit.smooth_l1(0.01 * 2**i, name=f"smooth_l1 {i}") for i in range(MANY)]
    times = {
        count: median(seconds(partial(target.equations, many[:count])) for _ in range(repeats))
        for count in (1, MANY)
    }
    ratio = max(0.0, times[MANY] - times[1]) / (MANY - 1) / pass_time
    return Row(
        "one more elementwise candidate / one plain gradient pass",
        f"{ratio:.4f}× (equations of {MANY} take {times[MANY]:.3f} s, of one {times[1]:.3f} s)",
        value=ratio,
        bound=CANDIDATE_BOUND,
    )


def _estimate(model: nn.Module, inputs: Tensor, targets: Tensor) -> tacit.Fit:
    return tacit.estimate(model, F.cross_entropy, (inputs, targets), elastic_net())


def _times_row(label: str, times: list[float]) -> Row:
    return Row(
        f"  {label}",
        f"{median(times):.3f} s (median of {len(times)}; {min(times):.3f} to {max(times):.3f})",
    )


def _load_warning(*series: list[float]) -> list[Row]:
    """A row that warns where other load on the machine makes the ratio meaningless."""
    if all(median(times) <= DISTURBED * min(times) for times in series):
        return []
    return [Row("  other load disturbed these times", "measure again on an idle machine")]


def _check_same_gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Check that both computations give the same gradient norm, so their times are comparable."""
    gradient_pass(model, inputs, targets)
    squares = [
        float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None
    ]
    norm = math.sqrt(sum(squares))
    estimate_norm = _estimate(model, inputs, targets).gradient_norm
    if not math.isclose(norm, estimate_norm, rel_tol=1e-4):
        raise RuntimeError(
            f"the gradients differ in norm: plain pass {norm!r}, estimate {estimate_norm!r}."
        )

"""What every technique promises, as a check that third parties can run on their own."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from tacit.errors import InputError, check_type
from tacit.objective.deriving import with_batch_size
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import Params, norm, same_buffers
from tacit.objective.randomness import split_draws

Technique = Callable[[Objective], Objective]
GROUPS = 8
"""Groups of draws whose disagreement measures the noise of a random technique."""
MANY = 6.0
"""Standard errors that two means of one quantity never differ by."""


def check_contract(
    technique: Technique,
    objective: Objective,
    *,
    at_zero: Technique | None = None,
    derivative: bool = True,
) -> None:
    """Check that technique(objective) is an objective that difference equations can be written of.

    An InputError lists the promises that it breaks:

    - it counts the same examples, and has the same parameters;
    - the same call gives the same bytes, whatever the random state;
    - the gradient is the derivative of the value, for fixed draws;
    - the mean over draws is that of its parts;
    - other batches of the same data give the same gradient, or one within the noise of the draws;
    - at scale zero it is the objective it was applied to;
    - model, mode, buffers and random state are left as they were.

    Args:
        technique: from an objective to an objective.
        objective: what to apply it to: small, in float64, over tensors of ten or more examples, at
            weights where the gradient is not zero.
        at_zero: the technique at scale zero; known for those of `tacit.techniques`.
        derivative: False for a technique whose gradient is no derivative of its value by design,
            as SAM's, whose step counts as constant.
    """
    check_type("technique", technique, Callable, "a function from an objective to an objective")
    check_objective(objective)
    before = _state(objective)
    result = technique(objective)
    unchanged = _same_state(before, _state(objective))
    check_objective(result, what="what the technique returned")
    broken = [
        *_broken_facts(technique, objective, result),
        *_broken_averages(result),
        *(_broken_derivative(result) if derivative else ()),
        *_broken_batches(technique, objective, result),
        *_broken_zero(objective, result, at_zero),
    ]
    if not unchanged or not _same_state(before, _state(objective)):
        broken.append("it changes the model, its mode or buffers, or the global random state")
    if broken:
        raise InputError(f"the technique breaks its contract: {'; '.join(broken)}.")


def _broken_facts(technique: Technique, objective: Objective, result: Objective) -> Iterator[str]:
    if (result.count, result.unit) != (objective.count, objective.unit):
        yield (
            f"it has {result.count} {result.unit} where the objective has {objective.count} "
            f"{objective.unit}"
        )
    if list(result.params) != list(objective.params):
        yield "it has other parameters than the objective"
        return
    first = result.gradient()
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        again = technique(objective).gradient()
    if any(not torch.equal(first[name], again[name]) for name in first):
        yield "the same call gives another gradient: draw all randomness from a seed"


def _broken_averages(result: Objective) -> Iterator[str]:
    """The mean over all draws against that over single groups of them."""
    if not result.random:
        return
    size = 2 if result.paired else 1
    groups = split_draws(result.draws, result.draws // size, paired=result.paired)
    value, gradient = result.value_and_gradient()
    parts = [result.value_and_gradient(draws=draws) for draws in groups]
    mean = sum(part[0] for part in parts) / len(parts)
    gap = {n: sum(p[1][n] for p in parts) / len(parts) - g for n, g in gradient.items()}
    if not math.isclose(mean, value, rel_tol=1e-9) or norm(gap) > 1e-9 * norm(gradient):
        yield "the mean over all draws is not the mean over its parts"


def _broken_derivative(result: Objective) -> Iterator[str]:
    """The gradient along random directions against central differences of the value."""
    generator = torch.Generator().manual_seed(0)
    point, gradient = result.point(), result.gradient()
    scale = max(norm(point) / math.sqrt(sum(p.numel() for p in point.values())), 1e-3)
    for _ in range(2):
        direction = {
            n: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device)
            for n, p in point.items()
        }
        slopes = [_slope(result, point, direction, step * scale) for step in (1e-4, 5e-5)]
        slope = (4 * slopes[1] - slopes[0]) / 3
        exact = sum(float((gradient[n].to(d) * d).sum()) for n, d in direction.items())
        if abs(slope - exact) > 1e-5 * norm(gradient) * norm(direction):
            yield (
                f"the gradient along a direction is {exact:.6g}, the difference quotient of the "
                f"value {slope:.6g}"
            )
            return


def _slope(result: Objective, point: Params, direction: Params, step: float) -> float:
    values = [
        result.value(
            same_buffers({n: p + sign * step * direction[n].to(p) for n, p in point.items()}, point)
        )
        for sign in (1, -1)
    ]
    return (values[0] - values[1]) / (2 * step)


def _broken_batches(technique: Technique, objective: Objective, result: Objective) -> Iterator[str]:
    """The gradient over the data in batches of another size."""
    other = with_batch_size(objective, max(1, objective.count // 3))
    if other is None:
        return
    here, there = _group_gradients(result), _group_gradients(technique(other))
    gap = {n: _mean(here, n) - _mean(there, n) for n in here[0]}
    noise = math.hypot(_standard_error(here), _standard_error(there))
    if norm(gap) > MANY * noise + 1e-7 * norm({n: _mean(here, n) for n in here[0]}):
        yield (
            f"with other batches of the same data the gradient differs by {norm(gap):.3g}, where "
            f"the noise of the draws is {noise:.2g}"
        )


def _group_gradients(result: Objective) -> list[Params]:
    """The gradient of each group of draws, or the only one."""
    if not result.random:
        return [result.gradient()]
    count = min(GROUPS, result.draws // (2 if result.paired else 1))
    groups = split_draws(result.draws, count, paired=result.paired)
    return [result.value_and_gradient(draws=draws)[1] for draws in groups]


def _mean(gradients: list[Params], name: str) -> torch.Tensor:
    return torch.stack([gradient[name] for gradient in gradients]).mean(0)


def _standard_error(gradients: list[Params]) -> float:
    """Norm of the standard error of the mean over groups; 0 for a single one."""
    if len(gradients) < 2:
        return 0.0
    deviations = [{n: g[n] - _mean(gradients, n) for n in g} for g in gradients]
    squares = sum(norm(deviation) ** 2 for deviation in deviations)
    return math.sqrt(squares / (len(gradients) - 1) / len(gradients))


def _broken_zero(
    objective: Objective, result: Objective, at_zero: Technique | None
) -> Iterator[str]:
    """The technique at scale zero against the objective."""
    at_scale = result.at_scale
    if at_zero is not None:
        zero = at_zero(objective)
    elif at_scale is not None:
        zero = at_scale(0.0)
    else:
        return
    value, gradient = objective.value_and_gradient()
    zero_value, zero_gradient = zero.value_and_gradient()
    gap = norm({n: zero_gradient[n] - g for n, g in gradient.items()})
    if not math.isclose(value, zero_value, rel_tol=1e-7) or gap > 1e-7 * norm(gradient):
        yield (
            f"at scale zero its gradient differs from that of the objective by {gap:.3g}, of "
            f"{norm(gradient):.3g}"
        )


def _state(objective: Objective) -> tuple[list[torch.Tensor], list[bool], list[object]]:
    model = objective.model
    tensors = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    numpy_state = np.random.get_state(legacy=False)["state"]["key"]  # noqa: NPY002 # the global one
    random_states = [torch.get_rng_state(), torch.tensor(numpy_state.astype(int))]
    modes = [module.training for module in model.modules()]
    others: list[object] = [
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    ]
    others += [parameter.grad for parameter in model.parameters()]
    others += [parameter.requires_grad for parameter in model.parameters()]
    return [*tensors, *random_states], modes, others


def _same_state(before: tuple, after: tuple) -> bool:
    same = len(before[0]) == len(after[0]) and all(map(torch.equal, before[0], after[0]))
    same_objects = all(a is b or a == b for a, b in zip(before[2], after[2], strict=True))
    return same and before[1] == after[1] and same_objects

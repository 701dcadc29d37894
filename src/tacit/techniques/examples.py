"""Techniques that change the examples: noise on inputs, augmentation, mixup."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import InputError, check_number, check_type
from tacit.objective.batches import (
    BatchPair,
    join_batches,
    map_tensors,
    row_count,
    select_rows,
    tensors_in,
)
from tacit.objective.deriving import probe_mean, probe_of, user_reader, with_noise, with_scale
from tacit.objective.losses import LossPerBatch, split_batch
from tacit.objective.objective import Objective, check_objective
from tacit.objective.randomness import Noise
from tacit.objective.scale import Scale
from tacit.techniques.batch_parts import (
    Key,
    describe_keys,
    find_inputs,
    has_target,
    keys_of,
    replace_parts,
)

Inputs = Key | Sequence[Key] | None


def input_noise(
    objective: Objective,
    sigma: float,
    *,
    inputs: Inputs = None,
    draws: int | None = None,
    seed: int = 0,
) -> Objective:
    """E L(θ; x + σξ) with standard normal ξ on every number of the inputs.

    Noise is ξ and −ξ in a pair of draws. For a linear model with loss ½(f−y)² it adds σ²·½‖w‖²; for
    a network σ²/2 · mean ‖∇ₓf‖² and σ²/2 · mean r·Δₓf, with r the residual (Bishop 1995), up to
    order σ⁴.

    Trap: the loss F.mse_loss has no ½, and all strengths double.

    Args:
        objective: the objective without the technique.
        sigma: standard deviation of the noise, in the units of the inputs that the model gets.
        inputs: names or positions of the parts of a batch that get noise; needed where there is
            more than one input, and for batches of any other form than (input, target).
        draws: how many draws of the noise are averaged, an even number; by default 16, or twice
            those of an objective that has draws itself.
        seed: draws depend only on (seed, draw, batch).
    """
    check_objective(objective)
    check_number("sigma", sigma, least=0)
    keys = find_inputs(objective, inputs, "input_noise")

    def change(_: nn.Module, pair: BatchPair, noise: Noise) -> BatchPair:
        batch, weights = pair
        parts = {key: batch[key] + sigma * noise.normal(batch[key]) for key in keys}
        return replace_parts(batch, parts), weights

    label = f"input_noise({sigma:g})"
    return with_scale(
        with_noise(objective, label, change=change, draws=draws, seed=seed),
        Scale("sigma", float(sigma), growth=4.0, order=2),
        lambda other: input_noise(objective, other, inputs=inputs, draws=draws, seed=seed),
    )


def augment(
    objective: Objective,
    function: Callable[[Any, torch.Generator], Any],
    *,
    draws: int | None = None,
    seed: int = 0,
) -> Objective:
    """E L(θ; function(inputs, generator)): the loss over randomly changed inputs.

    function(inputs, generator) gets the input of a batch (input, target), a tuple where there are
    several, or the whole batch of `Objective.from_batch_loss` and `from_mean_loss`. It returns the
    same with other values, and as many examples, and draws every random number from the generator,
    which is on the device of the data. Draws are not mirrored.

    Trap: an augmentation with a mean of its own (a rotation to one side) also moves the inputs. The
    difference then has that part, which is no penalty.

    Args:
        objective: the objective without the technique.
        function: the augmentation.
        draws: how many draws are averaged, an even number; by default 16, or twice those
            of an objective that has draws itself.
        seed: draws depend only on (seed, draw, batch).
    """
    check_objective(objective)
    check_type("function", function, Callable, "a function of (inputs, generator)")
    try:
        signature(function).bind("inputs", "generator")
    except TypeError as error:
        raise InputError(
            f"the augmentation cannot be called with (inputs, generator) ({error}): take the "
            "generator as its second argument, and draw every random number from it."
        ) from error
    by_target = has_target(objective)

    def change(_: nn.Module, pair: BatchPair, noise: Noise) -> BatchPair:
        batch, weights = pair
        parts = split_batch(batch)[0] if by_target else batch
        tensors = list(tensors_in(parts))
        if not tensors:
            raise InputError("a batch holds no tensor to augment.")
        copies = map_tensors(parts, Tensor.clone)  # a function may write into its inputs
        single = by_target and len(parts) == 1
        given = copies[0] if single else copies
        changed = function(given, noise.generator(tensors[0].device))
        changed = (changed,) if single else changed
        _check_rows(parts, changed)
        if by_target:
            changed = replace_parts(batch, dict(enumerate(changed)))
        return changed, weights

    name = getattr(function, "__name__", type(function).__name__)
    return with_noise(objective, f"augment({name})", change=change, draws=draws, seed=seed)


def _check_rows(parts: Any, changed: Any) -> None:
    """Refuse an augmentation that changes how many examples or parts a batch has."""
    sizes = [[len(t) for t in tensors_in(p) if t.ndim][:1] for p in (parts, changed)]
    same_form = isinstance(changed, Mapping) == isinstance(parts, Mapping)
    if not same_form or sizes[0] != sizes[1] or len(keys_of(parts)) != len(keys_of(changed)):
        raise InputError(
            f"the augmentation returned {describe_keys(changed)} for {describe_keys(parts)}: it "
            "must return as many parts and as many examples as it gets."
        )


def mixup(
    objective: Objective,
    alpha: float = 1.0,
    *,
    inputs: Inputs = None,
    draws: int | None = None,
    seed: int = 0,
) -> Objective:
    """The loss of mixed examples: x = λx_i + (1−λ)x_j and y = λy_i + (1−λ)y_j, λ ~ Beta(α, α).

    Every example i gets a partner j, drawn from all examples by their weights, itself included, and
    a λ of its own. Targets that are classes are not mixed; their losses are, which is the same for
    cross-entropy: λ·ℓ(f(x), y_i) + (1−λ)·ℓ(f(x), y_j). Draws of a pair have the same partners, with
    λ and 1−λ.

    A linear model with bias and loss ½(f−y)², at α = 1, gets −⅓ of L and +⅓ of ½(mean residual)².

    Traps: in training, partners come from the same minibatch. That is the same on average where
    batches are drawn at random, without the partners' part of 1/(batch size) that is the example
    itself. Mixed examples are not small changes: what they add need not be a penalty.

    Args:
        objective: the objective without the technique, over data in tensors.
        alpha: the parameter of the Beta distribution; 1 for uniform λ.
        inputs: as in `input_noise`. A batch of another form than (inputs, …, target) has only one
            part more, the target, whose losses are mixed.
        draws: how many draws are averaged, an even number; by default 16, or twice those
            of an objective that has draws itself.
        seed: draws depend only on (seed, draw, batch).
    """
    check_objective(objective)
    check_number("alpha", alpha, above=0)
    if not needs_rows(objective.data):
        raise InputError(
            "mixup pairs examples over all the data, and the batches of a loader or list only have "
            "partners within them: pass the data as a tuple (or dictionary) of tensors."
        )
    keys = find_inputs(objective, inputs, "mixup")
    target = _target_key(objective, keys)
    _check_losses(objective)
    count = len(next(tensors_in(objective.data)))
    blend = has_target(objective) and objective.data[target].is_floating_point()
    edges = _cumulative_weights(objective.weights, count)

    def change(_: nn.Module, pair: BatchPair, noise: Noise) -> BatchPair:
        batch, weights = pair
        first = batch[target]
        like = torch.empty(len(first), dtype=torch.float64, device=first.device)
        rows = _partners(edges, like, noise)
        share = _symmetric_beta(alpha, like, noise)

        def partner(key: Key) -> Tensor:
            data = objective.data[key]
            return select_rows(data, rows, count).to(first.device)

        def mixed(key: Key) -> Tensor:
            own = batch[key]
            shares = share.to(own.dtype).view(-1, *[1] * (own.ndim - 1))
            return shares * own + (1 - shares) * partner(key)

        parts = {key: mixed(key) for key in keys}
        if blend:
            return replace_parts(batch, {**parts, target: mixed(target)}), weights
        one = replace_parts(batch, parts)
        other = replace_parts(one, {target: partner(target)})
        shares = torch.cat([share, 1 - share])
        if weights is not None:
            shares = shares * torch.cat([weights, weights]).to(shares)
        return join_batches(one, other), shares

    copies = 1 if blend else 2
    label = f"mixup({alpha:g})"
    return with_noise(objective, label, change=change, copies=copies, draws=draws, seed=seed)


def needs_rows(data: Any) -> bool:
    """Whether data is in tensors, of which any rows can be read."""
    values = data.values() if isinstance(data, Mapping) else data if type(data) is tuple else ()
    return len(values) > 0 and all(isinstance(value, Tensor) for value in values)


def _target_key(objective: Objective, inputs: Sequence[Key]) -> Key:
    """The key of the target: the last part of (inputs, …, target), else the only other part."""
    batch = probe_of(objective)[0]
    others = [key for key in keys_of(batch) if key not in inputs]
    if has_target(objective):
        others = others[-1:]
    if len(others) != 1:
        raise InputError(
            f"a batch has the parts {describe_keys(batch)}: beside the inputs, mixup needs exactly "
            "one, the target. Mix inside of a batch_loss(model, batch, noise) of your own."
        )
    return others[0]


def _check_losses(objective: Objective) -> None:
    """Refuse losses that are not one per row."""
    batch = probe_of(objective)[0]
    if isinstance(user_reader(objective), LossPerBatch):
        raise InputError(
            "mixup needs the loss of every example, and this objective has one number per batch: "
            "use Objective(model, loss, data) or Objective.from_batch_loss."
        )
    rows = row_count(batch)
    if rows is None:
        raise InputError(
            f"the parts of a batch ({describe_keys(batch)}) differ in length: mixup needs one row "
            "per example in each."
        )
    if not has_target(objective):
        mean = probe_mean(objective)
        if mean.size != rows or mean.tokens is None:
            own = "with weights of its own " if mean.tokens is None else ""
            raise InputError(
                f"batch_loss returns {mean.size} losses {own}for {rows} examples: mixup needs one "
                "loss per example, whose weights are those of weights=."
            )


def _cumulative_weights(weights: Any, count: int) -> Tensor:
    """Where the share of each example ends on the line from 0 to 1."""
    shares = torch.ones(count) if weights is None else torch.as_tensor(weights).detach().cpu()
    total = shares.double().cumsum(0)
    return total / total[-1]


def _partners(edges: Tensor, like: Tensor, noise: Noise) -> Tensor:
    """One partner per row, by weight; the same in both draws of a pair.

    The line from 0 to 1 is cut into as many equal parts as there are rows, and every row gets a
    number from another part, at random: of all the data in one batch, a permutation.
    """
    order, within = (noise.uniform(like, mirrored=False) for _ in range(2))
    positions = (order.argsort() + within) / len(like)
    return torch.searchsorted(edges, positions.cpu(), right=True).clamp_max(len(edges) - 1)


def _symmetric_beta(alpha: float, like: Tensor, noise: Noise) -> Tensor:
    """Numbers from Beta(α, α), λ and 1 − λ in a pair of draws.

    With T from Student's t of 2α degrees of freedom, by the polar method of Bailey (1994),
    ½(1 + T/√(2α + T²)) is Beta(α, α).
    """
    u, v = (noise.uniform(like, mirrored=False) for _ in range(2))
    square = torch.expm1(-u.log() / alpha) * (2 * torch.pi * v).cos().square()
    return (1 + noise.signs(like) / (1 + 1 / square).sqrt()) / 2

"""Cheap checks on one batch, before any gradient is trusted."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.batches import tensors_in


def check_batch(batch: Any, index: int, *, masks: bool) -> None:
    """Refuse NaN and infinities in a batch; `masks` lets -inf pass (additive attention masks)."""
    if bad := not_finite(batch, masks=masks):
        raise InputError(
            f"data holds {bad} NaN or infinite values in batch {index} (counted from 0): drop or "
            "impute those examples."
        )


def not_finite(batch: Any, *, masks: bool) -> int:
    """How many numbers of a batch are NaN or infinite; `masks` lets -inf pass."""
    total = 0
    for tensor in tensors_in(batch):
        # One read of the data: a sum is finite only where every term is.
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum()):
            bad = torch.isnan(tensor) | torch.isposinf(tensor) if masks else ~torch.isfinite(tensor)
            total += int(bad.sum())
    return total


def check_loss(mean: Tensor, index: int) -> None:
    """Refuse a loss that is not a finite number."""
    if not torch.isfinite(mean):
        raise InputError(
            f"the loss is {float(mean.detach())} on batch {index} (counted from 0), with finite "
            "data and parameters: an overflow or a logarithm of zero is likely. Evaluate in a "
            "wider dtype, or from logits."
        )


def check_deterministic(evaluate: Callable[[], Tensor], *, training: bool) -> None:
    """Refuse a model that gives two losses for one batch."""
    first, second = evaluate().detach(), evaluate().detach()
    if abs(first - second) > 10 * torch.finfo(first.dtype).eps * abs(first):
        cause = (
            "randomness that torch's seed does not reach, such as numpy's inside the model"
            if training
            else "dropout called as a function with its default training=True, or noise drawn in "
            "forward; Objective(…, training=True, draws=…) averages over such draws"
        )
        raise InputError(
            f"the same batch gave two losses, {float(first)!r} and {float(second)!r}: the "
            f"objective is not deterministic. Likely cause: {cause}."
        )


def check_mean_reduced(
    evaluate: Callable[[slice], Tensor], count: int, *, precision: torch.dtype
) -> None:
    """Refuse a loss whose value on a batch is not the mean over its two halves.

    Only means over examples can be streamed and averaged exactly. Sums, class-weighted means and
    means over tokens that are not padding are not means over examples.
    """
    if count < 2:
        return
    middle = count // 2
    whole, head, tail = (
        float(evaluate(part).detach())
        for part in (slice(0, count), slice(0, middle), slice(middle, count))
    )
    mean = (middle * head + (count - middle) * tail) / count
    slack = torch.finfo(precision).eps ** 0.6 * max(abs(whole), abs(head), abs(tail))
    if abs(whole - mean) <= slack:
        return
    if abs(whole - (head + tail)) <= slack:
        raise InputError(
            f"the loss of a batch of {count} is the sum of its halves' losses ({whole:.6g}): it "
            "is sum-reduced. Pass a loss with reduction='mean'."
        )
    raise InputError(
        f"the loss of a batch of {count} is {whole:.6g}, the mean over its two halves {mean:.6g}: "
        "it is not a mean over examples. Likely causes: output and target shapes that broadcast "
        "(such as (n, 1) and (n,)), class weights, ignored tokens, or examples that interact. Use "
        "Objective.from_batch_loss with one loss per example or token."
    )


def explain_failure(error: Exception, batch: Any, params: dict[str, Tensor]) -> None:
    """Turn torch's complaint about unequal dtypes into one that says what to do."""
    wanted = next(iter(params.values())).dtype
    given = {t.dtype for t in tensors_in(batch)} - {wanted}
    if isinstance(error, RuntimeError) and "type" in str(error) and given:
        raise InputError(
            f"the data is {', '.join(map(str, given))} and the model is {wanted}: cast one to the "
            f"other, for instance with tensor.to({wanted})."
        ) from error


def coarsest_dtype(*tensors: Tensor) -> torch.dtype:
    """The least precise dtype at work, autocast included."""
    dtypes = [t.dtype for t in tensors]
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def perturb_last_digit(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every entry moved up or down, at random, by one epsilon of the coarsest dtype at work."""
    eps = torch.finfo(coarsest_dtype(*params.values())).eps
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, p in params.items():
        up = torch.randint(0, 2, (p.numel(),), generator=generator, dtype=torch.int8).view(p.shape)
        moved[name] = p * (1 + (2 * up.to(p.device, p.dtype) - 1) * eps)
    return moved

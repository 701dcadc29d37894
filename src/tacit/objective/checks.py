"""Cheap checks on a few examples, before any gradient is trusted."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.batches import check_rereadable, count_nonfinite, slice_batch, tensors_in
from tacit.objective.losses import count_examples
from tacit.objective.params import Params, coarsest_dtype
from tacit.objective.passes import Passes, check_finite_loss

PROBE_EXAMPLES = 256
"""Number of examples on which data, model and loss are checked, if batches can be sliced."""

Probe = tuple[Any, Tensor | None]
"""A batch of few examples and its weights."""


def check_on_probe(passes: Passes, params: Params, data: Any, *, mean_loss: bool) -> Probe:
    """Check data, model and loss on a few examples, and return these examples.

    Refused are data that cannot be read repeatedly, a loss that is not deterministic and, with
    `mean_loss`, a loss that is not a mean over examples.
    """
    probe = _choose_probe(passes, data, sliceable=mean_loss)
    _check_deterministic(passes, params, probe)
    if mean_loss:
        check_mean_loss(passes, params, probe[0])
    return probe


def _choose_probe(passes: Passes, data: Any, *, sliceable: bool) -> Probe:
    """Examples spread over the data where that is cheap, else the first of the first batch."""
    with passes.prepared(training=passes.training), torch.no_grad():
        check_rereadable(passes.batches, data)
        first = passes.first_batch()
        sample = None if passes.batches.sample is None else passes.batches.sample(PROBE_EXAMPLES)
        if sample is not None and not count_nonfinite(sample, masks=True):
            return passes.to_model(sample)
        return first_examples(first) if sliceable else first


def first_examples(probe: Probe) -> Probe:
    """The first examples of a batch (inputs, …, target)."""
    return slice_batch(probe, slice(PROBE_EXAMPLES), count_examples(probe[0]))


def _check_deterministic(passes: Passes, params: Params, probe: Probe) -> None:
    """Refuse a model that gives two different losses for one batch."""
    with passes.prepared(training=passes.training), torch.no_grad():
        try:
            first, second = (
                passes.batch_mean(params, *probe, draw=0).mean.detach() for _ in range(2)
            )
        except Exception as error:
            _explain_dtypes(error, probe[0], params)
            raise
    if abs(first - second) > 10 * torch.finfo(first.dtype).eps * abs(first):
        cause = (
            "randomness that torch's seed does not control, such as numpy's inside the model"
            if passes.training
            else "dropout called as a function with its default training=True, or noise drawn in "
            "forward; Objective(…, training=True, draws=…) averages over such draws"
        )
        raise InputError(
            f"the same batch gave two losses, {float(first)!r} and {float(second)!r}: the "
            f"objective is not deterministic. Likely cause: {cause}."
        )


def check_mean_loss(passes: Passes, params: Params, batch: Any) -> None:
    """Refuse a loss that is not a mean over the examples of this batch, in eval mode."""
    with passes.prepared(training=False), torch.no_grad():
        whole = passes.batch_mean(params, batch, None)
        check_finite_loss(whole.mean, 0)
        again = passes.batch_mean(params, batch, None) if passes.training else whole
        if not again.mean.isclose(whole.mean):
            return  # noise that eval mode does not stop: halves cannot be compared
        check_mean_reduced(
            lambda part: passes.batch_mean(params, slice_batch(batch, part, whole.size), None).mean,
            whole.size,
            precision=coarsest_dtype(whole.mean, *params.values()),
        )


def check_mean_reduced(
    evaluate: Callable[[slice], Tensor], count: int, *, precision: torch.dtype
) -> None:
    """Refuse a loss whose value on a batch is not the mean over its two halves.

    Only means over examples can be streamed and averaged exactly. Sums, class-weighted means and
    means over tokens without padding are not means over examples.
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


def _explain_dtypes(error: Exception, batch: Any, params: Params) -> None:
    """Turn torch's message about unequal dtypes into one that says what to do."""
    model_dtype = next(iter(params.values())).dtype
    data_dtypes = {t.dtype for t in tensors_in(batch)} - {model_dtype}
    if isinstance(error, RuntimeError) and "type" in str(error) and data_dtypes:
        raise InputError(
            f"the data is {', '.join(map(str, data_dtypes))} and the model is {model_dtype}: cast "
            f"one to the other, for instance with tensor.to({model_dtype})."
        ) from error

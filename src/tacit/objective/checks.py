"""Whether model, data and loss can be used: what is refused, before a gradient is trusted.

The loss of some examples, the probe, is computed twice, and compared with the losses of its parts:
only a mean over examples can be streamed and averaged exactly.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective import batches
from tacit.objective.batches import BatchPair, tensors_in
from tacit.objective.losses import (
    BatchMean,
    ChangedBatches,
    LossPerBatch,
    MeanLoss,
    WholeBatches,
    count_examples,
)
from tacit.objective.models import is_batch_norm, without_statistics
from tacit.objective.params import Params, fingerprint, same_buffers
from tacit.objective.parts import PART_ERRORS, Derive, Evaluate, check_parts
from tacit.objective.passes import Passes
from tacit.objective.ranks import Ranks

PROBE_EXAMPLES = 256
"""Number of examples in the probe, if batches can be sliced."""


def check_probe(passes: Passes, params: Params) -> BatchPair:
    """Check data, model and loss on a few examples, the probe, and return them.

    Refused are data without examples, a model that writes into its parameters, a loss that is not
    deterministic and, if it should be one, a loss that is not a mean over examples.
    """
    with passes.prepared(training=passes.training) as passes, torch.enable_grad():
        probe = _choose_probe(passes)
        copies = same_buffers({n: p.clone() for n, p in params.items()}, params)
        _check_deterministic(passes, copies, probe)
        _check_unwritten(copies, params)
        del copies  # as large as the model
    check_mean_loss(passes, params, probe[0])
    return probe


def check_shared(passes: Passes, params: Params) -> None:
    """Refuse processes with the same examples, or with other copies of the parameters."""
    ranks = passes.ranks
    if ranks.count == 1:
        return
    with ranks.agreeing(), passes.prepared(training=False) as passes:
        first = next(passes.read(), None)
    digest = _digest([] if first is None else list(tensors_in(first)))
    owners = Counter(filter(None, ranks.gather(digest)))
    if owners and min(owners.values()) > 1:
        raise InputError(
            f"{owners.total()} processes have {len(owners)} different first batches: each passes "
            "its own part of the data, as in Subset(data, range(rank, len(data), processes)), also "
            "those that have the same rows of parameters. A DistributedSampler repeats examples "
            "where they do not divide evenly."
        )
    _check_copies(ranks, ranks.part, params, "weights: load the same in all, or train together")
    remedy = "running statistics: for b in model.buffers(): torch.distributed.broadcast(b, src=0)"
    _check_copies(ranks, 0, getattr(params, "buffers", {}), remedy)


def _check_copies(ranks: Ranks, part: int, tensors: Params, needed: str) -> None:
    """Refuse tensors that are not the same in all processes with the same part of them."""
    copies: dict[int, Tensor] = {}
    for number, (other, numbers) in enumerate(ranks.gather((part, fingerprint(tensors)))):
        here = torch.tensor(numbers, dtype=torch.float64)
        if not torch.allclose(copies.setdefault(other, here), here, rtol=1e-6, atol=0.0):
            raise InputError(
                f"process {number} differs from one before it, which should have the same {needed}."
            )


def _digest(tensors: Sequence[Tensor]) -> str:
    """A hash of the contents of tensors; empty for none."""
    digest = hashlib.sha256()
    for tensor in tensors:
        entries = tensor.detach().cpu().to_dense().flatten().contiguous().view(torch.uint8)
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + entries.numpy().tobytes())
    return digest.hexdigest() if tensors else ""


def _choose_probe(passes: Passes) -> BatchPair:
    """Examples spread over the data where that is cheap, else the first of the first batch."""
    first = passes.first_batch()
    if isinstance(passes.loss, WholeBatches):
        return first
    sample = passes.batches.sample
    examples = None if sample is None else sample(PROBE_EXAMPLES)
    if (examples := passes.ranks.first(examples)) is not None:
        return passes.to_model(examples)
    if not isinstance(passes.loss, MeanLoss):
        return first
    return batches.slice_batch(first, slice(PROBE_EXAMPLES), count_examples(first[0]))


def _check_deterministic(passes: Passes, params: Params, probe: BatchPair) -> None:
    """Refuse a model that gives two different losses for one batch."""
    try:
        first, second = (passes.batch_mean(params, probe, 0).mean for _ in range(2))
    except RuntimeError as error:
        model_dtype = next(iter(params.values())).dtype
        data_dtypes = {t.dtype for t in tensors_in(probe[0])} - {model_dtype}
        if "type" not in str(error) or not data_dtypes:
            raise
        raise InputError(
            f"the data is {', '.join(map(str, data_dtypes))} and the model is {model_dtype}: "
            f"cast one to the other, for instance with tensor.to({model_dtype})."
        ) from error
    if abs(first - second) > 10 * torch.finfo(first.dtype).eps * abs(first):
        cause = "F.dropout or noise in forward; Objective(…, training=True, draws=…) averages it"
        if passes.training:
            cause = "randomness that torch's seed does not control, such as numpy's"
        raise InputError(
            f"the same batch gave two losses, {float(first)!r} and {float(second)!r}: the "
            f"objective is not deterministic. Likely cause: {cause}."
        )


def _check_unwritten(copies: Params, params: Params) -> None:
    """Refuse a model or loss that wrote into the parameters (copies of them) that it was run with.

    Views of the model's own memory are used later on, and the loss is no function of θ alone.
    """
    for name, copy in copies.items():
        versions = 0 if copy.is_inference() else copy._version
        if versions or not torch.equal(copy, params[name]):
            raise InputError(
                f"the forward pass or the loss writes into parameter {name!r}: max_norm= of an "
                "embedding, clipping or rescaling of weights in forward, or weights that the loss "
                "moves in place. Set max_norm=None; constrain weights after optimizer.step()."
            )


def check_rows_are_examples(passes: Passes, params: Params, probe: BatchPair) -> None:
    """Refuse outputs whose first dimension equals the batch size only by coincidence."""
    reader = passes.loss.reader if isinstance(passes.loss, ChangedBatches) else passes.loss
    if isinstance(reader, MeanLoss) and (count := count_examples(probe[0])) > 1:
        half = batches.slice_batch(passes.to_model(probe), slice(count // 2), count)
        passes.examples(params, lambda examples: None, half, draw=0)


def check_statistics(passes: Passes, params: Params, batch: Any) -> None:
    """Refuse batch norm written by hand, which `is_batch_norm` does not recognise.

    Such a module writes running statistics in training mode, and there the loss of an example
    depends on the others of its batch.
    """
    modules = passes.model.modules()
    if passes.loss.interacting or passes.paired or not any(map(_statistics, modules)):
        return
    passes = _by_example(passes)
    try:
        with passes.prepared(training=True), torch.enable_grad():
            written = passes.call(
                params,
                lambda model, _: _written(
                    model, lambda: passes.loss.mean(model, (batch, None), None)
                ),
            )
    except (*PART_ERRORS, AttributeError):  # training mode may have other outputs
        return
    for module, tensor in written.items():
        try:
            with passes.prepared(training=False), torch.enable_grad():
                module.training = True
                by_row = isinstance(passes.loss, MeanLoss)
                check_parts(_evaluate(passes), params, batch, by_row=by_row, repeatable=False)
        except InputError as error:
            raise InputError(
                f"a {type(module).__name__} writes {tensor!r} in training mode, where the examples "
                "of a batch interact: this is batch norm, but is not recognised as such. Name its "
                "statistics running_mean and running_var and pass batch_norm='batch', or pass "
                "batch_norm='running' for those of inference."
            ) from error


def _statistics(module: nn.Module) -> Params:
    """The tensors of a module that may be running statistics, batch norm's own left out."""
    tensors = {} if is_batch_norm(module) else {**vars(module), **module._buffers}
    return {n: t for n, t in tensors.items() if isinstance(t, Tensor) and t.is_floating_point()}


def _written(model: nn.Module, run: Callable[[], object]) -> dict[nn.Module, str]:
    """The modules whose statistics change while something runs, each with the name of one."""
    before = [
        (module, name, tensor, tensor.detach().clone())
        for module in model.modules()
        for name, tensor in _statistics(module).items()
    ]
    run()
    written: dict[nn.Module, str] = {}
    for module, name, tensor, value in before:
        now = getattr(module, name, tensor)
        if not isinstance(now, Tensor) or not torch.equal(now, value):
            written.setdefault(module, name)
    return written


def check_mean_loss(
    passes: Passes, params: Params, batch: Any, *, collected: bool = False, gradients: bool = True
) -> None:
    """Refuse a loss that is not a mean over the examples of this batch, in eval mode.

    A loss that takes its noise cannot be compared: its noise differs on a part of a batch. For
    the other arguments see `check_parts`.
    """
    if passes.loss.interacting or passes.paired:
        return
    if passes.batch_norm == "batch" and isinstance(passes.loss, WholeBatches):
        # A part of a batch has other statistics; with running ones it can be compared.
        if without_statistics(passes.model):
            return
        passes = _by_example(passes)
    with passes.prepared(training=False) as passes, torch.enable_grad():
        by_row, repeatable = isinstance(passes.loss, MeanLoss), not passes.training
        check_parts(
            _evaluate(passes), params, batch,
            by_row=by_row, repeatable=repeatable, collected=collected, gradients=gradients,
        )  # fmt: skip


def _by_example(passes: Passes) -> Passes:
    """The same with running statistics, and with each example's loss where that is known."""
    reader = passes.loss
    if isinstance(reader, WholeBatches):
        whole, reader = reader, reader.reader
        if isinstance(reader, LossPerBatch):
            reader = replace(whole, equal=False)  # weighted by the counts
    return replace(passes, loss=reader, batch_norm=None)


def _evaluate(passes: Passes) -> Evaluate:
    """The mean loss of a batch, in eval mode."""

    def evaluate(params: Params, batch: Any, derive: Derive | None) -> BatchMean:
        means: list[BatchMean] = []

        def derivative(_: Tensor, leaves: Params) -> tuple[()]:
            if derive is not None:
                derive(means[0], leaves)
            return ()

        def look(_: Any, mean: BatchMean) -> None:
            means.append(mean)

        asked = None if derive is None else derivative
        return passes.differentiate(params, (batch, None), asked, None, 0, look)[0]

    return evaluate

"""A model with its data, and the computations on them whose cost is measured."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tacit import Fit, Objective, Regularizer, endpoint_equations, fit
from tacit.errors import InputError
from tacit_paper import Row
from tacit_paper.scaling.config import Config, Size
from tacit_paper.scaling.measuring import Computation, device_name, tf32_products
from tacit_paper.scaling.networks import Decoder, build_decoder, random_batches, token_losses


@dataclass(frozen=True, eq=False)
class Workload:
    """A model with its batches, and the precision of the sums over them."""

    model: Decoder
    batches: Sequence[Tensor]
    sums: str
    labels: Row
    """What the rows say about it."""

    def objective(self, **options: Any) -> Objective:
        """The mean loss per token."""
        if self.sums != "float64":
            options["accumulate"] = self.sums
        return Objective.from_batch_loss(self.model, token_losses, self.batches, **options)

    def plain_pass(self) -> None:
        """Add up the gradients of all batches in `.grad`, as a training loop does."""
        for batch in self.batches:
            token_losses(self.model, batch).mean().backward()

    def clear_gradients(self) -> None:
        """Release what a plain pass left."""
        self.model.zero_grad(set_to_none=True)

    def new_objective(self) -> Objective:
        """An objective that has not seen the data, with no gradients in memory."""
        self.clear_gradients()
        return self.objective()

    def plain(self) -> Computation:
        """One plain gradient pass."""
        return Computation(lambda _: self.plain_pass(), self.clear_gradients)

    def making_an_objective(self) -> Computation:
        """What `Objective` checks when it is made."""
        return Computation(lambda _: self.objective(), self.clear_gradients)

    def gradient(self) -> Computation:
        """∇L, released at once."""
        return Computation(lambda objective: objective.gradient(), self.new_objective)

    def estimate(self, candidates: Sequence[Regularizer]) -> Computation:
        """Equations of these candidates, and their fit."""
        return Computation(
            lambda objective: fit_endpoint(objective, candidates), self.new_objective
        )

    def first(self, count: int) -> "Workload":
        """The same model with the first batches only."""
        batches = self.batches[:count]
        return replace(self, batches=batches, labels={**self.labels, "batches": len(batches)})

    def with_sums(self, sums: str) -> "Workload":
        """The same model and data with sums in this precision."""
        return replace(self, sums=sums, labels={**self.labels, "sums": sums})


def fit_endpoint(objective: Objective, candidates: Sequence[Regularizer]) -> Fit:
    """The strengths of these candidates at the model's weights."""
    return fit(endpoint_equations(objective, candidates))


@contextmanager
def open_workload(
    config: Config, size: Size, dtype: str, device: str, *, batches: int
) -> Iterator[Workload]:
    """A model of this size and its data, on the device."""
    if config.gpu and device != "cuda":
        raise InputError(
            f"the models of this preset are too large for device {device!r}: pass --device cuda, "
            "or --preset quick."
        )
    if device == "cuda":  # an earlier model may wait for the collector of cycles
        gc.collect()
        torch.cuda.empty_cache()
    model = build_decoder(
        size,
        positions=config.positions,
        dropout=config.dropout,
        dtype=getattr(torch, dtype),
        device=device,
    )
    data = random_batches(
        batches,
        sequences=config.sequences,
        positions=config.positions,
        vocabulary=size.vocabulary,
        device=device,
    )
    labels: Row = {
        "device_name": device_name(device),
        "torch": torch.__version__,
        "dtype": dtype,
        "sums": config.sums[0],
        "size": size.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": size.layers,
        "width": size.width,
        "checkpointed": size.checkpointed,
        "batches": batches,
        "tokens_per_batch": config.sequences * config.positions,
    }
    with tf32_products():
        yield Workload(model, data, config.sums[0], labels)

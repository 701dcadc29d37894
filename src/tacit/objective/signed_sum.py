"""Gradients of a batch with one coefficient per example, and their sum over batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.losses import ExampleOutputs
from tacit.objective.params import Params, add_scaled, float64_zeros, read_numbers, to_float64
from tacit.objective.ranks import current_ranks

Evaluate = Callable[[Params, Callable[[ExampleOutputs], Any]], tuple[Any, Tensor | None]]
"""evaluate(params, use): use(examples of one batch, in one draw), and the examples' weights."""


class SignedSum:
    """Accumulates Σ s_i w_i ∇ℓ_i over batches; does nothing without signs."""

    def __init__(self, signs: Tensor | None, params: Params, draws: int):
        self._signs, self._draws = signs, draws
        some = next(iter(params.values()))
        dtype = torch.promote_types(some.dtype, torch.float32)
        self._coefficients = None if signs is None else signs.to(some.device, dtype)
        """The signs where they are needed: a copy in every batch would wait for a GPU."""
        self.sums = None if signs is None else float64_zeros(params)
        self.examples_seen = 0
        """Number of examples in earlier batches."""
        self.counts = True
        """Whether the batch is one of this process's own."""

    def are_zero(self, size: int) -> bool:
        """Whether none of the next examples, so many, has a sign."""
        return self._signs is None or not self._signs[self.examples_seen :][:size].any()

    def coefficients(self, examples: ExampleOutputs) -> Tensor:
        """The coefficients of a batch's examples: signs times weights, or ones without signs."""
        output = examples.outputs[0]
        dtype = torch.promote_types(output.dtype, torch.float32)
        if self._coefficients is None or not self.counts:
            size, value = (examples.size,), float(self.counts)
            return torch.full(size, value, dtype=dtype, device=output.device)
        signs = self._coefficients[self.examples_seen :][: examples.size].to(output.device, dtype)
        return signs if examples.weights is None else signs * examples.weights.to(signs)

    def add(self, gradients: dict[str, Tensor | None]) -> None:
        """Add the signed gradient of one batch in one draw."""
        sums = {n: total for n, total in (self.sums or {}).items() if gradients[n] is not None}
        vectors = [g.detach() for g in (gradients[n] for n in sums) if g is not None]
        add_scaled(list(sums.values()), vectors, 1 / self._draws)


def pull_back_examples(
    examples: ExampleOutputs, leaves: Params, cotangents: Sequence[Tensor], *, graph: bool = True
) -> dict[str, Tensor | None]:
    """Jᵀ·cotangents by tensor, with its graph; None where no output depends on the tensor."""
    if not any(output.requires_grad for output in examples.outputs):
        raise InputError(derivatives.NO_DEPENDENCE)
    pairs = zip(examples.outputs, cotangents, strict=True)
    gradients = derivatives.pull_back(pairs, list(leaves.values()), create_graph=graph)
    return dict(zip(leaves, gradients, strict=True))


def check_sum(
    u: Tensor, column: Tensor, gradients: dict[str, Tensor | None], direction: Params
) -> None:
    """Refuse a backward that cannot be differentiated but raises no error.

    Σ u_i D ℓ_i[v] must equal ⟨∇ Σ u_i ℓ_i, v⟩, which needs no second backward.
    """
    pairs = [(g, direction[n]) for n, g in gradients.items() if g is not None and n in direction]
    on_devices: Params = {}
    epsilon = 0.0
    for number, (tensor, vector) in enumerate([(u, column), *pairs]):
        terms = to_float64(tensor.detach()) * to_float64(vector.to(tensor.device))
        on_devices[str(number)] = torch.stack([terms.sum(), terms.abs().sum()])
        epsilon = max(epsilon, torch.finfo(tensor.dtype).eps)
    (first, scale), *others = read_numbers(on_devices).values()
    sums = [first, sum(part for part, _ in others), scale + sum(size for _, size in others)]
    # Gradients are summed over the processes that share their rows.
    numbers = torch.tensor(sums, dtype=torch.float64)
    by_examples, by_gradient, scale = current_ranks().sum_parts(numbers).tolist()
    if abs(by_examples - by_gradient) > epsilon**0.5 * scale:
        raise RuntimeError("a backward here is not differentiable and raises no error")

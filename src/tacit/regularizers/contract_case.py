"""A regularizer at one point, with all that the clauses of its contract read from it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tacit.objective import derivatives
from tacit.objective.params import Params, same_buffers
from tacit.regularizers.family import Columns, Regularizer


@dataclass(frozen=True)
class Case:
    """A regularizer at one point, and the names of the parameters in its scope."""

    regularizer: Regularizer
    params: Params
    in_scope: tuple[str, ...]

    def at(self, params: Params) -> Params:
        """Other parameters, with the buffers of this point."""
        return same_buffers(params, self.params)

    @cached_property
    def columns(self) -> Columns:
        """The columns at the point."""
        return self.regularizer.bind(self.params)

    @cached_property
    def rows(self) -> Params:
        """All columns of every tensor, (entries, columns), with zeros where they are not active."""
        return dense_rows(self.columns, self.params)

    @cached_property
    def derivatives(self) -> Params:
        """The rows, with autograd's gradient of the value in place of columns from random probes.

        The value has probes of its own.
        """
        rows = {n: r.clone() for n, r in self.rows.items()}
        for column in self.columns.noisy:
            for tensor_name, gradient in value_gradients(self, column).items():
                rows[tensor_name][:, column] = gradient.flatten().to(rows[tensor_name])
        return {n: r if n in self.in_scope else self.rows[n] for n, r in rows.items()}

    @cached_property
    def smooth(self) -> Params:
        """Which entries of every flattened tensor have a gradient."""
        return {n: ~kink_mask(self.columns, n, whole_slice(p)) for n, p in self.params.items()}

    @cached_property
    def step(self) -> float:
        """The size of the largest weight."""
        sizes = [float(p.abs().max()) for p in self.params.values() if p.numel()]
        return max(sizes, default=0.0) or 1.0


def value_gradients(case: Case, column: int) -> Params:
    """Autograd's gradient of one value, with zeros where it does not depend on a tensor."""
    inputs = derivatives.leaves(case.params)
    with torch.enable_grad():
        value = case.regularizer.value(inputs)[column]
    gradients = zip(inputs.items(), derivatives.gradient(value, inputs), strict=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in gradients}


def whole_slice(tensor: Tensor) -> slice:
    """The slice of all entries of a flattened tensor."""
    return slice(0, tensor.numel())


def dense_rows(columns: Columns, params: Params) -> Params:
    """All columns of every tensor, (entries, columns)."""
    dense = {}
    for tensor_name, tensor in params.items():
        shape = (tensor.numel(), len(columns.names))
        dense[tensor_name] = torch.zeros(shape, dtype=torch.float64)
        if tensor_name in columns.active:
            rows = columns.rows(tensor_name, whole_slice(tensor))
            dense[tensor_name] = rows.new_zeros(shape)
            dense[tensor_name][:, list(columns.active[tensor_name])] = rows
    return dense


def kink_mask(columns: Columns, tensor_name: str, part: slice) -> Tensor:
    """The rows of a slice without a gradient, as a mask."""
    active = tensor_name in columns.active
    mask = columns.kinks(tensor_name, part) if active else None
    return torch.zeros(part.stop - part.start, dtype=torch.bool) if mask is None else mask.cpu()

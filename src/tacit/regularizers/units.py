"""Balance of hidden units: the weights into a unit against those out of it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tacit.errors import InputError, check_type
from tacit.objective.params import (
    Params,
    Scope,
    describe,
    entries_of,
    select,
    shorten,
    to_float64,
)
from tacit.regularizers.family import Columns, Regularizer


def balance(
    pairs: Collection[tuple[str, str]] | None = None,
    *,
    biases: bool = False,
    scope: Scope = None,
    name: str = "balance",
) -> Regularizer:
    """Imbalance of hidden units, R(θ) = Σ_j d_j², with d_j = ‖weights into j‖² − ‖weights out‖².

    For matrices W (units × inputs) and V (outputs × units) the weights into unit j are row j of W,
    and those out of it are column j of V, so that the gradient is 4 d_j W_j on the row and
    −4 d_j V_j on the column. Of convolutions, units are channels: the first dimension of W and the
    second of V.

    Gradient flow of the loss conserves d_j wherever the units' activation is homogeneous, as ReLU,
    leaky ReLU or none, and the weights have no other use. If the unit has a bias, what is conserved
    is ‖W_j‖² + b_j² − ‖V_j‖²: pass `biases=True`. So for such networks ∇R is orthogonal to ∇L, and
    beside no other candidate its strength is 0 at any endpoint. Weight decay and finite steps
    change d_j. Where weight decay came to rest d_j = 0, and the column is zero.

    Trap: by default, pairs are successive matrices in the model's order whose sizes fit. Sizes do
    not tell which layer feeds which: in models with branches, residual connections or attention,
    name the pairs. Frozen layers are not seen. Transposed convolutions have their dimensions the
    other way round, and a linear layer on flattened channels has more columns than units: neither
    can be part of a pair.

    Args:
        pairs: the names of W and V, as in [("0.weight", "2.weight")].
        biases: whether the bias of W's layer is part of the weights into a unit.
        scope: which rows the column covers; the others are constants in R.
        name: the name that the strength is listed under.
    """
    check_type("biases", biases, bool, "True or False")
    named = None if pairs is None else _check_pairs(pairs)
    family = _Balance(named, biases, scope, name)
    which = "successive" if named is None else repr(named)
    definition = f"balance(pairs={which}, biases={biases})"
    return Regularizer(name, family.bind, family.value, definition=definition)


@dataclass(frozen=True)
class _Balance:
    """Columns and value; without pairs, those of successive matrices."""

    pairs: tuple[tuple[str, str], ...] | None
    biases: bool
    scope: Scope
    name: str

    def bind(self, params: Params) -> Columns:
        """4 d_j θ on the weights into unit j, and −4 d_j θ on those out of it."""
        terms = self.terms(params)
        covered = self.covered(params, terms)
        differences = [_differences(params, term) for term in terms]

        def rows(tensor_name: str, part: slice) -> Tensor:
            theta = to_float64(entries_of(params[tensor_name].detach(), part))
            factors = torch.zeros_like(theta)
            for term, difference in zip(terms, differences, strict=True):
                for role in (role for role in term if role.tensor == tensor_name):
                    units = role.units(params[tensor_name], part).to(theta.device)
                    factors += role.sign * difference.to(theta)[units]
            return (4 * factors * theta)[:, None]

        return Columns((self.name,), dict.fromkeys(covered, (0,)), rows)

    def value(self, params: Params) -> Tensor:
        """Σ_j d_j², where weights outside the scope are constants."""
        terms = self.terms(params)
        covered = self.covered(params, terms)
        point = {n: p if n in covered else p.detach() for n, p in params.items()}
        differences = [sum(role.sign * role.squares(point) for role in term) for term in terms]
        return torch.stack([torch.as_tensor(d).square().sum() for d in differences]).sum()[None]

    def terms(self, params: Params) -> list[list["_Role"]]:
        """The tensors that each sum over units is of."""
        pairs = _successive(params, self.name) if self.pairs is None else self.pairs
        return [_roles(params, pair, biases=self.biases) for pair in pairs]

    def covered(self, params: Params, terms: list[list["_Role"]]) -> list[str]:
        """The names of the tensors in scope that are part of a term."""
        tensors = {role.tensor for term in terms for role in term}
        in_scope = select(params, self.scope, what=f"scope of {self.name}")
        covered = [n for n in in_scope if n in tensors]
        if not covered:
            raise InputError(
                f"{self.name} has none of its matrices ({shorten(sorted(tensors))}) in its scope. "
                "Widen its scope, or name other pairs."
            )
        return covered


class _Role(NamedTuple):
    """A tensor as the weights into units (its first dimension) or out of them (its second)."""

    tensor: str
    dimension: Literal[0, 1]
    sign: int

    def squares(self, params: Mapping[str, Tensor]) -> Tensor:
        """The sum of squares of every unit."""
        tensor = params[self.tensor]
        if self.dimension == 0:
            return tensor.reshape(len(tensor), -1).square().sum(1)
        return tensor.reshape(*tensor.shape[:2], -1).square().sum((0, 2))

    def units(self, tensor: Tensor, part: slice) -> Tensor:
        """The unit of every entry of a slice of the flattened tensor."""
        entries = torch.arange(part.start, part.stop)
        inner = tensor[0].numel() if self.dimension == 0 else tensor[0, 0].numel()
        count = tensor.shape[self.dimension]
        return (entries // inner) % count


def _differences(params: Mapping[str, Tensor], term: list[_Role]) -> Tensor:
    """d_j of every unit in float64, and 0 where it is only rounding of the weights."""
    eps = max(torch.finfo(params[role.tensor].dtype).eps for role in term)
    doubles = ({role.tensor: to_float64(params[role.tensor].detach())} for role in term)
    squares = torch.stack(
        [role.squares(tensor) for role, tensor in zip(term, doubles, strict=True)]
    )
    signs = torch.tensor([role.sign for role in term]).to(squares)
    difference = (signs[:, None] * squares).sum(0)
    eps = max(eps, 8 * torch.finfo(torch.float64).eps)  # of the sums
    return torch.where(difference.abs() > eps * squares.sum(0), difference, 0.0)


def _roles(params: Mapping[str, Tensor], pair: tuple[str, str], *, biases: bool) -> list[_Role]:
    """The tensors with weights into the units between two matrices, and out of them."""
    for tensor_name in pair:
        if tensor_name not in params:
            raise InputError(
                f"balance: no parameter {tensor_name!r} of the pair {pair}. There are: "
                f"{shorten(params)}."
            )
    first, second = (params[tensor_name] for tensor_name in pair)
    if not _fit(first, second):
        raise InputError(
            f"balance: {pair[0]!r} is {describe(first)} and {pair[1]!r} {describe(second)}: the "
            "first dimension of the one must be the second of the other, the units between them."
        )
    roles = [_Role(pair[0], 0, 1), _Role(pair[1], 1, -1)]
    bias = _bias_of(pair[0])
    if biases and bias in params and params[bias].shape == first.shape[:1]:
        roles.append(_Role(bias, 0, 1))
    return roles


def _bias_of(weight: str) -> str:
    """The name of the bias beside a weight: `0.bias` for `0.weight`."""
    module, _, last = weight.rpartition(".")
    bias = last.replace("weight", "bias")
    return f"{module}.{bias}" if module else bias


def _fit(first: Tensor, second: Tensor) -> bool:
    """Whether the second matrix reads the units that the first one writes, by their sizes."""
    matrices = first.ndim >= 2 and second.ndim >= 2 and first.numel() and second.numel()
    return bool(matrices) and first.shape[0] == second.shape[1]


def _successive(params: Mapping[str, Tensor], name: str) -> tuple[tuple[str, str], ...]:
    """Successive matrices whose sizes fit."""
    matrices = [n for n, p in params.items() if p.ndim >= 2]
    pairs = tuple(pair for pair in pairwise(matrices) if _fit(*(params[n] for n in pair)))
    if not pairs:
        raise InputError(
            f"{name}: no two successive matrices fit, with as many rows in the first as columns in "
            f"the second; there are {shorten(matrices) or 'no matrices'}. Name the pairs, as in "
            'balance([("0.weight", "2.weight")]).'
        )
    return pairs


def _check_pairs(pairs: Collection[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    needed = 'a list of pairs of names, as in [("0.weight", "2.weight")]'
    check_type("pairs", pairs, Collection, needed)
    checked = []
    for pair in pairs:
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if not is_pair or not all(isinstance(tensor_name, str) for tensor_name in pair):
            raise InputError(f"pairs has {pair!r}: pass {needed}.")
        checked.append((pair[0], pair[1]))
    if not checked or len(set(checked)) < len(checked):
        raise InputError(f"pairs is empty or has a pair twice: pass {needed}, each pair once.")
    return tuple(checked)

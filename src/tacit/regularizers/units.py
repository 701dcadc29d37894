"""Balance of hidden units: the weights into a unit against those out of it."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tacit.errors import InputError, check_type
from tacit.objective.params import Params, Scope, describe, select, shorten, to_float64
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
    name the pairs. Transposed convolutions, whose dimensions are the other way round, do not fit; nor
    does a linear layer on flattened channels.

    Args:
        pairs: the names of W and V, as in [("0.weight", "2.weight")].
        biases: whether the bias of W's layer is part of the weights into a unit.
        scope: which rows the column covers; the others are constants in R.
        name: the name that the strength is listed under.
    """
    check_type("biases", biases, bool, "True or False")
    named = None if pairs is None else _check_pairs(pairs)

    def terms_of(params: Mapping[str, Tensor]) -> list[tuple[list["_Role"], list["_Role"]]]:
        chosen = _successive(params, name) if named is None else named
        return [_roles(params, pair, biases=biases) for pair in chosen]

    def covered(params: Params) -> dict[str, list[tuple["_Role", int]]]:
        """The roles of every tensor in scope, each with the number of its term."""
        in_scope = set(select(params, scope, what=f"scope of {name}"))
        roles: dict[str, list[tuple[_Role, int]]] = {}
        for number, (into, out) in enumerate(terms_of(params)):
            for role in (*into, *out):
                if role.tensor in in_scope:
                    roles.setdefault(role.tensor, []).append((role, number))
        if not roles:
            raise InputError(
                f"{name} has no pair of matrices in its scope. Widen its scope, or name the pairs."
            )
        return {n: roles[n] for n in params if n in roles}

    def bind(params: Params) -> Columns:
        roles = covered(params)
        differences = [_differences(params, into, out) for into, out in terms_of(params)]

        def rows(tensor_name: str, part: slice) -> Tensor:
            theta = to_float64(params[tensor_name].detach().flatten()[part])
            factors = torch.zeros_like(theta)
            for role, number in roles[tensor_name]:
                units = role.units(params[tensor_name], part)
                factors += role.sign * differences[number].to(theta)[units.to(theta.device)]
            return (4 * factors * theta)[:, None]

        return Columns((name,), dict.fromkeys(roles, (0,)), rows)

    def value(params: Params) -> Tensor:
        roles = covered(params)
        point = {n: p if n in roles else p.detach() for n, p in params.items()}
        totals = []
        for into, out in terms_of(point):
            ahead = torch.stack([role.sums(point) for role in into]).sum(0)
            behind = torch.stack([role.sums(point) for role in out]).sum(0)
            totals.append((ahead - behind.to(ahead)).square().sum())
        return torch.stack(totals).sum().reshape(1)

    which = "successive" if named is None else repr(named)
    definition = f"balance(pairs={which}, biases={biases})"
    return Regularizer(name, bind, value, definition=definition)


class _Role(NamedTuple):
    """A tensor as the weights into units (its first dimension) or out of them (its second)."""

    tensor: str
    dimension: Literal[0, 1]
    sign: int

    def _by_unit(self, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The tensor in three dimensions or one, and the dimensions to sum over."""
        if self.dimension == 0:
            return tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None], (1,)
        return tensor.reshape(*tensor.shape[:2], -1), (0, 2)

    def square_norms(self, params: Mapping[str, Tensor]) -> Tensor:
        """The sum of squares of every unit, in float64."""
        tensor, dimensions = self._by_unit(params[self.tensor].detach())
        dtype = torch.float32 if tensor.device.type == "mps" else torch.float64
        norms = torch.linalg.vector_norm(tensor, dim=dimensions, dtype=dtype)
        return to_float64(norms).square()

    def sums(self, params: Mapping[str, Tensor]) -> Tensor:
        """The sum of squares of every unit, for autograd."""
        tensor, dimensions = self._by_unit(params[self.tensor])
        return tensor.square().sum(dimensions)

    def units(self, tensor: Tensor, part: slice) -> Tensor:
        """The unit of every entry of a slice of the flattened tensor."""
        entries = torch.arange(part.start, part.stop)
        inner = tensor[0].numel() if self.dimension == 0 else tensor[0, 0].numel()
        count = tensor.shape[self.dimension]
        return (entries // inner) % count


def _differences(params: Mapping[str, Tensor], into: list[_Role], out: list[_Role]) -> Tensor:
    """d_j of every unit, and 0 where it is only rounding of the weights."""
    ahead = torch.stack([role.square_norms(params) for role in into]).sum(0)
    behind = torch.stack([role.square_norms(params) for role in out]).sum(0)
    rounding = 4 * torch.finfo(params[into[0].tensor].dtype).eps * (ahead + behind.to(ahead))
    difference = ahead - behind.to(ahead)
    return torch.where(difference.abs() > rounding, difference, 0.0)


def _roles(
    params: Mapping[str, Tensor], pair: tuple[str, str], *, biases: bool
) -> tuple[list[_Role], list[_Role]]:
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
    into = [_Role(pair[0], 0, 1)]
    bias = _bias_of(pair[0])
    if biases and bias in params and params[bias].shape == first.shape[:1]:
        into.append(_Role(bias, 0, 1))
    return into, [_Role(pair[1], 1, -1)]


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

"""L + R as one function: the penalty that a fit amounts to, and the objective with it added."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tacit.equations.rows import check_candidates
from tacit.errors import InputError
from tacit.fitting.fits import Fit
from tacit.objective import derivatives
from tacit.objective.objective import Objective
from tacit.objective.params import Params, shorten, to_float64
from tacit.regularizers import Regularizer

Penalty = Callable[[Params], Tensor]
"""R as a scalar function of the parameters that autograd can differentiate."""


class NoHessianError(InputError):
    """A penalty or a point that has no second derivative to speak of."""


def penalty(
    regularizers: Regularizer | Sequence[Regularizer], strengths: Fit | Mapping[str, float]
) -> Penalty:
    """R(θ) = Σ λ_j R_j(θ) as a differentiable function, to be added to a loss.

    Of a Fit, the strengths it found and those of its known penalties are taken, so known penalties
    must be among the regularizers too. Trap: R belongs to the *mean* loss over all examples.

    >>> import tacit
    >>> ridge = penalty([tacit.l2()], {"l2": 0.5})
    >>> ridge({"w": torch.tensor([1.0, 3.0])})
    tensor(5.)
    """
    candidates = check_candidates(regularizers, None)
    wanted = all_strengths(strengths)
    held: dict[tuple[str, ...], list[Tensor]] = {}

    def value(params: Params) -> Tensor:
        names = tuple(params)
        if names not in held:
            bound = candidates.bind(params)
            _check_names(wanted, bound.columns.names)
            vector = torch.tensor([wanted[n] for n in bound.columns.names], dtype=torch.float64)
            held[names] = list(vector.split([family.size for family in bound.families]))
        pairs = zip(candidates.estimated, held[names], strict=True)
        parts = [(r.value(params), own) for r, own in pairs]
        return torch.stack([(own.to(values) * values).sum() for values, own in parts]).sum()

    return value


def no_penalty(params: Params) -> Tensor:
    """Zero, with a gradient of zero: what the control is trained with."""
    return (0 * next(iter(params.values()))).sum()


def all_strengths(given: Fit | Mapping[str, float]) -> dict[str, float]:
    """Every strength by its column's name, those of a fit's known penalties included."""
    if isinstance(given, Fit):
        known = known_strengths(given)
        both = known.keys() & given.strengths.keys()
        if both:
            raise InputError(
                f"{shorten(sorted(both))} is both estimated and known in this fit, so its strength "
                "is ambiguous: give the known penalty a name of its own with name=."
            )
        return {**given.strengths, **known}
    if not isinstance(given, Mapping):
        raise InputError(
            f"strengths is a {type(given).__name__}: pass a tacit.Fit, or a dictionary from name "
            "to strength, as in {'l2': 1e-3}."
        )
    for name, strength in given.items():
        number = isinstance(strength, Real) and not isinstance(strength, bool)
        if not number or not math.isfinite(strength):
            raise InputError(f"the strength of {name!r} is {strength!r}: pass a finite number.")
    return {name: float(strength) for name, strength in given.items()}


def known_strengths(fit: Fit) -> dict[str, float]:
    """Penalties that training did apply, as the fit's equations have them."""
    first = dict(fit.sources[0].known)
    if any(dict(source.known) != first for source in fit.sources):
        raise InputError(
            "the stacked equations of this fit have different known penalties, so there is no one "
            "penalty to retrain with: pass the strengths as a dictionary instead."
        )
    return first


def _check_names(strengths: Mapping[str, float], columns: Sequence[str]) -> None:
    missing = [n for n in columns if n not in strengths]
    unknown = [n for n in strengths if n not in set(columns)]
    if missing or unknown:
        raise InputError(
            f"strengths and regularizers differ: no strength for {shorten(missing) or 'none'}; no "
            f"regularizer for {shorten(unknown) or 'none'}. Pass the regularizers that the fit was "
            "made with, its known penalties included."
        )


@dataclass(frozen=True, eq=False)
class Penalised:
    """f = L + R as a function of one float64 vector on the CPU, with two derivatives.

    Trap: L is evaluated in the model's own dtype, so in float32 f has seven digits.
    """

    objective: Objective
    penalty: Penalty

    @property
    def epsilon(self) -> float:
        """Relative precision of the model's dtype."""
        return max(torch.finfo(p.dtype).eps for p in self.objective.params.values())

    def flat(self, params: Mapping[str, Tensor]) -> Tensor:
        """Parameters as one vector, copied."""
        return torch.cat(
            [to_float64(params[n].detach()).cpu().flatten() for n in self.objective.params]
        )

    def unflat(self, vector: Tensor) -> Params:
        """The vector as parameters, in float64, on the model's device where it has float64."""
        own = self.objective.params
        parts = zip(own.items(), vector.split([p.numel() for p in own.values()]), strict=True)
        return {
            n: part.reshape(p.shape).to("cpu" if p.device.type == "mps" else p.device)
            for (n, p), part in parts
        }

    def value_and_gradient(self, vector: Tensor) -> tuple[float, Tensor]:
        """The value f and ∇f."""
        params = self.unflat(vector)
        value, slope = self.objective.value_and_gradient(params)
        leaves = derivatives.leaves(params)
        with torch.enable_grad():
            added = self.penalty(leaves)
            own = torch.autograd.grad(
                added, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        forces = dict(zip(leaves, own, strict=True))
        return value + float(added.detach()), self.flat(slope) + self.flat(forces)

    def curvature(self, vector: Tensor) -> Callable[[Tensor], Tensor]:
        """Products of ∇²f with directions; the penalty's graph is built once.

        Refused where the penalty can be differentiated only once, as gradient_norm can.
        """
        params = self.unflat(vector)
        leaves = derivatives.leaves(params)
        tensors = list(leaves.values())
        # A function that can be differentiated only once leaves its mark in the second graph
        # where the gradient that flows into it has a graph; else it would pass for linear.
        one = torch.ones((), dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            added = self.penalty(leaves)
            first = torch.autograd.grad(
                added * one.to(added.device), tensors, create_graph=True, allow_unused=True
            )
        _check_twice([g.grad_fn for g in first if g is not None])
        bent = [(i, g) for i, g in enumerate(first) if g is not None and g.requires_grad]

        def product(direction: Tensor) -> Tensor:
            along = self.unflat(direction)
            total = self.flat(self.objective.hvp(along, params))
            if not bent:  # R is constant
                return total
            towards = list(along.values())
            own = _twice([g for _, g in bent], tensors, [towards[i] for i, _ in bent])
            return total + self.flat(dict(zip(leaves, own, strict=True)))

        return product

    def hessian(self, vector: Tensor) -> Tensor:
        """∇²f whole, a product a column."""
        product = self.curvature(vector)
        matrix = torch.stack([product(row) for row in torch.eye(len(vector), dtype=torch.float64)])
        return (matrix + matrix.T) / 2


def _check_twice(nodes: list[Any]) -> None:
    """Refuse a graph with a node that stands for "no second derivative"."""
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise NoHessianError(
                "the penalty has no Hessian: a regularizer can be differentiated only once, as "
                "gradient_norm can. Certify without it, with the other strengths as they are."
            )
        nodes += [following for following, _ in node.next_functions]


def _twice(outputs: list[Tensor], leaves: list[Tensor], along: list[Tensor]) -> Sequence[Tensor]:
    try:
        parts = torch.autograd.grad(
            outputs, leaves, along, retain_graph=True, allow_unused=True, materialize_grads=True
        )
    except RuntimeError as error:
        if "derivative" not in str(error) and "differentiate twice" not in str(error):
            raise
        raise NoHessianError(
            f"the penalty has no Hessian: an operator lacks its second derivative: {error}. "
            "Certify without that regularizer, with the other strengths as they are."
        ) from error
    if not all(torch.isfinite(part).all() for part in parts):
        raise NoHessianError(
            "the penalty's Hessian is not finite here: a norm of zeros, or a matrix with equal "
            "singular values. Evaluate where it is smooth, or use a smooth penalty."
        )
    return parts

"""The penalised objective f = L + R: the penalty R that a fit describes, and f with derivatives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tacit.equations.candidates import check_candidates
from tacit.errors import InputError, check_number, check_type
from tacit.fitting.fits import Fit
from tacit.objective import derivatives
from tacit.objective.objective import Objective
from tacit.objective.params import Params, same_buffers, shorten, to_float64
from tacit.regularizers import Regularizer

Penalty = Callable[[Params], Tensor]
"""R as a scalar function of the parameters that autograd can differentiate."""


class NoHessianError(InputError):
    """The penalised objective has no Hessian, or its Hessian could not be analysed."""


def penalty(
    regularizers: Regularizer | Sequence[Regularizer], strengths: Fit | Mapping[str, float]
) -> Penalty:
    """R(θ) = Σ λ_j R_j(θ) as a differentiable function, to be added to a loss.

    From a Fit, both the estimated strengths and those of its known penalties are used, so the
    regularizers must include the known penalties. Trap: R belongs to the *mean* loss over all
    examples; multiply R by the number of examples before adding it to a summed loss.

    >>> import tacit
    >>> ridge = penalty([tacit.l2()], {"l2": 0.5})
    >>> ridge({"w": torch.tensor([1.0, 3.0])})
    tensor(5.)
    """
    candidates = check_candidates(regularizers, None)
    strength_of = strengths_by_name(strengths)
    # Column names depend on the parameters' names, so the strengths are matched at the first call.
    vectors_of: dict[tuple[str, ...], list[Tensor]] = {}

    def value(params: Params) -> Tensor:
        names = tuple(params)
        if names not in vectors_of:
            bound = candidates.bind(params)
            columns = bound.columns.names
            _check_names(strength_of, columns)
            vector = torch.tensor([strength_of[c] for c in columns], dtype=torch.float64)
            vectors_of[names] = list(vector.split([family.size for family in bound.families]))
        terms = []
        for regularizer, vector in zip(candidates.estimated, vectors_of[names], strict=True):
            values = regularizer.value(params)
            terms.append((vector.to(values) * values).sum())
        return torch.stack(terms).sum()

    return value


def no_penalty(params: Params) -> Tensor:
    """Zero with a zero gradient: the penalty of a control without known penalties."""
    return (0 * next(iter(params.values()))).sum()


def strengths_by_name(strengths: Fit | Mapping[str, float]) -> dict[str, float]:
    """Every strength by its column's name, including those of a fit's known penalties."""
    if isinstance(strengths, Fit):
        known = known_strengths(strengths)
        if ambiguous := known.keys() & strengths.strengths.keys():
            raise InputError(
                f"{shorten(sorted(ambiguous))} is both estimated and known in this fit: give the "
                "known penalty a different name with name=."
            )
        return {**strengths.strengths, **known}
    needed = "a tacit.Fit, or a dictionary from name to strength, as in {'l2': 1e-3}"
    check_type("strengths", strengths, Mapping, needed)
    for name, strength in strengths.items():
        check_number(f"the strength of {name!r}", strength)
    return {name: float(strength) for name, strength in strengths.items()}


def known_strengths(fit: Fit) -> dict[str, float]:
    """Strengths of the fit's known penalties, by name."""
    first = dict(fit.sources[0].known)
    if any(dict(source.known) != first for source in fit.sources):
        raise InputError(
            "the stacked equations have different known penalties: pass strengths as a dictionary."
        )
    return first


def known_penalty(
    fit: Fit | Mapping[str, float], regularizers: Regularizer | Sequence[Regularizer]
) -> Penalty:
    """The known penalties of a fit, which a control retains; zero where there are none."""
    known = known_strengths(fit) if isinstance(fit, Fit) else {}
    if not known:
        return no_penalty
    estimated = check_candidates(regularizers, None).estimated
    return penalty([r for r in estimated if r.name in known], known)


def held_params(
    strengths: Fit | Mapping[str, float], unreached: Sequence[str], point: Params
) -> Params:
    """Parameters that retraining leaves as they are, because only the penalty reaches them.

    For a fit they are those of them that have no equations.
    """
    sources = strengths.sources if isinstance(strengths, Fit) else ()
    held = {n: point[n] for n in unreached if all(n in source.unreached for source in sources)}
    return same_buffers(held, point)


def _check_names(strengths: Mapping[str, float], columns: Sequence[str]) -> None:
    missing = [n for n in columns if n not in strengths]
    unknown = [n for n in strengths if n not in set(columns)]
    if missing or unknown:
        raise InputError(
            f"there is no strength for {shorten(missing) or 'none'}, no regularizer for "
            f"{shorten(unknown) or 'none'}: pass all regularizers of the fit, also the known ones."
        )


@dataclass(frozen=True, eq=False)
class PenalisedObjective:
    """f = L + R as a function of one float64 vector θ on the CPU, with two derivatives.

    Trap: L is evaluated in the model's dtype, so for a float32 model f has only seven digits.
    """

    objective: Objective
    penalty: Penalty
    held: Params = field(default_factory=dict)
    """Parameters that are no part of θ and keep these values; with them the buffers of all θ."""

    @property
    def epsilon(self) -> float:
        """Machine epsilon of the model's dtype."""
        return max(torch.finfo(p.dtype).eps for p in self.objective.params.values())

    def flatten(self, params: Mapping[str, Tensor]) -> Tensor:
        """Parameters as one vector, copied."""
        tensors = [params[n].detach() for n in self.objective.params if n not in self.held]
        return torch.cat([to_float64(tensor).cpu().flatten() for tensor in tensors])

    def unflatten(self, theta: Tensor) -> Params:
        """The vector as parameters in float64, on the model's device if that supports float64."""
        params = self.objective.params
        free = {n: p for n, p in params.items() if n not in self.held}
        parts = dict(zip(free, theta.split([p.numel() for p in free.values()]), strict=True))
        tensors = {n: to_float64(self.held[n]) if n in self.held else parts[n] for n in params}
        placed = {
            n: tensors[n].reshape(p.shape).to("cpu" if p.device.type == "mps" else p.device)
            for n, p in params.items()
        }
        return same_buffers(placed, self.held)

    def value_and_gradient(self, theta: Tensor) -> tuple[float, Tensor]:
        """f(θ) and ∇f(θ)."""
        params = self.unflatten(theta)
        loss, loss_gradient = self.objective.value_and_gradient(params)
        leaves = derivatives.leaves(params)
        with torch.enable_grad():
            penalty = self.penalty(leaves)
            parts = torch.autograd.grad(penalty, list(leaves.values()), materialize_grads=True)
        gradient = self.flatten(loss_gradient) + self.flatten(dict(zip(leaves, parts, strict=True)))
        return loss + float(penalty.detach()), gradient

    def hvp_at(self, theta: Tensor) -> Callable[[Tensor], Tensor]:
        """The function v ↦ ∇²f(θ)·v; the graph of the penalty's gradient is built only once.

        Raises NoHessianError for a penalty that can be differentiated only once (gradient_norm).
        """
        params = self.unflatten(theta)
        leaves = derivatives.leaves(params)
        with torch.enable_grad():
            gradients = derivatives.gradient_with_graph(self.penalty(leaves), leaves)
        if gradients is None:
            raise NoHessianError(
                "the penalty has no Hessian: a regularizer can be differentiated only once, as "
                "gradient_norm can. Certify without it, leaving the other strengths unchanged."
            )
        pairs = zip(leaves, gradients, strict=True)
        curved = {n: g for n, g in pairs if g is not None and g.requires_grad}

        def product(direction: Tensor) -> Tensor:
            along = self.unflatten(direction)
            along |= {n: torch.zeros_like(along[n]) for n in self.held}
            loss_product = self.flatten(self.objective.hvp(along, params))
            if not curved:  # R is constant
                return loss_product
            return loss_product + self.flatten(_penalty_hvp(curved, leaves, along))

        return product

    def hessian(self, theta: Tensor) -> Tensor:
        """∇²f(θ) as a dense matrix, by one Hessian-vector product per column."""
        product = self.hvp_at(theta)
        matrix = torch.stack([product(row) for row in torch.eye(len(theta), dtype=torch.float64)])
        return (matrix + matrix.T) / 2


def _penalty_hvp(gradients: Params, leaves: Params, direction: Params) -> Params:
    """∇²R·v by differentiating ⟨∇R, v⟩."""
    outputs, inputs = list(gradients.values()), list(leaves.values())
    along = [direction[n] for n in gradients]
    try:
        parts = torch.autograd.grad(
            outputs, inputs, along, retain_graph=True, materialize_grads=True
        )
    except RuntimeError as error:
        if not derivatives.lacks_double_backward(error):
            raise
        raise NoHessianError(
            f"the penalty has no Hessian: an operator lacks its second derivative: {error}. "
            "Certify without that regularizer, leaving the other strengths unchanged."
        ) from error
    if not all(torch.isfinite(part).all() for part in parts):
        raise NoHessianError(
            "the penalty's Hessian is not finite at these weights (the norm of a zero vector, or "
            "equal singular values): evaluate where the penalty is smooth, or use a smooth one."
        )
    return dict(zip(leaves, parts, strict=True))

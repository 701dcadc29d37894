"""Penalties of the loss gradient: its norm, its smoothed l1 norm, its variance over batches."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tacit.errors import InputError, check_number, check_type
from tacit.objective import derivatives
from tacit.objective.batches import needs_batch_size
from tacit.objective.deriving import has_technique
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, norm, select, shorten, sum_over_parts
from tacit.regularizers.data_dependent import streamed_value
from tacit.regularizers.family import (
    Columns,
    Regularizer,
    describe_of,
    weighted_gradient,
    whole_column,
)

MIN_SIGNAL = 10.0
"""A gradient of a smaller multiple of its rounding error has no reliable direction."""


def gradient_norm(
    objective: Objective,
    *,
    power: int = 2,
    of: Scope = None,
    scope: Scope = None,
    name: str = "gradient_norm",
    known: Mapping[Regularizer, float] | None = None,
) -> Regularizer:
    """Norm of the loss gradient: R(θ) = ‖∇L(θ)‖² with ∇R = 2 H ∇L, or R = ‖∇L‖ with H ∇L/‖∇L‖.

    H is the Hessian of L. The column takes two passes over the data, one for ∇L and one for the
    Hessian-vector product. What to expect:

        power=2: a step of gradient descent of size η follows the gradient flow of
            L + (η/4)‖∇L‖² up to an error of order η³ (Barrett & Dherin 2021): strength η/4.
        power=1: sharpness-aware minimization takes the gradient at θ + ρ ∇L/‖∇L‖, which is that of
            L + ρ‖∇L‖ to first order in ρ (Foret et al. 2021): strength ρ.

    Traps:
        L is the mean over all the data of the objective. The penalty of mini-batch SGD is the mean
        of ‖∇L_batch‖² over batches instead: see `gradient_variance`. SAM on mini-batches adds the
        mean of ‖∇L_batch‖.

        ‖∇L‖ has no derivative where ∇L = 0: with power=1, a point where ∇L is zero up to rounding
        is refused.

    Args:
        objective: the objective whose gradient is penalised.
        power: 2 for the squared norm, 1 for the norm.
        of: which parameters' gradient is in the norm, R = ‖∇_of L‖²; by default all. With one such
            penalty per layer, step sizes η_l of layers have strengths η_l/4.
        scope: which rows the column covers; the norm does not depend on it.
        name: the name that the strength is listed under.
        known: penalties that training applied, with their strengths, to penalise the gradient of
            L + Σ known instead: that is what steps on L + Σ known add. By default none, or those
            of trajectory equations whose reference follows the flow of L + Σ known.
    """
    _check("gradient_norm", objective, known)
    if isinstance(power, bool) or power not in (1, 2):
        raise InputError(f"power is {power!r}: pass 2 for ‖∇L‖², or 1 for ‖∇L‖.")
    if power == 2:
        function: _Function = _SquaredNorm()
    else:
        function = _Norm(partial(_zero_level, objective))
    definition = f"gradient_norm({', '.join(filter(None, (f'power={power}', describe_of(of))))})"
    return _of_gradient(_LossGradient(objective, known), function, name, scope, of, definition)


def gradient_l1(
    objective: Objective,
    *,
    eps: float,
    scope: Scope = None,
    name: str = "gradient_l1",
    known: Mapping[Regularizer, float] | None = None,
) -> Regularizer:
    """Smoothed l1 norm of the loss gradient, R(θ) = Σ_j √((∂_j L)² + ε), with ∇R = H (g/√(g²+ε)).

    H is the Hessian of L and g = ∇L. It is what Adam's steps add, with √v̂ + ε replaced by
    √(v̂ + ε), in the flow of its own metric (Cattaneo, Klusowski & Shigida 2024). There β₁ and β₂
    decide the strength: with A, B = (1+β₁)/(1−β₁), (1+β₂)/(1−β₂), it is (η/2)(A − B) where
    g² ≫ ε, so negative for the usual β₁ < β₂. The column takes two passes over the data.

    Trap: the flow of Adam is θ' = −g/√(g²+ε), not the gradient flow of L; beside that flow this is
    not the penalty. And eps is inside the root: torch's `eps` is outside, and compares with √eps.

    Args:
        objective: the objective whose gradient is penalised.
        eps: ε, above zero, in units of a squared gradient.
        scope: which rows the column covers; the sum is always over all parameters.
        name: the name that the strength is listed under.
        known: as in `gradient_norm`.
    """
    _check("gradient_l1", objective, known)
    check_number("eps", eps, above=0)
    loss, definition = _LossGradient(objective, known), f"gradient_l1(eps={float(eps)!r})"
    return _of_gradient(loss, _SmoothL1(eps), name, scope, None, definition)


def gradient_variance(
    objective: Objective, *, scope: Scope = None, name: str = "gradient_variance"
) -> Regularizer:
    """Variance of the gradient over batches, R(θ) = Σ_b w_b ‖∇L_b − ∇L‖² / Σ_b w_b.

    The batches b, with their weights (numbers of examples), are those of the objective. The mean
    over orders of an epoch of SGD with step η follows the flow of L + (η/4)‖∇L‖² + (η/4)R for the
    time of the epoch (Smith et al. 2021): `gradient_norm` and this at η/4 each. Sampling with
    replacement has the first alone. ∇R = 2 Σ_b w_b H_b (∇L_b − ∇L) / Σ_b w_b takes two passes.

    Traps:
        The batches must be those of training: pass a list of batches, a DataLoader that does not
        shuffle, or tensors with batch_size=, whose batches are consecutive rows.

        Training that shuffles the examples anew in every epoch has the mean over groupings. For n
        examples in batches of B that is R₁ (n−B)/(B(n−1)), where R₁ is the penalty of an objective
        with batch_size=1: fit R₁, and expect (η/4)(n−B)/(B(n−1)). A single grouping is a noisy
        column in that case, which biases its strength towards zero. A loader that shuffles is
        therefore refused; with batch_norm="batch" the mean is over `draws` groupings.

        Every batch is one step: batches of different sizes, as a smaller last one, move the
        weights by equal steps, and the law then holds up to that difference.

        Which examples share a batch is fixed here: `score_examples` treats the column as fixed.

    Args:
        objective: an objective that is not random: of the loss without dropout or augmentation.
        scope: which rows the column covers; the norm is always over all parameters.
        name: the name that the strength is listed under.
    """
    _check("gradient_variance", objective, None)
    _check_batches(objective)

    def over_batches(params: Params, of_batch: "_OfDeviation") -> Params:
        """The mean over batches of a function of ∇L_b − ∇L and of the graph of ∇L_b."""
        point, batches = objective.point(params), 0

        def count(mean: Tensor, leaves: Params) -> Sequence[Tensor | None]:
            nonlocal batches
            batches += 1
            return derivatives.gradient(mean, leaves)

        mean_gradient = objective.differentiate(point, derivative=count).derivative
        if batches < 2:
            raise InputError(
                "the data is one batch, whose gradient has no variance: pass the batches of "
                "training, as a DataLoader, a list of batches, or tensors with batch_size=."
            )
        derivative = partial(_apply_to_deviation, of_batch, mean_gradient)
        return objective.differentiate(point, derivative=derivative).derivative

    def gradient(params: Params) -> Params:
        point = objective.point(params)
        with derivatives.twice_differentiable():
            objective.compared.check_products(point)
            product = over_batches(point, _double_product)
        return {n: product[n] for n in select(params, scope, what=f"scope of {name}")}

    def evaluate(params: Params) -> Tensor:
        squares = over_batches(params, lambda deviations, *_: [d.square() for d in deviations])
        return _total(squares, lambda tensor: tensor)

    def bind(params: Params) -> Columns:
        return whole_column(name, gradient(params))

    return Regularizer(
        name,
        bind,
        streamed_value(evaluate, gradient),
        definition="gradient_variance",
        objective=objective,
        cost="second-order",
    )


_OfDeviation = Callable[
    [Sequence[Tensor], Sequence[Tensor | None], Params], Sequence[Tensor | None]
]
"""of_batch(∇L_b − ∇L, ∇L_b with its graph, leaves): one tensor per leaf."""


def _apply_to_deviation(
    of_batch: _OfDeviation, mean_gradient: Params, mean: Tensor, leaves: Params
) -> Sequence[Tensor | None]:
    """What `of_batch` makes of the deviation of a batch; a parameter it does not use has −∇L."""
    gradients = derivatives.gradient(mean, leaves, graph=of_batch is _double_product)
    deviations = [
        -g if batch is None else batch.detach().to(g) - g
        for batch, g in zip(gradients, mean_gradient.values(), strict=True)
    ]
    return of_batch(deviations, gradients, leaves)


def _double_product(
    deviations: Sequence[Tensor], gradients: Sequence[Tensor | None], leaves: Params
) -> Sequence[Tensor | None]:
    """2 H_b (∇L_b − ∇L)."""
    pairs = zip(gradients, deviations, strict=True)
    products = derivatives.pull_back(pairs, list(leaves.values()))
    return [None if product is None else 2 * product for product in products]


def _check(name: str, objective: Objective, known: Mapping[Regularizer, float] | None) -> None:
    needed = "the tacit.Objective whose gradient is penalised"
    check_type(f"the objective of {name}", objective, Objective, needed)
    example = "a dictionary from penalty to strength, as in {tacit.l2(): 5e-5}"
    check_type("known", known, Mapping | None, example)


def _check_batches(objective: Objective) -> None:
    """Refuse an objective whose batches are not known to be those of training."""
    if objective.ranks.count > 1:
        raise InputError(
            f"{objective.ranks.count} processes share the model, and a batch of training has "
            "examples of each: gradient_variance is of the batches of one process. Leave it out."
        )
    if objective.training:
        raise InputError(
            "the objective of gradient_variance is random (training=True), and the variance over "
            "batches would contain that of the draws: pass an objective without training=True."
        )
    if has_technique(objective):
        raise InputError(
            f"the objective of gradient_variance has a technique ({objective.loss_name}), whose "
            "draws or step would be in the variance over batches: pass the objective without it."
        )
    if needs_batch_size(objective.data) and objective.batch_size is None:
        raise InputError(
            "gradient_variance needs the batches of training, and this objective cuts its data "
            "into batches of tacit's own size: pass batch_size=, that of training, to the "
            "objective."
        )
    if not objective.regroups and not objective.repeats_order(shuffled=False):
        raise InputError(
            "the data is shuffled, so that its batches are others in every epoch, and those of one "
            "epoch would be a noisy column of gradient_variance: pass the list of batches if "
            "training kept them; otherwise the data unshuffled with batch_size=1, whose strength "
            "is then (η/4)(n−B)/(B(n−1)) for n examples in batches of B."
        )


class _LossGradient(NamedTuple):
    """∇L, or that of L + Σ s_k R_k, with its derivative."""

    objective: Objective
    known: Mapping[Regularizer, float] | None

    def at(self, params: Params) -> Params:
        """∇L + Σ s_k ∇R_k."""
        gradient = self.objective.gradient(params)
        if not self.known:
            return gradient
        penalties = weighted_gradient(self.known, params)
        return {n: g + penalties[n].to(g) for n, g in gradient.items()}

    def hvp(self, direction: Params, params: Params) -> Params:
        """The Hessian of L + Σ s_k R_k times a direction, zero at the names it leaves out."""
        zeros = {n: torch.zeros_like(p) for n, p in params.items()}
        product = self.objective.hvp(zeros | direction, params)
        if not self.known:
            return product
        penalties = _penalty_product(self.known, params, zeros | direction)
        return {n: p + penalties[n].to(p) for n, p in product.items()}


def _penalty_product(
    penalties: Mapping[Regularizer, float], params: Params, direction: Params
) -> Params:
    """Σ s_k ∇²R_k(θ)·direction, by double backward."""
    leaves = derivatives.leaves(params)
    with torch.enable_grad():
        total = torch.stack([s * r.value(leaves)[0] for r, s in penalties.items()]).sum()
        gradients = derivatives.gradient_with_graph(total, leaves)
    if gradients is None:
        raise InputError(
            "a penalty of the gradient needs second derivatives of the known penalties "
            f"({shorten(r.name for r in penalties)}), and one can be differentiated only once: "
            "pass known={}, as in gradient_norm(objective, known={}), to leave them out of it."
        )
    pairs = zip(gradients, direction.values(), strict=True)
    product = derivatives.pull_back(pairs, list(leaves.values()))
    zeros = {n: torch.zeros_like(p) for n, p in params.items()}
    return zeros | {n: p for n, p in zip(leaves, product, strict=True) if p is not None}


def _of_gradient(
    loss: _LossGradient,
    function: "_Function",
    name: str,
    scope: Scope,
    of: Scope,
    definition: str,
) -> Regularizer:
    """The penalty R(θ) = φ(g) with g = ∇L(θ), on the parameters `of`, and ∇R = H φ′(g)."""

    def in_scope(params: Params) -> tuple[str, ...]:
        return select(params, scope, what=f"scope of {name}")

    def penalised(params: Params) -> Params:
        g = loss.at(params)
        return {n: g[n] for n in select(params, of, what="of")}

    def gradient(params: Params) -> Params:
        product = loss.hvp(function.derivative(penalised(params), params), params)
        return {n: product[n] for n in in_scope(params)}

    def evaluate(params: Params) -> Tensor:
        return function.value(penalised(params))

    def bind(params: Params) -> Columns:
        return whole_column(name, gradient(params))

    def influence(params: Params, directions: Sequence[Params]) -> Tensor:
        # With g = ∇L and u = φ′(g), example i changes ⟨Hu, v⟩ by ⟨(H_i − H)u, v⟩ +
        # ⟨H φ″(g)(g_i − g), v⟩. The terms without i are shared by all examples; the others are
        # D²ℓ_i[v, u] and Dℓ_i[φ″(g)Hv]. Known penalties are in g and H, the same for all examples.
        scoped = [{n: v[n] for n in in_scope(params) if n in v} for v in directions]
        g = penalised(params)
        products = (loss.hvp(v, params) for v in scoped)
        bent = [function.second(g, {n: product[n] for n in g}) for product in products]
        base = function.derivative(g, params)
        second = loss.objective.directional_derivatives(scoped, params, base=base)
        first = loss.objective.directional_derivatives(bent, params)
        return (second.values + first.values).unsqueeze(2)

    def with_known(known: Mapping[Regularizer, float]) -> Regularizer:
        followed = loss._replace(known=known)
        return _of_gradient(followed, function, name, scope, of, definition)

    return Regularizer(
        name,
        bind,
        streamed_value(evaluate, gradient),
        definition=definition,
        reads="rows",
        influence=influence,
        objective=loss.objective,
        with_known=with_known if loss.known is None else None,
        cost="second-order",
    )


class _Function(Protocol):
    """A function φ of the gradient g, for R(θ) = φ(∇L(θ))."""

    def value(self, g: Params) -> Tensor:
        """φ(g), of one entry."""
        ...

    def derivative(self, g: Params, params: Params) -> Params:
        """φ′(g); `params` is the point that g is taken at."""
        ...

    def second(self, g: Params, direction: Params) -> Params:
        """φ″(g)·direction."""
        ...


class _SquaredNorm:
    """‖g‖²."""

    def value(self, g: Params) -> Tensor:
        return _total(g, torch.square)

    def derivative(self, g: Params, params: Params) -> Params:
        return {n: 2 * t for n, t in g.items()}

    def second(self, g: Params, direction: Params) -> Params:
        return {n: 2 * v for n, v in direction.items()}


class _Norm(NamedTuple):
    """‖g‖, which has no derivative at zero: refused at most at zero_level(point)."""

    zero_level: Callable[[Params, Iterable[str]], float]

    def value(self, g: Params) -> Tensor:
        return _total(g, torch.square).sqrt()

    def derivative(self, g: Params, params: Params) -> Params:
        size = norm(g)
        if size <= self.zero_level(params, g):
            raise InputError(
                f"gradient_norm(power=1) has no derivative here: ‖∇L‖ is {size:.2g}, zero up to "
                "rounding. Use power=2, or a point where the loss has a gradient."
            )
        return {n: t / size for n, t in g.items()}

    def second(self, g: Params, direction: Params) -> Params:
        size = norm(g)
        products = {n: float((t / size * direction[n]).sum()) for n, t in g.items()}
        along = sum(sum_over_parts(products).values())
        return {n: (direction[n] - along * t / size) / size for n, t in g.items()}


class _SmoothL1(NamedTuple):
    """Σ_j √(g_j² + ε)."""

    eps: float

    def value(self, g: Params) -> Tensor:
        return _total(g, lambda t: (t.square() + self.eps).sqrt())

    def derivative(self, g: Params, params: Params) -> Params:
        return {n: t / (t.square() + self.eps).sqrt() for n, t in g.items()}

    def second(self, g: Params, direction: Params) -> Params:
        return {n: self.eps * direction[n] / (t.square() + self.eps) ** 1.5 for n, t in g.items()}


def _total(tensors: Params, function: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum of a function over all entries, with one entry, in float64."""
    sums = [function(tensor).sum().cpu() for tensor in tensors.values()]
    return torch.stack(sums).sum().reshape(1)


def _zero_level(objective: Objective, params: Params, names: Iterable[str]) -> float:
    """The norm of ∇L, on the named parameters, below which it is rounding error."""
    rounding = objective.rounding(params)
    return MIN_SIGNAL * math.sqrt(sum(rounding[n] ** 2 for n in names))

"""Techniques that evaluate the loss at moved weights: noise on weights, and SAM."""

from torch import Tensor

from tacit.errors import InputError, check_number, check_type
from tacit.objective.deriving import with_noise, with_scale, with_shift
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import Params, Scope, norm, select
from tacit.objective.randomness import Noise
from tacit.objective.ranks import check_alone
from tacit.objective.scale import Scale

MIN_SIGNAL = 10
"""Least norm of a gradient, in units of its rounding error, that has a direction."""


def weight_noise(
    objective: Objective,
    sigma: float,
    *,
    scope: Scope = None,
    relative: bool = False,
    draws: int | None = None,
    seed: int = 0,
) -> Objective:
    """E L(θ + σz) with standard normal z, one z for all the data in each draw.

    Draws of a pair have z and −z. It adds σ²/2 · tr H with H the Hessian of L, up to order σ⁴; over
    a scope the trace is over its parameters.

    With relative=True it is E L(θ(1 + σz)), which adds σ²/2 · Σ θ_j² H_jj. The gradient is that of
    this loss: it holds the factor 1 + σz, as that of a layer that multiplies its weights by noise.

    Trap: at a σ that is not small beside the weights the terms of order σ⁴ matter: see
    `Fit.with_halved`.

    Args:
        objective: the objective without the technique.
        sigma: standard deviation of the noise; with relative=True as a fraction of each weight.
        scope: which parameters have noise; by default all.
        relative: whether noise is proportional to the weights.
        draws: how many draws of the noise are averaged, an even number; by default 16, or twice
            those of an objective that has draws itself.
        seed: draws depend only on (seed, draw).
    """
    check_objective(objective)
    check_number("sigma", sigma, least=0)
    check_type("relative", relative, bool, "True or False")
    check_alone(objective.ranks, "weight_noise", shards_only=True)
    names = set(select(objective.params, scope, what="scope of weight_noise"))

    def moved(parameter: Tensor, noise: Noise) -> Tensor:
        step = sigma * noise.normal(parameter)
        return parameter * (1 + step) if relative else parameter + step

    def move(params: Params, noise: Noise) -> Params:
        return {n: moved(p, noise) if n in names else p for n, p in params.items()}

    options = {"scope": scope, "relative": relative, "draws": draws, "seed": seed}
    return with_scale(
        with_noise(objective, f"weight_noise({sigma:g})", move=move, draws=draws, seed=seed),
        Scale("sigma", float(sigma), growth=4.0, order=2),
        lambda other: weight_noise(objective, other, **options),
    )


def sam(objective: Objective, rho: float, *, normalised: bool = True) -> Objective:
    """Sharpness-aware minimisation: ∇L at θ + ρ g/‖g‖, with g = ∇L(θ) over all the data.

    The step counts as constant, as in training, so that the gradient is not the derivative of the
    value, but that of L + ρ‖g‖ up to order ρ². With normalised=False the step is ρg, and the
    gradient is that of L + (ρ/2)‖g‖². Every gradient takes two passes.

    Traps: training with SAM takes g from each minibatch, which is another technique (m-SAM): its
    penalty is the mean of ‖g_batch‖, which is larger. Where g is nearly zero, as at the end of a
    training without SAM, its direction is noise: refused.

    Args:
        objective: the objective without the technique; it may have no randomness.
        rho: the radius; with normalised=False the factor of g.
        normalised: whether the step has the norm ρ, as in SAM.
    """
    check_objective(objective)
    check_number("rho", rho, least=0)
    check_type("normalised", normalised, bool, "True or False")
    if objective.random:
        raise InputError(
            "the objective is random (training=True, draws, or a technique with noise): the norm "
            "of a noisy gradient is too large, and SAM's step too. Apply sam to an objective "
            "without randomness."
        )

    def shift(params: Params) -> Params:
        gradient = objective.gradient(params)
        size = norm(gradient) if normalised else 1.0
        if normalised and size <= MIN_SIGNAL * norm_of_rounding(objective, params):
            raise InputError(
                f"the gradient of all the data has norm {size:.2g}, which is its rounding error: "
                "SAM's step has no direction. Evaluate at weights where the gradient is not zero, "
                "in float64, or pass normalised=False."
            )
        return {name: rho / size * g for name, g in gradient.items()}

    label = f"sam({rho:g})" if normalised else f"sam({rho:g}, normalised=False)"
    return with_scale(
        with_shift(objective, label, shift),
        Scale("rho", float(rho), growth=2.0, order=1),
        lambda other: sam(objective, other, normalised=normalised),
    )


def norm_of_rounding(objective: Objective, params: Params) -> float:
    """Norm of the change of the gradient when every weight moves by its last digit."""
    return sum(size**2 for size in objective.rounding(params).values()) ** 0.5

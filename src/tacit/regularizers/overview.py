"""All families of `tacit.regularizers` in one table: formula, cost, error bars, look-alikes.

The entries are data only: `catalogue` prints them, and the command line reads their names.
"""

import textwrap
from dataclasses import dataclass

from tacit.regularizers.family import Cost

EXACT = "the column is exact: only the target's noise"
EXAMPLES = "the column varies with the examples: score_examples follows it"
ROWS_AT_ZERO = f"{EXACT}; rows at zero have a kink and are left out (zero_width)"
SINGULAR_VALUES = f"{EXACT}; equations along the row and column space at low rank (zero_width)"
LARGEST = f"{EXACT}; fewer equations where the largest singular values are equal (equal_width)"
LABELS = {"cost": "cost", "bars": "error bars", "like": "mistaken for"}


@dataclass(frozen=True)
class Entry:
    """One family."""

    call: str
    """Its name with its arguments, without `scope` and `name`, which all have."""
    formula: str
    cost: Cost
    bars: str
    """How its error bars behave."""
    like: str
    """What it is easily mistaken for."""

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.call.partition("(")[0]


CATALOGUE = (
    Entry(
        "l2()",
        "Σ θ_i²",
        "weights",
        EXACT,
        "torch's weight_decay w, which is strength w/2; AdamW's decay, which is metric_ridge; any "
        "penalty of weights that are all of about the same size.",
    ),
    Entry(
        "l1(zero_width)",
        "Σ |θ_i|",
        "weights",
        ROWS_AT_ZERO,
        "smooth_l1 with a small β; l2 where all weights have about the same size.",
    ),
    Entry(
        "smooth_l1(beta)",
        "Σ h(θ_i), h(x) = x²/(2β) below β, |x| − β/2 above",
        "weights",
        EXACT,
        "l2, if β is above most weights; l1, if it is below nearly all.",
    ),
    Entry(
        "power(p, zero_width)",
        "Σ |θ_i|^p",
        "weights",
        f"{EXACT}; for p ≤ 1 rows at zero have a kink and are left out (zero_width)",
        "powers of nearby p: their columns differ by logarithms. p = 1 is l1, p = 2 is l2.",
    ),
    Entry(
        "hypentropy(scale)",
        "Σ s q(θ_i/s), q(z) = 2 − √(4 + z²) + z arcsinh(z/2), s the scale",
        "weights",
        EXACT,
        "l2 at 1/(4s), if all weights are below the scale; nearly l1, if all are far above.",
    ),
    Entry(
        "distance_to(params)",
        "Σ (θ_i − θ₀_i)²",
        "weights",
        EXACT,
        "l2, after long training from small weights; early stopping, which it stands for.",
    ),
    Entry(
        "metric_ridge(optimizer, model)",
        "Σ (√v̂_i + ε) θ_i²",
        "weights",
        f"{EXACT}; the metric is read from the optimizer and counts as known",
        "l2: fitted to AdamW's decay it comes out several times too small.",
    ),
    Entry(
        "group_l2(zero_width)",
        "Σ_g ‖θ_g‖, the groups g being rows of tensors",
        "weights",
        ROWS_AT_ZERO,
        "l2, if all rows have about the same norm.",
    ),
    Entry(
        "nuclear_norm(zero_width)",
        "Σ_W Σ_k σ_k(W)",
        "weights",
        SINGULAR_VALUES,
        "l2 of the matrices, if their singular values are about equal; weight decay of two factors "
        "is this penalty of their product.",
    ),
    Entry(
        "schatten(p, zero_width)",
        "Σ_W Σ_k σ_k(W)^p",
        "weights",
        SINGULAR_VALUES,
        "Schatten penalties of nearby p. p = 1 is nuclear_norm, p = 2 is l2 of the matrices.",
    ),
    Entry(
        "spectral_norm(equal_width)",
        "Σ_W σ_1(W)",
        "weights",
        LARGEST,
        "nuclear_norm and l2, if one singular value of each matrix dominates.",
    ),
    Entry(
        "stable_rank(equal_width)",
        "Σ_W ‖W‖_F²/σ_1(W)²",
        "weights",
        LARGEST,
        "a difference of l2 and spectral_norm, one of each per matrix: these span its column.",
    ),
    Entry(
        "orthogonality()",
        "Σ_W ‖WᵀW − I‖_F²",
        "weights",
        EXACT,
        "l2 of the matrices: with the opposite sign, if singular values are well below 1.",
    ),
    Entry(
        "balance(pairs, biases)",
        "Σ_j (‖weights into unit j‖² − ‖weights out of it‖²)²",
        "weights",
        EXACT,
        "l2, of which it is a difference between layers: positive in one, negative in the next. "
        "Gradient flow of networks with ReLU conserves each term.",
    ),
    Entry(
        "spline(knots, even, convex, zero_width)",
        "Σ s(θ_i), s′ linear between knots, one strength per knot",
        "weights",
        f"{EXACT}; rows at zero are left out if even; Fit.curve has bands of s and s′",
        "any penalty of single weights, which it approximates: compare the curve with theirs. Any "
        "target, where there are as many knots as weights.",
    ),
    Entry(
        "spectral_spline(knots, convex, zero_width)",
        "Σ_W Σ_k s(σ_k(W)), s′ linear between knots, one strength per knot",
        "weights",
        SINGULAR_VALUES,
        "any penalty of singular values, such as nuclear_norm and schatten.",
    ),
    Entry(
        "diagonal()",
        "Σ λ_i θ_i², one strength per parameter",
        "weights",
        f"{EXACT}; one endpoint has as many equations as strengths, and leaves no residual",
        "any penalty: it fits every endpoint exactly.",
    ),
    Entry(
        "symmetric()",
        "θᵀΛθ with any symmetric matrix Λ",
        "weights",
        f"{EXACT}; underdetermined unless many endpoints are stacked",
        "any penalty, as diagonal.",
    ),
    Entry(
        "regularizer(name, function)",
        "function(params)",
        "weights",
        "the column counts as fixed, also if the function reads data",
        "depends on the function; where it is a mean over examples, mean_of is streamed.",
    ),
    Entry(
        "mean_of(objective)",
        "mean over the examples of that objective's loss",
        "pass",
        EXAMPLES,
        "the loss itself: label smoothing, focal loss and distillation contain a multiple of it.",
    ),
    Entry(
        "gradient_norm(objective, power, of)",
        "‖∇L‖^power, of the named parameters",
        "second-order",
        EXAMPLES,
        "its other power (the columns are parallel at one point); the loss itself near a minimum; "
        "gradient_variance, which SGD on batches adds beside it.",
    ),
    Entry(
        "gradient_l1(objective, eps)",
        "Σ_j √((∂_j L)² + ε)",
        "second-order",
        EXAMPLES,
        "gradient_norm, if ε is above all squared gradients: then it is ‖∇L‖²/(2√ε).",
    ),
    Entry(
        "gradient_variance(objective)",
        "mean over batches of ‖∇L_batch − ∇L‖²",
        "second-order",
        "the column counts as fixed, because which examples share a batch is",
        "gradient_norm: only the sum of both is ‖∇L_batch‖²; hessian_trace near a fit without "
        "residuals.",
    ),
    Entry(
        "hessian_trace(objective, probes, of, seed)",
        "tr ∇²L, of the named parameters",
        "second-order",
        "exact when small; otherwise bars from groups of probes, whose noise does not attenuate "
        "the strength",
        "gradient_variance and input_jacobian: for squared loss all three contain ‖∇f‖².",
    ),
    Entry(
        "input_jacobian(objective, weighted, inputs, limit)",
        "mean Σ_j (∂f/∂x_j)ᵀ ℓ″ (∂f/∂x_j); mean ‖∂f/∂x‖² if not weighted",
        "second-order",
        EXAMPLES,
        "l2 of the first layer; what input noise adds, which has input_laplacian beside it.",
    ),
    Entry(
        "input_laplacian(objective, inputs, limit)",
        "mean ∂ℓ/∂f · Δ_x f",
        "second-order",
        EXAMPLES,
        "input_jacobian, its partner in what input noise adds: fit both. Zero for networks that "
        "are piecewise linear.",
    ),
    Entry(
        "activation_norm(objective, layers, weighted)",
        "mean Σ_l ‖h_l‖², the outputs h_l of layers",
        "pass",
        EXAMPLES,
        "l2 weighted by activations; explicit_dropout of the same layer.",
    ),
    Entry(
        "explicit_dropout(objective, by_layer, samples, seed)",
        "½ Σ_l mean Σ_j h_lj² [J_lᵀ H J_l]_jj",
        "second-order",
        EXAMPLES,
        "l2 of the weights behind the layer, weighted by squared activations.",
    ),
    Entry(
        "dropout_moments(objective)",
        "mean_i [E_z ℓ(z, y_i) − ℓ(f(x_i), y_i)], z the outputs under dropout, from their moments",
        "second-order",
        EXAMPLES,
        "explicit_dropout at q/(1−q), for small rates; its own strength is 1, since it has the "
        "rates of the model's layers in it.",
    ),
    Entry(
        "layerwise(family)",
        "Σ_l λ_l R(θ_l), one strength per layer",
        "weights",
        "those of the family, from fewer equations per strength",
        "the family, if the strengths agree.",
    ),
)


def catalogue() -> None:
    """Print every family: formula, cost, how its error bars behave, what it is mistaken for.

    The cost is "weights" (no data), "pass" (passes over the data) or "second-order" (passes with
    second derivatives). All families also take `scope` and `name`.
    """
    print("\n".join(_lines(entry) for entry in CATALOGUE), end="")


def _lines(entry: Entry) -> str:
    """An entry as a paragraph, 100 characters wide."""
    lines = [entry.call, f"    R = {entry.formula}"]
    for field, label in LABELS.items():
        text = f"{label}: {getattr(entry, field)}"
        lines += textwrap.wrap(
            text, 100, initial_indent="    ", subsequent_indent="      ", break_long_words=False
        )
    return "\n".join(lines) + "\n"

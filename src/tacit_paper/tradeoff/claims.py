"""What the paper says about the balance of gradients, and what decides it."""

from tacit_paper import Claim, Evidence, Row, Table


def _optimum(rows: Table) -> Row:
    (optimum,) = rows[rows.unit == "estimate"].to_dict("records")
    return optimum


def _measure_balance(rows: Table) -> Evidence:
    optimum = _optimum(rows)
    loss, penalty = optimum["loss_gradient"], optimum["penalty_gradient"]
    text = f"∇L = {_minus(loss)}, ∇R = {_minus(penalty)} at the ridge optimum"
    return Evidence(text, abs(loss + penalty) <= 1e-12 < 1e-3 < abs(loss))


def _measure_strength(rows: Table) -> Evidence:
    optimum = _optimum(rows)
    error = abs(optimum["estimated"] / optimum["strength"] - 1)
    text = f"λ̂ = {optimum['estimated']:.4f} for λ = {optimum['strength']:g} (error {error:.0e})"
    return Evidence(text, error <= 1e-10)


def _minus(value: float) -> str:
    return f"{value:.4f}".replace("-", "−")


CLAIMS = (
    Claim(
        "Where the loss is not minimal, a regularizer's gradient counteracts the nonzero loss "
        "gradient.",
        "Figure 1",
        "holds",
        _measure_balance,
    ),
    Claim(
        "In ridge regression the estimating equations hold exactly when λ̂ = λ.",
        "Sec. 2, linear models",
        "holds",
        _measure_strength,
    ),
)

"""What the paper says about the path of gradient descent, and what decides it."""

from tacit_paper import Claim, Evidence, Table
from tacit_paper.long_horizon.checks import final_ratios


def _measure_closeness(rows: Table) -> Evidence:
    smooth = rows[rows.unit != "ReLU"]
    closer = [1 / ratio for ratio in final_ratios(smooth).values()]
    steps = smooth.groupby("unit").step.max()
    text = (
        f"{min(closer):.0f} to {max(closer):.0f} times closer after {steps.min()} to "
        f"{steps.max()} steps"
    )
    return Evidence(text, min(closer) >= 10)


def _measure_smoothness(rows: Table) -> Evidence | None:
    ratios = final_ratios(rows)
    if not {"tanh", "ReLU"} <= ratios.keys():
        return None
    text = (
        "distance to the modified flow over that to the plain one: "
        f"tanh {ratios['tanh']:.2g}, ReLU {ratios['ReLU']:.2g}"
    )
    return Evidence(text, ratios["tanh"] <= 0.1 and ratios["ReLU"] >= 0.3)


CLAIMS = (
    Claim(
        "Gradient descent is closer to the continuous path of a modified loss, with (η/4)‖∇L‖² "
        "added.",
        "Sec. 3, Gradient step size",
        "holds",
        _measure_closeness,
    ),
    Claim(
        "The gradient penalty needs a twice differentiable loss, hence tanh rather than ReLU.",
        "App. H",
        "holds",
        _measure_smoothness,
    ),
)

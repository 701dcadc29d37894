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


def _measure_first_step(rows: Table) -> Evidence | None:
    """The deviation from the plain flow that (η/4)‖∇L‖², not fitted, explains after one step."""
    first = rows[(rows.unit == "tanh") & (rows.step == 1)]
    if not len(first):
        return None
    explained = 1 - float(first.modified.iloc[0] / first.plain.iloc[0]) ** 2
    text = f"first step from initial weights: the penalty explains {100 * explained:.2f} %"
    return Evidence(text, explained >= 0.99)


CLAIMS = (
    Claim(
        "Gradient descent is closer to the continuous path of a modified loss, with (η/4)‖∇L‖² "
        "added.",
        "Sec. 3, Gradient step size",
        "holds",
        _measure_closeness,
    ),
    Claim(
        "Regularization can be estimated in the dynamics of learning, including early on in "
        "training.",
        "Sec. 3, Gradient step size",
        "holds",
        _measure_first_step,
    ),
    Claim(
        "The gradient penalty needs a twice differentiable loss, hence tanh rather than ReLU.",
        "App. H",
        "holds",
        _measure_smoothness,
    ),
)

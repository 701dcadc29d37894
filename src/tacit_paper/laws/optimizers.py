"""Laws of steps of finite size, against the gradient flow over the same time."""

from tacit.equations import Trajectory
from tacit.regularizers import gradient_norm
from tacit_paper.laws.law import Recovered, law
from tacit_paper.laws.small_models import against_flow, descend, regression


@law(
    "gradient descent",
    {"gradient_norm": "η/4 · ‖∇L‖²"},
    source="Barrett & Dherin 2021",
    parameter="η",
    values=(4e-3, 2e-3, 1e-3),
    order=1,
)
def gradient_descent(step: float, seed: int) -> Recovered:
    """Steps of size η follow the flow of L + η/4 · ‖∇L‖², up to order η²."""
    objective = regression(seed)
    positions = descend(objective.gradient, objective.point(), step, 8)
    path = Trajectory.from_positions(positions, step)
    return Recovered(
        against_flow(objective, path, gradient_norm(objective)), {"gradient_norm": step / 4}
    )

"""Laws of training steps, each in a few lines beyond model, data and training."""

import pytest
import torch
from support.models import params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import Objective, Trajectory
from tacit.equations import accumulated_target, on_batches
from tacit.regularizers import (
    explicit_dropout,
    hypentropy,
)


class Run:
    """A small tanh network that is trained on its whole data, step by step."""

    def __init__(self, seed):
        self.model, self.data = tanh_mlp(seed, (3, 4, 1)), random_data(seed, inputs=3)
        self.objective = Objective(self.model, F.mse_loss, self.data)

    def train(self, optimizer, steps, recorder=None, scheduler=None):
        X, y = self.data
        for _ in range(steps):
            optimizer.zero_grad()
            F.mse_loss(self.model(X), y).backward()
            optimizer.step()
            if recorder:
                recorder.step()
            if scheduler:
                scheduler.step()


@pytest.mark.slow
def test_sgd_with_dropout_against_sgd_without_on_the_same_batches():
    """Dropout q adds q/(1−q) of its explicit penalty: by coupled steps, and by differences."""
    torch.manual_seed(7)
    q, (X, y) = 0.05, random_data(7, count=256, inputs=6)
    layers = nn.Linear(6, 16), nn.Tanh(), nn.Dropout(q), nn.Linear(16, 1)
    model = nn.Sequential(*layers).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    batches, recorder = [(X[r], y[r]) for r in torch.randint(256, (120, 192))], None
    for number, (inputs, target) in enumerate([*batches[:60], *batches]):
        recorder = tacit.record(model, sgd) if number == 60 else recorder
        sgd.zero_grad()
        F.mse_loss(model(inputs), target).backward()
        sgd.step()
        recorder and recorder.step()

    objective, path = Objective(model, F.mse_loss, (X, y)), recorder.trajectory()
    penalty = explicit_dropout(objective)
    plain = on_batches([Objective(model, F.mse_loss, batch) for batch in batches])
    coupled = tacit.fit(tacit.trajectory_equations(objective, path, penalty, reference=plain))
    dropped = Objective(model, F.mse_loss, (X, y), training=True, draws=128)
    parts = [
        tacit.difference_equations(dropped, objective, penalty, params=p) for p in path.points[::20]
    ]
    strength = tacit.fit(tacit.stack(parts)).strengths["explicit_dropout"]

    assert coupled.strengths["explicit_dropout"] == pytest.approx(strength, rel=0.05)
    low, high = coupled.intervals()["steps"]["explicit_dropout"]
    assert low < strength < high
    assert strength == pytest.approx(q / (1 - q), rel=0.1)  # to first order in q
    assert not coupled.problems


def test_a_diagonal_linear_network_has_the_hypentropy_as_its_potential():
    """Flow on β = u² − v² from u = v = α adds up to ¼·α²Σq(β/α²), q′(z) = arcsinh(z/2)."""
    (X, y), alpha, rate = random_data(8, count=12, inputs=5), 0.3, 5e-4
    u = v = torch.full((5, 1), alpha, dtype=torch.float64)
    positions = []
    for _ in range(600):
        positions.append({"weight": (u * u - v * v).T})
        slope = 2 * X.T @ (X @ (u * u - v * v) - y) / len(X)
        u, v = u - rate * 2 * u * slope, v + rate * 2 * v * slope

    model = nn.Linear(5, 1, bias=False).double()
    target = accumulated_target(
        Objective(model, F.mse_loss, (X, y)), Trajectory.from_positions(positions, rate)
    )
    fit = tacit.estimate(target, hypentropy(alpha**2))

    assert fit.strengths["hypentropy"] == pytest.approx(0.25, rel=2e-3)
    assert fit.explained > 0.9999
    assert tacit.estimate(target, tacit.l2()).problems


def noisy_steps(seed, noise):
    """Descent on L + 0.05‖θ‖² whose steps carry noise of these sizes."""
    run, generator = Run(9), torch.Generator().manual_seed(seed)
    positions, rate = [params_of(run.model)], 1e-2
    for size in noise:
        point, gradient = positions[-1], run.objective.gradient(positions[-1])
        force = {
            n: gradient[n] + 0.1 * p + size * torch.randn(p.shape, generator=generator).double()
            for n, p in point.items()
        }
        positions.append({n: p - rate * force[n] for n, p in point.items()})
    return run.objective, Trajectory.from_positions(positions, rate)


@pytest.mark.slow
def test_weights_of_steps_narrow_the_interval():
    """With noise of σ_t over a decade, W_t = 1/σ_t² has intervals of half the width."""
    covered, widths = {"weighted": 0, "unweighted": 0}, {"weighted": 0.0, "unweighted": 0.0}
    for seed in range(1000, 1008):
        noise = 0.03 * 10 ** torch.rand(50, generator=torch.Generator().manual_seed(seed)).double()
        objective, path = noisy_steps(seed, noise)
        for name, weights in (("weighted", noise**-2), ("unweighted", None)):
            fit = tacit.fit(
                tacit.trajectory_equations(objective, path, tacit.l2(), step_weights=weights)
            )
            low, high = fit.intervals()["steps"]["l2"]
            covered[name] += low < 0.05 < high
            widths[name] += high - low
    assert widths["weighted"] <= 0.55 * widths["unweighted"]
    assert min(covered.values()) >= 6

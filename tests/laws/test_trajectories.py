"""Laws of training steps, each in a few lines beyond model, data and training."""

import itertools

import pytest
import torch
from support.models import params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import Objective, Trajectory
from tacit.equations import accumulated_target, adam_flow, on_batches
from tacit.regularizers import (
    explicit_dropout,
    gradient_l1,
    gradient_norm,
    gradient_variance,
    hypentropy,
    metric_ridge,
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


@pytest.mark.parametrize("seed", [5, 6])
def test_adam_follows_its_own_flow_with_a_penalty_of_the_gradients_entries(seed):
    """Adam adds (η/2)(A − B)·Σ_j √(g_j² + ε), A and B = (1+β)/(1−β) of β₁ and β₂, to its flow.

    (Cattaneo, Klusowski & Shigida 2024; where gradients are far above ε.)
    """
    run, rate, (first, second) = Run(seed), 1e-7, (0.9, 0.99)
    adam = torch.optim.Adam(run.model.parameters(), lr=rate, betas=(first, second), eps=1e-8)
    run.train(adam, 1500)

    recorder = tacit.record(run.model, adam)
    run.train(adam, 5, recorder)
    penalty, metric = gradient_l1(run.objective, eps=1e-16), adam_flow(1e-16)
    fit = tacit.fit(
        tacit.trajectory_equations(
            run.objective, recorder.trajectory(), penalty, reference=tacit.rk4(2), metric=metric
        )
    )

    law = rate / 2 * ((1 + first) / (1 - first) - (1 + second) / (1 - second))
    assert fit.strengths["gradient_l1"] == pytest.approx(law, rel=0.015)
    assert not fit.problems


def test_steps_of_adamw_show_its_decay_in_the_metric():
    """Decay w of AdamW is (w/2)·Σ_j (√v̂_j + ε) θ_j²: exact from the first steps on."""
    run = Run(1)
    adamw = torch.optim.AdamW(run.model.parameters(), lr=1e-3, weight_decay=0.3)

    recorder = tacit.record(run.model, adamw)
    run.train(adamw, 20, recorder)
    ridge = metric_ridge(adamw, run.model)
    fit = tacit.fit(tacit.trajectory_equations(run.objective, recorder.trajectory(), ridge))

    assert fit.strengths["metric_ridge"] == pytest.approx(0.15, rel=1e-8)
    assert not fit.problems


def test_groups_with_their_own_rates_penalise_their_own_gradients():
    """Steps of size η_l in layer l add (η_l/4)·‖∇_l L‖² for every layer."""
    run, rates = Run(2), {"0": 1e-3, "2": 4e-3}
    groups = [{"params": run.model[int(n)].parameters(), "lr": r} for n, r in rates.items()]
    sgd = torch.optim.SGD(groups)

    recorder = tacit.record(run.model, sgd)
    run.train(sgd, 10, recorder)
    norms = [gradient_norm(run.objective, of=layer, name=layer) for layer in rates]
    path = recorder.trajectory()
    fit = tacit.fit(tacit.trajectory_equations(run.objective, path, norms, reference=tacit.rk4(4)))

    for layer, rate in rates.items():
        assert fit.strengths[layer] == pytest.approx(rate / 4, rel=0.02)
    assert not fit.problems


def test_a_schedule_of_step_sizes_has_one_strength_per_unit_of_time():
    """A step of size η_t adds (η_t/4)·‖∇L‖²: ¼ per unit of time under any schedule."""
    run = Run(3)
    sgd = torch.optim.SGD(run.model.parameters(), lr=2e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 12)

    recorder = tacit.record(run.model, sgd)
    run.train(sgd, 10, recorder, cosine)
    norm, path = gradient_norm(run.objective), recorder.trajectory()
    fit = tacit.fit(
        tacit.trajectory_equations(
            run.objective, path, norm, reference=tacit.rk4(4), scaled_by_time=True
        )
    )

    assert fit.strengths["gradient_norm"] == pytest.approx(0.25, rel=0.01)
    assert not fit.problems


def epoch(objectives, start, order, rate):
    """One epoch of SGD as a trajectory of one step."""
    point = start
    for number in order:
        gradient = objectives[number].gradient(point)
        point = {n: p - rate * gradient[n] for n, p in point.items()}
    return Trajectory.from_positions([start, point], rate * len(order))


def test_shuffled_sgd_penalises_the_norm_and_the_variance_of_gradients():
    """Epochs of shuffled batches add (η/4)·‖∇L‖² and (η/4)·(variance of ∇L over batches).

    (Smith, Dherin, Barrett & De 2021; a mean over the orders of the batches.)
    """
    run, rate = Run(4), 2e-4
    (X, y), batches = run.data, torch.arange(64).split(16)
    parts = [Objective(run.model, F.mse_loss, (X[rows], y[rows])) for rows in batches]
    objective, start = (
        Objective(run.model, F.mse_loss, run.data, batch_size=16),
        run.objective.params,
    )

    orders = itertools.permutations(range(4))
    path = Trajectory.mean([epoch(parts, start, o, rate) for o in orders], sampled=False)
    columns = [gradient_norm(objective), gradient_variance(objective)]
    fit = tacit.fit(tacit.trajectory_equations(objective, path, columns, reference=tacit.rk4()))

    assert fit.strengths["gradient_norm"] == pytest.approx(rate / 4, rel=0.01)
    assert fit.strengths["gradient_variance"] == pytest.approx(rate / 4, rel=0.01)


def test_federated_averaging_rewards_the_variance_between_clients():
    """K local steps on clients, averaged, add T/(4K)·‖∇L‖² − T(1 − 1/K)/4·(variance), T = Kη."""
    run, rate, local = Run(5), 2e-4, 5
    (X, y), shards = run.data, torch.arange(64).split(16)
    clients = [Objective(run.model, F.mse_loss, (X[rows], y[rows])) for rows in shards]
    objective, start = (
        Objective(run.model, F.mse_loss, run.data, batch_size=16),
        run.objective.params,
    )

    paths = [epoch([client] * local, start, range(local), rate) for client in clients]
    mean = Trajectory.mean(paths, sampled=False)
    columns = [gradient_norm(objective), gradient_variance(objective)]
    fit = tacit.fit(tacit.trajectory_equations(objective, mean, columns, reference=tacit.rk4()))

    time = local * rate
    assert fit.strengths["gradient_norm"] == pytest.approx(time / 4 / local, rel=0.02)
    assert fit.strengths["gradient_variance"] == pytest.approx(
        -time * (1 - 1 / local) / 4, rel=0.01
    )


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

"""Metrics, weights of steps, scaled columns, coupled references, means over runs, integrals."""

import itertools
from dataclasses import replace

import pytest
import torch
from support.descent import descend
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective, Trajectory, reference
from tacit.equations import accumulated_target, adam_flow, euler, on_batches
from tacit.regularizers import gradient_norm

MODEL, DATA, STEP = tanh_mlp(2), random_data(2), 3e-2
OBJECTIVE, LOSS = Objective(MODEL, F.mse_loss, DATA), loss_of(MODEL, F.mse_loss, DATA)
START = params_of(MODEL)
PATH = Trajectory.from_positions(descend(MODEL, DATA, STEP, 10, ridge=0.05), STEP)
CANDIDATES = [tacit.l2(), tacit.smooth_l1(0.1)]
for moved in PATH.displacements:  # so that no strengths are exact
    moved["0.weight"].add_(1e-3 * torch.randn(8, 5, generator=torch.Generator().manual_seed(9)))


def dense_steps(path=PATH):
    """[design, target] of every step, for an explicit reference."""
    for point, moved, time in zip(path.points, path.displacements, path.times, strict=True):
        target = reference.euler_target(LOSS, point, moved, time)
        yield reference.design(CANDIDATES, point), target


def dense_fit(designs, targets):
    return reference.fit(torch.cat(designs), torch.cat(targets)).tolist()


def strengths(**options):
    path = options.pop("path", PATH)
    candidates = options.pop("candidates", CANDIDATES)
    fit = tacit.fit(tacit.trajectory_equations(OBJECTIVE, path, candidates, **options))
    return list(fit.strengths.values())


@pytest.mark.parametrize("by_parameter", [False, True], ids=["steps", "parameters"])
def test_weights_of_steps_are_those_of_weighted_least_squares(by_parameter):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(10, generator=generator, dtype=torch.float64) * 9 + 1
    given = weights
    rows = [w.expand(reference.flat(START).shape) for w in weights]
    if by_parameter:
        given = [
            {n: torch.rand(p.shape, generator=generator).double() for n, p in START.items()}
            for _ in weights
        ]
        rows = [reference.flat(weight) for weight in given]
    designs, targets = zip(*dense_steps(), strict=True)
    expected = dense_fit(
        [d * w.sqrt()[:, None] for d, w in zip(designs, rows, strict=True)],
        [t * w.sqrt() for t, w in zip(targets, rows, strict=True)],
    )
    assert strengths(step_weights=given) == pytest.approx(expected, rel=1e-9)
    target = tacit.trajectory_target(OBJECTIVE, PATH, step_weights=given)
    from_target = tacit.fit(target.equations(CANDIDATES)).strengths.values()
    assert list(from_target) == pytest.approx(expected, rel=1e-9)
    assert strengths() != pytest.approx(expected, rel=1e-9)


def test_a_constant_metric_is_that_of_preconditioned_descent():
    """Steps θ − η M⁻¹∇(L + 0.05‖θ‖²): in the metric M the ridge is exact, without it it is not."""
    generator = torch.Generator().manual_seed(1)
    metric = {n: torch.rand(p.shape, generator=generator).double() + 0.5 for n, p in START.items()}
    metric["2.bias"] = 2.0
    positions = [START]
    for _ in range(4):
        point, gradient = positions[-1], OBJECTIVE.gradient(positions[-1])
        positions.append(
            {n: p - STEP / metric[n] * (gradient[n] + 0.1 * p) for n, p in point.items()}
        )
    path = Trajectory.from_positions(positions, STEP)
    found = strengths(path=path, metric=metric, candidates=[tacit.l2()])
    assert found == pytest.approx([0.05], rel=1e-9)
    assert strengths(path=path, candidates=[tacit.l2()]) != pytest.approx([0.05], rel=0.1)
    exact = strengths(path=path, metric=metric, known={tacit.l2(): 0.02}, candidates=[tacit.l2()])
    assert exact == pytest.approx([0.03], rel=1e-8)


def test_a_metric_of_the_gradient_is_followed_along_the_flow():
    """One step of the flow dθ/dt = −g/√(g²+ε), by dense Runge–Kutta."""

    def velocity(theta):
        gradient = reference.gradient(LOSS, reference.unflatten(theta, START))
        return -gradient / (gradient.square() + 1e-3).sqrt()

    theta, h = reference.flat(START), 0.1
    k1 = velocity(theta)
    k2 = velocity(theta + h / 2 * k1)
    k3 = velocity(theta + h / 2 * k2)
    k4 = velocity(theta + h * k3)
    moved = reference.unflatten(h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), START)
    path = Trajectory([START], [moved], [h])
    options = {"reference": tacit.rk4(1), "metric": adam_flow(1e-3)}
    fit = tacit.fit(tacit.trajectory_equations(OBJECTIVE, path, tacit.l2(), **options))
    assert [problem.kind for problem in fit.problems] == ["no signal"]
    target = tacit.trajectory_target(OBJECTIVE, Trajectory([START], [START], [h]), **options)
    scale = -reference.gradient(LOSS, START) / k1
    expected = scale * (reference.flat(moved) - theta) / h
    torch.testing.assert_close(reference.flat(target.points[0].vectors[0]), expected)


def schedule(steps=6):
    """Descent whose step sizes fall, recorded by the recorder."""
    model = tanh_mlp(3)
    objective = Objective(model, F.mse_loss, DATA)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.6)
    recorder = tacit.record(model, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(DATA[0]), DATA[1]).backward()
        optimizer.step()
        recorder.step()
        rates.step()
    return objective, recorder.trajectory()


@pytest.mark.parametrize("steps", [5, 12])
def test_under_a_schedule_columns_scaled_by_time_have_one_strength(steps):
    objective, path = schedule(steps)
    norm, flow = gradient_norm(objective), tacit.rk4(4)
    target = tacit.trajectory_target(objective, path, reference=flow)
    unscaled, scaled = (
        tacit.fit(target.equations(norm, scaled_by_time=choice)) for choice in (False, True)
    )
    assert scaled.strengths["gradient_norm"] == pytest.approx(0.25, rel=5e-3)
    assert not scaled.problems
    (problem,) = (p for p in unscaled.problems if p.kind == "unexplained")
    assert "scaled_by_time" in str(problem)
    written = tacit.trajectory_equations(
        objective, path, [norm, tacit.l2()], reference=flow, scaled_by_time=[norm]
    )
    both = tacit.fit(written).strengths
    assert both["gradient_norm"] == pytest.approx(0.25, rel=5e-3)
    assert abs(both["l2"]) < 1e-6
    with pytest.raises(InputError, match="stack"):
        tacit.stack([target.equations(norm), target.equations(norm, scaled_by_time=True)])


def test_scaled_by_time_needs_steps_and_candidates():
    target = tacit.endpoint_target(OBJECTIVE)
    with pytest.raises(InputError, match="endpoint equations have no steps"):
        target.equations(tacit.l2(), scaled_by_time=True)
    with pytest.raises(InputError, match="l2, which is not among the candidates"):
        tacit.trajectory_equations(OBJECTIVE, PATH, tacit.l1(), scaled_by_time=[tacit.l2()])


def test_coupled_steps_cancel_the_noise_of_their_batches():
    """SGD on L + 0.05‖θ‖² against SGD on L, on the same batches: exact from every single step."""
    X, y = DATA
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(len(X), (4,), generator=generator) for _ in range(5)]
    plain = [Objective(MODEL, F.mse_loss, (X[rows], y[rows])) for rows in batches]
    positions = [START]
    for objective in plain:
        gradient = objective.gradient(positions[-1])
        positions.append({n: p - STEP * (gradient[n] + 0.1 * p) for n, p in positions[-1].items()})
    path = Trajectory.from_positions(positions, STEP)
    coupled = on_batches(plain)
    assert strengths(path=path, reference=coupled, candidates=[tacit.l2()]) == pytest.approx(
        [0.05], rel=1e-9
    )
    known = strengths(
        path=path, reference=coupled, candidates=[tacit.l2()], known={tacit.l2(): 0.01}
    )
    assert known == pytest.approx([0.04], rel=1e-9)
    alone = strengths(path=path, candidates=[tacit.l2()])
    assert alone != pytest.approx([0.05], rel=0.5)
    seen = []

    def by_number(objective, params, time, step):
        seen.append(step)
        return euler(plain[step], params, time)

    assert strengths(path=path, reference=by_number, candidates=[tacit.l2()]) == pytest.approx(
        [0.05], rel=1e-9
    )
    assert seen == [0, 1, 2, 3, 4]
    with pytest.raises(InputError, match="2 objectives for 5 steps"):
        strengths(path=path, reference=on_batches(plain[:2]))


def run_of_batches(start, order, plain, step):
    """Positions of one epoch of SGD."""
    point = start
    for number in order:
        gradient = plain[number].gradient(point)
        point = {n: p - step * gradient[n] for n, p in point.items()}
    return Trajectory.from_positions([start, point], step * len(order))


def test_the_mean_over_runs_has_their_mean_displacement_and_their_noise():
    X, y = DATA
    plain = [
        Objective(MODEL, F.mse_loss, (X[rows], y[rows])) for rows in torch.arange(64).split(16)
    ]
    runs = [run_of_batches(START, order, plain, 1e-2) for order in itertools.permutations(range(4))]
    sample, population = Trajectory.mean(runs), Trajectory.mean(runs, sampled=False)
    for name, moved in population.displacements[0].items():
        mean = torch.stack([run.displacements[0][name] for run in runs]).mean(0)
        torch.testing.assert_close(moved, mean)
        groups = torch.stack([group[name] for group in sample.groups[0]])
        assert len(groups) == 8
        torch.testing.assert_close(groups.mean(0), mean)
    fits = [
        tacit.fit(tacit.trajectory_equations(OBJECTIVE, path, tacit.l2(), reference=tacit.rk4()))
        for path in (sample, population)
    ]
    assert fits[0].strengths["l2"] == pytest.approx(fits[1].strengths["l2"], rel=1e-9)
    assert "draws" in fits[0].error_bars
    assert "draws" not in fits[1].error_bars
    with pytest.raises(InputError, match="of the same times"):
        Trajectory.mean([runs[0], run_of_batches(START, [0], plain, 1e-2)])
    with pytest.raises(InputError, match="0 runs"):
        Trajectory.mean([])


def test_the_integral_of_gradient_flow_is_the_difference_of_half_the_squared_norm():
    """−∫∇L = θ_end − θ_start, which is ½∇‖θ‖² at the end minus that at the start."""
    path = Trajectory.from_positions(descend(tanh_mlp(2), DATA, 1e-3, 50), 1e-3)
    target = accumulated_target(OBJECTIVE, path)
    fit = tacit.fit(target.equations(tacit.l2()))
    assert fit.strengths["l2"] == pytest.approx(0.5, rel=1e-2)
    end = {n: p + path.displacements[-1][n] for n, p in path.points[-1].items()}
    points = [reference.gradient(LOSS, p) for p in (*path.points, end)]
    integral = -sum(1e-3 * (a + b) / 2 for a, b in itertools.pairwise(points))
    torch.testing.assert_close(reference.flat(target.points[0].vectors[0]), integral)
    column = 2 * (reference.flat(end) - reference.flat(path.points[0]))
    expected = float(column @ integral / (column @ column))
    assert fit.strengths["l2"] == pytest.approx(expected, rel=1e-10)
    assert "−∫∇L over the path" in fit.summary()
    gap = Trajectory(path.points[::2], path.displacements[::2], path.times[::2])
    with pytest.raises(InputError, match="step 1 does not begin where step 0 ended"):
        accumulated_target(OBJECTIVE, gap)
    with pytest.raises(InputError, match="accumulated equations"):
        tacit.score_examples(fit)


def test_a_common_weight_of_all_steps_changes_no_problem():
    """Rounding and burn-in are compared with the target as it is weighted."""
    model, (X, y) = tanh_mlp(2).float(), (part.float() for part in DATA)
    objective = Objective(model, F.mse_loss, (X, y))
    for options in ({"lr": 1e-6}, {"lr": 1e-2, "momentum": 0.9}):
        optimizer = torch.optim.SGD(model.parameters(), weight_decay=1e-6, **options)
        recorder = tacit.record(model, optimizer)
        for _ in range(6):
            optimizer.zero_grad()
            F.mse_loss(model(X), y).backward()
            optimizer.step()
            recorder.step()
        kinds = [
            {problem.kind for problem in tacit.fit(equations).problems}
            for weight in (1.0, 1e12, 1e-12)
            for equations in [
                tacit.trajectory_equations(
                    objective, recorder.trajectory(), tacit.l2(),
                    reference=tacit.rk4(1), step_weights=[weight] * 6,
                )
            ]
        ]  # fmt: skip
        assert "unsettled" in kinds[0] if "momentum" in options else "no signal" in kinds[0]
        assert kinds[1] == kinds[2] == kinds[0]


def one_step(optimizer, model):
    """One recorded step from START, with the state that the optimizer has."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(START[name])
    recorder = tacit.record(model, optimizer)
    optimizer.zero_grad()
    F.mse_loss(model(DATA[0]), DATA[1]).backward()
    optimizer.step()
    recorder.step()
    return recorder.trajectory()


def test_the_mean_over_runs_of_adamw_is_in_the_harmonic_mean_of_their_metrics():
    """−time·mean(M⁻¹)g is the mean of steps −time·M⁻¹g from one point."""
    runs = []
    for seed in range(3):
        model, generator = tanh_mlp(2), torch.Generator().manual_seed(seed)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.3)
        one_step(adamw, model)
        for p in model.parameters():
            adamw.state[p]["exp_avg_sq"].mul_(10 * torch.rand(p.shape, generator=generator))
        runs.append(one_step(adamw, model))
    ridge = tacit.regularizers.metric_ridge(adamw, model)
    mean = Trajectory.mean(runs, sampled=False)
    assert strengths(path=mean, candidates=ridge) == pytest.approx([0.15], rel=1e-6)


def test_runs_with_and_without_a_metric_or_momentum_have_a_mean():
    model, runs = tanh_mlp(2), []
    for rate, momentum in ((1e-2, 0.9), (1e-2, 0), (4e-2, 0)):
        groups = [
            {"params": model[0].parameters(), "lr": rate * (1 - momentum), "momentum": momentum},
            {"params": model[2].parameters(), "lr": 4e-2},
        ]
        sgd = torch.optim.SGD(groups, weight_decay=0.1)
        one_step(sgd, model)
        runs.append(one_step(sgd, model))
    assert not runs[2].metrics
    for order in (runs, runs[::-1]):
        mean = Trajectory.mean(order, sampled=False)
        assert strengths(path=mean, candidates=tacit.l2()) == pytest.approx([0.05], rel=1e-6)
    adam = one_step(torch.optim.Adam(model.parameters(), lr=4e-2), model)
    other = Trajectory.from_positions([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], 4e-2)
    for wrong, words in (
        ([runs[0], adam], "whether Adam moved them"),
        ([runs[0], other], "run 1 belongs to another model"),
        (runs[0], "a list of runs"),
    ):
        with pytest.raises(InputError, match=words):
            Trajectory.mean(wrong)


def test_on_batches_has_one_batch_for_every_update():
    with pytest.raises(InputError, match="12 objectives for 10 steps"):
        strengths(reference=on_batches([OBJECTIVE] * 12))
    with pytest.raises(InputError, match="of up to 3 update"):
        strengths(reference=on_batches([OBJECTIVE] * 10), path=replace(PATH, updates=3))


def test_an_integral_takes_no_known_penalties_and_names_a_young_momentum():
    model = tanh_mlp(2)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    recorder = tacit.record(model, sgd)
    for _ in range(30):
        sgd.zero_grad()
        F.mse_loss(model(DATA[0]), DATA[1]).backward()
        sgd.step()
        recorder.step()
    target = accumulated_target(OBJECTIVE, recorder.trajectory())
    fit = tacit.fit(target.equations(tacit.l2()))
    assert fit.strengths["l2"] > 0.6  # for 1/2, because the buffers were empty
    assert "unsettled" in {problem.kind for problem in fit.problems}
    with pytest.raises(InputError, match="at every point of the path"):
        target.equations(tacit.l2(), known={tacit.l1(): 0.1})


def test_wrong_metrics_and_weights_are_refused():
    for options, words in (
        ({"metric": dict.fromkeys(START, 0.0)}, "metric is zero for 0.weight"),
        ({"metric": dict.fromkeys(START, "x")}, "is 'x'"),
        ({"metric": lambda gradient: None}, "metric is None"),
        ({"metric": lambda gradient: {}}, "no value for 0.weight"),
        ({"metric": lambda gradient: {n: -g.abs() for n, g in gradient.items()}}, "smallest"),
        ({"metric": lambda: {}}, "cannot be called with a gradient"),
        ({"metric": {"0.weight": 1.0}}, "no value for 0.bias"),
        ({"metric": 2.0}, "metric is 2.0"),
        ({"metric": dict.fromkeys(START, -1.0)}, "number above zero"),
        ({"step_weights": [1.0]}, "1 step_weights for 10 steps"),
        ({"step_weights": torch.tensor(1.0)}, "0 step_weights for 10 steps"),
        ({"step_weights": [None] * 10}, r"step_weights\[0\] has no finite weight"),
        ({"step_weights": [{**dict.fromkeys(START, 1.0), "w": 1.0}] * 10}, "unknown names w"),
        ({"step_weights": [-1.0] * 10}, r"step_weights\[0\] has no finite weight"),
        ({"step_weights": [{"0.weight": 1.0}] * 10}, "for '0.bias'"),
        ({"reference": lambda objective, params, time: params}, "four arguments"),
    ):
        with pytest.raises(InputError, match=words):
            strengths(**options)
    with pytest.raises(InputError, match="eps is -1"):
        adam_flow(-1)

"""Scores of examples, at a fixed design: subsets, weights, clusters, populations, bad calls."""

import math
import time
from dataclasses import replace

import pytest
import torch
from support.problems import random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit import InputError, Objective, bounds, fit
from tacit.uncertainty.scores import score_examples


def regularizers():
    return [tacit.l2(), tacit.smooth_l1(0.1), tacit.regularizers.group_l2(scope="*.weight")]


def endpoint(objective, families, **options):
    return fit(tacit.endpoint_equations(objective, families, **options))


def scored(objective, families, *, population=None, clusters=None, **options):
    found = endpoint(objective, families, **options)
    return found, score_examples(
        found, objective, families, population=population, clusters=clusters, **options
    )


def strengths(found):
    return torch.tensor(list(found.strengths.values()), dtype=torch.float64)


def gradients(model, loss, data):
    """One whole gradient an example, by a loop."""
    rows = []
    for i in range(len(data[-1])):
        *inputs, target = (part[i : i + 1] for part in data)
        slopes = torch.autograd.grad(loss(model(*inputs), target), list(model.parameters()))
        rows.append(torch.cat([s.flatten() for s in slopes]))
    return torch.stack(rows)


@pytest.mark.parametrize("batch_size", [1024, 7])
def test_strengths_of_a_subset_are_a_mean_of_scores(batch_size):
    model, (X, y) = tanh_mlp(0), random_data(0, count=80)
    objective = Objective(model, F.mse_loss, (X, y), batch_size=batch_size)
    known = {tacit.regularizers.distance_to({n: p * 0.5 for n, p in objective.params.items()}): 0.3}
    found, scores = scored(objective, regularizers(), known=known)
    assert scores.values.shape == (80, 3)
    assert scores.values.mean(0).abs().max() < 1e-12 * scores.values.abs().max()
    for seed in range(3):
        chosen = torch.randperm(80, generator=torch.Generator().manual_seed(seed))[: 20 + seed]
        part = Objective(model, F.mse_loss, (X[chosen], y[chosen]))
        expected = strengths(endpoint(part, regularizers(), known=known))
        moved = strengths(found) + scores.values[chosen].mean(0)
        torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-11)


def test_leaving_one_out_is_exact_with_weights_and_without():
    model, (X, y) = tanh_mlp(1), random_data(1, count=30)
    weights = torch.rand(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for given in (None, weights):
        objective = Objective(model, F.mse_loss, (X, y), weights=given)
        _, scores = scored(objective, regularizers())
        without = scores.leave_one_out()
        for i in (0, 11, 29):
            kept = torch.arange(30) != i
            part = Objective(
                model,
                F.mse_loss,
                (X[kept], y[kept]),
                weights=None if given is None else given[kept],
            )
            expected = strengths(endpoint(part, regularizers()))
            torch.testing.assert_close(without[i], expected, rtol=1e-9, atol=1e-11)
    index, change = scores.most_influential("l2", 3)[0]
    apart = without[:, 0] - scores.strengths["l2"]
    assert index == int(apart.abs().argmax())
    assert change == pytest.approx(float(apart[index]), rel=1e-9)


def test_covariance_is_that_of_dense_gradients():
    model, data = tanh_mlp(2), random_data(2, count=50)
    objective = Objective(model, F.mse_loss, data)
    families = regularizers()
    _, scores = scored(objective, families)
    columns = [torch.cat([t.flatten() for t in c.values()])
               for r in families for c in r.gradient(objective.params).values()]  # fmt: skip
    design = torch.stack(columns, dim=1)
    dense = gradients(model, F.mse_loss, data)
    inverse = torch.linalg.pinv(design)
    covariance = inverse @ dense.T.cov() @ inverse.T / 50
    bars = scores.error_bars()
    torch.testing.assert_close(bars.covariance, covariance, rtol=1e-8, atol=0)
    assert (bars.kind, bars.freedom) == ("sampling", 49)
    assert bars.basis == "50 examples of an unlimited population"
    cov = dense.T.cov()
    rho = bounds.correlation(design, cov / (cov.trace() / len(cov)))
    # The trace is estimated, from a few directions; the rest is exact.
    exact = rho * float(cov.trace()) / scores.trace
    assert scores.correlation == pytest.approx(max(1, exact), rel=1e-8)
    assert scores.effective_parameters == pytest.approx(len(cov) / scores.correlation)
    assert scores.noise == pytest.approx(scores.trace / 50 / dense.mean(0).square().sum())
    assert 0.5 < scores.trace / float(cov.trace()) < 2


@pytest.mark.parametrize("small", [2**16, 0])
def test_the_trace_is_right_on_average_over_signs(monkeypatch, small):
    """Along a few directions in small models; in large ones from a signed sum of gradients."""
    from tacit.uncertainty import scores as module

    monkeypatch.setattr(module, "SMALL", small)
    model, data = tanh_mlp(2), random_data(2, count=50)
    objective, found = Objective(model, F.mse_loss, data), []
    fitted = endpoint(objective, [tacit.l2()])
    for seed in range(50):
        monkeypatch.setattr(module, "SEED", 1000 * seed)
        found.append(score_examples(fitted, objective, [tacit.l2()]).trace)
    trace = float(gradients(model, F.mse_loss, data).T.cov().trace())
    assert sum(found) / 50 == pytest.approx(trace, rel=0.1)


def test_rows_kinks_and_made_anew_directions(monkeypatch):
    from tacit.uncertainty import directions as module

    model, (X, y) = tanh_mlp(3), random_data(3)
    with torch.no_grad():
        model[0].weight[0] = 0  # where l1 has no gradient
    objective = Objective(model, F.mse_loss, (X, y))
    families = [tacit.l2(), tacit.l1()]
    found, scores = scored(objective, families, rows="*.weight")
    assert scores.rows == found.rows < 48
    part = Objective(model, F.mse_loss, (X[:30], y[:30]))
    expected = strengths(endpoint(part, families, rows="*.weight"))
    torch.testing.assert_close(strengths(found) + scores.values[:30].mean(0), expected)
    monkeypatch.setattr(module, "HELD", 0)
    again = score_examples(found, objective, families, rows="*.weight")
    torch.testing.assert_close(again.values, scores.values, rtol=1e-12, atol=1e-14)


def test_populations_clusters_and_the_bootstrap():
    model, data = tanh_mlp(4), random_data(4, count=200)
    objective = Objective(model, F.mse_loss, data)
    found, free = scored(objective, regularizers())
    half = score_examples(found, objective, regularizers(), population=400)
    whole = score_examples(found, objective, regularizers(), population=200)
    torch.testing.assert_close(half.error_bars().covariance, free.error_bars().covariance / 2)
    assert half.error_bars().basis == "200 of 400 examples"
    assert half.noise == pytest.approx(free.noise / 2)
    assert not whole.error_bars().covariance.any()
    assert "nothing was sampled" in whole.error_bars().basis
    assert (whole.bootstrap(3) == strengths(found)).all()

    labels = [f"patient {i // 4}" for i in range(200)]
    grouped = score_examples(found, objective, regularizers(), clusters=labels)
    sums = free.values.view(50, 4, 3).sum(1)
    expected = sums.T @ sums * 50 / 49 / 200**2
    torch.testing.assert_close(grouped.error_bars().covariance, expected)
    assert grouped.error_bars().freedom == 49
    assert "50 clusters" in grouped.error_bars().basis
    for scores in (free, half, grouped):
        drawn = scores.bootstrap(4000, seed=1)
        spread, bars = drawn.T.cov(), scores.error_bars().covariance
        assert ((spread / bars).diagonal() - 1).abs().max() < 0.12
        assert (drawn.mean(0) - strengths(found)).abs().max() < bars.diagonal().sqrt().max() / 10
    assert torch.equal(free.bootstrap(20, seed=3), free.bootstrap(40, seed=3)[:20])


def test_intervals_cover_the_strength_of_the_population():
    model, (X, y) = tanh_mlp(5), random_data(5, count=2000)
    truth = strengths(endpoint(Objective(model, F.mse_loss, (X, y)), regularizers()))
    covered, count = torch.zeros(3), 120
    for seed in range(count):
        chosen = torch.randperm(2000, generator=torch.Generator().manual_seed(seed))[:100]
        part = Objective(model, F.mse_loss, (X[chosen], y[chosen]))
        found, scores = scored(part, regularizers(), population=2000)
        intervals = scores.error_bars().intervals(found.strengths).values()
        covered += torch.tensor(
            [float(a <= t <= b) for (a, b), t in zip(intervals, truth, strict=True)]
        )
    assert (covered / count > 0.87).all(), covered


def test_difference_equations_score_what_the_technique_adds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 1)).double()
    X, y = random_data(6, count=40)
    families = [tacit.l2(), tacit.smooth_l1(0.1)]
    for groups in (2, 3):  # four draws make two groups of equal size, and three that are not
        technique = Objective(model, F.mse_loss, (X, y), training=True, draws=4, batch_size=1)
        plain = Objective(model, F.mse_loss, (X, y), batch_size=1)
        equations = tacit.difference_equations(technique, plain, families, groups=groups)
        found = fit(equations)
        scores = score_examples(found, technique, families, plain=plain)
        # A batch has its own draws by its place, so that a head of the data keeps them.
        part = [Objective(model, F.mse_loss, (X[:15], y[:15]), training=t, draws=4 if t else 1,
                          batch_size=1) for t in (True, False)]  # fmt: skip
        expected = fit(tacit.difference_equations(*part, families, groups=groups))
        moved = strengths(found) + scores.values[:15].mean(0)
        torch.testing.assert_close(moved, strengths(expected), rtol=1e-9, atol=1e-11)


def test_strengths_held_at_zero_and_undetermined_ones():
    model, data = tanh_mlp(4), random_data(4)
    objective = Objective(model, F.mse_loss, data)
    families = regularizers()
    equations = tacit.endpoint_equations(objective, families)
    found = fit(equations, nonnegative=True)
    held = [n for n, value in found.strengths.items() if not value]
    assert 0 < len(held) < 3
    scores = score_examples(found, objective, families)
    errors = scores.error_bars().standard_errors
    assert {n for n, e in errors.items() if math.isnan(e)} == set(held)
    free = [r for r in families if r.name not in held]
    _, alone = scored(objective, free)
    for name, error in alone.error_bars().standard_errors.items():
        assert errors[name] == pytest.approx(error, rel=1e-8)
    twice = [tacit.l2(), tacit.l2(name="again"), tacit.smooth_l1(0.1)]
    found, scores = scored(objective, twice)
    errors = scores.error_bars().standard_errors
    assert [math.isinf(e) for e in errors.values()] == [True, True, False]


def test_a_shuffling_loader_and_single_precision():
    model, data = tanh_mlp(8).float(), tuple(t.float() for t in random_data(8))
    objective = Objective(
        model, F.mse_loss, DataLoader(TensorDataset(*data), batch_size=9, shuffle=True)
    )
    _, scores = scored(objective, regularizers())
    _, plain = scored(Objective(model, F.mse_loss, data), regularizers())
    apart = scores.error_bars().covariance / plain.error_bars().covariance
    assert (apart - 1).abs().max() < 1e-3


def test_a_noisy_target_is_a_problem():
    model, data = tanh_mlp(9), random_data(9, count=16)
    _, scores = scored(Objective(model, F.mse_loss, data), [tacit.l2()])
    scores = replace(scores, trace=16 * 0.4 * scores.square)
    (problem,) = scores.problems
    assert problem.kind == "noisy"
    assert "40%" in problem.message
    assert "60%" in problem.message
    assert scores.ceiling == pytest.approx(0.6)
    assert not replace(scores, trace=scores.trace / 4).problems


def test_the_bootstrap_is_quick():
    model, data = tanh_mlp(4), random_data(4, count=40)
    _, scores = scored(Objective(model, F.mse_loss, data), regularizers())
    large = replace(scores, values=torch.randn(10_000, 3).double())
    start = time.perf_counter()
    assert large.bootstrap().shape == (2000, 3)
    assert time.perf_counter() - start < 10  # a fifth of a second alone; the benchmark has it


def test_bad_calls_are_refused():
    model, (X, y) = tanh_mlp(10), random_data(10)
    objective, families = Objective(model, F.mse_loss, (X, y)), [tacit.l2(), tacit.l1()]
    equations = tacit.endpoint_equations(objective, families)
    found = fit(equations)
    moved = {n: p * 1.1 for n, p in objective.params.items()}
    other = Objective(model, F.mse_loss, (X, y * 2))
    fewer = Objective(model, F.mse_loss, (X[:9], y[:9]))
    calls = {
        "found is a dict": lambda: score_examples({}, objective, families),
        "an objective is a Sequential": lambda: score_examples(found, model, families),
        "2 stacked sources": lambda: score_examples(
            fit(tacit.stack([equations, equations])), objective, families
        ),
        "plain is given": lambda: score_examples(found, objective, families, plain=objective),
        "the regularizers given have": lambda: score_examples(found, objective, families[::-1]),
        "known is": lambda: score_examples(
            found, objective, families, known={tacit.l2(name="x"): 1}
        ),
        "rows here and": lambda: score_examples(found, objective, families, rows="0"),
        "9 examples and the fit 64": lambda: score_examples(found, fewer, families),
        "scored anew": lambda: score_examples(found, objective, families, params=moved),
        "that has not changed": lambda: score_examples(found, other, families),
        "population is 10": lambda: score_examples(found, objective, families, population=10),
        "3 labels for 64": lambda: score_examples(found, objective, families, clusters=[1, 2, 3]),
        "one cluster": lambda: score_examples(found, objective, families, clusters=[1] * 64),
        "no strength 'x'": lambda: score_examples(found, objective, families).most_influential("x"),
        "replicates is 0": lambda: score_examples(found, objective, families).bootstrap(0),
        "count is 0": lambda: score_examples(found, objective, families).most_influential("l1", 0),
    }
    for text, call in calls.items():
        with pytest.raises(InputError, match=text):
            call()
    path = tacit.Trajectory([objective.params], [objective.params], [1.0])
    steps = fit(tacit.trajectory_equations(objective, path, families))
    with pytest.raises(InputError, match="trajectory equations"):
        score_examples(steps, objective, families)

"""Scores of examples where the design is fixed: subsets, weights, techniques, wrong calls."""

import math

import pytest
import torch
from support.models import params_of, random_data, tanh_mlp
from support.scoring import example_gradients, fit_and_score, fit_endpoint, strengths_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit import InputError, Objective, bounds, reference
from tacit.uncertainty import scores as scores_module
from tacit.uncertainty.scores import score_examples


def three_regularizers():
    return [tacit.l2(), tacit.smooth_l1(0.1), tacit.regularizers.group_l2(scope="*.weight")]


@pytest.mark.parametrize("batch_size", [1024, 7])
def test_strengths_of_a_subset_are_the_strengths_plus_its_mean_score(batch_size):
    model, (X, y) = tanh_mlp(0), random_data(0, count=80)
    objective = Objective(model, F.mse_loss, (X, y), batch_size=batch_size)
    known = {tacit.regularizers.distance_to({n: p * 0.5 for n, p in objective.params.items()}): 0.3}
    fit, scores = fit_and_score(objective, three_regularizers(), known=known)
    assert scores.values.shape == (80, 3)
    assert scores.values.mean(0).abs().max() < 1e-12 * scores.values.abs().max()
    for seed in range(3):
        subset = torch.randperm(80, generator=torch.Generator().manual_seed(seed))[: 20 + seed]
        part = Objective(model, F.mse_loss, (X[subset], y[subset]))
        expected = strengths_of(fit_endpoint(part, three_regularizers(), known=known))
        predicted = strengths_of(fit) + scores.values[subset].mean(0)
        torch.testing.assert_close(predicted, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("weighted", [False, True])
def test_leaving_one_out_is_exact(weighted):
    model, (X, y) = tanh_mlp(1), random_data(1, count=30)
    random = torch.rand(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = random if weighted else None
    objective = Objective(model, F.mse_loss, (X, y), weights=weights)
    _, scores = fit_and_score(objective, three_regularizers())
    left_out = scores.leave_one_out()
    for i in (0, 11, 29):
        others = torch.arange(30) != i
        part_weights = None if weights is None else weights[others]
        part = Objective(model, F.mse_loss, (X[others], y[others]), weights=part_weights)
        expected = strengths_of(fit_endpoint(part, three_regularizers()))
        torch.testing.assert_close(left_out[i], expected, rtol=1e-9, atol=1e-11)
    index, change = scores.most_influential("l2", 3)[0]
    changes = left_out[:, 0] - scores.strengths["l2"]
    assert index == int(changes.abs().argmax())
    assert change == pytest.approx(float(changes[index]), rel=1e-9)


def test_covariance_and_noise_are_those_of_dense_gradients():
    model, data = tanh_mlp(2), random_data(2, count=50)
    objective = Objective(model, F.mse_loss, data)
    regularizers = three_regularizers()
    _, scores = fit_and_score(objective, regularizers)
    design = reference.design(regularizers, params_of(model))
    gradients = example_gradients(model, F.mse_loss, data)
    gradient_covariance = gradients.T.cov()
    inverse = torch.linalg.pinv(design)
    bars = scores.error_bars()
    expected = inverse @ gradient_covariance @ inverse.T / 50
    torch.testing.assert_close(bars.covariance, expected, rtol=1e-8, atol=0)
    assert (bars.kind, bars.freedom) == ("sampling", 49)
    assert bars.basis == "50 examples of an infinite population"
    trace, size = float(gradient_covariance.trace()), len(gradient_covariance)
    correlation = bounds.correlation(design, gradient_covariance / (trace / size))
    # Only the trace is estimated, along a few directions.
    exact = correlation * trace / scores.covariance_trace
    assert scores.correlation == pytest.approx(max(1, exact), rel=1e-8)
    assert scores.effective_parameters == pytest.approx(size / scores.correlation)
    noise = scores.covariance_trace / 50 / gradients.mean(0).square().sum()
    assert scores.noise_fraction == pytest.approx(noise)
    assert 0.5 < scores.covariance_trace / trace < 2


@pytest.mark.parametrize("probe_entries", [2**16, 0])
def test_the_covariance_trace_is_right_on_average_over_signs(monkeypatch, probe_entries):
    """Along a few directions in small models; from a signed sum of gradients in large ones."""
    monkeypatch.setattr(scores_module, "PROBE_ENTRIES", probe_entries)
    model, data = tanh_mlp(2), random_data(2, count=50)
    objective = Objective(model, F.mse_loss, data)
    fit = fit_endpoint(objective, [tacit.l2()])
    traces = []
    for seed in range(50):
        monkeypatch.setattr(scores_module, "SEED", 1000 * seed)
        traces.append(score_examples(fit).covariance_trace)
    trace = float(example_gradients(model, F.mse_loss, data).T.cov().trace())
    assert sum(traces) / 50 == pytest.approx(trace, rel=0.1)


@pytest.mark.slow
def test_intervals_cover_the_strength_of_the_population():
    model, (X, y) = tanh_mlp(5), random_data(5, count=2000)
    population = Objective(model, F.mse_loss, (X, y))
    truth = strengths_of(fit_endpoint(population, three_regularizers()))
    covered, count = torch.zeros(3), 60
    for seed in range(count):
        sample = torch.randperm(2000, generator=torch.Generator().manual_seed(seed))[:100]
        part = Objective(model, F.mse_loss, (X[sample], y[sample]))
        fit, scores = fit_and_score(part, three_regularizers(), population=2000)
        intervals = scores.error_bars().intervals(fit.strengths).values()
        covered += torch.tensor(
            [float(low <= t <= high) for (low, high), t in zip(intervals, truth, strict=True)]
        )
    assert (covered / count > 0.87).all(), covered


@pytest.mark.parametrize("groups", [2, 3])  # of four draws: groups of equal and of unequal size
def test_difference_equations_score_what_the_technique_adds(groups):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 1)).double()
    X, y = random_data(6, count=40)
    regularizers = [tacit.l2(), tacit.smooth_l1(0.1)]

    def technique_and_plain(count):
        # The draws of a batch depend on its index, so the first batches of the data keep theirs.
        data, options = (X[:count], y[:count]), {"batch_size": 1}
        technique = Objective(model, F.mse_loss, data, training=True, draws=4, **options)
        return technique, Objective(model, F.mse_loss, data, **options)

    def fit_difference(technique, plain):
        equations = tacit.difference_equations(technique, plain, regularizers, groups=groups)
        return tacit.fit(equations)

    fit = fit_difference(*technique_and_plain(40))
    scores = score_examples(fit)
    expected = strengths_of(fit_difference(*technique_and_plain(15)))
    predicted = strengths_of(fit) + scores.values[:15].mean(0)
    torch.testing.assert_close(predicted, expected, rtol=1e-9, atol=1e-11)


def test_scores_of_a_difference_are_those_of_dense_gradients_with_and_without_the_technique():
    model, data = tanh_mlp(9), random_data(9, count=30)
    regularizers = three_regularizers()
    technique = Objective(model, F.smooth_l1_loss, data)
    plain = Objective(model, F.mse_loss, data)
    fit = tacit.fit(tacit.difference_equations(technique, plain, regularizers))
    differences = example_gradients(model, F.smooth_l1_loss, data)
    differences = differences - example_gradients(model, F.mse_loss, data)
    inverse = torch.linalg.pinv(reference.design(regularizers, params_of(model)))
    expected = (differences - differences.mean(0)) @ inverse.T
    torch.testing.assert_close(score_examples(fit).values, expected, rtol=1e-8, atol=1e-10)


def test_strengths_at_zero_have_no_errors_and_undetermined_ones_infinite_errors():
    objective = Objective(tanh_mlp(4), F.mse_loss, random_data(4))
    regularizers = three_regularizers()
    equations = tacit.endpoint_equations(objective, regularizers)
    fit = tacit.fit(equations, nonnegative=True)
    at_zero = [n for n, strength in fit.strengths.items() if not strength]
    assert 0 < len(at_zero) < 3
    errors = score_examples(fit).error_bars().standard_errors
    assert {n for n, error in errors.items() if math.isnan(error)} == set(at_zero)
    _, scores_of_free = fit_and_score(objective, [r for r in regularizers if r.name not in at_zero])
    for name, error in scores_of_free.error_bars().standard_errors.items():
        assert errors[name] == pytest.approx(error, rel=1e-8)
    twice = [tacit.l2(), tacit.l2(name="again"), tacit.smooth_l1(0.1)]
    _, scores = fit_and_score(objective, twice)
    errors = scores.error_bars().standard_errors
    assert [math.isinf(error) for error in errors.values()] == [True, True, False]


def test_a_shuffling_loader_in_single_precision_gives_the_same_errors():
    model, data = tanh_mlp(8).float(), tuple(t.float() for t in random_data(8))
    loader = DataLoader(TensorDataset(*data), batch_size=9, shuffle=True)
    _, shuffled = fit_and_score(Objective(model, F.mse_loss, loader), three_regularizers())
    _, in_order = fit_and_score(Objective(model, F.mse_loss, data), three_regularizers())
    ratio = shuffled.error_bars().covariance / in_order.error_bars().covariance
    assert (ratio - 1).abs().max() < 1e-3


def test_a_batch_without_gradient_is_scored():
    X = torch.eye(4).double()
    y = torch.tensor([[1.0], [2.0], [0.0], [0.0]]).double()
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data = torch.tensor([[0.5, 1.0, 0.0, 0.0]]).double()
    objective = Objective(model, F.mse_loss, (X, y), batch_size=2)
    _, scores = fit_and_score(objective, tacit.l2())
    assert scores.values[2:].abs().max() == scores.values[2:].abs().min()


def test_weights_may_be_returned_for_some_batches_only():
    X, y = torch.eye(4).double(), torch.tensor([[1.0], [2.0], [0.0], [1.0]]).double()
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data = torch.tensor([[0.5, 1.0, 0.0, 0.0]]).double()

    def losses(model, batch):
        each = (model(batch[0]) - batch[1]).square()[:, 0]
        return (each, batch[2]) if len(batch) == 3 else each

    data = [(X[:3], y[:3], torch.full((3,), 2.0)), (X[3:], y[3:])]
    _, scores = fit_and_score(Objective.from_batch_loss(model, losses, data), tacit.l2())
    assert scores.weights is not None
    assert scores.weights.tolist() == [2, 2, 2, 1]


def test_a_fit_with_every_strength_at_zero_is_returned_with_a_note_in_its_summary():
    X, model = random_data(7)[0], tanh_mlp(0)
    target = model(X).detach() / 2  # smaller weights fit better: the strength of l2 is negative
    fit = tacit.estimate(
        model, F.mse_loss, (X, target), tacit.l2(), nonnegative=True, population=1000
    )
    assert fit.strengths == {"l2": 0}
    assert "sampling" not in fit.error_bars
    assert "every strength at zero" in fit.summary()


def test_wrong_calls_are_refused():
    objective = Objective(tanh_mlp(10), F.mse_loss, random_data(10))
    fit = fit_endpoint(objective, [tacit.l2(), tacit.l1()])

    def call(**options):
        return lambda: score_examples(fit, **options)

    scores = score_examples(fit)
    calls = {
        "population is 10": call(population=10),
        "population is 64.5.*a whole number": call(population=64.5),
        "population is True": call(population=True),
        r"\(3,\) for 64": call(clusters=[1, 2, 3]),
        "one cluster": call(clusters=[1] * 64),
        "one dimension": call(clusters=torch.zeros(64, 1)),
        "no strength 'x'": lambda: scores.most_influential("x"),
        "count is 0": lambda: scores.most_influential("l1", 0),
        "replicates is 0": lambda: scores.bootstrap(0),
    }
    for words, wrong_call in calls.items():
        with pytest.raises(InputError, match=words):
            wrong_call()


def test_error_bars_of_a_function_that_reads_the_examples_say_that_they_are_too_narrow():
    """λ̂ = mean x²·(2−θ) / mean z²·θ, with as much noise in the column as in the target."""
    examples, replicates, theta = 400, 4000, 4 / 3
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2, replicates, examples, generator=generator, dtype=torch.float64)
    means = draws.square().mean(2)
    spread = float((means[0] * (2 - theta) / (means[1] * theta)).std())
    x, z = draws[:, 0]
    model = torch.nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(theta)
    own = tacit.regularizer("own", lambda p: z.square().mean() * p["weight"].square().sum())
    data = (x[:, None], 2 * x[:, None])
    fit = tacit.estimate(model, torch.nn.functional.mse_loss, data, [own], population=math.inf)
    ratio = fit.standard_errors["sampling"]["own"] / spread
    assert math.erf(1.96 * ratio / math.sqrt(2)) == pytest.approx(0.84, abs=0.04)
    text = " ".join(fit.summary().split())
    assert "columns of own treated as fixed, as if they did not read the examples" in text
    assert "covered the truth 84 % of the time where a function of your own reads" in text
    fit = tacit.estimate(
        model, torch.nn.functional.mse_loss, data, [tacit.l2()], population=math.inf
    )
    assert "treated as fixed" not in fit.summary()


@pytest.mark.parametrize("weighted", [False, True])
def test_a_part_of_the_examples_tells_the_noise_of_the_target(weighted, monkeypatch):
    """The trace from random signs of a quarter of the examples, on average over the signs."""
    monkeypatch.setattr(scores_module, "PROBE_ENTRIES", 1)
    monkeypatch.setattr("tacit.uncertainty.directions.MOST_SIGNED", 60)
    model, data = tanh_mlp(5), random_data(5, count=400)
    random = torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = 0.5 + random if weighted else torch.ones(400, dtype=torch.float64)
    options = {"weights": weights} if weighted else {}
    fit = fit_endpoint(Objective(model, F.mse_loss, data, **options), three_regularizers())
    estimates = []
    for seed in range(200):
        monkeypatch.setattr(scores_module, "SEED", seed)
        estimates.append(score_examples(fit).covariance_trace)
    gradients = example_gradients(model, F.mse_loss, data)
    deviations = gradients - weights @ gradients / weights.sum()
    exact = float((weights[:, None] * deviations).square().sum() / weights.sum() ** 2) * 400
    estimates = torch.tensor(estimates)
    error = estimates.std() / len(estimates) ** 0.5
    assert abs(estimates.mean() - exact) < 3 * error + 0.03 * exact
    assert error < 0.1 * exact

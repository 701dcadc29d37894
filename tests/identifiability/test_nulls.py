"""Random columns in place of one, against dense refits and against their distribution."""

import pytest
import torch
from scipy import stats
from support.models import minimise, params_of, random_data, tanh_mlp
from support.objectives import CountedBatches, random_batches
from support.scoring import fit_endpoint
from support.systems import draw
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective, null_distribution, reference
from tacit.identifiability import chance, unique_shares


def dense_draws(design, target, sizes, column, shuffles, seed):
    """Explained fractions of dense refits, with one column permuted within each tensor."""
    generator = torch.Generator().manual_seed(seed)
    permuted = [
        [part[torch.randperm(len(part), generator=generator)] for _ in range(shuffles)]
        for part in design[:, column].split(sizes)
    ]
    for index in range(shuffles):
        shuffled = design.clone()
        shuffled[:, column] = torch.cat([parts[index] for parts in permuted])
        yield reference.explained(shuffled, reference.fit(shuffled, target), target)


def quartic():
    return tacit.regularizer("quartic", lambda p: sum(t.pow(4).sum() for t in p.values()))


def random_direction(seed):
    """A penalty whose gradient is one random direction."""

    def value(params):
        sizes = [p.numel() for p in params.values()]
        parts = draw(seed, sum(sizes)).split(sizes)
        return sum((p.flatten() @ d for p, d in zip(params.values(), parts, strict=True)))

    return tacit.regularizer("random", value)


@pytest.mark.parametrize("column", [0, 1, 2])
def test_permutations_agree_with_dense_refits(column):
    model, data = tanh_mlp(7), random_data(7)
    objective = Objective(model, F.mse_loss, data)
    regularizers = [tacit.l2(), tacit.smooth_l1(1e-1), quartic()]
    name = regularizers[column].name
    fit = fit_endpoint(objective, regularizers)
    null = null_distribution(fit, name, shuffles=20, seed=3)
    params = params_of(model)
    design, target = reference.design(regularizers, params), -reference.flat(objective.gradient())
    sizes = [p.numel() for p in params.values()]
    expected = list(dense_draws(design, target, sizes, column, 20, 3))
    assert list(null.draws) == pytest.approx(expected, rel=1e-9)
    assert null.observed == pytest.approx(fit.explained, rel=1e-10)
    assert null.observed - null.without == pytest.approx(unique_shares(fit)[name], abs=1e-10)
    assert null == null_distribution(fit, name, shuffles=20, seed=3)


def test_known_penalties_kinks_scopes_and_rows_are_as_in_the_equations():
    """Equations of the weights that are not zero; the permuted column covers the first layer."""
    model, data = tanh_mlp(8), random_data(8)
    with torch.no_grad():
        model[0].weight[:2] = 0
    objective = Objective(model, F.mse_loss, data)
    regularizers, applied = [tacit.l1(), tacit.layerwise(tacit.l2())], tacit.smooth_l1(0.1)
    fit = fit_endpoint(objective, regularizers, known={applied: 0.02}, rows="*.weight")
    null = null_distribution(fit, "l2[0]", shuffles=30, seed=4)
    params = params_of(model)
    has_equation = torch.cat([(p != 0).flatten() & (p.ndim > 1) for p in params.values()])
    design = reference.design(regularizers, params)[has_equation]
    known_gradient = 0.02 * reference.design([applied], params)[:, 0]
    target = (-reference.flat(objective.gradient()) - known_gradient)[has_equation]
    first = int((params["0.weight"] != 0).sum())
    sizes = [first, len(design) - first]
    expected = list(dense_draws(design, target, sizes, 1, 30, 4))
    assert list(null.draws) == pytest.approx(expected, rel=1e-9)
    assert null.observed == pytest.approx(fit.explained, rel=1e-10)


def test_a_penalty_that_was_applied_beats_every_permutation_and_an_idle_one_does_not():
    model, data = tanh_mlp(9), random_data(9)
    minimise(model, F.mse_loss, data, {tacit.l2(): 2e-2})
    objective = Objective(model, F.mse_loss, data)
    null = null_distribution(fit_endpoint(objective, tacit.l2()), "l2", shuffles=199)
    assert null.observed == pytest.approx(1)
    assert null.p_value == 1 / 200
    constant = tacit.regularizer("constant", lambda params: sum(t.sum() for t in params.values()))
    constant_fit = fit_endpoint(objective, constant)
    assert null_distribution(constant_fit, "constant", shuffles=50).p_value == 1
    target, p_values = tacit.endpoint_target(objective), []
    for seed in range(9100, 9160):
        fit = tacit.fit(target.equations(random_direction(seed)))
        null = null_distribution(fit, "random", target=target, shuffles=99, seed=seed)
        p_values.append(null.p_value)
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


def test_drawn_directions_have_the_distribution_that_chance_uses():
    objective = Objective(tanh_mlp(10), F.mse_loss, random_data(10))
    regularizers = [tacit.l2(), tacit.smooth_l1(1e-1)]
    equations = tacit.endpoint_equations(objective, regularizers)
    null = null_distribution(tacit.fit(equations), "smooth_l1", kind="direction", seed=9200)
    fractions = [(value - null.without) / (1 - null.without) for value in null.draws]
    distribution = stats.beta(0.5, (equations.rows - 2) / 2)
    assert stats.kstest(fractions, distribution.cdf).pvalue > 0.01
    assert null.p_value == pytest.approx(chance(equations)["smooth_l1"], abs=0.05)


def test_the_target_of_the_fit_saves_the_pass_and_changes_nothing():
    data = CountedBatches(random_batches(12))
    objective = Objective(tanh_mlp(12), F.mse_loss, data)
    target = tacit.endpoint_target(objective)
    known = {tacit.l2(scope="*.bias", name="decay"): 0.1}
    fit = tacit.fit(target.equations([tacit.l2(), tacit.smooth_l1(0.1)], known=known))
    data.passes = 0
    with_target = null_distribution(fit, "l2", target=target, shuffles=20)
    assert data.passes == 0
    assert with_target == null_distribution(fit, "l2", shuffles=20)
    assert data.passes == 1


def test_weights_that_have_changed_are_refused():
    model = tanh_mlp(11)
    fit = fit_endpoint(Objective(model, F.mse_loss, random_data(11)), tacit.l2())
    model[0].weight.data.mul_(1.1)
    with pytest.raises(InputError, match="write the equations again"):
        null_distribution(fit, "l2")


def test_a_target_of_another_fit_and_a_nonnegative_fit_are_refused():
    objective = Objective(tanh_mlp(13), F.mse_loss, random_data(13))
    other = tacit.endpoint_target(Objective(tanh_mlp(13), F.mse_loss, random_data(14)))
    fit = fit_endpoint(objective, tacit.l2())
    with pytest.raises(InputError, match="target= is another"):
        null_distribution(fit, "l2", target=other)
    nonnegative = tacit.fit(fit.equations, nonnegative=True)
    with pytest.raises(InputError, match=r"fit\.unconstrained"):
        null_distribution(nonnegative, "l2")


def test_wrong_calls_are_refused():
    objective = Objective(tanh_mlp(11), F.mse_loss, random_data(11))
    ridge_fit = fit_endpoint(objective, tacit.l2())
    path = tacit.Trajectory([objective.params], [objective.params], [1.0])
    steps_fit = tacit.fit(tacit.trajectory_equations(objective, path, tacit.l2()))
    difference_fit = tacit.fit(tacit.difference_equations(objective, objective, tacit.l2()))
    stacked_fit = tacit.fit(tacit.stack([ridge_fit.equations] * 2))
    for fit, name, options, words in (
        (ridge_fit, "l1", {}, "there are l2"),
        (ridge_fit, "l2", {"shuffles": 0}, "shuffles"),
        (ridge_fit, "l2", {"seed": -1}, "seed"),
        (ridge_fit, "l2", {"kind": "sign"}, "direction"),
        (objective, "l2", {}, "what tacit.fit returns"),
        (steps_fit, "l2", {}, "is for endpoint"),
        (difference_fit, "l2", {}, "is for endpoint"),
        (stacked_fit, "l2", {}, "Write the equations again"),
    ):
        with pytest.raises(InputError, match=words):
            null_distribution(fit, name, **options)

"""Random columns in place of one, against dense refits and against their distribution."""

import pytest
import torch
from scipy import stats
from support.models import minimise, params_of, random_data, tanh_mlp
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
    null = null_distribution(objective, regularizers, name, shuffles=20, seed=3)
    params = params_of(model)
    design, target = reference.design(regularizers, params), -reference.flat(objective.gradient())
    sizes = [p.numel() for p in params.values()]
    expected = list(dense_draws(design, target, sizes, column, 20, 3))
    assert list(null.draws) == pytest.approx(expected, rel=1e-9)
    fit = tacit.fit(tacit.endpoint_equations(objective, regularizers))
    assert null.observed == pytest.approx(fit.explained, rel=1e-10)
    assert null.observed - null.without == pytest.approx(unique_shares(fit)[name], abs=1e-10)
    assert null == null_distribution(objective, regularizers, name, shuffles=20, seed=3)


def test_known_penalties_kinks_scopes_and_rows_are_as_in_the_equations():
    """Equations of the weights that are not zero; the permuted column covers the first layer."""
    model, data = tanh_mlp(8), random_data(8)
    with torch.no_grad():
        model[0].weight[:2] = 0
    objective = Objective(model, F.mse_loss, data)
    regularizers, applied = [tacit.l1(), tacit.layerwise(tacit.l2())], tacit.smooth_l1(0.1)
    options = {"known": {applied: 0.02}, "rows": "*.weight"}
    null = null_distribution(objective, regularizers, "l2[0]", shuffles=30, seed=4, **options)
    params = params_of(model)
    has_equation = torch.cat([(p != 0).flatten() & (p.ndim > 1) for p in params.values()])
    design = reference.design(regularizers, params)[has_equation]
    known_gradient = 0.02 * reference.design([applied], params)[:, 0]
    target = (-reference.flat(objective.gradient()) - known_gradient)[has_equation]
    first = int((params["0.weight"] != 0).sum())
    sizes = [first, len(design) - first]
    expected = list(dense_draws(design, target, sizes, 1, 30, 4))
    assert list(null.draws) == pytest.approx(expected, rel=1e-9)
    fit = tacit.fit(tacit.endpoint_equations(objective, regularizers, **options))
    assert null.observed == pytest.approx(fit.explained, rel=1e-10)


def test_a_penalty_that_was_applied_beats_every_permutation_and_an_idle_one_does_not():
    model, data = tanh_mlp(9), random_data(9)
    minimise(model, F.mse_loss, data, {tacit.l2(): 2e-2})
    objective = Objective(model, F.mse_loss, data)
    null = null_distribution(objective, [tacit.l2()], "l2", shuffles=199)
    assert null.observed == pytest.approx(1)
    assert null.p_value == 1 / 200
    constant = tacit.regularizer("constant", lambda params: sum(t.sum() for t in params.values()))
    assert null_distribution(objective, [constant], "constant", shuffles=50).p_value == 1
    p_values = [
        null_distribution(
            objective, [random_direction(seed)], "random", shuffles=99, seed=seed
        ).p_value
        for seed in range(9100, 9160)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


def test_drawn_directions_have_the_distribution_that_chance_uses():
    objective = Objective(tanh_mlp(10), F.mse_loss, random_data(10))
    regularizers = [tacit.l2(), tacit.smooth_l1(1e-1)]
    null = null_distribution(objective, regularizers, "smooth_l1", kind="direction", seed=9200)
    equations = tacit.endpoint_equations(objective, regularizers)
    fractions = [(value - null.without) / (1 - null.without) for value in null.draws]
    distribution = stats.beta(0.5, (equations.rows - 2) / 2)
    assert stats.kstest(fractions, distribution.cdf).pvalue > 0.01
    assert null.p_value == pytest.approx(chance(equations)["smooth_l1"], abs=0.05)


def test_wrong_calls_are_refused():
    objective = Objective(tanh_mlp(11), F.mse_loss, random_data(11))
    for arguments, options, words in (
        ((objective, [tacit.l2()], "l1"), {}, "there are l2"),
        ((objective, [tacit.l2()], "l2"), {"shuffles": 0}, "shuffles"),
        ((objective, [tacit.l2()], "l2"), {"seed": -1}, "seed"),
        ((objective, [tacit.l2()], "l2"), {"kind": "sign"}, "direction"),
        ((objective.model, [tacit.l2()], "l2"), {}, "tacit.Objective"),
    ):
        with pytest.raises(InputError, match=words):
            null_distribution(*arguments, **options)

"""Flipping signs of scores by cluster: against a naive version, and how often it is wrong."""

from itertools import product

import pytest
import torch
from support.systems import draw

from tacit.identifiability.sign_flips import (
    MOST_EXACT,
    effective_scores,
    flip_test,
    least_p,
    sign_vectors,
)


def clusters_of(seed, clusters=8, rows=6, columns=4):
    """Random [design | target] of every cluster."""
    return draw(seed, clusters, rows, columns + 1)


def naive_p_value(factors, tested, others):
    """The p-value with whole columns: least squares, and every sign vector in a loop."""
    rows = factors.flatten(0, 1)

    def rest(part):
        beside = rows[:, others]
        return part - beside @ torch.linalg.lstsq(beside, part).solution if others else part

    columns, target = rest(rows[:, tested]), rest(rows[:, -1:])
    added = []
    for signs in product((1.0, -1.0), repeat=len(factors)):
        flipped = target * torch.tensor(signs).double().repeat_interleave(factors.shape[1])[:, None]
        fitted = columns @ torch.linalg.lstsq(columns, flipped).solution
        added.append(float(fitted.square().sum()))
    return sum(a >= added[0] * (1 - 1e-9) for a in added) / len(added)


@pytest.mark.parametrize(("tested", "others"), [([0], [1, 2, 3]), ([0, 1], [2]), ([3], [])])
@pytest.mark.parametrize("seed", range(4))
def test_the_p_value_is_that_of_all_sign_vectors(seed, tested, others):
    factors = clusters_of(seed)
    factors[:, :, -1] += 0.5 * factors[:, :, 0]
    assert flip_test(factors, tested, others) == pytest.approx(
        naive_p_value(factors, tested, others), abs=1e-12
    )


def test_scores_add_up_to_what_the_columns_add():
    factors = clusters_of(0)
    rows = factors.flatten(0, 1)
    left = [
        (rows[:, -1:] - d @ torch.linalg.lstsq(d, rows[:, -1:]).solution).square().sum()
        for d in (rows[:, [2, 3]], rows[:, :4])
    ]
    scores = effective_scores(factors, [0, 1], [2, 3])
    assert float(scores.sum(0).square().sum()) == pytest.approx(float(left[0] - left[1]))


def test_an_exact_column_has_the_least_p_value_that_clusters_allow():
    factors = clusters_of(1)
    factors[:, :, -1] = 2.0 * factors[:, :, 0] - factors[:, :, 1]
    assert flip_test(factors, [0], [1, 2]) == least_p(8) == 2**-7
    assert flip_test(factors, [3], [0, 1]) == 1.0  # nothing is left
    assert flip_test(factors, [0], [0]) == 1.0  # nothing of its own


def test_clusters_without_the_column_do_not_count():
    factors = clusters_of(2)
    factors[:, :, -1] = factors[:, :, 0]
    factors[3:, :, 0] = 0.0
    factors[:, :, -1] = factors[:, :, 0]
    assert flip_test(factors, [0], []) == least_p(3)


def test_of_many_clusters_sign_vectors_are_drawn_the_same_each_time():
    assert len(sign_vectors(4)) == 8
    many = sign_vectors(40)
    assert many.shape == (2 ** (MOST_EXACT - 1), 40)
    assert torch.equal(many, sign_vectors(40))
    assert (many[0] == 1).all()
    assert abs(float(many[1:, 1:].mean())) < 0.01


def test_p_values_are_uniform_where_clusters_have_no_strength_in_common():
    def p_value(seed):
        factors = clusters_of(50_000 + seed, clusters=9, rows=5)
        own = draw(90_000 + seed, 9, 1, 4)  # each cluster has strengths of its own, of mean zero
        factors[:, :, -1] = 0.2 * factors[:, :, -1] + (factors[:, :, :4] * own).sum(2)
        return flip_test(factors, [0], [1, 2, 3])

    p_values = torch.tensor([p_value(seed) for seed in range(1000)])
    for level in (0.05, 0.2, 0.5):
        share = float((p_values <= level).double().mean())
        assert abs(share - level) <= 3.5 * (level * (1 - level) / 1000) ** 0.5

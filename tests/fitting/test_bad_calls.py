"""Wrong calls of `fit` and of its results are refused with the mistake and its remedy."""

import pytest
import torch
from support.bad_calls import OBJECTIVE, PARAMS, assert_refused

import tacit

EQUATIONS = tacit.endpoint_equations(OBJECTIVE, tacit.l2())


def fit_at_the_kink():
    origin = {name: torch.zeros_like(p) for name, p in PARAMS.items()}
    return tacit.fit(tacit.endpoint_equations(OBJECTIVE, tacit.l1(), params=origin))


def fit_nonnegative_matrix():
    matrix = tacit.regularizers.symmetric(scope="2")
    return tacit.fit(tacit.endpoint_equations(OBJECTIVE, matrix), nonnegative=True)


CASES = {
    "an objective instead of equations": (
        lambda: tacit.fit(OBJECTIVE),
        ["fit", "Objective"],
        "pass what endpoint",
    ),
    "every row at a kink": (
        fit_at_the_kink,
        ["no equations", "kink", "rows="],
        "such as smooth_l1",
    ),
    "a matrix with nonnegative entries": (
        fit_nonnegative_matrix,
        ["nonnegative", "symmetric()"],
        "Fit freely",
    ),
    "the matrix of a fit without one": (
        lambda: tacit.fit(EQUATIONS).matrix(),
        ["0", "l2"],
        "exactly one diagonal",
    ),
}


@pytest.mark.parametrize(("call", "names", "remedy"), CASES.values(), ids=CASES.keys())
def test_a_wrong_call_names_the_mistake_and_the_remedy(call, names, remedy):
    assert_refused(call, names, remedy)

"""Wrong candidates are refused with the mistake and its remedy."""

import pytest
import torch
from support.bad_calls import INF, MODEL, NAN, PARAMS, WRONG_SHAPE, X, assert_refused, params_with

import tacit
from tacit.regularizers import diagonal, distance_to, gradient_norm, nuclear_norm, symmetric


def bind(regularizer, params=PARAMS):
    return regularizer.bind(params)


def bind_custom(function, **options):
    return bind(tacit.regularizer("r", function, **options))


def params_of_size(size):
    return {"w": torch.ones(size)}


CASES = {
    **{
        f"beta of {beta!r}": (
            lambda beta=beta: tacit.smooth_l1(beta),
            [f"beta is {beta!r}"],
            "number above zero",
        )
        for beta in (0, -1.0, NAN, INF, "1e-3", None, True, 10**400)
    },
    "a blank name": (lambda: tacit.l2(name=" "), ["name is ' '"], "a string that is not empty"),
    "no name": (lambda: diagonal(name=None), ["name is None"], "pass a string"),
    "a scope that matches nothing": (
        lambda: bind(tacit.l2(scope="conv*")),
        ["scope", "l2", "'conv*'", "no parameter"],
        "0.weight",
    ),
    "a function as scope that matches nothing": (
        lambda: bind(tacit.l1(scope=lambda name: False)),
        ["scope", "l1", "no parameter"],
        "0.weight",
    ),
    "a number as scope": (
        lambda: bind(tacit.l2(scope=3)),
        ["scope", "l2", "is 3"],
        "pass a name",
    ),
    "a scope without matrices": (
        lambda: bind(nuclear_norm(scope="*.bias")),
        ["two or more dim"],
        "Widen",
    ),
    "a distance to a model": (lambda: distance_to(MODEL), ["Sequential"], "dictionary"),
    "a distance to numbers": (
        lambda: distance_to({"w": 1}),
        ["distance_to for 'w' is 1"],
        "torch.as_tensor",
    ),
    "a distance to NaN": (
        lambda: distance_to(params_with(NAN)),
        ["'2.bias'", "1 NaN"],
        "earlier checkpoint",
    ),
    "a distance to another model": (
        lambda: bind(distance_to({"w": X})),
        ["no such tensor", "'0.weight'"],
        "limit the scope",
    ),
    "a distance to another shape": (
        lambda: bind(distance_to(WRONG_SHAPE)),
        ["(4,)", "'2.bias'", "(1,)"],
        "limit the scope",
    ),
    "layers of a number": (lambda: tacit.layerwise(3), ["'int'", "not a sum"], "Pass l2()"),
    "layers of a matrix family": (
        lambda: tacit.layerwise(diagonal()),
        ["'diagonal'", "not a sum"],
        "Pass l2()",
    ),
    "layers of layers": (
        lambda: tacit.layerwise(tacit.layerwise(tacit.l2())),
        ["not a sum"],
        "Pass l2()",
    ),
    "a gradient norm of a model": (
        lambda: gradient_norm(MODEL),
        ["Sequential"],
        "pass the tacit.Objective",
    ),
    "a number as function": (lambda: tacit.regularizer("r", 3), ["'r'", "is 3"], "pass a function"),
    "a function that returns a matrix": (
        lambda: bind_custom(lambda params: params["0.weight"]),
        ["(8, 5)", "a scalar tensor is needed"],
        "Sum",
    ),
    "a function that returns a float": (
        lambda: bind_custom(lambda params: 1.0),
        ["'r'", "float"],
        "a scalar",
    ),
    "a function that leaves the graph": (
        lambda: bind_custom(lambda params: torch.tensor(params["2.bias"].item())),
        ["'r'", "does not depend"],
        "without .item",
    ),
    "a function of parameters outside its scope": (
        lambda: bind_custom(lambda params: params["2.bias"].sum(), scope="0"),
        ["'r'", "does not depend"],
        "it covers",
    ),
    "a function with an infinite derivative": (
        lambda: bind_custom(lambda params: (params["2.bias"] * 0).sqrt()),
        ["'r'", "'2.bias'", "1 NaN"],
        "wider dtype",
    ),
    "too many coefficients of a diagonal": (
        lambda: bind(diagonal(), params_of_size(5001)),
        ["5001", "at most 5000"],
        "Limit its",
    ),
    "too many coefficients of a matrix": (
        lambda: bind(symmetric(), params_of_size(100)),
        ["p(p+1)/2 = 5050", "at most 5000"],
        "Limit its",
    ),
    "far too many coefficients of a matrix": (
        lambda: bind(symmetric(), params_of_size(10**6)),
        ["1000000", "at most 5000"],
        "Limit its",
    ),
}


@pytest.mark.parametrize(("call", "names", "remedy"), CASES.values(), ids=CASES.keys())
def test_a_wrong_call_names_the_mistake_and_the_remedy(call, names, remedy):
    assert_refused(call, names, remedy)

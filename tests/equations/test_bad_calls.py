"""Wrong calls of what writes, stacks and restricts equations are refused with their remedy."""

import pytest
import torch
from support.bad_calls import (
    INF,
    MODEL,
    NAN,
    OBJECTIVE,
    PARAMS,
    X,
    Y,
    assert_refused,
    make_objective,
    params_with,
)
from torch import nn

import tacit
from tacit import Trajectory

TWO_DRAWS = make_objective((X, Y), training=True, draws=2)
RIDGE = tacit.l2()
EQUATIONS = tacit.endpoint_equations(OBJECTIVE, RIDGE)
TRAJECTORY = Trajectory.from_positions([PARAMS, {n: p.clone() for n, p in PARAMS.items()}], 0.1)


def endpoint(regularizers=RIDGE, **options):
    return tacit.endpoint_equations(OBJECTIVE, regularizers, **options)


CANDIDATES = {
    "no candidates": (lambda: endpoint([]), ["regularizers is []"], "at least one"),
    "None as candidates": (lambda: endpoint(None), ["regularizers is None"], "at least one"),
    "penalties with strengths": (
        lambda: endpoint({tacit.l2(): 0.1}),
        ["regularizers is a dictionary"],
        "known=penalties",
    ),
    "a function that was not called": (
        lambda: endpoint([tacit.l2]),
        ["regularizer", "function"],
        "Call it",
    ),
    "a name instead of a candidate": (
        lambda: endpoint(["l2"]),
        ["regularizer", "str"],
        "tacit.l2()",
    ),
    "two candidates of one name": (
        lambda: endpoint([tacit.l2(), tacit.l2()]),
        ["named l2"],
        "name=",
    ),
    "known penalties as a list": (
        lambda: endpoint(known=[tacit.l2()]),
        ["known", "list"],
        "pass a dictionary",
    ),
    "the name of a known penalty": (
        lambda: endpoint(known={"l2": 1.0}),
        ["regularizer", "str"],
        "tacit.l2()",
    ),
    "a known strength of NaN": (
        lambda: endpoint(known={tacit.l1(): NAN}),
        ["strength", "'l1'", "nan"],
        "weight_decay",
    ),
    "a known strength beyond every float": (
        lambda: endpoint(known={tacit.l1(): 10**400}),
        ["strength", "'l1'"],
        "pass a finite number",
    ),
    "a known strength as text": (
        lambda: endpoint(known={tacit.l1(): "1"}),
        ["'l1'", "'1'"],
        "pass a finite number",
    ),
    "a known penalty with several coefficients": (
        lambda: endpoint(known={tacit.layerwise(tacit.l1()): 1.0}),
        ["2 coefficients"],
        "one strength",
    ),
    "rows that match nothing": (
        lambda: endpoint(rows="conv*"),
        ["rows", "'conv*'", "no parameter"],
        "0.weight",
    ),
    "params of another model": (
        lambda: endpoint(params={"w": X}),
        ["params", "another model", "missing 0.weight"],
        "parameters here are",
    ),
    "a model as objective": (
        lambda: tacit.endpoint_equations(MODEL, tacit.l2()),
        ["objective", "Sequential"],
        "pass tacit.Objective",
    ),
}


def difference(technique=TWO_DRAWS, plain=OBJECTIVE, **options):
    return tacit.difference_equations(technique, plain, tacit.l2(), **options)


DIFFERENCES = {
    "a model as plain objective": (
        lambda: difference(plain=MODEL),
        ["objective", "Sequential"],
        "pass tacit.Objective",
    ),
    "a plain objective of another model": (
        lambda: difference(plain=make_objective(model=nn.Linear(5, 1).double())),
        ["the technique objective trains 0.weight", "the plain one does not"],
        "pass objectives of the same model",
    ),
    "no groups": (
        lambda: difference(groups=0),
        ["groups", "0"],
        "a whole number, at least 1",
    ),
    "a fractional number of groups": (
        lambda: difference(groups=1.5),
        ["groups", "1.5"],
        "a whole number",
    ),
    "more groups than draws": (
        lambda: difference(groups=3),
        ["2 draws", "3 groups", "fewer"],
        "draws=3",
    ),
}


def from_positions(positions, step_sizes):
    return Trajectory.from_positions(positions, step_sizes)


def trajectory_equations(trajectory=TRAJECTORY, **options):
    return tacit.trajectory_equations(OBJECTIVE, trajectory, tacit.l2(), **options)


TRAJECTORIES = {
    "one position": (lambda: from_positions([PARAMS], 0.1), ["1 position"], "two or more"),
    "no position": (lambda: from_positions([], 0.1), ["0 position"], "two or more"),
    "fewer step sizes than steps": (
        lambda: from_positions([PARAMS] * 3, [0.1]),
        ["2 steps", "1 step size"],
        "a single number",
    ),
    **{
        f"a step of time {time!r}": (
            lambda time=time: Trajectory([PARAMS], [PARAMS], [time]),
            ["time", repr(time)],
            "a finite number, above 0",
        )
        for time in (0.0, -0.1, NAN, INF, "0.1", True)
    },
    "a point without a time": (
        lambda: Trajectory([PARAMS], [PARAMS], []),
        ["1 points", "1 displacements", "0 times"],
        "Trajectory.from_positions",
    ),
    "no steps": (lambda: Trajectory([], [], []), ["0 points"], "at least one step"),
    "a displacement of another model": (
        lambda: Trajectory([PARAMS], [{"w": X}], [1]),
        ["displacement 0", "another model", "missing 0.weight", "unknown w"],
        "parameters here are",
    ),
    "a point of numbers": (
        lambda: Trajectory([{"a": 1}], [{"a": 1}], [1.0]),
        ["point 0['a']", "int"],
        "torch.as_tensor",
    ),
    "positions of numbers": (
        lambda: from_positions([{"a": 1}, {"a": 2}], 1.0),
        ["position 0['a']", "int"],
        "torch.as_tensor",
    ),
    "an infinite displacement": (
        lambda: Trajectory([PARAMS], [params_with(INF)], [1.0]),
        ["displacement 0", "'2.bias'", "1 NaN or infinite"],
        "wider dtype",
    ),
    "positions as tensors": (
        lambda: from_positions([X, X], 1),
        ["position 0", "Tensor"],
        "pass a",
    ),
    "a position with NaN": (
        lambda: from_positions([PARAMS, params_with(NAN)], 1),
        ["position 1", "'2.bias'", "1 NaN"],
        "earlier checkpoint",
    ),
    "positions that share their memory": (
        lambda: from_positions([PARAMS, PARAMS], 1),
        ["positions 0 and 1", "memory"],
        "copies",
    ),
    "a list as trajectory": (
        lambda: trajectory_equations([PARAMS]),
        ["trajectory", "list"],
        "tacit.Trajectory",
    ),
    "a trajectory of another model": (
        lambda: trajectory_equations(from_positions([{"w": X}, {"w": X + 1}], 1)),
        ["point", "another model", "unknown w"],
        "parameters here are",
    ),
    "a reference that was not called": (
        lambda: trajectory_equations(reference=tacit.rk4),
        ["reference"],
        "tacit.rk4(substeps=10)",
    ),
    "no reference": (
        lambda: trajectory_equations(reference=None),
        ["reference is None"],
        "pass tacit.equations.euler",
    ),
    "no substeps": (lambda: tacit.rk4(0), ["substeps", "0"], "a whole number, at least 1"),
    "fractional substeps": (lambda: tacit.rk4(2.5), ["substeps", "2.5"], "a whole number"),
}


def record(optimizer=None):
    return tacit.record(MODEL, optimizer)


RECORDINGS = {
    "an optimizer with steps of its own": (
        lambda: record(torch.optim.RMSprop([X])),
        ["RMSprop", "step of its own"],
        "torch's SGD, Adam or AdamW",
    ),
    "the name of an optimizer": (
        lambda: record("sgd"),
        ["optimizer", "'sgd'"],
        "torch.optim.SGD",
    ),
    "an optimizer of a part of the model": (
        lambda: record(torch.optim.SGD([MODEL[0].weight], lr=0.1)),
        ["does not train '0.bias' and 2 others"],
        "requires_grad=False",
    ),
    "parameters instead of a model": (
        lambda: tacit.record(PARAMS),
        ["record", "dict"],
        "torch.nn.Module",
    ),
    "an unknown step size": (lambda: record().step(), ["step size"], "pass it"),
    "a step size of zero": (
        lambda: record().step(0),
        ["time", "0"],
        "a finite number, above 0",
    ),
    "an empty recording": (
        lambda: record().trajectory(),
        ["nothing was recorded"],
        "recorder.step",
    ),
}
STACKS = {
    "no equations": (lambda: tacit.stack([]), ["no equations"], "at least one"),
    "equations that are not in a list": (
        lambda: tacit.stack(EQUATIONS),
        ["Equations"],
        "a list of equations",
    ),
    "a fit among equations": (
        lambda: tacit.stack([tacit.fit(EQUATIONS)]),
        ["Fit"],
        "pass what endpoint",
    ),
    "equations of other candidates": (
        lambda: tacit.stack([EQUATIONS, endpoint(tacit.l1())]),
        ["l1", "l2"],
        "same regularizers",
    ),
    "another number of targets": (
        lambda: tacit.stack([EQUATIONS, difference()]),
        ["2 target columns"],
        "groups",
    ),
    "a layer that does not exist": (
        lambda: EQUATIONS.layer("1"),
        ["no layer '1'"],
        "0, 2",
    ),
}
CASES = {**CANDIDATES, **DIFFERENCES, **TRAJECTORIES, **RECORDINGS, **STACKS}


@pytest.mark.parametrize(("call", "names", "remedy"), CASES.values(), ids=CASES.keys())
def test_a_wrong_call_names_the_mistake_and_the_remedy(call, names, remedy):
    assert_refused(call, names, remedy)


def test_a_displacement_may_exceed_the_range_of_the_points_dtype():
    point, displacement = torch.zeros(1, dtype=torch.float16), torch.tensor([1e5]).double()
    assert len(Trajectory([{"w": point}], [{"w": displacement}], [1.0])) == 1

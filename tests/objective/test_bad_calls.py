"""Wrong data, models, losses and parameters are refused with the mistake and its remedy."""

import pytest
import torch
from support.bad_calls import (
    INF,
    MODEL,
    NAN,
    OBJECTIVE,
    PARAMS,
    WRONG_SHAPE,
    X,
    Y,
    assert_refused,
    make_objective,
    params_with,
    with_value,
)
from support.models import tanh_mlp
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tacit import Objective

ONES = torch.ones(8)
FLOAT32_IMAGES, CONVOLUTION = (X.float()[:, None], Y[:, None]), nn.Conv1d(1, 1, 5).double()
PER_EXAMPLE_MSE = nn.MSELoss(reduction="none")


def with_batch_loss(batch_loss, data=(X, Y), **options):
    return Objective.from_batch_loss(MODEL, batch_loss, data, **options)


def squares(model, batch):
    return (model(batch[0]) - batch[1]).square()[:, 0]


def squares_with_weights(weights):
    return lambda model, batch: (squares(model, batch), weights)


class Exhausted:
    """Looks re-iterable, but every pass continues where the last one stopped."""

    def __init__(self):
        self.batches = iter([(X[:4], Y[:4]), (X[4:], Y[4:])])

    def __iter__(self):
        return self.batches


class ExhaustedDataset(Exhausted, IterableDataset):
    pass


DATA = {
    "tensors without rows": (
        lambda: make_objective((X[:0], Y[:0])),
        ["data is empty"],
        "at least one example",
    ),
    "a list without batches": (
        lambda: make_objective([]),
        ["data is empty"],
        "at least one example",
    ),
    "a dataset without rows": (
        lambda: make_objective(TensorDataset(X[:0], Y[:0])),
        ["data is empty"],
        "at least one",
    ),
    "tensors of different lengths": (
        lambda: make_objective((X, Y[:5])),
        ["differ in length", "8", "5"],
        "one row",
    ),
    "a batch of different lengths": (
        lambda: make_objective([(X, Y[:5])]),
        ["differ in length", "8", "5", "batch"],
        "one row",
    ),
    "a dictionary of different lengths": (
        lambda: with_batch_loss(squares, {"x": X, "y": Y[:5]}),
        ["'x': 8", "'y': 5"],
        "one row",
    ),
    "a generator": (
        lambda: make_objective(batch for batch in [(X, Y)]),
        ["generator", "only once"],
        "list(data)",
    ),
    "a zip": (
        lambda: make_objective(zip([X], [Y], strict=True)),
        ["zip", "only once"],
        "list(data)",
    ),
    "an iterable that is exhausted": (
        lambda: make_objective(Exhausted()),
        ["Exhausted", "only once"],
        "list(data)",
    ),
    "a loader of a dataset that is exhausted": (
        lambda: make_objective(DataLoader(ExhaustedDataset(), None)),
        ["ExhaustedDataset"],
        "list(data)",
    ),
    "NaN in inputs": (
        lambda: make_objective((with_value(X, NAN), Y)),
        ["1 NaN or infinite", "batch 0"],
        "drop or impute",
    ),
    "infinity in targets": (
        lambda: make_objective((X, with_value(Y, INF))),
        ["1 NaN or infinite", "batch 0"],
        "drop or impute",
    ),
    "minus infinity in inputs": (
        lambda: make_objective((with_value(X, -INF), Y)),
        ["1 NaN or infinite", "batch 0"],
        "drop or impute",
    ),
    "NaN in a later batch": (
        lambda: make_objective((with_value(X, NAN, -1), Y), batch_size=3).value(),
        ["NaN", "batch 2"],
        "drop or impute",
    ),
    "NaN in a dataset": (
        lambda: make_objective(TensorDataset(with_value(X, NAN), Y)),
        ["1 NaN or infinite", "batch 0"],
        "drop or impute",
    ),
    "NaN inside a nested batch": (
        lambda: with_batch_loss(squares, [{"x": [with_value(X, NAN)]}]),
        ["1 NaN or infinite", "batch 0"],
        "drop or impute",
    ),
    "a number as data": (lambda: make_objective(3), ["data is 3"], "DataLoader"),
    "a list of two tensors": (
        lambda: make_objective([X, Y]),
        ["a batch is a Tensor"],
        "tuple (X, y)",
    ),
    "inputs without a target": (
        lambda: make_objective((X,)),
        ["a batch is a tuple"],
        "(inputs, …, target)",
    ),
    "a dictionary for a loss of outputs": (
        lambda: make_objective({"x": X, "y": Y}),
        ["a batch is a dict"],
        "from_batch_loss",
    ),
    "a target that is no tensor": (
        lambda: make_objective([(X, "cat")]),
        ["target", "no tensor"],
        "Stack",
    ),
    "float32 data for a float64 model": (
        lambda: make_objective((X.float(), Y)),
        ["float32", "float64"],
        "cast",
    ),
    "float32 data for a float64 convolution": (
        lambda: make_objective(FLOAT32_IMAGES, model=CONVOLUTION),
        ["float32", "float64"],
        "cast",
    ),
    "a batch size of zero": (
        lambda: make_objective(batch_size=0),
        ["batch_size", "0"],
        "a whole number, at least 1",
    ),
    "too few weights": (
        lambda: make_objective(weights=torch.ones(5)),
        ["weights", "(5,)", "8"],
        "one weight",
    ),
    "negative weights": (
        lambda: make_objective(weights=-ONES),
        ["weights"],
        "finite and not negative",
    ),
    "weights that are all zero": (
        lambda: make_objective(weights=ONES * 0),
        ["weights"],
        "one above zero",
    ),
    "weights of NaN": (
        lambda: make_objective(weights=ONES * NAN),
        ["weights"],
        "finite and not negative",
    ),
    "weights for a list of batches": (
        lambda: make_objective([(X, Y)], weights=ONES),
        ["weights"],
        "return (losses, weights)",
    ),
    "weights passed twice": (
        lambda: with_batch_loss(squares_with_weights(ONES), weights=ONES),
        ["weights", "twice"],
        "Leave one out",
    ),
    "a batch loss with too few weights": (
        lambda: with_batch_loss(squares_with_weights(ONES[:3])),
        ["weights", "(3,)", "(8,)"],
        "one weight per loss",
    ),
    "a batch loss with negative weights": (
        lambda: with_batch_loss(squares_with_weights(-ONES)),
        ["weights"],
        "finite and not negative",
    ),
}


def frozen_model():
    return tanh_mlp(0).requires_grad_(False)


def diverged_model():
    model = tanh_mlp(0)
    model[0].weight.data[0, 0] = NAN
    return model


def broadcasting_loss(output, target):
    return (output - target).square().mean()


def root_at_zero(output, target):
    return (output * 0).abs().sqrt().mean()


OBJECTIVES = {
    "a function as model": (
        lambda: make_objective(model=torch.relu),
        ["model is a builtin"],
        "torch.nn.Module",
    ),
    "a model without parameters": (
        lambda: make_objective(model=nn.Tanh()),
        ["Tanh", "no trainable"],
        "unfreeze",
    ),
    "a frozen model": (
        lambda: make_objective(model=frozen_model()),
        ["no trainable"],
        "unfreeze",
    ),
    "a lazy layer": (
        lambda: make_objective(model=nn.LazyLinear(1)),
        ["'weight'", "lazy"],
        "one batch through",
    ),
    "a diverged model": (
        lambda: make_objective(model=diverged_model()),
        ["'0.weight'", "1 NaN"],
        "checkpoint",
    ),
    "a string as loss": (
        lambda: make_objective(loss="mse"),
        ["loss is 'mse'"],
        "pass a function",
    ),
    "an unknown option": (
        lambda: with_batch_loss(squares, drawz=2),
        ["option of from_batch_loss", "'drawz'"],
        "'draws'",
    ),
    "parameters as arrays": (
        lambda: OBJECTIVE.value({n: p.detach().numpy() for n, p in PARAMS.items()}),
        ["params['0.weight']", "ndarray"],
        "torch.as_tensor",
    ),
    "a sum-reduced loss": (
        lambda: make_objective(loss=nn.MSELoss(reduction="sum")),
        ["sum-reduced"],
        "reduction='mean'",
    ),
    "a loss without reduction": (
        lambda: make_objective(loss=PER_EXAMPLE_MSE),
        ["(8, 1)"],
        "a scalar is needed",
    ),
    "a loss that returns a float": (
        lambda: make_objective(loss=lambda output, target: 1.0),
        ["float"],
        "a scalar is needed",
    ),
    "a loss that broadcasts over pairs of examples": (
        lambda: make_objective((X, Y[:, 0]), loss=broadcasting_loss),
        ["not a mean", "broadcast"],
        "from_batch",
    ),
    "a weighted loss without reduction": (
        lambda: make_objective(loss=PER_EXAMPLE_MSE, weights=ONES),
        ["(1, 1)"],
        "mean-reduced",
    ),
    "a batch loss that is a mean": (
        lambda: with_batch_loss(lambda model, batch: squares(model, batch).mean()),
        ["shape ()"],
        "a 1-D tensor",
    ),
    "a batch loss that returns None": (
        lambda: with_batch_loss(lambda model, batch: None),
        ["NoneType"],
        "a 1-D tensor",
    ),
    "a loss of NaN": (
        lambda: make_objective(loss=lambda output, target: output.mean() * NAN).value(),
        ["loss is nan", "batch 0"],
        "wider dtype",
    ),
    "a derivative of infinity": (
        lambda: make_objective(loss=root_at_zero).gradient(),
        ["derivative", "'0.weight'"],
        "wider dtype",
    ),
    "a loss of detached outputs": (
        lambda: make_objective(loss=lambda output, target: output.detach().mean()).gradient(),
        ["does not depend"],
        "detached",
    ),
    "no draws": (
        lambda: make_objective(draws=0),
        ["draws", "0"],
        "a whole number, at least 1",
    ),
    "a fractional number of draws": (
        lambda: make_objective(draws=1.5),
        ["draws", "1.5"],
        "a whole number",
    ),
    "a truth value as number of draws": (
        lambda: make_objective(draws=True),
        ["draws", "True"],
        "a whole number",
    ),
    "a negative seed": (
        lambda: make_objective(seed=-1),
        ["seed", "-1"],
        "a whole number, at least 0",
    ),
    "params as a list": (
        lambda: OBJECTIVE.value([1.0]),
        ["params", "list"],
        "pass a dictionary",
    ),
    "params that are numbers": (
        lambda: OBJECTIVE.value(dict.fromkeys(PARAMS, 1)),
        ["'0.weight'", "int"],
        "pass a tensor",
    ),
    "params of another model": (
        lambda: OBJECTIVE.value({"w": X}),
        ["params", "another model", "missing 0.weight", "unknown w"],
        "parameters here are",
    ),
    "params of another shape": (
        lambda: OBJECTIVE.gradient(WRONG_SHAPE),
        ["'2.bias'", "(4,)", "(1,)"],
        "same architecture",
    ),
    "params with NaN": (
        lambda: OBJECTIVE.value(params_with(NAN)),
        ["params", "'2.bias'", "1 NaN"],
        "earlier checkpoint",
    ),
    "params with infinity": (
        lambda: OBJECTIVE.gradient(params_with(INF)),
        ["params", "'2.bias'", "1 NaN or inf"],
        "earlier checkpoint",
    ),
    "a direction of another model": (
        lambda: OBJECTIVE.hvp({"w": X}),
        ["direction", "another model", "missing 0.weight", "unknown w"],
        "parameters here are",
    ),
    "a direction with NaN": (
        lambda: OBJECTIVE.hvp(params_with(NAN)),
        ["direction", "'2.bias'", "1 NaN"],
        "earlier checkpoint",
    ),
}
CASES = {**DATA, **OBJECTIVES}


@pytest.mark.parametrize(("call", "names", "remedy"), CASES.values(), ids=CASES.keys())
def test_a_wrong_call_names_the_mistake_and_the_remedy(call, names, remedy):
    assert_refused(call, names, remedy)

"""One regularizer of every family, on one small network."""

import torch
from torch import nn
from torch.nn import functional as F

import tacit
from support.models import params_of, random_data, tanh_mlp

MODEL = tanh_mlp(0, sizes=(3, 4, 2))
START = params_of(MODEL)
OBJECTIVE = tacit.Objective(MODEL, F.mse_loss, random_data(1, count=9, inputs=3, outputs=2))

DROPOUT_MODEL = nn.Sequential(MODEL[0], nn.Sequential(nn.Tanh(), nn.Dropout(0.2)), MODEL[2])
CLASS_DATA = random_data(1, count=9, inputs=3)[0], torch.arange(9) % 2
SQUARED_DROPOUT = tacit.Objective(DROPOUT_MODEL, F.mse_loss, OBJECTIVE.data)
DROPOUT_OBJECTIVE = tacit.Objective(DROPOUT_MODEL, F.cross_entropy, CLASS_DATA)

ADAMW = torch.optim.AdamW(MODEL.parameters())
for parameter in MODEL.parameters():  # as after three steps
    squares = torch.full_like(parameter, 0.1) + parameter.detach().square()
    ADAMW.state[parameter] = {"step": torch.tensor(3.0), "exp_avg_sq": squares}


def coupled(params):
    """A penalty that is not a sum over tensors."""
    spread = sum(p.sin().sum() for p in params.values())
    return spread.exp() + params["0.weight"].sum() * params["2.weight"].square().sum()


KNOTS = (-0.7, -0.2, 0.05, 0.33, 0.61)
"""Knots of splines; where they are a number, the knots depend on the scope."""
SEPARABLE = {
    "l2": tacit.l2,
    "l1": tacit.l1,
    "smooth_l1": lambda **options: tacit.smooth_l1(0.7, **options),
    "distance_to": lambda **options: tacit.regularizers.distance_to(START, **options),
    "group_l2": tacit.regularizers.group_l2,
    "nuclear_norm": tacit.regularizers.nuclear_norm,
    "metric_ridge": lambda **options: tacit.regularizers.metric_ridge(ADAMW, MODEL, **options),
    "power": lambda **options: tacit.regularizers.power(0.5, **options),
    "power of 1.5": lambda **options: tacit.regularizers.power(1.5, **options),
    "hypentropy": lambda **options: tacit.regularizers.hypentropy(0.3, **options),
    "schatten": lambda **options: tacit.regularizers.schatten(0.5, **options),
    "schatten of 3": lambda **options: tacit.regularizers.schatten(3, **options),
    "spectral_norm": tacit.regularizers.spectral_norm,
    "stable_rank": tacit.regularizers.stable_rank,
    "orthogonality": tacit.regularizers.orthogonality,
}
ONLY_MATRICES = (
    *("nuclear_norm", "schatten", "spectral_norm", "stable_rank", "orthogonality", "balance"),
    "spectral_spline",
)
NOT_SEPARABLE = {
    "spline": lambda **options: tacit.regularizers.spline(KNOTS, **options),
    "spline of even shape": lambda **options: tacit.regularizers.spline(
        KNOTS[2:], even=True, **options
    ),
    "spline of convex shape": lambda **options: tacit.regularizers.spline(
        KNOTS[2:], even=True, convex=True, **options
    ),
    "spectral_spline": lambda **options: tacit.regularizers.spectral_spline(KNOTS[2:], **options),
    "diagonal": tacit.regularizers.diagonal,
    "symmetric": tacit.regularizers.symmetric,
    "balance": tacit.regularizers.balance,
    "gradient_norm": lambda **options: tacit.regularizers.gradient_norm(OBJECTIVE, **options),
    "explicit_dropout": lambda **options: tacit.regularizers.explicit_dropout(
        DROPOUT_OBJECTIVE, **options
    ),
    "custom": lambda **options: tacit.regularizer("custom", coupled, **options),
}
FAMILIES = SEPARABLE | NOT_SEPARABLE


CLASSIFIER = tacit.Objective(nn.Sequential(*MODEL, nn.Tanh()), F.cross_entropy, CLASS_DATA)
BATCHES = tacit.Objective(MODEL, F.mse_loss, OBJECTIVE.data, batch_size=4)
PENALTY = tacit.Objective.from_batch_loss(
    MODEL, lambda model, batch: torch.logsumexp(model(batch[0]), 1).square(), CLASS_DATA
)
FROZEN_HEAD = nn.Linear(2, 2).double().requires_grad_(False)
LONGER = tacit.Objective(nn.Sequential(*MODEL, nn.Tanh(), FROZEN_HEAD), F.mse_loss, OBJECTIVE.data)


def made(factory, objective, **options):
    """A factory of a family of data, which takes further options."""
    return lambda **more: factory(objective, **options, **more)


FROM_DATA = {
    "mean_of": made(tacit.regularizers.mean_of, PENALTY),
    "gradient_norm of power 1": made(tacit.regularizers.gradient_norm, OBJECTIVE, power=1),
    "gradient_norm of a layer": made(tacit.regularizers.gradient_norm, OBJECTIVE, of="2"),
    "gradient_l1": made(tacit.regularizers.gradient_l1, OBJECTIVE, eps=0.1),
    "gradient_variance": made(tacit.regularizers.gradient_variance, BATCHES),
    "hessian_trace": made(tacit.regularizers.hessian_trace, OBJECTIVE),
    "input_jacobian": made(tacit.regularizers.input_jacobian, CLASSIFIER),
    "input_jacobian of outputs": made(
        tacit.regularizers.input_jacobian, CLASSIFIER, weighted=False
    ),
    "input_laplacian": made(tacit.regularizers.input_laplacian, CLASSIFIER),
    "dropout_moments": made(tacit.regularizers.dropout_moments, SQUARED_DROPOUT),
    "activation_norm": made(tacit.regularizers.activation_norm, OBJECTIVE, layers=["1", "2"]),
    "activation_norm of weights": made(
        tacit.regularizers.activation_norm, LONGER, layers=["0", "2", "4"], weighted=True
    ),
}
"""Passes over the data take time: these are tested with fewer scopes."""

"""Candidate regularizers: each has a name, gradient columns ∇R_j(θ) and values R_j(θ)."""

from tacit.regularizers.activations import activation_norm
from tacit.regularizers.by_layer import layerwise
from tacit.regularizers.contract import check_contract
from tacit.regularizers.custom import regularizer
from tacit.regularizers.data_dependent import mean_of
from tacit.regularizers.dropout.moments import dropout_moments
from tacit.regularizers.dropout.penalty import explicit_dropout
from tacit.regularizers.elementwise import distance_to, hypentropy, l1, l2, power, smooth_l1
from tacit.regularizers.family import (
    Columns,
    Regularizer,
    TensorGradient,
    join_columns,
    separable,
)
from tacit.regularizers.hessian import hessian_trace
from tacit.regularizers.input_derivatives import input_jacobian, input_laplacian
from tacit.regularizers.loss_gradients import gradient_l1, gradient_norm, gradient_variance
from tacit.regularizers.matrices import (
    group_l2,
    nuclear_norm,
    orthogonality,
    schatten,
    spectral_norm,
    stable_rank,
)
from tacit.regularizers.overview import catalogue
from tacit.regularizers.quadratic import diagonal, symmetric
from tacit.regularizers.splines import spectral_spline, spline
from tacit.regularizers.units import balance
from tacit.regularizers.weight_decay import metric_ridge, optimizer_penalties

__all__ = [
    "Columns",
    "Regularizer",
    "TensorGradient",
    "activation_norm",
    "balance",
    "catalogue",
    "check_contract",
    "diagonal",
    "distance_to",
    "dropout_moments",
    "explicit_dropout",
    "gradient_l1",
    "gradient_norm",
    "gradient_variance",
    "group_l2",
    "hessian_trace",
    "hypentropy",
    "input_jacobian",
    "input_laplacian",
    "join_columns",
    "l1",
    "l2",
    "layerwise",
    "mean_of",
    "metric_ridge",
    "nuclear_norm",
    "optimizer_penalties",
    "orthogonality",
    "power",
    "regularizer",
    "schatten",
    "separable",
    "smooth_l1",
    "spectral_norm",
    "spectral_spline",
    "spline",
    "stable_rank",
    "symmetric",
]

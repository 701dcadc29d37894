"""Candidate regularizers: each has a name, gradient columns ∇R_j(θ) and values R_j(θ)."""

from tacit.regularizers.custom import regularizer
from tacit.regularizers.data_dependent import gradient_norm
from tacit.regularizers.dropout.penalty import explicit_dropout
from tacit.regularizers.elementwise import distance_to, l1, l2, smooth_l1
from tacit.regularizers.family import Columns, Regularizer, join_columns, layerwise
from tacit.regularizers.hessian import hessian_trace
from tacit.regularizers.matrices import group_l2, nuclear_norm
from tacit.regularizers.quadratic import diagonal, symmetric
from tacit.regularizers.weight_decay import metric_ridge, optimizer_penalties

__all__ = [
    "Columns",
    "Regularizer",
    "diagonal",
    "distance_to",
    "explicit_dropout",
    "gradient_norm",
    "group_l2",
    "hessian_trace",
    "join_columns",
    "l1",
    "l2",
    "layerwise",
    "metric_ridge",
    "nuclear_norm",
    "optimizer_penalties",
    "regularizer",
    "smooth_l1",
    "symmetric",
]

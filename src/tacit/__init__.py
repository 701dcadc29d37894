"""Estimate the regularization that a training run applied without writing it down."""

from tacit import bounds, ensembles, theory
from tacit.bootstrapping import bootstrap, time_varying
from tacit.equations import Equations, stack
from tacit.errors import InputError, Problem
from tacit.fitting import Fit, fit
from tacit.flow import euler, rk4
from tacit.matching import (
    difference_equations,
    endpoint_equations,
    estimate,
    trajectory_equations,
)
from tacit.objective import Objective
from tacit.regularizers import (
    Regularizer,
    diagonal,
    distance_to,
    explicit_dropout,
    gradient_norm,
    group_l2,
    l1,
    l2,
    layerwise,
    nuclear_norm,
    regularizer,
    smooth_l1,
    symmetric,
)
from tacit.trajectory import Recorder, Trajectory, record
from tacit.validation import (
    Certificate,
    LeastSquaresCertificate,
    Validation,
    certify,
    certify_least_squares,
    penalty,
    validate,
)

__all__ = [
    "Certificate",
    "Equations",
    "Fit",
    "InputError",
    "LeastSquaresCertificate",
    "Objective",
    "Problem",
    "Recorder",
    "Regularizer",
    "Trajectory",
    "Validation",
    "bootstrap",
    "bounds",
    "certify",
    "certify_least_squares",
    "diagonal",
    "difference_equations",
    "distance_to",
    "endpoint_equations",
    "ensembles",
    "estimate",
    "euler",
    "explicit_dropout",
    "fit",
    "gradient_norm",
    "group_l2",
    "l1",
    "l2",
    "layerwise",
    "nuclear_norm",
    "penalty",
    "record",
    "regularizer",
    "rk4",
    "smooth_l1",
    "stack",
    "symmetric",
    "theory",
    "time_varying",
    "trajectory_equations",
    "validate",
]

"""Estimate the regularization that a training run applied without writing it down."""

from tacit import bounds, ensembles, identifiability, theory
from tacit.averaging import EpochAverages, average_epochs
from tacit.bootstrapping import bootstrap, time_varying
from tacit.equations import Equations, stack
from tacit.errors import InputError, Problem
from tacit.fitting import Fit, fit
from tacit.flow import euler, rk4
from tacit.identifiability import (
    compare,
    drift,
    null_distribution,
    ordered_shares,
    unique_shares,
)
from tacit.matching import (
    difference_equations,
    endpoint_equations,
    estimate,
    trajectory_equations,
)
from tacit.noise import Noise
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
from tacit.uncertainty.error_bars import ErrorBars
from tacit.uncertainty.scores import Scores, score_examples
from tacit.uncertainty.stationary import stationary_error_bars
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
    "EpochAverages",
    "Equations",
    "ErrorBars",
    "Fit",
    "InputError",
    "LeastSquaresCertificate",
    "Noise",
    "Objective",
    "Problem",
    "Recorder",
    "Regularizer",
    "Scores",
    "Trajectory",
    "Validation",
    "average_epochs",
    "bootstrap",
    "bounds",
    "certify",
    "certify_least_squares",
    "compare",
    "diagonal",
    "difference_equations",
    "distance_to",
    "drift",
    "endpoint_equations",
    "ensembles",
    "estimate",
    "euler",
    "explicit_dropout",
    "fit",
    "gradient_norm",
    "group_l2",
    "identifiability",
    "l1",
    "l2",
    "layerwise",
    "nuclear_norm",
    "null_distribution",
    "ordered_shares",
    "penalty",
    "record",
    "regularizer",
    "rk4",
    "score_examples",
    "smooth_l1",
    "stack",
    "stationary_error_bars",
    "symmetric",
    "theory",
    "time_varying",
    "trajectory_equations",
    "unique_shares",
    "validate",
]

"""Estimate the regularization that a training run applied without writing it down."""

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

__all__ = [
    "Equations",
    "Fit",
    "InputError",
    "Objective",
    "Problem",
    "Recorder",
    "Regularizer",
    "Trajectory",
    "diagonal",
    "difference_equations",
    "distance_to",
    "endpoint_equations",
    "estimate",
    "euler",
    "fit",
    "gradient_norm",
    "group_l2",
    "l1",
    "l2",
    "layerwise",
    "nuclear_norm",
    "record",
    "regularizer",
    "rk4",
    "smooth_l1",
    "stack",
    "symmetric",
    "trajectory_equations",
]

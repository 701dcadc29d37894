"""Estimate the regularization that a training run applied without writing it down.

Names are imported when they are first used, so that `tacit --help` does not wait for torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit import (
        bounds,
        ensembles,
        equations,
        fitting,
        identifiability,
        objective,
        reference,
        regularizers,
        theory,
        uncertainty,
        validation,
    )
    from tacit.equations import (
        Equations,
        Target,
        Trajectory,
        average_epochs,
        bootstrap,
        difference_equations,
        difference_target,
        endpoint_equations,
        endpoint_target,
        record,
        rk4,
        stack,
        trajectory_equations,
        trajectory_target,
    )
    from tacit.errors import InputError, Problem
    from tacit.estimating import estimate, time_varying
    from tacit.fitting import Fit, fit
    from tacit.identifiability import null_distribution
    from tacit.objective import Objective
    from tacit.regularizers import Regularizer, l1, l2, layerwise, regularizer, smooth_l1
    from tacit.uncertainty import score_examples
    from tacit.validation import validate

__all__ = [
    "Equations",
    "Fit",
    "InputError",
    "Objective",
    "Problem",
    "Regularizer",
    "Target",
    "Trajectory",
    "average_epochs",
    "bootstrap",
    "bounds",
    "difference_equations",
    "difference_target",
    "endpoint_equations",
    "endpoint_target",
    "ensembles",
    "equations",
    "estimate",
    "fit",
    "fitting",
    "identifiability",
    "l1",
    "l2",
    "layerwise",
    "null_distribution",
    "objective",
    "record",
    "reference",
    "regularizer",
    "regularizers",
    "rk4",
    "score_examples",
    "smooth_l1",
    "stack",
    "theory",
    "time_varying",
    "trajectory_equations",
    "trajectory_target",
    "uncertainty",
    "validate",
    "validation",
]

try:
    __version__ = version("tacit")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"

_HOMES = {
    "tacit.equations": (
        "Equations Target Trajectory average_epochs bootstrap difference_equations "
        "difference_target endpoint_equations endpoint_target record rk4 stack "
        "trajectory_equations trajectory_target"
    ),
    "tacit.errors": "InputError Problem",
    "tacit.estimating": "estimate time_varying",
    "tacit.fitting": "Fit fit",
    "tacit.identifiability": "null_distribution",
    "tacit.objective": "Objective",
    "tacit.regularizers": "Regularizer l1 l2 layerwise regularizer smooth_l1",
    "tacit.uncertainty": "score_examples",
    "tacit.validation": "validate",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in __all__:
        value = import_module(f"tacit.{name}")
    else:
        raise AttributeError(f"module 'tacit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

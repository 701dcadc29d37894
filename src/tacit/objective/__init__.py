"""A model, a loss and data as functions of the parameters."""

from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, matrices
from tacit.objective.randomness import Noise

__all__ = ["Noise", "Objective", "Params", "Scope", "matrices"]

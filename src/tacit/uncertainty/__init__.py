"""Error bars that need the objective again: for sampled examples."""

from tacit.uncertainty.folds import cross_fit
from tacit.uncertainty.sampling import Scores
from tacit.uncertainty.scores import score_examples

__all__ = ["Scores", "cross_fit", "score_examples"]

"""Error bars that need the objective again: for sampled examples, and for the noise of SGD."""

from tacit.uncertainty.folds import cross_fit
from tacit.uncertainty.sampling import Scores
from tacit.uncertainty.scores import score_examples
from tacit.uncertainty.stationary import stationary_error_bars

__all__ = ["Scores", "cross_fit", "score_examples", "stationary_error_bars"]

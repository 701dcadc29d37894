"""Error bars that need the objective again: for sampled examples, and for the noise of SGD."""

from tacit.uncertainty.sampling import Scores
from tacit.uncertainty.scores import score_examples
from tacit.uncertainty.stationary import stationary_error_bars

__all__ = ["Scores", "score_examples", "stationary_error_bars"]

"""The penalties of dropout: to second order in the noise of the masks, and at any rate.

`penalty` is the second-order family, `layers` finds a model's dropout layers and records their
inputs, and `terms` computes the penalty of one batch. `moments` is the family for any rate: `chain`
reads a model as a chain of layers, `propagation` and `activations` have the moments of its outputs
under random masks, and `skewed` the expected loss of outputs with these moments.
"""

from tacit.regularizers.dropout.moments import batch_penalty, dropout_moments
from tacit.regularizers.dropout.penalty import explicit_dropout

__all__ = ["batch_penalty", "dropout_moments", "explicit_dropout"]

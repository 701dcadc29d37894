"""The explicit regularizer of dropout.

`penalty` is the family, `layers` finds a model's dropout layers and records their inputs, and
`terms` computes the penalty of one batch.
"""

from tacit.regularizers.dropout.penalty import explicit_dropout

__all__ = ["explicit_dropout"]

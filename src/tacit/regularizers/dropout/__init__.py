"""The penalty that dropout adds to a loss: its family, the layers it acts in, and one batch."""

from tacit.regularizers.dropout.penalty import explicit_dropout

__all__ = ["explicit_dropout"]

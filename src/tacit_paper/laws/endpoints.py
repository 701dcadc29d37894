"""Laws of where training ends: decay, early stopping, averaging, other parameters of a model."""

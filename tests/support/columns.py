"""The columns and kinks of a regularizer as dense tensors, and random parameters."""

import torch

from tacit import reference


def random_params(like, seed=1, scale=1.0):
    """Gaussian parameters in the shapes of others."""
    generator = torch.Generator().manual_seed(seed)
    return {
        n: scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for n, p in like.items()
    }


def dense_columns(regularizer, params):
    """All gradient columns as one matrix of shape (parameters, columns)."""
    columns = regularizer.gradient(params).values()
    return torch.stack([reference.flat(column) for column in columns], dim=1)


def kinks_of(regularizer, params):
    """The kink mask of every tensor, in its shape; tensors without a mask are absent."""
    columns = regularizer.bind(params)
    masks = {n: columns.kinks(n, slice(0, params[n].numel())) for n in columns.active}
    return {n: mask.view(params[n].shape) for n, mask in masks.items() if mask is not None}


def kink_positions(regularizer, params):
    """The indices of the kinks in every tensor that has any."""
    masks = kinks_of(regularizer, params)
    return {n: mask.nonzero().tolist() for n, mask in masks.items() if mask.any()}

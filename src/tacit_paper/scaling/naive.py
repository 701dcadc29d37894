"""The same strengths by the normal equations, from gradients that were added up in `.grad`."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from tacit_paper import Row

BETA = 1e-3
"""The width of the smoothed lasso."""
SLICE = 2**22
"""Entries of a parameter that are in float64 at once."""


def strength_columns(strengths: Mapping[str, float], model: nn.Module, batches: int) -> Row:
    """What each penalty contributes, and the distance from the naive strengths.

    Both are in units of ‖∇L‖, so that they say something for strengths near zero as well: a part is
    λ‖∇R‖/‖∇L‖, and the distance is ‖Σ (λ_k − naive λ_k) ∇R_k‖/‖∇L‖.
    """
    naive, gram = naive_strengths(model, batches)
    values = torch.tensor([strengths["l2"], strengths["smooth_l1"]], dtype=torch.float64)
    l2_part, smooth_l1_part = (values * gram.diagonal().sqrt()).tolist()
    error = values - naive
    distance = float(error @ gram @ error) ** 0.5
    return {"l2_part": l2_part, "smooth_l1_part": smooth_l1_part, "naive_distance": distance}


def naive_strengths(model: nn.Module, batches: int) -> tuple[Tensor, Tensor]:
    """Strengths of `l2` and `smooth_l1`, and ΦᵀΦ/‖∇L‖² of their columns Φ.

    (ΦᵀΦ)λ = −Φᵀ∇L, with the columns 2θ and θ/β limited to [−1, 1]. `.grad` has the sum of the
    gradients of all batches.
    """
    products = torch.zeros(3, 3, dtype=torch.float64)
    for parameter in model.parameters():
        theta, gradient = parameter.detach(), parameter.grad
        assert gradient is not None
        for weights, slopes in zip(_slices(theta), _slices(gradient), strict=True):
            huber = (weights / BETA).clamp(-1, 1)
            columns = torch.stack([2 * weights, huber, -slopes / batches])
            products += (columns @ columns.T).cpu()
    gram = products[:2, :2]
    return torch.linalg.solve(gram, products[:2, 2]), gram / products[2, 2]


def _slices(tensor: Tensor) -> Iterator[Tensor]:
    return (part.double() for part in tensor.flatten().split(SLICE))

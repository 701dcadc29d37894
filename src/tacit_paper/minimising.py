"""L-BFGS in place, for optima that laws and penalties are compared at."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def minimise(
    function: Callable[[], Tensor],
    tensors: Iterable[Tensor],
    *,
    iterations: int = 5000,
    history: int = 50,
    tolerance: float = 1e-12,
) -> None:
    """Minimise a function of tensors in place, until no entry of its gradient is above a size."""
    variables = [tensor.requires_grad_() for tensor in tensors]
    optimizer = torch.optim.LBFGS(
        variables, max_iter=iterations, max_eval=2 * iterations, history_size=history,
        tolerance_grad=tolerance, tolerance_change=0.0, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = function()
        value.backward()
        return value

    optimizer.step(closure)
    optimizer.zero_grad()

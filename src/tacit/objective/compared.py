"""Derivatives of an objective, compared with finite differences on a few examples."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.batches import BatchPair
from tacit.objective.params import Params, shorten
from tacit.objective.passes import Passes
from tacit.objective.third_order import wrong_third_derivatives


class ComparedDerivatives:
    """What is known of torch's derivatives of an objective; each order is compared once."""

    def __init__(self, passes: Passes, probe: BatchPair):
        self._passes, self._probe = passes, probe
        self._products_checked = False
        self._wrong_thirds: tuple[str, ...] | None = None

    def wrong_gradient(self, point: Params, names: Sequence[str]) -> tuple[str, ...]:
        """The layers in which ∇L is not the finite difference of L."""
        passes = self._passes

        def value(params: Params) -> Tensor:
            with passes.prepared(training=passes.training), torch.enable_grad():
                pair = passes.to_model(self._probe)
                return passes.call(
                    params, lambda model, noise: passes.loss.mean(model, pair, noise).mean, draw=0
                )

        return derivatives.wrong_gradient(value, point, names)

    def check_products(self, point: Params) -> None:
        """Refuse a model through which double backward is wrong."""
        if self._products_checked:
            return
        gradient = partial(self._passes.batch_gradient, pair=self._probe)

        def product(params: Params, direction: Params) -> Sequence[Tensor | None]:
            along = partial(derivatives.hessian_product, direction=direction)
            return gradient(params, derivative=along)

        if layers := derivatives.wrong_product(gradient, product, point):
            raise InputError(
                f"second derivatives of the loss are wrong in {shorten(layers)}: a Hessian product "
                "is not the finite difference of the gradient. The layer calls a function that "
                "cannot be differentiated twice: write its backward pass in torch operations "
                "that autograd can follow, without .detach() or .data, or leave out what needs "
                "second derivatives."
            )
        self._products_checked = True

    def wrong_thirds(self, point: Params) -> tuple[str, ...]:
        """The layers in which torch's third derivatives are wrong."""
        if self._wrong_thirds is None:
            derive = partial(self._passes.batch_gradient, pair=self._probe)
            self._wrong_thirds = wrong_third_derivatives(derive, point, self._passes.model)
        return self._wrong_thirds

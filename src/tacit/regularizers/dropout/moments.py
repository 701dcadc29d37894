"""The penalty of dropout at any rate, by propagating moments through a chain."""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tacit.errors import InputError, check_type
from tacit.objective import derivatives
from tacit.objective.losses import Loss, split_batch
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, describe
from tacit.regularizers.data_dependent import mean_penalty, per_example
from tacit.regularizers.dropout.chain import NEEDED, Chain, Linear, called_modules, read_chain
from tacit.regularizers.dropout.layers import dropout_layers
from tacit.regularizers.dropout.propagation import output_moments
from tacit.regularizers.dropout.skewed import (
    MOST_SKEWED,
    expected_losses,
    losses_of,
    points_per_example,
)
from tacit.regularizers.family import Regularizer

ENTRIES = {"cpu": 2**22, "cuda": 2**26}
"""Entries of the covariances of the examples that are propagated at once, by kind of device."""


class BatchPenalty(Protocol):
    """R_i of every example of a batch; see `batch_penalty`."""

    def __call__(
        self, params: Params, inputs: Tensor, targets: Any, rates: Tensor | None = None
    ) -> Tensor:
        """R_i of every example."""
        ...


def dropout_moments(
    objective: Objective, *, scope: Scope = None, name: str = "dropout_moments"
) -> Regularizer:
    """The penalty that dropout adds at any rate, R(θ) = mean_i [E_z ℓ(z, y_i) − ℓ(f(x_i), y_i)].

    z are the outputs under random masks, at the rates of the model's `nn.Dropout` modules. Mean,
    full covariance and third cumulants are propagated layer by layer (`propagation`), and E ℓ is
    taken over outputs with these moments (`skewed`). No parameter is fitted, and dropout has
    strength 1.

    R is exact for squared error with dropout on the inputs of linear networks, or only on the last
    hidden layer. Otherwise it is an approximation, which needs no expansion in the rate: that of
    the second-order `explicit_dropout` diverges as q/(1−q) grows. To propagate moments is known
    (Wang & Manning 2013); of a penalty with skewed outputs no earlier one is known to us.

    The model must be a chain of `nn.Linear`, `nn.ReLU`, `nn.GELU`, `nn.Tanh` and `nn.Dropout`. The
    column takes one pass, in which every example has a width × width covariance per layer: hundreds
    of gradient passes (500 at 3 layers of 256), more the wider the layers. Examples are propagated
    in small groups, whatever the objective's batch size.

    Traps:
        Unlike for `explicit_dropout`, the rates are in R: the strength to expect is 1, not
        q/(1−q). A strength far from 1 says that the approximation fails, even if much is explained.

        It fails where noise is large and passes many layers, as in five hidden layers at q = ½,
        where skewness is no small correction any more. Fits then explain less, with a strength far
        from 1.

        Above 32 outputs, the skewness of the outputs is left out, and R is too large.

        The rates are read when this function is called. Layers with p = 0 do nothing.

    Args:
        objective: an Objective(model, loss, data), with or without `training=True`. The loss is any
            mean-reduced loss of outputs that `torch.func.vmap` can map. E ℓ is a mean over 512
            points (2 per output, if that is more), the same for all examples: exact for quadratic
            losses, within a few per cent of ∇R for cross-entropy.
        scope: which rows the column covers.
        name: the name that the strength is listed under.
    """
    needed = "the tacit.Objective of the model with dropout layers"
    check_type("the objective of dropout_moments", objective, Objective, needed)
    if objective.loss is None:
        raise InputError(
            "dropout_moments needs the loss as a function of the model's output, and this "
            "objective is from_batch_loss: make it as Objective(model, loss, data)."
        )
    chain, loss = read_chain(objective.model), objective.loss
    dropout_layers(objective, by_layer=False, name="dropout_moments")
    _check_chain(objective, chain)
    penalty = _of_batch(chain, loss)
    size = _examples_at_once(chain)

    def penalties(model: nn.Module, batch: Any) -> Tensor:
        (inputs, *_), target = split_batch(batch)
        params, x = chain.params(), rows_of(inputs, chain)
        parts = [slice(start, start + size) for start in range(0, len(x), size)]
        if len(parts) <= 1:
            return penalty(params, x, target)
        terms = [
            checkpoint(penalty, params, x[part], target[part], use_reentrant=False)
            for part in parts
        ]
        return torch.cat(terms)

    examples = per_example("dropout_moments", objective, penalties, batch_size=size)
    family = mean_penalty(
        examples, objective, scope=scope, name=name, cost="second-order", compare=False
    )
    rates = ", ".join(f"{m.p:g}" for m in chain.modules if isinstance(m, nn.Dropout))
    return replace(family, definition=f"dropout_moments(p={rates})")


def batch_penalty(model: nn.Module, loss: Loss) -> BatchPenalty:
    """The penalty of `dropout_moments` of one batch, to train with in place of dropout.

    Returns penalty(params, inputs, targets, rates=None), which has R_i of every example and is
    differentiable by the parameters. Add its mean to the plain loss.

    Parameters are named as in the model. They may have one more dimension in front, for members of
    an ensemble; then inputs are (members, examples, features), targets have both dimensions too,
    and so has R_i. `rates` are None for the rates of the model's layers, or one rate per member for
    all layers with p > 0.

    Trap: the whole batch is in one graph, with several tensors of examples × width × width per
    layer. The model's modules must be called in the order in which they are registered, and nothing
    else: only `dropout_moments` checks it.

    >>> import tacit
    >>> model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1, bias=False))
    >>> penalty = tacit.regularizers.dropout.batch_penalty(model, nn.functional.mse_loss)
    >>> x, y = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1)
    >>> penalty({"1.weight": torch.tensor([[3.0, 1.0]])}, x, y)  # q/(1−q) Σ_j x_j² w_j²
    tensor([13.0000])
    """
    check_type("the model of batch_penalty", model, nn.Module, "a chain, such as nn.Sequential")
    return _of_batch(read_chain(model), loss)


def _of_batch(chain: Chain, loss: Loss) -> BatchPenalty:
    losses = losses_of(loss)

    def penalty(
        params: Params, inputs: Tensor, targets: Any, rates: Tensor | None = None
    ) -> Tensor:
        moments = output_moments(chain, params, inputs, rates)
        plain = chain.outputs(params, inputs)
        return expected_losses(losses, moments, targets) - losses(plain.unsqueeze(-2), targets)

    return penalty


def _check_chain(objective: Objective, chain: Chain) -> None:
    """Refuse a model that does more than call its modules in the order of the chain."""

    def compare(model: nn.Module, batch: Any, weights: Tensor | None, index: int) -> None:
        inputs, target = split_batch(batch)
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or not isinstance(target, Tensor):
            raise InputError(
                f"a batch has {len(inputs)} inputs and a target of {describe(target)}: "
                "dropout_moments needs batches of two tensors, (inputs, target)."
            )
        outputs, called = called_modules(chain, model, inputs)
        if tuple(called) != chain.modules:
            raise InputError(
                f"{type(model).__name__} does not call its modules once each in the order in which "
                f"they are registered: {NEEDED}. Write it as nn.Sequential, in the order of calls."
            )
        x = rows_of(inputs[0], chain)
        with torch.no_grad():
            own = chain.outputs(chain.params(), x)
        tolerance = torch.finfo(own.dtype).eps ** 0.5 * float(own.abs().max())
        if own.shape != outputs.shape or not torch.allclose(own, outputs, rtol=0, atol=tolerance):
            raise InputError(
                f"{type(model).__name__} does more than its modules, one after the other: a "
                f"function such as F.relu, a skip connection, a hook. {NEEDED}. Write functions as "
                "modules, or use explicit_dropout, which takes any model."
            )

    objective.for_each_batch(derivatives.leaves(objective.point()), compare, probe=True)


def rows_of(inputs: Tensor, chain: Chain) -> Tensor:
    """The inputs with one row per example."""
    if any(isinstance(module, nn.Flatten) for module in chain.modules):
        inputs = inputs.flatten(1)
    if inputs.ndim != 2:
        raise InputError(
            f"the inputs have shape {tuple(inputs.shape)}: dropout_moments needs one row of "
            "features per example. Put nn.Flatten first, or flatten the data."
        )
    return inputs


def _examples_at_once(chain: Chain) -> int:
    """How many examples are propagated at once."""
    params = chain.params()
    widths = [params[step.weight].shape[0] for step in chain.steps if isinstance(step, Linear)]
    outputs = widths[-1]
    pairs = outputs**2 if outputs <= MOST_SKEWED else 0
    entries = max(max(widths) ** 2, pairs * max(widths), points_per_example(outputs) * outputs)
    device = next(iter(params.values())).device.type
    return max(1, ENTRIES.get(device, ENTRIES["cpu"]) // entries)

"""Penalties that are means over examples, and values that are streamed over the data."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tacit.errors import InputError, check_type
from tacit.objective import derivatives
from tacit.objective.deriving import has_shift, has_technique
from tacit.objective.losses import BatchLoss
from tacit.objective.objective import BATCH_SIZE, Objective, ObjectiveOptions
from tacit.objective.params import Params, Scope, select, shorten
from tacit.regularizers.family import Columns, Cost, Regularizer, whole_column


def mean_of(objective: Objective, *, scope: Scope = None, name: str = "mean_of") -> Regularizer:
    """The mean of another objective, R(θ) = mean_i r_i(θ), for any penalty r_i per example.

    Value, gradient and the influence of examples are streamed over its data. Write the penalty as
    `Objective.from_batch_loss(model, penalties, data)`, where penalties(model, batch) returns one
    number per example. What a technique adds to the mean loss L is then one line:

        label smoothing ε         mean_i [log p_y − mean_k log p_k]     at ε
        confidence penalty β      mean_i Σ_k p_k log p_k                at β
        distillation of weight a  mean_i [loss to the teacher − loss]   at a
        focal loss, γ → 0         mean_i [−log(1 − p_y) log p_y]        at γ

    The column takes one pass. Its first gradient is compared with a finite difference, on a few
    examples, and refused where torch's derivative is wrong.

    Traps:
        `mean_of(objective)` of the loss that is fitted is the target itself: at an endpoint its
        strength is −1, whatever was done.

        The mean of a random objective (training=True) is over its draws. A column of few draws is
        noisy, and that biases λ̂ towards zero, by the factor 1/(1 + noise²/‖column‖²) if it is the
        only column; error bars do not show it. Raise `draws` until λ̂ stays the same.

    Args:
        objective: the objective whose mean loss is the penalty.
        scope: which rows the column covers; the mean is of the whole model.
        name: the name that the strength is listed under.

    >>> import tacit
    >>> X = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> def squares(model, batch):
    ...     return model(batch["x"]).squeeze(1) ** 2
    >>> objective = tacit.Objective.from_batch_loss(model, squares, {"x": X})
    >>> mean_of(objective).value({"weight": torch.tensor([[2.0, 1.0]])})
    tensor([6.5000])
    """
    needed = "the tacit.Objective whose mean is the penalty"
    check_type("the objective of mean_of", objective, Objective, needed)
    if has_shift(objective):
        raise InputError(
            "the objective of mean_of has sam(), whose gradient is not the derivative of its "
            "value: pass the objective without sam. What sam adds is gradient_norm(power=1)."
        )
    penalty = mean_penalty(objective, objective, scope=scope, name=name, cost="pass")
    return replace(penalty, definition="mean_of")


def mean_penalty(
    penalties: Objective,
    examples: Objective,
    *,
    scope: Scope,
    name: str,
    cost: Cost,
    compare: bool = True,
) -> Regularizer:
    """The mean of an objective as a regularizer.

    Args:
        penalties: the objective whose loss per example is the penalty.
        examples: the objective that it was made from, whose examples it shares.
        scope: which rows the column covers.
        name: the name of the column.
        cost: what the column takes.
        compare: whether its first gradient is compared with a finite difference; unnecessary where
            autograd only passes once through the user's code.
    """
    checked = not compare

    def in_scope(params: Params) -> tuple[str, ...]:
        return select(params, scope, what=f"scope of {name}")

    def gradient(params: Params) -> Params:
        nonlocal checked
        point, names = penalties.point(params), in_scope(params)
        with derivatives.twice_differentiable():  # it may take derivatives itself
            if not checked and (layers := penalties.compared.wrong_gradient(point, names)):
                raise InputError(
                    f"autograd's gradient of {name} is wrong in {shorten(layers)}: it is not the "
                    "finite difference of its value. Either its loss holds a part constant "
                    "(.detach(), .data, no_grad): compute constants outside of the loss. Or it "
                    "takes derivatives itself through a layer that torch cannot differentiate that "
                    "often (a custom function; three times a fused norm, or batch norm in training "
                    "mode): write that layer in elementary torch operations."
                )
            checked = True
            whole = penalties.gradient(point)
        return {n: whole[n] for n in names}

    def evaluate(params: Params) -> Tensor:
        with derivatives.twice_differentiable():
            return torch.tensor([penalties.value(params)], dtype=torch.float64)

    def bind(params: Params) -> Columns:
        return whole_column(name, gradient(params))

    def influence(params: Params, directions: Sequence[Params]) -> Tensor:
        scoped = [{n: v[n] for n in in_scope(params) if n in v} for v in directions]
        return penalties.directional_derivatives(scoped, params).values.unsqueeze(2)

    return Regularizer(
        name,
        bind,
        streamed_value(evaluate, gradient),
        influence=influence,
        objective=examples,
        cost=cost,
    )


def per_example(
    name: str, objective: Objective, penalties: BatchLoss, *, batch_size: int | None = None
) -> Objective:
    """The objective of a penalty per example, with another one's model, examples and weights.

    It is evaluated in eval mode, with the other's choice of batch norm. The objective must be one
    of (inputs, …, target), whose batches say how to call the model.

    Args:
        name: the name of the penalty, for messages.
        objective: the other objective.
        penalties: penalties(model, batch) returns one number per example.
        batch_size: most rows of data in tensors at once, where the objective's are too many.
    """
    needed = "the tacit.Objective of the model and its data"
    check_type(f"the objective of {name}", objective, Objective, needed)
    if objective.loss is None:
        raise InputError(
            f"{name} calls the model by itself, and the batches of this objective do not say how: "
            "make it as Objective(model, loss, data) with batches (inputs, …, target). Or write "
            "the penalty per example as Objective.from_batch_loss, and pass that to mean_of."
        )
    if has_technique(objective):
        raise InputError(
            f"the objective of {name} has a technique ({objective.loss_name}), which would be left "
            f"out, because {name} reads the examples and weights as they are: pass the objective "
            "without it."
        )
    options: ObjectiveOptions = {"weights": objective.weights, "batch_norm": objective.batch_norm}
    if objective.batch_size is not None:
        options["batch_size"] = objective.batch_size
    if batch_size is not None:
        options["batch_size"] = min(batch_size, objective.batch_size or BATCH_SIZE)
    if objective.regroups:  # the same examples share a batch
        options |= {"draws": objective.draws, "seed": objective.seed}
    with derivatives.twice_differentiable():
        return Objective.from_batch_loss(objective.model, penalties, objective.data, **options)


def streamed_value(
    evaluate: Callable[[Params], Tensor], gradient: Callable[[Params], Params]
) -> Callable[[Params], Tensor]:
    """The value of a penalty of one strength as autograd needs it; see `StreamedValue`."""

    def pull_back(params: Params, cotangent: Tensor) -> Params:
        return {n: cotangent[0].to(g.device) * g for n, g in gradient(params).items()}

    def value(params: Params) -> Tensor:
        return StreamedValue.apply(evaluate, pull_back, tuple(params), *params.values())

    return value


class StreamedValue(torch.autograd.Function):
    """Values of a penalty, whose backward passes over the data again.

    This avoids one graph over all the data. `value(params)` returns R_j of every column j, and
    `pull_back(params, cotangent)` the gradient of Σ_j cotangent_j R_j, where it is not zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        value: Callable[[Params], Tensor],
        pull_back: Callable[[Params, Tensor], Params],
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Tensor:
        """R_j of every column, in the dtype of the parameters."""
        ctx.pull_back, ctx.names = pull_back, names
        ctx.save_for_backward(*tensors)
        return value(dict(zip(names, tensors, strict=True))).to(tensors[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] # as torch documents it
        ctx: Any, *cotangents: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradient by each parameter; the other arguments have none."""
        params = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        gradient = ctx.pull_back(params, cotangents[0])
        products = (gradient[n].to(p) if n in gradient else None for n, p in params.items())
        return (None, None, None, *products)

"""The weight decay of an optimizer as penalties: ridge, or ridge in Adam's metric if decoupled."""

import math
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tacit.errors import InputError, check_type
from tacit.objective.models import named_parameters, trainable
from tacit.objective.params import Params, Scope, entries_of, shorten, to_float64
from tacit.objective.ranks import own_rows
from tacit.regularizers.elementwise import l2
from tacit.regularizers.family import Regularizer, TensorGradient, separable

COUPLED_STEPS = (
    "SGD.step", "ASGD.step", "Adam.step", "NAdam.step", "RAdam.step", "Adamax.step", "Adagrad.step",
    "Adadelta.step", "RMSprop.step", "LBFGS.step", "Rprop.step",
)  # fmt: skip
"""Steps of torch that add weight decay to the gradient (or have none), unless a group decouples."""
ADAM_STEPS = ("Adam.step", "AdamW.step")


def optimizer_penalties(optimizer: Optimizer, model: nn.Module) -> dict[Regularizer, float]:
    """The penalties that an optimizer's weight decay applies to a model, with their strengths.

    Training with weight decay w comes to rest where, in every parameter group,

        ∇L + w θ = 0            if decay is added to the gradient (SGD, Adam): `l2` at w/2;
        ∇L + w (√v̂ + ε) θ = 0   if it is decoupled (AdamW): `metric_ridge` at w/2,

    because AdamW adds w θ to a step of ∇L/(√v̂ + ε). Learning rates cancel. Groups of equal decay
    are one penalty, whose scope is their trainable parameters in the model. Pass the result as
    `known=`, or its list as candidates.

    Trap: for AdamW the metric is that of the optimizer's state now. Call this after training, where
    the equations are written; only what `watch` and `average_epochs` record has a metric of its
    own. A parameter that had no gradient in some steps was not decayed in those, so that its
    strength is smaller.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.02)
    >>> [(r.name, strength) for r, strength in optimizer_penalties(optimizer, model).items()]
    [('weight_decay', 0.01)]
    """
    optimizer = unwrap_optimizer(optimizer)
    names = trained_names(optimizer, model)
    metric = adam_metric(optimizer, model)
    groups: dict[tuple[float, bool], list[str]] = {}
    for group in optimizer.param_groups:
        if decay := _decay(optimizer, group):
            decoupled = _is_decoupled(optimizer, group)
            members = [names[id(p)] for p in group["params"] if id(p) in names]
            if decoupled and metric:  # a parameter without gradients has no state and no decay
                members = [n for n in members if n in metric]
            groups.setdefault((decay, decoupled), []).extend(members)
    groups = {key: members for key, members in groups.items() if members}
    penalties = {}
    for number, ((decay, decoupled), members) in enumerate(groups.items()):
        name = f"weight_decay[{number}]" if len(groups) > 1 else "weight_decay"
        scope = frozenset(members).__contains__
        if decoupled:
            penalty = metric_ridge(optimizer, model, scope=scope, name=name)
        else:
            penalty = l2(scope=scope, name=name)
        penalties[penalty] = decay / 2
    return penalties


def metric_ridge(
    optimizer: Optimizer, model: nn.Module, *, scope: Scope = None, name: str = "metric_ridge"
) -> Regularizer:
    """Ridge in Adam's metric, R(θ) = Σ_i (√v̂_i + ε) θ_i², with gradient 2(√v̂_i + ε) θ_i.

    v̂ is the bias-corrected mean of squared gradients in the optimizer's state. It is copied, so
    that further training does not change the penalty; equations of `average_epochs` use that of
    each epoch instead. AdamW's `weight_decay=w` is strength w/2. Parameters that had no gradient
    have no state, and are not covered.

    Before the optimizer's first step there is no v̂ yet: then the penalty is only for equations that
    bring a metric, of `average_epochs` and `watch`.
    """
    optimizer = unwrap_optimizer(optimizer)
    trained_names(optimizer, model)  # refuses a model that it does not train
    metric = adam_metric(optimizer, model)
    is_untrained_adam = step_rule(optimizer) in ADAM_STEPS and not any(optimizer.state.values())
    if not metric and not is_untrained_adam:
        raise InputError(
            f"the state of {type(optimizer).__name__} has no mean of squared gradients (exp_avg_sq)"
            " for this model: pass an Adam or AdamW optimizer that has trained it."
        )
    return ridge_in_metric(metric, scope, name=name)


def ridge_in_metric(metric: Params, scope: Scope = None, *, name: str) -> Regularizer:
    """Ridge in this metric, by parameter: see `metric_ridge`."""

    def covers(theta: Tensor, tensor_name: str) -> bool:
        if not metric:
            raise InputError(
                f"{name} was made before the optimizer's first step, when Adam's squared gradients "
                "were not known: make it after training. Only equations of average_epochs and "
                "watch bring those of their epochs."
            )
        if tensor_name in metric and metric[tensor_name].shape != theta.shape:
            raise InputError(
                f"{name}: {tensor_name!r} has shape {tuple(theta.shape)}, and in the optimizer "
                f"{tuple(metric[tensor_name].shape)}: pass the model that the optimizer trained."
            )
        return tensor_name in metric

    def gradient(theta: Tensor, tensor_name: str) -> TensorGradient:
        scale = metric[tensor_name]

        def at(part: slice) -> Tensor:
            entries = to_float64(entries_of(theta, part))
            return 2 * entries_of(scale, part).to(entries.device) * entries

        return TensorGradient(at)

    def value(theta: Tensor, tensor_name: str) -> Tensor:
        return (metric[tensor_name].to(theta) * theta.square()).sum()

    ridge = separable(name, scope, value=value, gradient=gradient, covers=covers, by_row=True)
    return replace(ridge, in_metric=lambda other: ridge_in_metric(other, scope, name=name))


def adam_metric(optimizer: Optimizer, model: nn.Module) -> Params:
    """√v̂ + ε of Adam by parameter, in float64; nothing for parameters without such a state."""
    names = parameter_names(model)
    metric = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            # A fused step that a GradScaler skipped makes the state, at step zero.
            if id(parameter) in names and "exp_avg_sq" in state and float(state["step"]):
                metric[names[id(parameter)]] = adam_scale(group, state)
    return metric


def adam_scale(group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    """√v̂ + ε of one parameter, in float64."""
    square = own_rows(state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"])
    bias = math.sqrt(1 - float(group["betas"][1]) ** float(state["step"]))
    return to_float64(square).sqrt() / bias + group["eps"]


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters, frozen ones too, by the `id` of the parameter."""
    return {id(p): n for n, p in named_parameters(model).items()}


def trained_names(optimizer: Optimizer, model: nn.Module) -> dict[int, str]:
    """The same for trainable ones that the optimizer has; refused if there are none."""
    check_type("model", model, nn.Module, "the torch.nn.Module that the optimizer trains")
    in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
    params = trainable(model)
    names = {i: n for i, n in parameter_names(model).items() if i in in_groups and n in params}
    if not names:
        raise InputError(
            f"the optimizer trains no trainable parameter of this {type(model).__name__} (there "
            f"are {shorten(params)}): pass the model whose parameters it was made with, "
            "not a copy."
        )
    return names


def step_rule(optimizer: Optimizer) -> str:
    """Which of torch's update rules an optimizer takes, as in "SGD.step"; "" if it has its own.

    Subclasses that inherit their step count as the class they inherit it from.
    """
    step = type(optimizer).step
    return step.__qualname__ if step.__module__.startswith("torch.optim.") else ""


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer inside wrappers that hold it as `.optimizer`, as Accelerate's does."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    needed = "an optimizer such as torch.optim.SGD(…), or the one inside of a wrapper"
    check_type("optimizer", optimizer, Optimizer, needed)
    return optimizer


def _decay(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """The total decay of a parameter group."""
    rule = step_rule(optimizer)
    if not rule and "weight_decay" not in group:
        raise InputError(
            f"the groups of {type(optimizer).__name__} have no weight_decay, and tacit does not "
            f"know its steps: {_REMEDY}"
        )
    decay = float(group.get("weight_decay") or 0)
    if rule == "ASGD.step":
        decay += float(group["lambd"])  # a second decay, on by default
    if decay and group.get("maximize"):
        raise InputError(
            "the optimizer has maximize=True, so that the sign of its decay depends on which sign "
            f"the objective's loss has: minimise the loss, or {_REMEDY}"
        )
    return decay


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether weight decay acts on the weights beside the step, as in AdamW."""
    rule = step_rule(optimizer)
    decoupled = bool(group.get("decoupled_weight_decay"))
    if rule not in COUPLED_STEPS or (decoupled and rule != "Adam.step"):
        detail = " decoupled" if decoupled else ""
        raise InputError(
            f"{type(optimizer).__name__} has{detail} weight_decay={group['weight_decay']}, and how "
            f"its steps apply it is not known: {_REMEDY}"
        )
    return decoupled


_REMEDY = (
    "pass the penalties that it applied as known=, such as {tacit.l2(): w / 2} for a decay w that "
    "is added to the gradient, or {metric_ridge(optimizer, model): w / 2} for Adam with a "
    "decoupled one (tacit.regularizers.metric_ridge)."
)

"""Label smoothing: targets mixed with the uniform distribution over classes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.errors import InputError, check_number
from tacit.objective.deriving import probe_mean, user_reader, with_loss, with_scale
from tacit.objective.losses import Loss, MeanLoss, Outputs
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import coarsest_dtype
from tacit.objective.scale import Scale

NOT_CROSS_ENTROPY = (
    "label_smoothing needs a loss that equals torch's cross_entropy(output, target), or its "
    "binary_cross_entropy_with_logits, and this one has another value: another loss, class "
    "weights, label_smoothing= already, an ignore_index= other than -100, or a factor? Pass the "
    "plain cross-entropy; for other losses make an objective of the smoothed loss yourself."
)


def label_smoothing(objective: Objective, eps: float) -> Objective:
    """(1 − ε)·L + ε·mean_i(−mean_k log p_k): cross-entropy with smoothed targets.

    It adds exactly ε · mean_i[−mean_k log p_k + log p_y]. The loss may be anything that equals
    torch's cross_entropy of its (output, target): the function, a module, nll_loss of
    log-probabilities, targets that are probabilities, ignored targets of index −100. A binary
    cross-entropy from logits has two classes: its targets become (1 − ε)y + ε/2.

    Refused are other losses, class weights and targets that are smoothed already.

    Args:
        objective: the objective without the technique, made from loss(output, target).
        eps: the part of the uniform distribution, from 0 to below 1.
    """
    check_objective(objective)
    check_number("eps", eps, least=0, below=1)
    return with_scale(
        _mixed(objective, f"label_smoothing({eps:g})", 1 - eps, eps),
        Scale("eps", float(eps), growth=2.0, order=1),
        lambda other: label_smoothing(objective, other),
    )


def smoothing_penalty(objective: Objective) -> Objective:
    """mean_i[−mean_k log p_k + log p_y]: the penalty that label smoothing ε adds, at strength ε.

    As the objective of a `mean_of` candidate. What `label_smoothing` refuses is refused here too.
    """
    return _mixed(check_objective(objective), "label smoothing penalty", -1.0, 1.0)


def _mixed(objective: Objective, label: str, plain: float, uniform: float) -> Objective:
    """plain·(cross-entropy of the targets) + uniform·(cross-entropy of uniform ones)."""
    reader = user_reader(objective)
    if not isinstance(reader, MeanLoss):
        raise InputError(
            "label_smoothing needs an objective made from loss(output, target). With "
            "from_batch_loss or from_mean_loss, write the smoothed loss (label_smoothing= of "
            "torch's cross_entropy) and make an objective of it: difference_equations takes both."
        )
    loss = reader.function
    entropy = _cross_entropy_like(loss, probe_mean(objective).outputs)

    def mixed(output: Any, target: Any) -> Tensor:
        value = loss(output, target)
        mixture = plain * value + uniform * entropy(output, target, uniform=True)
        same = _agree(value, entropy(output, target))
        try:
            agrees = bool(same)
        except RuntimeError:  # one example at a time, by vmap
            return torch.where(same, mixture, torch.nan)
        if not agrees:
            raise InputError(NOT_CROSS_ENTROPY)
        return mixture

    return with_loss(objective, label, mixed)


def _categorical(output: Any, target: Any, *, uniform: bool = False) -> Tensor:
    """Cross-entropy of logits or log-probabilities, of the targets or of uniform ones."""
    return F.cross_entropy(output, target, label_smoothing=float(uniform))


def _binary(output: Any, target: Any, *, uniform: bool = False) -> Tensor:
    """Binary cross-entropy of logits, of the targets or of one half."""
    target = torch.full_like(target, 0.5) if uniform else target
    return F.binary_cross_entropy_with_logits(output, target)


def _cross_entropy_like(loss: Loss, outputs: Outputs | None) -> Callable[..., Tensor]:
    """The cross-entropy that a loss equals on some examples."""
    output, target, _ = outputs or (None, None, None)
    if isinstance(output, Tensor) and isinstance(target, Tensor):
        several = output.shape[min(1, output.ndim - 1)] > 1 if output.ndim else False
        # Of one class the cross-entropy is zero, as any other loss is where it fits exactly.
        for entropy in (_categorical, _binary) if several else (_binary,):
            try:
                if bool(_agree(loss(output, target), entropy(output, target))):
                    return entropy
            except (RuntimeError, ValueError, IndexError):  # shapes or dtypes of another loss
                continue
    raise InputError(NOT_CROSS_ENTROPY)


def _agree(loss: Tensor, entropy: Tensor) -> Tensor:
    """Whether two values of a loss are the same, up to rounding."""
    eps = torch.finfo(coarsest_dtype(loss, entropy)).eps
    tolerance = min(eps**0.5, max(2 * eps, 3e-4))
    return (loss - entropy).abs() <= tolerance * entropy.abs().clamp_min(1e-3)

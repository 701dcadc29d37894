"""Laws of changed losses, labels and examples.

Some are identities, which hold for any weights whatever the theory: they test signs, scales and
sums over batches of the library. Where a model is trained to rest, its training is that of torch,
and shares nothing with the penalty that is fitted.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tacit import Objective, Regularizer, estimate, regularizer
from tacit.objective.params import Params
from tacit.objective.randomness import Noise
from tacit_paper.laws.law import Recovered, law
from tacit_paper.laws.small_models import (
    Examples,
    class_data,
    classification,
    difference,
    half_squares,
    linear_model,
    mean_penalty,
    regression,
    regression_data,
    tanh_network,
)
from tacit_paper.minimising import minimise


def _log_p(output: Tensor, target: Tensor) -> Tensor:
    """The logarithm of the probability of the right class, by example."""
    return output.log_softmax(1).gather(1, target[:, None])[:, 0]


def _smoothing(output: Tensor, target: Tensor) -> Tensor:
    """The mean of −mean_k log p_k + log p_y."""
    return (_log_p(output, target) - output.log_softmax(1).mean(1)).mean()


def _negative_entropy(output: Tensor, _: Tensor) -> Tensor:
    """The mean of Σ_k p_k log p_k, the negative entropy."""
    return (output.softmax(1) * output.log_softmax(1)).sum(1).mean()


@law(
    "label smoothing, trained to rest",
    {"smoothing": "ε · mean[log p_y − mean log p_k]"},
    source="Szegedy et al. 2016; linear in ε",
    parameter="ε",
    values=(0.1,),
)
def label_smoothing(eps: float, seed: int) -> Recovered:
    """The smoothed loss of torch is L + ε · mean[−mean_k log p_k + log p_y], an identity."""
    model, (X, y) = tanh_network(seed, (3, 3)), class_data(seed)
    smoothed = nn.CrossEntropyLoss(label_smoothing=eps)
    minimise(lambda: smoothed(model(X), y), model.parameters())
    objective = Objective(model, F.cross_entropy, (X, y))
    fit = estimate(objective, mean_penalty("smoothing", objective, _smoothing))
    return Recovered(fit, {"smoothing": eps})


@law(
    "random labels with probability ε",
    {"smoothing": "ε · mean[log p_y − mean log p_k]"},
    source="the mean loss over the labels is that of smoothed ones",
    parameter="ε",
    values=(0.4,),
    draws=512,
)
def label_flips(eps: float, seed: int, draws: int) -> Recovered:
    """A label that is drawn anew from K classes with probability ε is smoothed in the mean."""
    objective = classification(seed)

    def flipped(model: nn.Module, batch: Examples, noise: Noise) -> Tensor:
        (X, y), (when, what) = batch, noise.uniform(batch[0][:, :2]).T
        labels = torch.where(when < eps, (3 * what).long(), y)
        return F.cross_entropy(model(X), labels, reduction="none")

    technique = Objective.from_batch_loss(
        objective.model, flipped, objective.data, training=True, draws=draws, seed=seed
    )
    fit = difference(technique, objective, mean_penalty("smoothing", objective, _smoothing))
    return Recovered(fit, {"smoothing": eps})


@law(
    "confidence penalty, trained to rest",
    {"negative_entropy": "β · mean Σ p_k log p_k"},
    source="Pereyra et al. 2017; linear in β",
    parameter="β",
    values=(0.2,),
)
def confidence_penalty(beta: float, seed: int) -> Recovered:
    """Training minimises L − β · mean entropy of the outputs: the penalty itself, by definition."""
    model, (X, y) = tanh_network(seed, (3, 3)), class_data(seed)

    def trained() -> Tensor:
        entropy = torch.distributions.Categorical(logits=model(X)).entropy().mean()
        return F.cross_entropy(model(X), y) - beta * entropy

    minimise(trained, model.parameters())
    objective = Objective(model, F.cross_entropy, (X, y))
    fit = estimate(objective, mean_penalty("negative_entropy", objective, _negative_entropy))
    return Recovered(fit, {"negative_entropy": beta})


@law(
    "focal loss",
    {"focus": "γ · mean[−log(1 − p_y) log p_y]"},
    source="(1 − p)^γ = 1 + γ log(1 − p) + O(γ²), in Lin et al. 2017",
    parameter="γ",
    values=(0.02, 0.01, 0.005),
    order=1,
)
def focal_loss(gamma: float, seed: int) -> Recovered:
    """−(1 − p)^γ log p = −log p − γ log(1 − p) log p + O(γ²)."""
    objective = classification(seed)

    def focal(output: Tensor, target: Tensor) -> Tensor:
        log_p = _log_p(output, target)
        return -((1 - log_p.exp()) ** gamma * log_p).mean()

    def focus(output: Tensor, target: Tensor) -> Tensor:
        log_p = _log_p(output, target)
        return -((-log_p.expm1()).log() * log_p).mean()

    technique = Objective(objective.model, focal, objective.data)
    fit = difference(technique, objective, mean_penalty("focus", objective, focus))
    return Recovered(fit, {"focus": gamma})


@law(
    "generalised cross-entropy (1 − p^q)/q",
    {"log_squared": "−q/2 · mean log² p_y"},
    source="p^q = 1 + q log p + q²/2 log² p + …, in Zhang & Sabuncu 2018",
    parameter="q",
    values=(0.02, 0.01, 0.005),
    order=1,
)
def generalised_cross_entropy(q: float, seed: int) -> Recovered:
    """(1 − p^q)/q = −log p − q/2 · log² p + O(q²)."""
    objective = classification(seed)

    def generalised(output: Tensor, target: Tensor) -> Tensor:
        return (1 - output.softmax(1).gather(1, target[:, None]) ** q).mean() / q

    def log_squared(output: Tensor, target: Tensor) -> Tensor:
        return _log_p(output, target).square().mean()

    technique = Objective(objective.model, generalised, objective.data)
    fit = difference(technique, objective, mean_penalty("log_squared", objective, log_squared))
    return Recovered(fit, {"log_squared": -q / 2})


@law(
    "softmax at temperature 1 + t",
    {"slope": "−t · mean⟨z, p − y⟩"},
    source="the derivative of the loss in the temperature",
    parameter="t",
    values=(0.008, 0.004, 0.002),
    order=1,
)
def temperature(t: float, seed: int) -> Recovered:
    """The loss of z/(1 + t) is that of z minus t⟨z, ∂ℓ/∂z⟩ + O(t²), with ∂ℓ/∂z = p − y."""
    objective = classification(seed)

    def cooled(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output / (1 + t), target)

    def slope(output: Tensor, target: Tensor) -> Tensor:
        return (output * (output.softmax(1) - F.one_hot(target, 3))).sum(1).mean()

    technique = Objective(objective.model, cooled, objective.data)
    fit = difference(technique, objective, mean_penalty("slope", objective, slope))
    return Recovered(fit, {"slope": -t})


@law(
    "distillation of weight a, temperature T → ∞",
    {
        "distance": "a · mean‖z − z_teacher‖²/2K, centred",
        "cross_entropy": "−a · cross-entropy",
    },
    source="Hinton et al. 2015: the limit of T²·KL(teacher ‖ student)",
    parameter="1/T",
    values=(0.02, 0.01, 0.005),
    order=1,
)
def distillation(cold: float, seed: int) -> Recovered:
    """(1 − a)·L + a·T²·KL of softened outputs: the divergence tends to a squared distance."""
    a, (X, y), model = 0.5, class_data(seed), tanh_network(seed, (3, 5, 3))
    teacher = tanh_network(seed + 1000, (3, 5, 3))(X).detach()
    targets = torch.stack([teacher, F.one_hot(y, 3).double()], 1)

    def plain(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target[:, 1])

    def distilled(output: Tensor, target: Tensor) -> Tensor:
        student, softened = (cold * output).log_softmax(1), (cold * target[:, 0]).log_softmax(1)
        divergence = F.kl_div(student, softened, reduction="batchmean", log_target=True)
        return (1 - a) * plain(output, target) + a * divergence / cold**2

    def distance(output: Tensor, target: Tensor) -> Tensor:
        return (output - target[:, 0]).var(1, correction=0).mean() / 2

    technique, objective = (Objective(model, f, (X, targets)) for f in (distilled, plain))
    penalties = {"distance": distance, "cross_entropy": plain}
    columns = [mean_penalty(name, objective, f) for name, f in penalties.items()]
    return Recovered(
        difference(technique, objective, *columns), {"distance": a, "cross_entropy": -a}
    )


class _SideBySide(nn.Module):
    """The outputs of several networks of the same inputs."""

    def __init__(self, networks: Sequence[nn.Module]):
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([network(x) for network in self.networks], 1)


@law(
    "mean of M networks against their mean loss",
    {"variance": "−1 · ½ mean variance of the outputs"},
    source="Krogh & Vedelsby 1995",
    parameter="M",
    values=(4,),
)
def ensembling(members: int, seed: int) -> Recovered:
    """½(f̄ − y)² = mean_m ½(f_m − y)² − ½ variance of the f_m, an identity."""
    model = _SideBySide([tanh_network(100 * seed + member) for member in range(members)])

    def loss_of_mean(output: Tensor, target: Tensor) -> Tensor:
        return half_squares(output.mean(1, keepdim=True), target)

    def mean_loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() / 2

    def variance(output: Tensor, _: Tensor) -> Tensor:
        return output.var(1, correction=0).mean() / 2

    data = regression_data(seed)
    technique, plain = (Objective(model, loss, data) for loss in (loss_of_mean, mean_loss))
    fit = difference(technique, plain, mean_penalty("variance", plain, variance))
    return Recovered(fit, {"variance": -1.0})


@law(
    "residuals clipped at c, trained to rest",
    {"clipping": "1 · mean[Huber_c(r) − ½r²]"},
    source="the clipped residual is the derivative of Huber's loss",
    parameter="c",
    values=(0.4,),
)
def residual_clipping(c: float, seed: int) -> Recovered:
    """Steps along mean clip(r_i)·x_i come to rest where Huber's loss does: the penalty is exact."""
    X, y = regression_data(seed)
    weight = torch.zeros(1, 3, dtype=torch.float64)
    for _ in range(1000):
        weight -= 0.3 * (X @ weight.T - y).clamp(-c, c).T @ X / len(X)

    def clipping(output: Tensor, target: Tensor) -> Tensor:
        return F.huber_loss(output, target, delta=c) - half_squares(output, target)

    objective = Objective(linear_model(weight), half_squares, (X, y))
    fit = estimate(objective, mean_penalty("clipping", objective, clipping))
    return Recovered(fit, {"clipping": 1.0})


@law(
    "log-cosh loss log cosh(δr)/δ²",
    {"fourth_power": "−δ²/12 · mean r⁴"},
    source="log cosh x = x²/2 − x⁴/12 + O(x⁶)",
    parameter="δ",
    values=(0.2, 0.1, 0.05),
    order=2,
)
def log_cosh(delta: float, seed: int) -> Recovered:
    """With log cosh, the loss of a residual is ½r² − δ²/12 · r⁴ + O(δ⁴)."""
    objective = regression(seed)

    def rounded(output: Tensor, target: Tensor) -> Tensor:
        return (delta * (output - target)).cosh().log().mean() / delta**2

    def fourth_power(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).pow(4).mean()

    technique = Objective(objective.model, rounded, objective.data)
    fit = difference(technique, objective, mean_penalty("fourth_power", objective, fourth_power))
    return Recovered(fit, {"fourth_power": -(delta**2) / 12})


@law(
    "weights w_k of classes",
    {f"class {k}": "(w_k/w̄ − 1) · loss of class k" for k in range(3)},
    source="a weighted mean, in terms of the mean",
    parameter="w₁/w₀",
    values=(2.0,),
)
def class_weights(factor: float, seed: int) -> Recovered:
    """Σ_i w_i ℓ_i/Σ_i w_i is the mean loss plus (w_k/w̄ − 1) times the part of every class.

    An identity: what is tested is `weights=` of an objective.
    """
    model, (X, y) = tanh_network(seed, (3, 5, 3)), class_data(seed)
    plain, weights = Objective(model, F.cross_entropy, (X, y)), factor ** torch.arange(3).double()

    def of_class(k: int) -> Regularizer:
        def part(output: Tensor, target: Tensor) -> Tensor:
            return -(_log_p(output, target) * (target == k)).mean()

        return mean_penalty(f"class {k}", plain, part)

    technique = Objective(model, F.cross_entropy, (X, y), weights=weights[y])
    relative = weights / weights[y].mean() - 1
    fit = difference(technique, plain, *(of_class(k) for k in range(3)))
    return Recovered(fit, {f"class {k}": float(relative[k]) for k in range(3)})


@law(
    "tilted losses, log mean exp(tℓ)/t",
    {"variance": "t/2 · variance of the losses"},
    source="Li et al. 2021: the second cumulant",
    parameter="t",
    values=(0.02, 0.01, 0.005),
    order=1,
)
def tilted_losses(t: float, seed: int) -> Recovered:
    """(1/t) log mean exp(t ℓ_i) = mean ℓ_i + t/2 · variance + O(t²)."""
    objective = regression(seed)

    def tilted(model: nn.Module, batch: Examples) -> Tensor:
        losses = (model(batch[0]) - batch[1]).square()[:, 0] / 2
        return ((t * losses).logsumexp(0) - math.log(len(losses))) / t

    def variance(params: Params) -> Tensor:
        output = functional_call(objective.model, params, (X,))
        return ((output - y).square() / 2).var(correction=0)

    X, y = objective.data
    options = {"interacting": True, "batch_size": len(X)}
    technique = Objective.from_batch_loss(objective.model, tilted, objective.data, **options)
    fit = difference(technique, objective, regularizer("variance", variance))
    return Recovered(fit, {"variance": t / 2})

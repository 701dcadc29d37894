"""Time of `score_examples` relative to one forward pass, and of its bootstrap."""

from dataclasses import replace
from statistics import median

import torch
from table import Row
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from workload import classification_data, mlp, seconds

import tacit
from tacit.uncertainty.scores import Scores, score_examples

BOUND = 12.0
"""3(k + 1) forward passes for k = 3 strengths: one derivative per strength, one for the target."""
NARROW_BOUND = 6.5
"""Of the narrow transformer: close to per-example gradients by vmap, which store all gradients."""
BOOTSTRAP_BOUND = 1.0
"""Seconds for 2,000 replicates of 10,000 examples."""
GRADIENT_EXAMPLES = 256
"""Examples whose gradients are computed; their time is scaled up to all examples."""
TOKENS, VOCABULARY = 32, 100


class Transformer(nn.Module):
    """Two encoder layers over 32 tokens, averaged over tokens and mapped to ten classes."""

    def __init__(self, width: int):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.embed = nn.Embedding(VOCABULARY, width)
        self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the ten classes."""
        return self.out(self.encode(self.embed(tokens)).mean(1))


def candidates() -> list[tacit.Regularizer]:
    """Three candidates with one strength each."""
    return [tacit.l2(), tacit.smooth_l1(1e-3), tacit.regularizers.group_l2(scope="*.weight")]


def measure(*, quick: bool) -> list[Row]:
    """Ratios of median times for three models, then the bootstrap."""
    images = classification_data(500 if quick else 20_000)
    rows, scores = _compare("MLP", mlp(), images, 1024, quick=quick)
    # At width 128 elementwise operations take a large part of a pass, at width 512 matrix products.
    for width, count, batch in ((128, 1024, 64), (512, 256, 32)):
        size = 4 if quick else count
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(VOCABULARY, (size, TOKENS), generator=generator)
        data = tokens, torch.randint(10, (size,), generator=generator)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Transformer(width).eval()
        label, bound = f"transformer of width {width}", NARROW_BOUND if width == 128 else BOUND
        rows += _compare(label, model, data, batch, quick=quick, bound=bound)[0]
    return [*rows, *_bootstraps(scores, quick=quick)]


def _compare(
    label: str,
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    batch: int,
    *,
    quick: bool,
    bound: float = BOUND,
) -> tuple[list[Row], Scores]:
    objective = tacit.Objective(model, F.cross_entropy, data, batch_size=batch)
    fit = tacit.fit(tacit.endpoint_equations(objective, candidates()))
    forward_times: list[float] = []
    score_times: list[float] = []
    for _ in range(1 if quick else 7):
        forward_times.append(seconds(lambda: forward_pass(model, data, batch)))
        score_times.append(seconds(lambda: score_examples(fit)))
    count = 4 if quick else GRADIENT_EXAMPLES
    few = (data[0][:count], data[1][:count])
    per_example_gradients(model, few)  # warm-up of torch.func
    gradient_time = seconds(lambda: per_example_gradients(model, few))
    gradient_time *= len(data[0]) / len(few[0])
    forward_time, score_time = median(forward_times), median(score_times)
    ratio = score_time / forward_time
    rows = [
        Row(
            f"score_examples of 3 strengths, {label} / one forward pass",
            f"{ratio:.1f}× ({score_time:.2f} s over {forward_time:.3f} s)",
            value=ratio,
            bound=bound,
        ),
        Row(
            f"  per-example gradients by vmap, {label} / one forward pass",
            f"{gradient_time / forward_time:.1f}× ({len(data[0]):,} examples, batches of {batch})",
        ),
    ]
    return rows, score_examples(fit)


def forward_pass(model: nn.Module, data: tuple[Tensor, Tensor], batch: int) -> float:
    """The mean loss, as an evaluation loop computes it."""
    total = 0.0
    with torch.no_grad():
        for x, y in zip(*(part.split(batch) for part in data), strict=True):
            total += float(F.cross_entropy(model(x), y)) * len(x)
    return total / len(data[0])


def per_example_gradients(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    """Compute every example's gradient, 64 at a time because each is as large as the model."""
    params = {n: p.detach() for n, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no batching rule
        for x, y in zip(*(part.split(64) for part in data), strict=True):
            gradients(params, x, y)


def _bootstraps(scores: Scores, *, quick: bool) -> list[Row]:
    """Time of the bootstrap of these scores, replaced by random ones for many examples."""
    rows = []
    for count, bound in ((10_000, BOOTSTRAP_BOUND), (60_000, None)):
        size = count // 10 if quick else count
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        random_scores = replace(scores, values=values)
        elapsed = min(seconds(random_scores.bootstrap) for _ in range(1 if quick else 3))
        label = f"bootstrap, 2,000 replicates of {size:,} examples"
        rows.append(Row(label, f"{elapsed:.2f} s", value=elapsed, bound=bound))
    return rows

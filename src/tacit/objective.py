"""A model, a loss and data as functions of the parameters: value, gradient, Hessian products."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tacit import derivatives, probes
from tacit.borrowing import Borrowed, mode
from tacit.data import (
    check_items,
    check_restarts,
    cut,
    forked_randomness,
    move,
    open_data,
    seed_devices,
)
from tacit.errors import InputError
from tacit.losses import BatchLoss, BatchMean, Loss, Measure, from_mean, from_units
from tacit.params import Params, check_finite, check_params, trainable, zeros
from tacit.progress import track


class Objective:
    """L(θ), the mean loss over all examples, and its derivatives, streamed over the data.

    Sums are kept in float64 whatever the model's dtype, and a ragged last batch counts by its
    size. The model is only borrowed: its mode, parameters, buffers and gradients, and the random
    state, are as before after every call.

    Args:
        model: the trained module; parameters with requires_grad=False are held fixed.
        loss: loss(output, target), mean-reduced, as torch's are.
        data: a tuple of tensors (inputs, …, target), a DataLoader, or an iterable of such batches.
        weights: one weight an example, for data held in tensors; L is then the weighted mean.
        batch_size: how many rows of data held in tensors go through the model at once.
        training: evaluate with dropout and the like active (batch norm stays in eval).
        draws: how many draws of that randomness are averaged.
        seed: draws depend on (seed, draw, batch) alone.

    >>> X, y = torch.eye(2), torch.tensor([[1.0], [3.0]])
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> objective = Objective(model, torch.nn.functional.mse_loss, (X, y))
    >>> objective.gradient({"weight": torch.zeros(1, 2)})
    {'weight': tensor([[-1., -3.]], dtype=torch.float64)}
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Any,
        *,
        weights: Tensor | None = None,
        batch_size: int = 1024,
        training: bool = False,
        draws: int = 1,
        seed: int = 0,
    ):
        self._borrow(model, loss, training=training, draws=draws, seed=seed)
        self._measure: Measure = from_mean(loss)
        self._masks = False
        self._open(data, weights, batch_size)
        if weights is None:
            self._check_mean_reduced()

    @classmethod
    def from_batch_loss(
        cls,
        model: nn.Module,
        batch_loss: BatchLoss,
        data: Any,
        *,
        weights: Tensor | None = None,
        batch_size: int = 1024,
        training: bool = False,
        draws: int = 1,
        seed: int = 0,
    ) -> Self:
        """An objective from batch_loss(model, batch) -> losses, 1-D, one per example or token.

        For dict batches, several inputs, padding, Hugging Face style models: whatever the loss
        needs to call. It is handed the user's own model with its parameters swapped. It may also
        return (losses, weights); L is then the weighted mean.
        """
        self = cls.__new__(cls)
        self._borrow(model, batch_loss, training=training, draws=draws, seed=seed)
        self._measure = from_units(batch_loss)
        self._masks = True  # a whole batch may carry additive attention masks, -inf by right
        self._open(data, weights, batch_size)
        return self

    @property
    def params(self) -> Params:
        """The model's trainable parameters as they are now, tied ones once; not copies."""
        return trainable(self.model)

    def point(self, params: Mapping[str, Tensor] | None = None, *, what: str = "params") -> Params:
        """Parameters to evaluate at: those given, checked, or the model's own.

        Frozen and tied parameters may be among those given if they are as in the model.
        """
        own = self.params
        if params is None:
            check_finite(own, what="the model's value")
            return own
        if isinstance(params, Mapping):
            named = self.model.named_parameters(remove_duplicate=False)
            fixed = {n: p for n, p in named if n not in own}
            params = {n: p for n, p in params.items() if n not in fixed or not _equal(p, fixed[n])}
        return check_params(params, own, what=what)

    @property
    def count(self) -> int:
        """How many examples (or tokens) the mean is over."""
        if self._count is None:
            self.value()
        return self._count or 0

    def value(self, params: Mapping[str, Tensor] | None = None) -> float:
        """L(θ)."""
        with torch.no_grad():
            return self._stream(self.point(params), lambda mean, weight: None)[0]

    def gradient(self, params: Mapping[str, Tensor] | None = None) -> Params:
        """∇L(θ), in float64."""
        return self.value_and_gradient(params)[1]

    @torch.inference_mode(mode=False)
    def value_and_gradient(
        self, params: Mapping[str, Tensor] | None = None, *, draws: Sequence[int] | None = None
    ) -> tuple[float, Params]:
        """L(θ) and ∇L(θ) in one pass; `draws` says which of the draws to average."""
        leaves = derivatives.leaves(self.point(params))
        return self._sum_vectors(
            leaves, lambda mean: derivatives.gradient(mean, leaves), draws=draws
        )

    @torch.inference_mode(mode=False)
    def hvp(
        self, direction: Mapping[str, Tensor], params: Mapping[str, Tensor] | None = None
    ) -> Params:
        """H(θ)·direction, the Hessian of L times a direction, in float64, by double backward."""
        leaves = derivatives.leaves(self.point(params))
        along = check_params(direction, leaves, what="direction")
        # Fused attention kernels have no double backward; the math path has.
        with sdpa_kernel(SDPBackend.MATH):
            return self._sum_vectors(
                leaves, lambda mean: derivatives.hessian_product(mean, leaves, along)
            )[1]

    @torch.inference_mode(mode=False)
    def rounding(self, params: Mapping[str, Tensor] | None = None) -> Params:
        """How far ∇L moves, on the first examples, when every weight moves by its last digit.

        A gradient is not known better than this, however many digits it prints: it is the level
        at which a target counts as no signal.
        """
        params = self.point(params)
        generator = torch.Generator().manual_seed(0)
        moved = {n: derivatives.last_digit_moved(p, generator) for n, p in params.items()}
        batch, weights = self._first
        with self._ready(training=self.training), torch.enable_grad():
            ends = []
            for point in (params, moved):
                leaves = derivatives.leaves(point)
                mean = self._evaluate(leaves, batch, weights, draw=0, index=0).mean
                ends.append(derivatives.gradient(mean, leaves))
        pairs = zip(params, *ends, strict=True)
        return {n: torch.zeros(()) if a is None or b is None else b.sub_(a) for n, a, b in pairs}

    # Set-up and its checks.

    def _borrow(
        self, model: nn.Module, loss: Any, *, training: bool, draws: int, seed: int
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(
                f"model is a {type(model).__name__}: pass a torch.nn.Module whose parameters "
                "were trained."
            )
        if not callable(loss):
            raise InputError(
                f"the loss is a {type(loss).__name__}: pass a function, such as "
                "torch.nn.functional.cross_entropy."
            )
        for name, number, least in (("draws", draws, 1), ("seed", seed, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise InputError(f"{name} is {number!r}: pass a whole number, at least {least}.")
        self.model, self.training, self.draws, self.seed = model, training, draws, seed
        self.loss_name: str = getattr(loss, "__name__", type(loss).__name__)
        self._borrowed = Borrowed(model)
        self._count: int | None = None
        self._devices = {p.device for p in model.parameters()}
        self.point()

    def _open(self, data: Any, weights: Tensor | None, batch_size: int) -> None:
        self._batches = open_data(data, weights=weights, batch_size=batch_size)
        params = self.params
        with self._ready(training=self.training), torch.no_grad():
            check_restarts(data)
            check_items(data)
            first = next(self._read(), None)
            if first is None:
                raise InputError("data is empty: it yields no batch. Pass at least one example.")
            first = first if self._batches.probe is None else cut(first, slice(self._batches.probe))
            self._first, (batch, weights) = first, first
            try:
                evaluate = self._evaluate
                probes.check_deterministic(
                    lambda: evaluate(params, batch, weights, draw=0, index=0).mean,
                    training=self.training,
                )
            except Exception as error:
                probes.explain_failure(error, batch, params)
                raise

    def _check_mean_reduced(self) -> None:
        batch, _ = self._first
        params = self.params
        with self._ready(training=False), torch.no_grad():
            whole = self._evaluate(params, batch, None)
            probes.check_loss(whole.mean, 0)
            if self.training and not self._evaluate(params, batch, None).mean.isclose(whole.mean):
                return  # noise that eval mode does not stop: halves cannot be compared
            precision = probes.coarsest(whole.mean, *params.values())
            probes.check_mean_reduced(
                lambda part: self._evaluate(params, cut(batch, part), None).mean,
                whole.units,
                precision=precision,
            )

    # Streaming.

    @contextmanager
    def _ready(self, *, training: bool) -> Iterator[None]:
        """The model in the right mode and a forked random state; both are put back."""
        forked = forked_randomness(self._devices, self._batches.generators)
        with forked, mode(self.model, training=training):
            yield

    def _read(self) -> Iterator[tuple[Any, Tensor | None]]:
        device = next(iter(self.params.values())).device
        batches = track(self._batches.read(), total=self._batches.length, label=self.loss_name)
        for index, (batch, weights) in enumerate(batches):
            moved = move(batch, device)
            probes.check_batch(moved, index, masks=self._masks)
            yield moved, None if weights is None else weights.to(device)

    def _evaluate(
        self,
        params: Params,
        batch: Any,
        weights: Tensor | None,
        *,
        draw: int | None = None,
        index: int = 0,
    ) -> BatchMean:
        """The mean loss of one batch; a draw's randomness depends on (seed, draw, batch) alone."""
        if self.training and draw is not None:
            state = np.random.SeedSequence([self.seed, draw, index]).generate_state(1, np.uint64)
            seed_devices(int(state[0]) >> 1, self._devices)
        return self._borrowed.evaluate(self._measure, params, batch, weights)

    def _stream(
        self,
        params: Params,
        use: Callable[[Tensor, float], None],
        *,
        draws: Sequence[int] | None = None,
    ) -> tuple[float, float]:
        """Hand every batch's mean loss and weight to `use`; the overall mean and weight."""
        draws = range(self.draws if self.training else 1) if draws is None else draws
        total, weight, count = 0.0, 0.0, 0
        with self._ready(training=self.training):
            for index, (batch, weights) in enumerate(self._read()):
                part = BatchMean(torch.zeros(()), 0.0, 0)
                for draw in draws:
                    part = self._evaluate(params, batch, weights, draw=draw, index=index)
                    probes.check_loss(part.mean, index)
                    use(part.mean, part.weight / len(draws))
                    total += float(part.mean.detach()) * part.weight / len(draws)
                weight, count = weight + part.weight, count + part.units
        self._remember(count, weight)
        return total / weight, weight

    def _remember(self, count: int, weight: float) -> None:
        if self._count not in (None, count) or not weight:
            raise InputError(
                f"the data gave {count} examples of total weight {weight:g}, where an earlier "
                f"pass gave {self._count}: tacit reads the data more than once. Pass data that "
                "starts anew and stays the same, such as a list of batches."
            )
        self._count = count

    def _sum_vectors(
        self,
        leaves: Params,
        vectors: Callable[[Tensor], Sequence[Tensor | None]],
        *,
        draws: Sequence[int] | None = None,
    ) -> tuple[float, Params]:
        """The weighted mean over batches of a vector of each batch's mean loss, in float64."""
        sums = zeros(leaves)

        def add(mean: Tensor, weight: float) -> None:
            for total, part in zip(sums.values(), vectors(mean), strict=True):
                if part is not None:
                    total.add_(part.to(total.device), alpha=weight)

        with torch.enable_grad():
            value, weight = self._stream(leaves, add, draws=draws)
        for total in sums.values():
            total.div_(weight)
        check_finite(sums, what="the derivative of the loss")
        return value, sums


def _equal(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and bool((a.to(b) == b).all())

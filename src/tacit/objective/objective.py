"""A model, a loss and data as functions of the parameters: value, gradient, Hessian products."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tacit.errors import InputError
from tacit.objective import checks as probes
from tacit.objective import derivatives, losses
from tacit.objective import per_example as directional
from tacit.objective.batches import (
    check_items,
    check_restarts,
    join_batches,
    open_batches,
    slice_batch,
)
from tacit.objective.borrowing import Borrowed
from tacit.objective.losses import BatchLoss, Loss, count_examples
from tacit.objective.params import (
    Params,
    aliases,
    check_finite,
    check_params,
    float64_zeros,
    trainable,
)
from tacit.objective.passes import Stream, check_count
from tacit.objective.randomness import takes_noise

PROBE = 256
"""Examples of a batch that probes look at, where batches can be cut."""


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
        self._check_arguments(model, loss, training=training, draws=draws, seed=seed)
        self._mean_reduced = True
        self.paired: bool = False
        """Whether batch_loss takes its noise, so that draws 2j and 2j+1 are mirror images."""
        self.loss: Loss | None = loss
        """The loss(output, target) it was made with; None after `from_batch_loss`."""
        self._open(data, weights, batch_size, losses.from_mean(loss), losses.spread_mean(loss))
        self._check_mean_reduced(self._first[0])

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
        return (losses, weights); L is then the weighted mean. With training=True it may be one of
        (model, batch, noise), a technique's noise from `Noise`, mirrored in pairs of draws.
        """
        self = cls.__new__(cls)
        self._check_arguments(model, batch_loss, training=training, draws=draws, seed=seed)
        self._mean_reduced = False
        self.paired = takes_noise(batch_loss, training=training, draws=draws)
        self.loss = None
        read = losses.from_units(batch_loss), losses.spread_units(batch_loss)
        self._open(data, weights, batch_size, *read)
        return self

    @property
    def params(self) -> Params:
        """The model's trainable parameters as they are now, tied ones once; not copies."""
        return trainable(self.model)

    @property
    def count(self) -> int:
        """How many examples (or tokens) the mean is over."""
        if self._count is None:
            self.value()
        return self._count or 0

    def point(self, params: Mapping[str, Tensor] | None = None, *, what: str = "params") -> Params:
        """Parameters to evaluate at: those given, checked, or the model's own.

        Frozen parameters and other names of tied ones may be among them if they agree.
        """
        own = self.params
        if params is None:
            check_finite(own, what="the model's value")
            return own
        if isinstance(params, Mapping):
            same = aliases(self.model, params)
            params = {n: p for n, p in params.items() if n not in same}
        return check_params(params, own, what=what)

    def value(self, params: Mapping[str, Tensor] | None = None) -> float:
        """L(θ)."""
        with torch.no_grad():
            return self._run(self.point(params), lambda mean, weight: None)[0]

    def gradient(self, params: Mapping[str, Tensor] | None = None) -> Params:
        """∇L(θ), in float64."""
        return self.value_and_gradient(params)[1]

    @torch.inference_mode(mode=False)
    def value_and_gradient(
        self, params: Mapping[str, Tensor] | None = None, *, draws: Sequence[int] | None = None
    ) -> tuple[float, Params]:
        """L(θ) and ∇L(θ) in one pass; `draws` says which of the draws to average."""
        leaves = derivatives.leaves(self.point(params))
        return self._mean_vector(
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
            return self._mean_vector(
                leaves, lambda mean: derivatives.hessian_product(mean, leaves, along)
            )[1]

    def directional_derivatives(
        self,
        directions: Sequence[Params],
        params: Mapping[str, Tensor] | None = None,
        *,
        draws: Sequence[int] | None = None,
        base: Params | None = None,
        signs: Tensor | None = None,
    ) -> directional.DirectionalDerivatives:
        """D ℓ_i(θ)[v_j] of every unit i, direction j; with a base D²ℓ_i[v_j, base].

        One pass, in the order of the data. A direction is zero at the names that it leaves out.
        With a sign for every unit, Σ s_i ∇ℓ_i comes along at no cost.
        """
        start, options = (self.point(params), self._first), {"base": base, "signs": signs}
        found = directional.directional_derivatives(
            self._stream, *start, directions, draws=draws, **options
        )
        check_count(len(found.values), self._count)
        return found

    @torch.inference_mode(mode=False)
    def rounding(self, params: Mapping[str, Tensor] | None = None) -> Params:
        """How far ∇L moves, on the first examples, when every weight moves by its last digit.

        A gradient is not known better than this, however many digits it prints: it is the level
        at which a target counts as no signal. The digit is that of the coarsest arithmetic at
        work, autocast included.
        """
        here = self.point(params)
        batch, weights = self._stream.moved(self._first)
        moved = probes.perturb_last_digit(here)
        found = []
        with self._stream.ready(training=self.training), torch.enable_grad():
            for point in (here, moved):
                leaves = derivatives.leaves(point)
                self._stream.evaluate(
                    leaves, batch, weights, draw=0,
                    use=lambda mean, _, leaves=leaves: found.append(
                        derivatives.gradient(mean, leaves)
                    ),
                )  # fmt: skip
        return {
            n: p.new_zeros(p.shape) if a is None or b is None else b.sub_(a)
            for (n, p), a, b in zip(here.items(), *found, strict=True)
        }

    def predictions(self, *points: Mapping[str, Tensor]) -> tuple[list[Tensor], Any]:
        """Outputs for all examples at each point, in eval mode, and the last batch's target.

        One pass for all points, because a shuffling loader changes its order with every pass.
        """
        where = [self.point(p) for p in points]
        return self._stream.predictions(where, single=self._mean_reduced)

    def repeats_order(self, *, shuffled: bool = True) -> bool:
        """Whether every pass has the same order; unless `shuffled`, under any random state."""
        return self._stream.repeats_order(shuffled=shuffled)

    def for_each_batch(
        self,
        params: Params,
        use: Callable[[nn.Module, Any, Tensor | None, int], None],
        *,
        first: bool = False,
    ) -> None:
        """One pass in eval mode: use(model, batch, weights, index), the parameters swapped in.

        For what no mean loss can say (activations, outputs). `first` stops at the examples that
        probes look at.
        """
        with self._stream.ready(training=False), torch.enable_grad():
            batches = [self._stream.moved(self._first)] if first else self._stream.read()
            for index, (batch, weights) in enumerate(batches):
                Borrowed(self.model).at(
                    params, lambda model, b=batch, w=weights, i=index: use(model, b, w, i)
                )

    def _check_arguments(
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
        if not isinstance(training, bool):
            raise InputError(f"training is {training!r}: pass True or False.")
        for name, number, least in (("draws", draws, 1), ("seed", seed, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise InputError(f"{name} is {number!r}: pass a whole number, at least {least}.")
        self.model, self.training, self.draws, self.seed = model, training, draws, seed
        self.loss_name: str = getattr(loss, "__name__", type(loss).__name__)
        self._count: int | None = None
        self.point()

    def _open(self, data: Any, weights: Tensor | None, batch_size: int, *read: Any) -> None:
        """Check the data, and probe the objective on its first examples."""
        self.data, self.weights = data, weights
        batches = open_batches(data, weights=weights, batch_size=batch_size)
        params = self.params
        self._stream = Stream(
            self.model,
            read[0],
            batches,
            self.loss_name,
            read[1],
            masks=not self._mean_reduced,
            training=self.training,
            draws=self.draws,
            seed=self.seed,
            paired=self.paired,
        )
        with self._stream.ready(training=self.training), torch.no_grad():
            check_items(data)
            check_restarts(batches, data)
            first = next(self._stream.read(), None)
            if first is None:
                raise InputError("data is empty: it yields no batch. Pass at least one example.")
            sample = None if batches.sample is None else batches.sample(PROBE)
            if sample is not None and not probes.not_finite(sample, masks=True):
                first = self._stream.moved(sample)
            elif self._mean_reduced:
                first = slice_batch(first, slice(PROBE), count_examples(first[0]))
            self._first: tuple[Any, Tensor | None] = first
            try:
                probes.check_deterministic(
                    lambda: self._stream.evaluate(params, *first, draw=0).mean,
                    training=self.training,
                )
            except Exception as error:
                probes.explain_failure(error, first[0], params)
                raise

    def _check_mean_reduced(self, batch: Any) -> None:
        """Refuse a loss that is not a mean over the examples of this batch."""
        params, evaluate = self.params, self._stream.evaluate
        with self._stream.ready(training=False), torch.no_grad():
            whole = evaluate(params, batch, None)
            probes.check_loss(whole.mean, 0)
            if self.training and not evaluate(params, batch, None).mean.isclose(whole.mean):
                return  # noise that eval mode does not stop: halves cannot be compared
            probes.check_mean_reduced(
                lambda part: evaluate(params, slice_batch(batch, part, whole.units), None).mean,
                whole.units,
                precision=probes.coarsest_dtype(whole.mean, *params.values()),
            )

    def _run(
        self,
        params: Params,
        use: Callable[[Tensor, float], None],
        *,
        draws: Sequence[int] | None = None,
    ) -> tuple[float, float]:
        """One pass over the data: the mean loss and the weight behind it."""
        value, weight, units, last = self._stream.run(params, use, draws=draws)
        check_count(units, self._count)
        if self._count is None and self._mean_reduced and self._stream.batches.sample is None:
            # Class weights or padding may show only between batches that differ.
            some = slice_batch(last, slice(PROBE), count_examples(last))
            first = self._stream.moved(self._first[0])
            mixed = join_batches(first, some, (count_examples(first), count_examples(some)))
            if mixed is not None:
                self._check_mean_reduced(mixed)
        self._count = units
        return value, weight

    def _mean_vector(
        self,
        leaves: Params,
        vectors: Callable[[Tensor], Sequence[Tensor | None]],
        *,
        draws: Sequence[int] | None = None,
    ) -> tuple[float, Params]:
        """L, and the weighted mean over batches of a vector of each batch's loss, in float64."""
        sums = float64_zeros(leaves)

        def add(mean: Tensor, weight: float) -> None:
            for total, part in zip(sums.values(), vectors(mean), strict=True):
                if part is not None:
                    total.add_(part.to(total.device), alpha=weight)

        with torch.enable_grad():
            value, weight = self._run(leaves, add, draws=draws)
        for total in sums.values():
            total.div_(weight)
        check_finite(sums, what="the derivative of the loss")
        return value, sums

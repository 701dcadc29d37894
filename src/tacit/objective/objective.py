"""A model, a loss and data as functions of the parameters: value, gradient, Hessian products."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective import checks, derivatives, per_example
from tacit.objective.batches import join_batches, open_batches
from tacit.objective.losses import (
    BatchLoss,
    Loss,
    LossReader,
    batch_loss_reader,
    count_examples,
    mean_loss_reader,
)
from tacit.objective.params import (
    Params,
    check_params,
    norm,
    perturb_last_digit,
    point_of,
    trainable,
)
from tacit.objective.passes import Passes, PassResult
from tacit.objective.per_example import DirectionalDerivatives
from tacit.objective.randomness import takes_noise


class Objective:
    """L(θ), the mean loss over all examples, and its derivatives, streamed over the data.

    Sums are in float64 for every dtype of the model, and a batch is weighted by its size.
    The model is only borrowed: its mode, parameters, buffers and gradients, and the random state,
    are unchanged after every call.

    Args:
        model: the trained module; parameters with requires_grad=False are constants.
        loss: loss(output, target), mean-reduced, as torch's losses are by default.
        data: a tuple of tensors (inputs, …, target), a DataLoader, or an iterable of such batches.
        weights: one weight per example, for data in tensors; L is then the weighted mean.
        batch_size: how many rows of data in tensors go through the model at once.
        training: evaluate with dropout and similar layers active (batch norm stays in eval).
        draws: how many draws of that randomness are averaged.
        seed: draws depend only on (seed, draw, batch).

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
        self._set_arguments(model, loss, training=training, draws=draws, seed=seed)
        self.paired: bool = False
        """Whether batch_loss takes its noise, so that draws 2j and 2j+1 are mirror images."""
        self.loss: Loss | None = loss
        """The loss(output, target) it was made with; None after `from_batch_loss`."""
        self._open(data, weights, batch_size, mean_loss_reader(loss))

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

        For dict batches, several inputs, padding, Hugging Face style models: the loss may call
        the model in any way. It receives the user's own model with its parameters swapped. It may
        also return (losses, weights); L is then the weighted mean. With training=True it may take
        (model, batch, noise): the technique's noise as a `Noise`, mirrored in pairs of draws.
        """
        self = cls.__new__(cls)
        self._set_arguments(model, batch_loss, training=training, draws=draws, seed=seed)
        self.paired = takes_noise(batch_loss, training=training, draws=draws)
        self.loss = None
        self._open(data, weights, batch_size, batch_loss_reader(batch_loss))
        return self

    @property
    def params(self) -> Params:
        """The model's current trainable parameters, tied ones once; not copies."""
        return trainable(self.model)

    @property
    def count(self) -> int:
        """How many examples (or tokens) the mean is over."""
        if self._count is None:
            self.value()
        return self._count or 0

    def point(self, params: Mapping[str, Tensor] | None = None, *, what: str = "params") -> Params:
        """The point to evaluate at: the given parameters, checked, or the model's current ones.

        Frozen parameters and second names of tied ones may be among them if their values agree.
        """
        return point_of(self.model, params, what=what)

    def value(self, params: Mapping[str, Tensor] | None = None) -> float:
        """L(θ)."""
        with torch.no_grad():
            result = self._passes.run(self.point(params), lambda mean, weight: None)
        self._check_pass(result)
        return result.value

    def gradient(self, params: Mapping[str, Tensor] | None = None) -> Params:
        """∇L(θ), in float64."""
        return self.value_and_gradient(params)[1]

    @torch.inference_mode(mode=False)
    def value_and_gradient(
        self, params: Mapping[str, Tensor] | None = None, *, draws: Sequence[int] | None = None
    ) -> tuple[float, Params]:
        """L(θ) and ∇L(θ) in one pass; `draws` selects which draws to average."""
        leaves = derivatives.leaves(self.point(params))
        result, gradient = self._passes.mean_vector(
            leaves, lambda mean: derivatives.gradient(mean, leaves), draws=draws
        )
        self._check_pass(result)
        return result.value, gradient

    @torch.inference_mode(mode=False)
    def hvp(
        self, direction: Mapping[str, Tensor], params: Mapping[str, Tensor] | None = None
    ) -> Params:
        """H(θ)·direction, the Hessian of L times a direction, in float64, by double backward."""
        leaves = derivatives.leaves(self.point(params))
        direction = check_params(direction, leaves, what="direction")
        with derivatives.math_attention():
            result, product = self._passes.mean_vector(
                leaves, lambda mean: derivatives.hessian_product(mean, leaves, direction)
            )
        self._check_pass(result)
        return product

    def directional_derivatives(
        self,
        directions: Sequence[Params],
        params: Mapping[str, Tensor] | None = None,
        *,
        draws: Sequence[int] | None = None,
        base: Params | None = None,
        signs: Tensor | None = None,
    ) -> DirectionalDerivatives:
        """D ℓ_i(θ)[v_j] of every example i and direction j; with a base D²ℓ_i(θ)[v_j, base].

        One pass, in the order of the data. A direction is zero at the names that it leaves out.
        With one sign s_i per example, Σ s_i w_i ∇ℓ_i is returned too, at no extra cost; the w_i are
        the weights of the examples, or 1.
        """
        result = per_example.directional_derivatives(
            self._passes, self.point(params), self._probe, directions, draws=draws, base=base,
            signs=signs,
        )  # fmt: skip
        self._check_count(len(result.values))
        return result

    @torch.inference_mode(mode=False)
    def rounding(self, params: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """Norm, by tensor, of the change of ∇L when every weight moves by its last digit.

        It is measured on a few examples. It bounds how precisely ∇L is known, so a target of this
        norm has no signal. The last digit is that of the least precise dtype in use, autocast
        included.
        """
        point = self.point(params)
        gradients = [
            self._passes.batch_gradient(theta, *self._probe)
            for theta in (point, perturb_last_digit(point))
        ]
        return {
            name: 0.0 if here is None or there is None else norm({name: there.sub_(here)})
            for name, here, there in zip(point, *gradients, strict=True)
        }

    def predictions(self, *points: Mapping[str, Tensor]) -> tuple[list[Tensor], Any]:
        """Outputs for all examples at each point, in eval mode, and the last batch's target.

        One pass for all points, because a shuffling loader changes its order with every pass.
        """
        return self._passes.predictions(
            [self.point(point) for point in points], has_outputs=self.loss is not None
        )

    def repeats_order(self, *, shuffled: bool = True) -> bool:
        """Whether every pass has the same order; with shuffled=False, under any random state."""
        return self._passes.repeats_order(shuffled=shuffled)

    def for_each_batch(
        self,
        params: Params,
        use: Callable[[nn.Module, Any, Tensor | None, int], None],
        *,
        probe: bool = False,
    ) -> None:
        """One pass in eval mode: use(model, batch, weights, index) with the parameters swapped in.

        For quantities that are not mean losses (activations, outputs). With probe=True only the
        few examples that the constructor checked are visited.
        """
        passes = self._passes
        with passes.prepared(training=False), torch.enable_grad():
            batches = [passes.to_model(self._probe)] if probe else passes.read()
            for index, (batch, weights) in enumerate(batches):
                passes.call(
                    params, lambda model, _, b=batch, w=weights, i=index: use(model, b, w, i)
                )

    def describe(self, params: Params) -> dict[str, Any]:
        """Facts about the model, the loss and the data, for the header of a summary."""
        names = [n for n, _ in self.model.named_parameters(remove_duplicate=False)]
        return {
            "loss": self.loss_name,
            "examples": self.count,
            "frozen": sum(p.numel() for p in self.model.parameters() if not p.requires_grad),
            "tied": len(names) - len(list(self.model.parameters())),
            "dtype": ", ".join(
                sorted({str(p.dtype).removeprefix("torch.") for p in params.values()})
            ),
            "parameter_norm": norm(params),
        }

    def _set_arguments(
        self, model: nn.Module, loss: Any, *, training: bool, draws: int, seed: int
    ) -> None:
        """Check the arguments that both constructors share, and store them."""
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

    def _open(self, data: Any, weights: Tensor | None, batch_size: int, reader: LossReader) -> None:
        """Open the data, and check data, model and loss on a few examples."""
        self.data, self.weights = data, weights
        is_mean_loss = self.loss is not None
        self._passes = Passes(
            self.model,
            reader,
            open_batches(data, weights=weights, batch_size=batch_size),
            self.loss_name,
            allow_masks=not is_mean_loss,
            training=self.training,
            draws=self.draws,
            seed=self.seed,
            paired=self.paired,
        )
        self._probe = checks.check_on_probe(
            self._passes, self.point(), data, mean_loss=is_mean_loss
        )

    def _check_pass(self, result: PassResult) -> None:
        """Refuse data that changed between passes, and losses that are not means across batches."""
        self._check_count(result.examples)
        streamed = self._passes.batches.sample is None
        if self._count is None and self.loss is not None and streamed:
            # Class weights or padding may show only between batches that differ.
            last, _ = checks.first_examples((result.last_batch, None))
            first = self._passes.to_model(self._probe[0])
            mixed = join_batches(first, last, (count_examples(first), count_examples(last)))
            if mixed is not None:
                checks.check_mean_loss(self._passes, self.params, mixed)
        self._count = result.examples

    def _check_count(self, count: int) -> None:
        if self._count not in (None, count):
            raise InputError(
                f"the data gave {count} examples, where an earlier pass gave {self._count}: tacit "
                "reads the data more than once. Pass data that can be read repeatedly and stays "
                "the same, such as a list of batches."
            )


def check_objective(objective: Objective, *, what: str = "an objective") -> Objective:
    """The objective itself; anything else is refused."""
    if not isinstance(objective, Objective):
        raise InputError(
            f"{what} is a {type(objective).__name__}: pass tacit.Objective(model, loss, data)."
        )
    return objective

"""A model, a loss and data as functions of the parameters: value, gradient, Hessian products."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from tacit.errors import InputError, check_choice, check_type, check_whole
from tacit.objective import derivatives, per_example
from tacit.objective.batches import (
    is_empty,
    needs_batch_size,
    open_batches,
    tensors_in,
)
from tacit.objective.checks import check_probe, check_shared, check_statistics
from tacit.objective.compared import ComparedDerivatives
from tacit.objective.few_examples import loss_of_few
from tacit.objective.losses import (
    BatchLoss,
    Count,
    ExampleLosses,
    Loss,
    LossPerBatch,
    MeanLoss,
    WholeBatches,
    whole_batches,
)
from tacit.objective.models import (
    BatchNorm,
    check_batch_norm,
    point_of,
    running_statistics,
    trainable,
)
from tacit.objective.options import (
    SUMS,
    Accumulate,
    ObjectiveOptions,
    check_draws,
    check_options,
)
from tacit.objective.params import (
    Params,
    check_params,
    norm,
    sum_over_parts,
)
from tacit.objective.passes import Derivative, Passes, PassResult, move_by
from tacit.objective.per_example import DirectionalDerivatives
from tacit.objective.randomness import seed_reading, takes_noise
from tacit.objective.ranks import Ranks, on_its_ranks, ranks_of
from tacit.objective.rereading import check_rereadable, keeps_order
from tacit.objective.rounding import begin_rounding
from tacit.objective.scale import Scale
from tacit.objective.survey import Facts, Survey
from tacit.objective.third_order import curvatures, sum_of_gradients
from tacit.objective.visits import Visit, predict, visit

BATCH_SIZE = 1024
"""Rows of data in tensors that go through the model at once, unless batch_size= is passed."""


Shift = Callable[[Params], Params]
"""shift(params): by how much to move the parameters, in float64."""


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
        batch_size: how many rows of data in tensors go through the model at once (1024).
        training: evaluate with dropout and similar layers active, and with data that is random
            itself (augmentation) read anew for each draw.
        draws: how many draws of that randomness are averaged.
        seed: draws depend only on (seed, draw, batch).
        batch_norm: which statistics batch norm uses; a model that has it needs the choice. "batch":
            those of each batch, as in training. A draw is then also a way to group the examples
            into batches, and a batch is the unit of scores. "running": the running ones, as in
            inference and in fine-tuning with frozen batch norm. Points of another time bring
            theirs, as a state_dict does.
        accumulate: the dtype that gradients are summed in. "float32" takes half the memory of
            "float64"; strengths agree to about 1e-5. Trap: it rounds to 1e-7 of the gradients of
            batches. Where their mean is far smaller (the difference of a technique, steps of a
            trajectory, a very weak penalty), that may be much of it.

    >>> X, y = torch.eye(2), torch.tensor([[1.0], [3.0]])
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> objective = Objective(model, torch.nn.functional.mse_loss, (X, y))
    >>> objective.gradient({"weight": torch.zeros(1, 2)})
    {'weight': tensor([[-1., -3.]], dtype=torch.float64)}
    """

    @torch.inference_mode(mode=False)
    def __init__(  # noqa: PLR0913 # the model, its loss and the data, then keyword options
        self,
        model: nn.Module,
        loss: Loss | ExampleLosses | WholeBatches,
        data: Any,
        *,
        weights: Tensor | None = None,
        batch_size: int | None = None,
        training: bool = False,
        draws: int = 1,
        seed: int = 0,
        batch_norm: BatchNorm | None = None,
        accumulate: Accumulate = "float64",
    ):
        reader = loss if isinstance(loss, ExampleLosses | WholeBatches) else MeanLoss(loss)
        a_loss = "a function, such as torch.nn.functional.cross_entropy"
        for name, value, kind, needed in (
            ("model", model, nn.Module, "a trained torch.nn.Module"),
            ("the loss", reader.function, Callable, a_loss),
            ("training", training, bool, "True or False"),
        ):
            check_type(name, value, kind, needed)
        self.batch_norm: BatchNorm | None = check_batch_norm(model, batch_norm)
        grouped = self.batch_norm == "batch"
        self.batch_size: int | None = batch_size
        """The batch_size= that was passed; None where it was left out."""
        reader = whole_batches(reader) if grouped else reader
        if batch_size is None:
            if (grouped or reader.interacting) and needs_batch_size(data):
                raise InputError(
                    "batch_size is missing: the loss depends on which examples share a batch. Pass "
                    "the batch size of training, or a loader or a list of its batches as data."
                )
            batch_size = BATCH_SIZE
        numbers = (("batch_size", batch_size, 1), ("draws", draws, 1), ("seed", seed, 0))
        for name, number, least in numbers:
            check_whole(name, number, least)
        check_choice("accumulate", accumulate, SUMS)
        self.model, self.data, self.weights = model, data, weights
        self.training, self.draws, self.seed = training, draws, seed
        inner = reader.reader if isinstance(reader, WholeBatches) else reader
        self.loss: Loss | None = inner.function if isinstance(inner, MeanLoss) else None
        """The loss(output, target) it was made with; None after `from_batch_loss`."""
        self.paired: bool = self.loss is None and takes_noise(reader.function, training, draws)
        """Whether batch_loss takes its noise, so that draws 2j and 2j+1 are mirror images."""
        self.loss_name: str = getattr(reader.function, "__name__", type(reader.function).__name__)
        self.ranks: Ranks = ranks_of(model)
        """The processes that share the model, each with examples of its own."""
        if self.ranks.count > 1 and is_empty(data):
            data, weights = [], None  # the others have some
        batches = open_batches(data, weights, batch_size, shuffled=grouped)
        devices = {p.device for p in model.parameters()}
        streamed = batches.source is not None
        self._redraws = streamed and check_rereadable(batches, devices, training=training)
        passes = Passes(
            model, reader, batches, self.loss_name, training, draws, seed, self.paired,
            batch_norm=self.batch_norm, redraws_data=self._redraws or grouped,
            sums=SUMS[accumulate], ranks=self.ranks,
        )  # fmt: skip
        check_shared(passes, self.point())
        self.regroups: bool = grouped and passes.regroups()
        """Whether draws differ in which examples share a batch."""
        self.random: bool = training or self.regroups
        """Whether draws differ: in dropout and the like, or in which examples share a batch."""
        check_draws(draws, fixed=grouped and not self.random)
        self._passes = passes if self.random else replace(passes, draws=1)
        with self.ranks:
            self._probe = check_probe(self._passes, self.point())
        self._passes = replace(self._passes, spare=self._probe)
        if batch_norm != "running":
            check_statistics(self._passes, self.point(), self._probe[0])
        self._count: int | None = None
        self._shares: tuple[int, ...] = ()
        """How many of the examples every process has, once they were counted."""
        self._facts = Facts()
        self.compared: ComparedDerivatives = ComparedDerivatives(self._passes, self._probe)
        """Its higher derivatives, compared with finite differences."""
        self._checked_passes = self._passes  # those without a technique
        self._shift: Shift | None = None
        self.scale: Scale | None = None
        """The scale of the technique (`tacit.techniques`) that was applied last, if it has one."""
        self.at_scale: Callable[[float], Objective] | None = None
        """The same with that technique at another scale."""
        self.base: Objective | None = None
        """The objective that a technique was applied to."""

    @classmethod
    def from_batch_loss(
        cls,
        model: nn.Module,
        batch_loss: BatchLoss,
        data: Any,
        *,
        interacting: bool = False,
        **options: Unpack[ObjectiveOptions],
    ) -> Self:
        """An objective from batch_loss(model, batch) -> losses, 1-D, one per example or token.

        For dict batches, several inputs, padding, Hugging Face style models: the loss may call
        the model in any way. It receives the user's own model with its parameters swapped. It may
        also return (losses, weights); L is then the weighted mean. With training=True it may take
        (model, batch, noise): the technique's noise as a `Noise`, mirrored in pairs of draws.

        With interacting=True it returns one number per batch. It is for losses in which the loss of
        an example depends on the others of its batch, as in contrastive learning: L is the mean
        over batches, `count` is the number of batches, and error bars resample batches.

        The options are those of `Objective`: weights, batch_size, training, draws, seed,
        batch_norm, accumulate.
        """
        check_type("interacting", interacting, bool, "True or False")
        whole = WholeBatches(LossPerBatch(batch_loss))
        loss = whole if interacting else ExampleLosses(batch_loss)
        return cls(model, loss, data, **check_options("from_batch_loss", options))

    @classmethod
    def from_mean_loss(
        cls,
        model: nn.Module,
        batch_mean: BatchLoss,
        data: Any,
        *,
        count: Count,
        **options: Unpack[ObjectiveOptions],
    ) -> Self:
        """An objective from batch_mean(model, batch), the mean loss of a batch as a scalar.

        For models that return their own mean loss, as those of Hugging Face (`out.loss`). Batches
        may hold different numbers of tokens: count(batch), or count(model, batch), is the number
        that a batch's mean is over, and L = Σ count·mean / Σ count.

        A mean does not tell the losses of its examples apart: scores have one row per batch, and
        `count` of the objective is the number of batches.
        """
        needed = "a function of a batch, the number of examples or tokens that its mean is over"
        check_type("count", count, Callable, needed)
        reader = WholeBatches(LossPerBatch(batch_mean, count), interacting=False)
        return cls(model, reader, data, **check_options("from_mean_loss", options))

    @property
    def unit(self) -> str:
        """What the mean is over, and what error bars resample: "examples" or "batches"."""
        return "batches" if isinstance(self._passes.loss, WholeBatches) else "examples"

    @property
    def params(self) -> Params:
        """The model's current trainable parameters, tied ones once; not copies."""
        return trainable(self.model)

    @property
    def count(self) -> int:
        """How many examples (or tokens) the mean is over."""
        if self._count is None:
            with self.ranks:
                return self._run(self.point()).examples
        return self._count

    def point(self, params: Mapping[str, Tensor] | None = None, *, what: str = "params") -> Params:
        """The point to evaluate at: the given parameters, checked, or the model's current ones.

        Frozen parameters and second names of tied ones may be among them if their values agree.
        """
        statistics = running_statistics(self.model) if self.batch_norm == "running" else ()
        return point_of(self.model, params, what=what, statistics=statistics)

    @on_its_ranks
    def value(self, params: Mapping[str, Tensor] | None = None) -> float:
        """L(θ)."""
        return self._run(self.point(params)).value

    def gradient(self, params: Mapping[str, Tensor] | None = None) -> Params:
        """∇L(θ), in float64, or in float32 with accumulate="float32"."""
        return self.value_and_gradient(params)[1]

    def value_and_gradient(
        self, params: Mapping[str, Tensor] | None = None, *, draws: Sequence[int] | None = None
    ) -> tuple[float, Params]:
        """L(θ) and ∇L(θ) in one pass; `draws` selects which draws to average."""
        result = self.differentiate(params, draws=draws)
        return result.value, result.derivative

    @on_its_ranks
    @torch.inference_mode(mode=False)
    def differentiate(
        self,
        params: Mapping[str, Tensor] | None = None,
        *,
        draws: Sequence[int] | None = None,
        derivative: Derivative = derivatives.gradient,
    ) -> PassResult:
        """L(θ), ∇L(θ) and the names of the parameters that the loss of no batch depends on.

        In place of ∇L it can be the mean over batches of another derivative(mean, leaves).
        """
        return self._run(self.point(params), derivative, draws)

    @on_its_ranks
    @torch.inference_mode(mode=False)
    def hvp(
        self, direction: Mapping[str, Tensor], params: Mapping[str, Tensor] | None = None
    ) -> Params:
        """H(θ)·direction, the Hessian of L times a direction, in float64, by double backward.

        The first product of an objective is compared with a finite difference, on a few examples.
        """
        self._check_unshifted()
        point = self.point(params)
        vector = check_params(direction, point, what="direction")
        with derivatives.twice_differentiable():
            self.compared.check_products(point)
            return self._run(
                point, lambda mean, leaves: derivatives.hessian_product(mean, leaves, vector)
            ).derivative

    @on_its_ranks
    @torch.inference_mode(mode=False)
    def curvature(self, directions: Sequence[Params], params: Params | None = None) -> float:
        """Σ_v vᵀH(θ)v over directions v, in one pass."""
        self._check_unshifted()
        point = self.point(params)
        with derivatives.twice_differentiable():
            self.compared.check_products(point)
            entries = self._run(point, partial(curvatures, directions=directions)).derivative
        return sum(sum_over_parts({n: float(e.sum()) for n, e in entries.items()}).values())

    @on_its_ranks
    @torch.inference_mode(mode=False)
    def curvature_gradient(
        self, directions: Sequence[Params], params: Params | None = None
    ) -> Params:
        """Σ_v ∇(vᵀH(θ)v) over directions v, in float64: third derivatives of L, in one pass.

        Where torch's are wrong (layer norm), four passes per direction; see `third_order`.
        """
        self._check_unshifted()
        point = self.point(params)
        with derivatives.twice_differentiable():
            self.compared.check_products(point)
            wrong = self.compared.wrong_thirds(point)
            return sum_of_gradients(self._run, point, directions, wrong)

    @on_its_ranks
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

        One pass, in the order of the data, process after process where several share the model. A
        direction is zero at the names that it leaves out. With one sign s_i per example,
        Σ s_i w_i ∇ℓ_i is returned too; the w_i are the weights of the examples, or 1. In forward
        mode that takes a backward pass over the batches with signs other than 0, and else hardly
        anything.
        """
        self._check_unshifted()
        if self.regroups and len(range(self.draws) if draws is None else draws) > 1:
            raise InputError(
                "the draws of batch_norm='batch' share their examples, so that the batches of "
                "several draws are no independent sample: score an objective with draws=1."
            )
        if signs is not None and self.ranks.count > 1:
            start = sum(self._shares[: self.ranks.number])
            signs = signs[start : start + self._shares[self.ranks.number]]
        result = per_example.directional_derivatives(
            self._passes, self.point(params), self._probe, directions, draws=draws, base=base,
            signs=signs,
        )  # fmt: skip
        self._check_count(len(result.values))
        return result

    @on_its_ranks
    def rounding(self, params: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """Norm, by tensor, of the change of ∇L when every weight moves by its last digit.

        It is measured on a few examples, and of large tensors on a part of the entries. It bounds
        how precisely ∇L is known, so a target of this norm has no signal. The last digit is that of
        the least precise dtype in use: of weights, of the model's operations, or of the sums.
        """
        return self.begin_rounding(params)()

    @on_its_ranks
    def begin_rounding(
        self, params: Mapping[str, Tensor] | None = None
    ) -> Callable[[], dict[str, float]]:
        """A function that returns `rounding`: until it is called, nothing waits for a GPU."""
        return begin_rounding(self._passes, self.point(params), self._probe)

    @on_its_ranks
    @torch.inference_mode(mode=False)
    def loss_of_few(self, params: Params) -> float:
        """The loss on a few examples, always the same ones: for comparisons of points."""
        return loss_of_few(self._passes, self.point(params), self._probe)

    def predictions(self, *points: Mapping[str, Tensor]) -> tuple[list[Tensor], Any]:
        """Outputs for all examples at each point, in eval mode, and the last batch's target.

        One pass for all points, because a shuffling loader changes its order with every pass.
        """
        return predict(self._passes, self.loss, [self.point(point) for point in points])

    def repeats_order(self, *, shuffled: bool = True) -> bool:
        """Whether every pass begins with the same batch, as far as can be observed.

        Passes fork the random state, so a shuffled loader repeats its order. With shuffled=False
        the order must be the same under any random state, as labels beside the data require.
        """
        passes, first_batches = self._passes, []
        if self._redraws:  # what the examples are depends on the random state, their order may not
            return keeps_order(passes.batches, passes.devices)
        for seed in range(2):
            with passes.prepared(training=False):
                if not shuffled:
                    seed_reading((seed,), passes.devices, passes.batches.generators)
                batch, _ = passes.first_batch(0 if shuffled else seed)
                first_batches.append(list(tensors_in(batch)))
        first, second = first_batches
        return len(first) == len(second) and all(map(torch.equal, first, second))

    def for_each_batch(self, params: Params, use: Visit, *, probe: bool = False) -> None:
        """One pass in eval mode: use(model, batch, weights, index) with the parameters swapped in.

        For quantities that are not mean losses (activations, outputs). With probe=True only the
        few examples that the constructor checked are visited.
        """
        drawn = self._redraws and self._passes.draws > 1
        visit(self._passes, params, use, self._probe if probe else None, drawn=drawn)

    @on_its_ranks
    def describe(self, params: Params) -> dict[str, Any]:
        """Facts about the model, the loss and the data, for the header of a summary."""
        parameters = list(self.model.parameters())
        names = list(self.model.named_parameters(remove_duplicate=False))
        dtypes = {str(p.dtype).removeprefix("torch.") for p in params.values()}
        return {
            "loss": self.loss_name,
            "examples": self.count,
            "unit": self.unit,
            "ignored": self._facts.ignored,
            "uneven": self._facts.uneven,
            "frozen": sum(p.numel() for p in parameters if not p.requires_grad),
            "tied": len(names) - len(parameters),
            "dtype": ", ".join(sorted(dtypes)),
            "parameter_norm": norm(params),
        }

    def _run(
        self, params: Params, derivative: Derivative = None, draws: Sequence[int] | None = None
    ) -> PassResult:
        """One pass; data that changed and losses that are not means across batches are refused."""
        gradient = derivative is derivatives.gradient
        new = self._count is None or (gradient and not self._facts.tokens_known)
        interacting = self._passes.loss.interacting
        first = Survey(count_tokens=gradient) if new and not interacting else None
        look = None if first is None else first.see
        passes = self._passes
        if self._shift is not None:
            passes = replace(passes, move=move_by(self._shift(params)))
        result = passes.run(params, derivative, draws, look)
        self._check_count(result.examples)
        if first is not None:  # all processes check what one of them has collected
            first = self.ranks.first(first if first.batches else None) or first
            self._facts = first.finish(self._checked_passes, params)
        self._count, self._shares = result.examples, result.shares
        return result

    def _check_unshifted(self) -> None:
        if self._shift is not None:
            raise InputError(
                "sam() moves the weights by a gradient of all examples, which counts as constant: "
                "its gradient has no Hessian and is no mean over examples. Pass the objective "
                "without sam, or leave out what needs second derivatives or scores of examples."
            )

    def _check_count(self, count: int) -> None:
        if not self._redraws and self._count not in (None, count):
            raise InputError(
                f"the data gave {count} examples, where an earlier pass gave {self._count}: pass "
                "data that can be read repeatedly and stays the same, such as a list of batches."
            )


def check_objective(objective: Objective, *, what: str = "an objective") -> Objective:
    """The objective itself; anything else is refused."""
    if not isinstance(objective, Objective):
        raise InputError(
            f"{what} is a {type(objective).__name__}: pass tacit.Objective(model, loss, data)."
        )
    return objective

"""Derivatives of every example's loss along a few directions, in one pass over the data.

Where examples do not interact and each has one row, they are sums of products at the operations
that read parameters (`local_derivatives`), once a few examples have shown that these are right.

Elsewhere they come from the whole network. Let f_i(θ) be the outputs of example i, and J_i their
Jacobian. For any cotangents u the map u ↦ Σ_i u_i J_iᵀ ∂ℓ_i/∂f_i is linear in u, so its derivative
by u_i along a direction v is ⟨∂ℓ_i/∂f_i, J_i v⟩ = D ℓ_i[v]. One backward pass with a graph
therefore serves all directions, at one more (cheap) backward pass each.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.batches import BatchPair, row_count, slice_batch
from tacit.objective.checks import check_rows_are_examples
from tacit.objective.closed_forms import ClosedForms
from tacit.objective.local_derivatives import LocalDerivatives, OtherGraphError, learn_places
from tacit.objective.local_products import NoLocalProductError
from tacit.objective.losses import (
    ExampleLosses,
    ExampleOutputs,
    WholeBatches,
    examples_of_losses,
)
from tacit.objective.params import Params, same_buffers, to_float64
from tacit.objective.parts import PART_ERRORS
from tacit.objective.passes import Passes
from tacit.objective.rereading import check_draws_align
from tacit.objective.signed_sum import Evaluate, SignedSum, check_sum, pull_back_examples

FORWARD_ON = ("cuda",)
"""Kinds of devices on which all directions at once are faster than reverse mode: those on which
starting operations takes much of the time."""


class DirectionalDerivatives(NamedTuple):
    """Derivatives of every example, in the order of the data, and each example's weight."""

    values: Tensor
    """(examples, directions), in float64 on the CPU."""
    weights: Tensor | None
    """Weights of the examples in the mean; None where all are equal."""
    signed_sum: Params | None = None
    """Σ s_i w_i ∇ℓ_i for the signs s that were passed, in float64."""


@dataclass
class _FirstOrder:
    """D ℓ_i[v_j] of batches: from local products where these are known, or else by reverse mode.

    By forward mode where the first use of reverse mode fails.
    """

    leaves: Params
    directions: Sequence[Params]
    signed_sum: SignedSum
    local: LocalDerivatives | None = None
    together: "AllDirections | None" = None
    """By forward mode along all directions at once, where that is possible."""
    reverse_worked: bool = False
    sum_checked: bool = False
    reverse_error: str | None = None

    def of_batch(self, evaluate: Evaluate) -> tuple[Tensor, Tensor | None]:
        """The derivatives of one batch, in one draw, and its weights."""
        if self.local is not None:  # it reads torch's own layer norm from the graph
            with derivatives.math_attention():
                return self._along_each(evaluate)
        if self.together is not None:
            result = self.together.of_batch(evaluate, self.signed_sum)
            if result is not None:
                return result
            self.together = None
        with derivatives.twice_differentiable():
            return self._along_each(evaluate)

    def _along_each(self, evaluate: Evaluate) -> tuple[Tensor, Tensor | None]:
        """The same, one direction after the other where local products are not known."""
        if self.reverse_error is None or self.local is not None:
            try:
                values, weights = evaluate(self.leaves, self._by_products_or_reverse_mode)
                if values is not None:
                    return values, weights
            except RuntimeError as error:
                if self.reverse_worked or isinstance(error, torch.OutOfMemoryError):
                    raise
                self.reverse_error = str(error)
        return self._by_forward_mode(evaluate)

    def _by_products_or_reverse_mode(self, examples: ExampleOutputs) -> Tensor | None:
        """D ℓ_i[v_j]; None if only forward mode is left."""
        values = self._by_local_products(examples)
        if values is None and self.reverse_error is None:
            values = self.by_reverse_mode(examples)
            self.reverse_worked = True
        return values

    def _by_local_products(self, examples: ExampleOutputs) -> Tensor | None:
        """D ℓ_i[v_j] as sums over operations; None for a batch where that is not possible."""
        if self.local is None:
            return None
        signed = self.signed_sum.sums is not None
        coefficients = self.signed_sum.coefficients(examples) if signed else None
        try:
            derivatives = self.local.of_batch(examples, coefficients)
        except OtherGraphError:
            return None
        except (NoLocalProductError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.local = None
            return None
        if signed and derivatives.gradient is not None:
            self.signed_sum.add(derivatives.gradient)
        return derivatives.columns.cpu()

    def by_reverse_mode(self, examples: ExampleOutputs) -> Tensor:
        """D ℓ_i[v_j] as the derivative of ⟨∇ Σ u_i ℓ_i, v_j⟩ by u_i, at any u."""
        u = self.signed_sum.coefficients(examples).clone().requires_grad_()
        gradients = pull_back_examples(examples, self.leaves, examples.scaled_gradients(u))
        columns = []
        for j in range(len(self.directions)):
            direction = self.directions[j]
            (column,) = _along(gradients, direction, [u])
            if not self.sum_checked:
                check_sum(u, column, gradients, direction)
            columns.append(column)
        self.sum_checked = True
        self.signed_sum.add(gradients)
        return to_float64(torch.stack(columns, dim=1))

    def _by_forward_mode(self, evaluate: Evaluate) -> tuple[Tensor, Tensor | None]:
        """One forward pass per direction; the signed sum takes a plain backward pass."""
        columns, weights = [], None
        try:
            if self.signed_sum.sums is not None:
                evaluate(self.leaves, self._add_signed_gradient)
            for j in range(len(self.directions)):
                with forward_ad.dual_level(), torch.no_grad():
                    dual = _dual_params(self.leaves, self.directions[j])
                    column, weights = evaluate(dual, _from_tangents)
                columns.append(column)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise InputError(
                "derivatives of single examples need double backward or forward mode, and an "
                f"operator here has neither ({self.reverse_error}; {error}). Custom functions need "
                "a differentiable backward or a jvp. Operators of torch need neither where batches "
                "are tensors of three or more rows, and every row has one loss."
            ) from error
        return torch.stack(columns, dim=1), weights

    def _add_signed_gradient(self, examples: ExampleOutputs) -> None:
        cotangents = examples.scaled_gradients(self.signed_sum.coefficients(examples))
        self.signed_sum.add(pull_back_examples(examples, self.leaves, cotangents, graph=False))


@dataclass
class AllDirections:
    """D ℓ_i[v_j] of losses, by forward mode along all directions at once.

    It is twice as fast as reverse mode, and the signed sum is a backward pass over the batches in
    which an example has a sign. The first such sum is compared with the derivatives.
    """

    leaves: Params
    stacked: Params
    """By parameter, all directions."""
    checked: bool = False

    def of_batch(
        self, evaluate: Evaluate, signed_sum: SignedSum
    ) -> tuple[Tensor, Tensor | None] | None:
        """The derivatives of one batch, and its weights; None where that is not possible."""
        point = {n: p.detach() for n, p in self.leaves.items()}
        weights: list[Tensor | None] = []

        def losses(moved: Params) -> Tensor:
            values, batch_weights = evaluate(
                same_buffers(point | moved, self.leaves), lambda examples: examples.outputs[0]
            )
            weights.append(batch_weights)
            return values

        def along(direction: Params) -> Tensor:
            here = {n: point[n] for n in direction}
            return torch.func.jvp(losses, (here,), (direction,))[1]

        try:
            with (
                derivatives.math_attention(),
                ClosedForms(forward=True),
                torch.no_grad(),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore", DeprecationWarning)
                columns = torch.func.vmap(along, randomness="same")(self.stacked).mT
            if not self.checked or not signed_sum.are_zero(len(columns)):
                self._add_gradient(evaluate, signed_sum, columns)
        except (*PART_ERRORS, AttributeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return None
        return to_float64(columns), weights[0]

    def _add_gradient(self, evaluate: Evaluate, signed_sum: SignedSum, columns: Tensor) -> None:
        """Add the signed gradient of a batch; the first is compared with the derivatives."""

        def use(examples: ExampleOutputs) -> None:
            signed, u = True, signed_sum.coefficients(examples)
            if not self.checked and not u.any():  # zeros would agree with anything
                signed, u = False, torch.ones_like(u)
            gradients = pull_back_examples(
                examples, self.leaves, examples.scaled_gradients(u), graph=False
            )
            if not self.checked:
                for j, column in enumerate(columns.mT):
                    check_sum(u, column, gradients, {n: v[j] for n, v in self.stacked.items()})
            if signed:
                signed_sum.add(gradients)

        evaluate(self.leaves, use)
        self.checked = True


def _all_directions(
    passes: Passes, leaves: Params, directions: Sequence[Params]
) -> AllDirections | None:
    """Forward mode along all directions, where it is faster: for losses, on a GPU.

    Directions that are too many to be stored are taken one by one.
    """
    devices = {p.device.type for p in leaves.values()}
    losses = isinstance(passes.loss, ExampleLosses)
    if not losses or not devices.issubset(FORWARD_ON) or not isinstance(directions, list):
        return None
    names = [n for n in leaves if any(n in v for v in directions)]
    zeros = {n: torch.zeros_like(leaves[n]) for n in names if any(n not in v for v in directions)}
    stacked = {
        n: torch.stack([v[n].to(leaves[n]) if n in v else zeros[n] for v in directions])
        for n in names
    }
    return AllDirections(leaves, stacked)


@torch.inference_mode(mode=False)
def directional_derivatives(
    passes: Passes,
    params: Params,
    probe: BatchPair,
    directions: Sequence[Params],
    *,
    draws: Sequence[int] | None = None,
    base: Params | None = None,
    signs: Tensor | None = None,
) -> DirectionalDerivatives:
    """D ℓ_i[v_j] of every example, or D²ℓ_i[v_j, base].

    Directions are read by index once per batch and draw, so that they can be made on demand. With
    one sign per example, the signed sum of all gradients is accumulated in the same pass.
    """
    _check_directions(params, directions, base)
    draws, leaves = range(passes.draws) if draws is None else draws, derivatives.leaves(params)
    if passes.redraws_data and passes.draws > 1:
        check_draws_align(passes.batches, passes.devices)
    first_order = _FirstOrder(leaves, directions, SignedSum(signs, params, len(draws)))
    # What is compared below needs all rows of a parameter; and where processes share them, no
    # other way is tried after an error of one of them.
    whole = passes.ranks.shards is None
    first_order.reverse_worked = not whole

    second_order = None
    if base is not None:
        second_order = partial(_second_order, leaves=leaves, directions=directions, base=base)

    def of_batch(evaluate: Evaluate) -> tuple[Tensor, Tensor | None]:
        if second_order is None:
            return first_order.of_batch(evaluate)
        with derivatives.twice_differentiable():
            return evaluate(leaves, second_order)

    prepared = passes.prepared(training=passes.training)
    with prepared as passes, torch.enable_grad():
        check_rows_are_examples(passes, params, probe)
        if base is None and whole:
            with derivatives.math_attention():
                first_order.local = _local_derivatives(passes, leaves, probe, directions)
            first_order.together = _all_directions(passes, leaves, directions)
        readings = [
            _read_examples(passes, draws_here, of_batch, first_order.signed_sum, len(draws))
            for draws_here in passes.readings(draws)
        ]
    joined, weights = _of_all_processes(passes, *_sum_readings(readings))
    passes.ranks.sum_over_replicas(list((first_order.signed_sum.sums or {}).values()))
    if not torch.isfinite(joined).all():
        raise InputError(
            "derivatives of single examples are not finite, with a finite mean loss: they overflow "
            "the model's dtype. Evaluate in a wider one."
        )
    return DirectionalDerivatives(joined, weights, first_order.signed_sum.sums)


def _local_derivatives(
    passes: Passes, leaves: Params, probe: BatchPair, directions: Sequence[Params]
) -> LocalDerivatives | None:
    """How to compute derivatives from local products; None where they are not known to be right."""
    count = row_count(probe[0])
    if passes.loss.interacting or isinstance(passes.loss, WholeBatches) or not count or count < 3:
        return None

    def evaluate(size: int, use: Callable[[ExampleOutputs], Any]) -> Any:
        part = slice_batch(passes.to_model(probe), slice(size), count)
        return passes.examples(leaves, use, part, draw=0)[0]

    try:
        return learn_places(evaluate, leaves, directions)
    except (NoLocalProductError, *PART_ERRORS, AttributeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None


def _check_directions(params: Params, directions: Sequence[Params], base: Params | None) -> None:
    if not len(directions):
        raise InputError("directions is empty: pass at least one, a dictionary of named tensors.")
    for name, tensor in (*directions[0].items(), *(base or {}).items()):
        if name not in params or tensor.shape != params[name].shape:
            raise InputError(
                f"a direction has {name!r} of shape {tuple(tensor.shape)}, which does not fit the "
                "model's parameters. Pass tensors with the names and shapes of Objective.params."
            )


def derivatives_of_terms(terms: Tensor, leaves: Params, directions: Sequence[Params]) -> Tensor:
    """D term_i[v_j] of a batch's terms, one per example, in float64 on the CPU."""
    if not terms.requires_grad:
        return torch.zeros(len(terms), len(directions), dtype=torch.float64)
    first_order = _FirstOrder(leaves, directions, SignedSum(None, leaves, 1))
    return first_order.by_reverse_mode(examples_of_losses(terms)).cpu()


def _second_order(
    examples: ExampleOutputs, leaves: Params, directions: Sequence[Params], base: Params
) -> Tensor:
    """D²ℓ_i[v, b] of every example, direction v and the base b.

    The chain rule for ℓ_i(f_i(θ)), with g_i = ∂ℓ_i/∂f_i and the Hessian H_i = ∂²ℓ_i/∂f_i²:

        D²ℓ_i[v, b] = ⟨g_i, D²f_i[v, b]⟩ + (D f_i[v])ᵀ H_i (D f_i[b]).

    With cotangents u for the outputs, s(u) = ⟨Σ_i J_iᵀu_i, b⟩ is linear in u, ∂s/∂u_i = D f_i[b].
    Its gradient by θ, again linear in u, has ∂⟨∇s, v⟩/∂u_i = D²f_i[v, b]: both come from reverse
    mode, without forward mode and without third derivatives.
    """
    us = [gradient.clone().requires_grad_() for gradient in examples.output_gradients]
    gradients = pull_back_examples(examples, leaves, us)
    total = torch.zeros(examples.size, len(directions), dtype=torch.float64)
    try:
        hessian_products = examples.output_hessian_product(_along(gradients, base, us))
        inputs = list(leaves.values())
        curvature = dict(zip(leaves, _along(gradients, base, inputs, graph=True), strict=True))
        for j in range(len(directions)):
            first = _along(gradients, directions[j], us)
            second = _along(curvature, directions[j], us)
            terms = zip(examples.output_gradients, second, first, hessian_products, strict=True)
            for output_gradient, d2f, df, product in terms:
                total[:, j] += _row_products(output_gradient, d2f)
                if product is not None:
                    total[:, j] += _row_products(product, df)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(
            f"second derivatives of single examples need double backward, which an operator here "
            f"lacks: {error}. Custom functions need a differentiable backward."
        ) from error
    return total


def _from_tangents(examples: ExampleOutputs) -> Tensor:
    """D ℓ_i[v] from the tangents that the outputs carry."""
    column = torch.zeros(examples.size, dtype=torch.float64)
    for output, gradient in zip(examples.outputs, examples.output_gradients, strict=True):
        tangent = forward_ad.unpack_dual(output).tangent
        if tangent is not None:
            column += _row_products(gradient, tangent)
    return column


def _dual_params(params: Params, direction: Params) -> Params:
    """Parameters that carry a direction as their tangent."""
    detached = {n: p.detach() for n, p in params.items()}
    with warnings.catch_warnings():
        # Its first use loads decompositions through a compiler that torch calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        tangents = {n: direction[n].to(p) for n, p in detached.items() if n in direction}
        detached |= {n: forward_ad.make_dual(detached[n], t) for n, t in tangents.items()}
        return same_buffers(detached, params)


def _along(
    gradients: Mapping[str, Tensor | None],
    direction: Params,
    inputs: Sequence[Tensor],
    *,
    graph: bool = False,
) -> list[Tensor]:
    """Derivatives of ⟨gradients, direction⟩ by the inputs."""
    pairs = [(gradients[name], direction[name]) for name in gradients if name in direction]
    columns = derivatives.pull_back(pairs, inputs, retain_graph=True, create_graph=graph)
    return [torch.zeros_like(t) if c is None else c for t, c in zip(inputs, columns, strict=True)]


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    """Inner products row by row, in float64 on the CPU."""
    products = to_float64(a) * to_float64(b)
    return products.flatten(1).sum(1).cpu() if a.ndim > 1 else products.cpu()


def _read_examples(
    passes: Passes,
    draws: Sequence[int],
    of_batch: Callable[[Evaluate], tuple[Tensor, Tensor | None]],
    signed_sum: SignedSum,
    all_draws: int,
) -> tuple[Tensor, Tensor | None]:
    """One reading: the sum over its draws, divided by the number of all draws; the weights."""
    values: list[Tensor] = []
    weights_by_batch: list[Tensor | None] = []
    signed_sum.examples_seen = 0
    for index, pair, signed_sum.counts in passes.read_in_step(draws[0]):
        total, weights = None, None
        for draw in draws:
            evaluate = partial(passes.examples, pair=pair, draw=draw, index=index)
            batch_values, weights = of_batch(evaluate)
            share = batch_values / all_draws
            total = share if total is None else total.to(share.device) + share
        if not signed_sum.counts or total is None:
            continue
        signed_sum.examples_seen += len(total)
        values.append(total)
        weights_by_batch.append(weights)
    # Read from the device at the end, so that no batch waits for the one before.
    joined = torch.cat([part.cpu() for part in values]) if values else torch.zeros(0)
    return joined, _join_weights(values, weights_by_batch)


def _of_all_processes(
    passes: Passes, values: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The derivatives and weights of the examples of all processes, one after the other."""
    if passes.ranks.count == 1:
        return values, weights
    parts = [part for part in passes.ranks.gather((values, weights)) if len(part[0])]
    return torch.cat([v for v, _ in parts]), _join_weights(*map(list, zip(*parts, strict=True)))


def _sum_readings(
    readings: Sequence[tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None]:
    """The sum over readings of the same examples, and the examples' weights."""
    (joined, weights), *others = readings
    for values, other_weights in others:
        same_weights = (
            weights is other_weights
            if weights is None or other_weights is None
            else weights.equal(other_weights)
        )
        if values.shape != joined.shape or not same_weights:
            raise InputError(
                f"the data gave {len(values)} examples in one draw and {len(joined)} in another, "
                "or other weights: derivatives of single examples need the same examples, in the "
                "same order and with the same weights, in every draw."
            )
        joined = joined + values
    return joined, weights


def _join_weights(values: list[Tensor], weights: list[Tensor | None]) -> Tensor | None:
    """Weights of all examples, one where a batch has none; None if no batch has weights."""
    if all(batch_weights is None for batch_weights in weights):
        return None
    ones = [torch.ones(len(batch_values), dtype=torch.float64) for batch_values in values]
    pairs = zip(ones, weights, strict=True)
    return torch.cat([one if w is None else to_float64(w.detach()).cpu() for one, w in pairs])

"""Derivatives of every example's loss along a few directions, in one pass over the data.

The gradient of no single example is formed. Let f_i(θ) be the outputs of example i, and J_i their
Jacobian. For any cotangents u the map u ↦ Σ_i u_i J_iᵀ ∂ℓ_i/∂f_i is linear in u, so its derivative
by u_i along a direction v is ⟨∂ℓ_i/∂f_i, J_i v⟩ = D ℓ_i[v]. One backward pass with a graph
therefore serves all directions, at one more (cheap) backward pass each.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.batches import slice_batch
from tacit.objective.checks import Probe
from tacit.objective.losses import ExampleOutputs, count_examples, examples_of_losses
from tacit.objective.params import Params, float64_zeros, to_float64
from tacit.objective.passes import Passes
from tacit.objective.randomness import Noise


class DirectionalDerivatives(NamedTuple):
    """Derivatives of every example, in the order of the data, and each example's weight."""

    values: Tensor
    """(examples, directions), in float64 on the CPU."""
    weights: Tensor | None
    """Weights of the examples in the mean; None where all are equal."""
    signed_sum: Params | None = None
    """Σ s_i w_i ∇ℓ_i for the signs s that were passed, in float64."""


Differentiate = Callable[[ExampleOutputs], Tensor]
"""From a batch's outputs to its derivatives, (examples, directions)."""
BatchDerivatives = Callable[[Params, Differentiate], tuple[Tensor, Tensor | None]]
"""From parameters and `Differentiate` to one batch's derivatives, in one draw, and its weights."""


@dataclass
class _Mode:
    """How derivatives are computed: by reverse mode, or by forward mode if its first use fails."""

    use_forward: bool = False
    reverse_worked: bool = False
    reverse_error: str = field(default="", repr=False)


class _SignedSum:
    """Accumulates Σ s_i w_i ∇ℓ_i over batches; does nothing without signs."""

    def __init__(self, signs: Tensor | None, params: Params, draws: int):
        self._signs, self._draws, self._examples_seen = signs, draws, 0
        self.sums = None if signs is None else float64_zeros(params)

    def coefficients(self, examples: ExampleOutputs) -> Tensor:
        """The coefficients of a batch's examples: signs times weights, or ones without signs."""
        coefficients = torch.ones(examples.size)
        if self._signs is not None:
            coefficients = self._signs[self._examples_seen : self._examples_seen + examples.size]
            if examples.weights is not None:
                coefficients = coefficients * examples.weights.to(coefficients)
        dtype = torch.promote_types(examples.outputs[0].dtype, torch.float32)
        return coefficients.to(examples.outputs[0].device, dtype)

    def add(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Add the signed gradient of one batch in one draw."""
        if self.sums is None:
            return
        for name, total in self.sums.items():
            gradient = gradients[name]
            if gradient is not None:
                total.add_(gradient.detach().to(total.device), alpha=1 / self._draws)

    def add_by_backward(self, examples: ExampleOutputs, leaves: Params) -> Tensor:
        """Add the signed gradient by a plain backward pass, for derivatives in forward mode.

        Returns a tensor without columns, because the caller passes this as a `Differentiate`.
        """
        cotangents = _scale_rows(self.coefficients(examples), examples.output_gradients)
        self.add(_pull_back(examples, leaves, cotangents, graph=False))
        return torch.zeros(examples.size, 0)

    def end_batch(self, count: int) -> None:
        """Advance past the `count` examples of a batch, after all its draws."""
        self._examples_seen += count


@torch.inference_mode(mode=False)
def directional_derivatives(
    passes: Passes,
    params: Params,
    probe: Probe,
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
    if not len(directions):
        raise InputError("directions is empty: pass at least one, a dictionary of named tensors.")
    for direction in (directions[0], base or {}):
        _check_direction(direction, params)
    draws, mode = passes.select_draws(draws), _Mode()
    signed_sum = _SignedSum(signs, params, len(draws))
    values: list[Tensor] = []
    weights_by_batch: list[Tensor | None] = []
    with passes.prepared(training=passes.training), derivatives.math_attention():
        _check_rows_are_examples(passes, params, probe)
        for index, (batch, weights) in enumerate(passes.read()):
            total, example_weights = torch.zeros(()), None
            for draw in draws:

                def evaluate(
                    params: Params,
                    differentiate: Differentiate,
                    b=batch,
                    w=weights,
                    d=draw,
                    i=index,
                ) -> tuple[Tensor, Tensor | None]:
                    def read(model: nn.Module, noise: Noise | None) -> tuple[Tensor, Tensor | None]:
                        examples = passes.loss.examples(model, b, w, noise)
                        return to_float64(differentiate(examples)).cpu(), examples.weights

                    return passes.call(params, read, draw=d, index=i)

                batch_values, example_weights = (
                    _first_order(evaluate, params, directions, mode, signed_sum)
                    if base is None
                    else _second_order(evaluate, params, directions, base)
                )
                total = total + batch_values / len(draws)
            signed_sum.end_batch(len(total))
            values.append(total)
            weights_by_batch.append(example_weights)
    joined = torch.cat(values)
    if not torch.isfinite(joined).all():
        raise InputError(
            "derivatives of single examples are not finite, with a finite mean loss: they overflow "
            "the model's dtype. Evaluate in a wider one."
        )
    weights = _join_weights(values, weights_by_batch)
    return DirectionalDerivatives(joined, weights, signed_sum.sums)


def derivatives_of_terms(terms: Tensor, leaves: Params, directions: Sequence[Params]) -> Tensor:
    """D term_i[v_j] of a batch's terms, one per example, in float64 on the CPU."""
    if not terms.requires_grad:
        return torch.zeros(len(terms), len(directions), dtype=torch.float64)
    no_sum = _SignedSum(None, leaves, 1)
    columns = _by_reverse_mode(examples_of_losses(terms), leaves, directions, no_sum, check=True)
    return to_float64(columns).cpu()


def _first_order(
    evaluate: BatchDerivatives,
    params: Params,
    directions: Sequence[Params],
    mode: _Mode,
    signed_sum: _SignedSum,
) -> tuple[Tensor, Tensor | None]:
    """One batch in one draw; if reverse mode fails the first time, all batches use forward mode."""
    if not mode.use_forward:
        try:
            with torch.enable_grad():
                leaves, check = derivatives.leaves(params), not mode.reverse_worked
                result = evaluate(
                    leaves,
                    lambda examples: _by_reverse_mode(
                        examples, leaves, directions, signed_sum, check=check
                    ),
                )
            mode.reverse_worked = True
            return result
        except RuntimeError as error:
            if mode.reverse_worked or isinstance(error, torch.OutOfMemoryError):
                raise
            mode.use_forward, mode.reverse_error = True, str(error)
    try:
        if signed_sum.sums is not None:
            with torch.enable_grad():
                leaves = derivatives.leaves(params)
                evaluate(leaves, lambda examples: signed_sum.add_by_backward(examples, leaves))
        columns, weights = [], None
        for j in range(len(directions)):
            with forward_ad.dual_level(), torch.no_grad():
                column, weights = evaluate(_dual_params(params, directions[j]), _by_forward_mode)
            columns.append(column)
        return torch.cat(columns, dim=1), weights
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(
            "derivatives of single examples need double backward or forward mode, and an operator "
            f"here has neither ({mode.reverse_error}; {error}). Custom functions need a "
            "differentiable backward or a jvp."
        ) from error


def _second_order(
    evaluate: BatchDerivatives, params: Params, directions: Sequence[Params], base: Params
) -> tuple[Tensor, Tensor | None]:
    with torch.enable_grad():
        leaves = derivatives.leaves(params)
        return evaluate(
            leaves, lambda examples: _second_derivatives(examples, leaves, directions, base)
        )


def _by_reverse_mode(
    examples: ExampleOutputs,
    leaves: Params,
    directions: Sequence[Params],
    signed_sum: _SignedSum,
    *,
    check: bool,
) -> Tensor:
    """D ℓ_i[v_j] as the derivative of ⟨∇ Σ u_i ℓ_i, v_j⟩ by u_i, at any u."""
    u = signed_sum.coefficients(examples).clone().requires_grad_()
    cotangents = _scale_rows(u, examples.output_gradients)
    gradients = _pull_back(examples, leaves, cotangents)
    columns = []
    for j in range(len(directions)):
        pairs = _differentiable_pairs(gradients, directions[j])
        column = torch.zeros_like(u)
        if pairs:
            tensors, direction = zip(*pairs, strict=True)
            (column,) = torch.autograd.grad(
                tensors, u, direction, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        if check:
            _check_sum(u.detach() * column, gradients, directions[j])
        columns.append(column)
    signed_sum.add(gradients)
    return torch.stack(columns, dim=1)


def _second_derivatives(
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
    gradients = _pull_back(examples, leaves, us)
    total = torch.zeros(examples.size, len(directions), dtype=torch.float64)
    along_base = _differentiable_pairs(gradients, base)
    if not along_base:
        return total
    try:
        s = torch.stack([(gradient * b).sum() for gradient, b in along_base]).sum()
        outputs_along_base = _derivatives_by_cotangents([s], us, [torch.ones_like(s)])
        hessian_products = examples.output_hessian_product(outputs_along_base)
        gradient_of_s = derivatives.gradient(s, leaves, graph=True)
        curvature = dict(zip(leaves, gradient_of_s, strict=True))
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


def _by_forward_mode(examples: ExampleOutputs) -> Tensor:
    """D ℓ_i[v] from the tangents that the outputs carry."""
    column = torch.zeros(examples.size, dtype=torch.float64)
    for output, gradient in zip(examples.outputs, examples.output_gradients, strict=True):
        tangent = forward_ad.unpack_dual(output).tangent
        if tangent is not None:
            column += _row_products(gradient, tangent)
    return column.unsqueeze(1)


def _dual_params(params: Params, direction: Params) -> Params:
    """Parameters that carry a direction as their tangent."""
    with warnings.catch_warnings():
        # Its first use loads decompositions through a compiler that torch calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {
            n: forward_ad.make_dual(p, direction[n].to(p)) if n in direction else p
            for n, p in params.items()
        }


def _pull_back(
    examples: ExampleOutputs, leaves: Params, cotangents: Sequence[Tensor], *, graph: bool = True
) -> dict[str, Tensor | None]:
    """Jᵀ·cotangents by tensor, with its graph; None where no output depends on the tensor."""
    pairs = [(o, c) for o, c in zip(examples.outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        raise InputError(derivatives.NO_DEPENDENCE)
    outputs, cotangents = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(
        outputs, list(leaves.values()), cotangents, create_graph=graph, allow_unused=True
    )
    return dict(zip(leaves, gradients, strict=True))


def _differentiable_pairs(
    gradients: dict[str, Tensor | None], direction: Params
) -> list[tuple[Tensor, Tensor]]:
    """Gradients that can be differentiated further, each with its tensor of the direction."""
    return [
        (gradient, direction[n].to(gradient))
        for n, gradient in gradients.items()
        if n in direction and gradient is not None and gradient.requires_grad
    ]


def _along(
    gradients: dict[str, Tensor | None], direction: Params, us: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Derivatives of ⟨gradients, direction⟩ by the cotangents u."""
    pairs = _differentiable_pairs(gradients, direction)
    return _derivatives_by_cotangents([g for g, _ in pairs], us, [d for _, d in pairs])


def _derivatives_by_cotangents(
    outputs: list[Tensor], us: Sequence[Tensor], grad_outputs: list[Tensor]
) -> Sequence[Tensor]:
    """Derivatives of ⟨outputs, grad_outputs⟩ by the cotangents u; zeros without outputs."""
    if not outputs:
        return [torch.zeros_like(u) for u in us]
    return torch.autograd.grad(
        outputs, list(us), grad_outputs, retain_graph=True, allow_unused=True,
        materialize_grads=True,
    )  # fmt: skip


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    """Inner products row by row, in float64 on the CPU."""
    products = to_float64(a) * to_float64(b)
    return products.flatten(1).sum(1).cpu() if a.ndim > 1 else products.cpu()


def _scale_rows(factors: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Every row of every tensor times its example's factor."""
    return [factors.view(-1, *[1] * (t.ndim - 1)).to(t) * t for t in tensors]


def _join_weights(values: list[Tensor], weights: list[Tensor | None]) -> Tensor | None:
    """Weights of all examples, one where a batch has none; None if no batch has weights."""
    if all(batch_weights is None for batch_weights in weights):
        return None
    ones = [torch.ones(len(batch_values), dtype=torch.float64) for batch_values in values]
    pairs = zip(ones, weights, strict=True)
    return torch.cat([one if w is None else to_float64(w.detach()).cpu() for one, w in pairs])


def _check_direction(direction: Params, params: Params) -> None:
    """Refuse a direction that does not fit the parameters."""
    for name, tensor in direction.items():
        if name not in params or tensor.shape != params[name].shape:
            raise InputError(
                f"a direction has {name!r} of shape {tuple(tensor.shape)}, which does not fit the "
                "model's parameters. Pass tensors by the names of Objective.params, in their "
                "shapes."
            )


def _check_rows_are_examples(passes: Passes, params: Params, probe: Probe) -> None:
    """Refuse outputs whose first dimension equals the batch size only by coincidence."""
    count = 0 if passes.allow_masks else count_examples(probe[0])

    def read_half(model: nn.Module, noise: Noise | None) -> None:
        batch, weights = slice_batch(probe, slice(count // 2), count)
        passes.loss.examples(model, batch, weights, noise)

    # The losses of batch_loss have one row per example by definition.
    if count > 1:
        with torch.no_grad():
            passes.call(params, read_half, draw=0)


def _check_sum(column: Tensor, gradients: dict[str, Tensor | None], direction: Params) -> None:
    """Refuse a backward that cannot be differentiated but raises no error.

    Σ u_i D ℓ_i[v] must equal ⟨∇ Σ u_i ℓ_i, v⟩, which needs no second backward.
    """
    values = to_float64(column)
    expected, scale = 0.0, float(values.abs().sum())
    epsilons = [torch.finfo(column.dtype).eps]
    for name, gradient in gradients.items():
        if gradient is not None and name in direction:
            terms = to_float64(gradient.detach()) * to_float64(direction[name]).to(gradient.device)
            expected, scale = expected + float(terms.sum()), scale + float(terms.abs().sum())
            epsilons.append(torch.finfo(gradient.dtype).eps)
    if abs(float(values.sum()) - expected) > max(epsilons) ** 0.5 * scale:
        raise RuntimeError("a backward here is not differentiable and raises no error")

"""Bishop's pair: what Gaussian noise on the inputs adds to the loss of a network."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import InputError, check_type, check_whole
from tacit.objective.batches import tensors_in
from tacit.objective.losses import Loss, count_examples, split_batch
from tacit.objective.objective import Objective
from tacit.objective.params import Scope, describe
from tacit.regularizers.data_dependent import mean_penalty, per_example
from tacit.regularizers.family import Regularizer

LIMIT = 256
"""Largest number of directions in which the exact sums are computed, unless limit= is passed."""


def input_jacobian(
    objective: Objective,
    *,
    weighted: bool = True,
    inputs: int | Sequence[int] | None = None,
    limit: int = LIMIT,
    scope: Scope = None,
    name: str = "input_jacobian",
) -> Regularizer:
    """The squared Jacobian by the inputs, R(θ) = mean_i Σ_j (∂f_i/∂x_j)ᵀ ℓ″_i (∂f_i/∂x_j).

    f_i = f(x_i; θ) are the outputs of example i, and ℓ″_i is the Hessian of its loss ℓ(f_i, y_i) by
    them. For squared error with ½ per example, R = mean_i ‖∂f_i/∂x‖²; torch's mse_loss has no ½ and
    averages over outputs, so that it is 2/outputs times that.

    Independent Gaussian noise of variance σ² on every input adds σ²/2 tr ∂²ℓ/∂x² to the loss of an
    example, to second order in σ. By the chain rule that is σ²/2 times this penalty and σ²/2 times
    `input_laplacian` (Bishop 1995). With `weighted=False`, R = mean_i ‖∂f_i/∂x‖_F² for any loss:
    what is usually called Jacobian regularization.

    ∇R includes how ℓ″ changes with θ. The sum takes two backward passes per output (one with
    weighted=False), all in one graph; reduce the objective's batch_size if memory runs out.

    Traps:
        This penalty alone is not what input noise adds: away from a perfect fit, the two parts are
        of similar size. List both.

        Torch's third derivatives are wrong in some fused layers. The first gradient is
        compared with a finite difference, and such models are refused.

    Args:
        objective: an Objective(model, loss, data) of floating-point inputs. Its model is evaluated
            in eval mode.
        weighted: whether the Hessian of the loss weighs the outputs.
        inputs: which of the model's inputs, counted from 0, where it has several.
        limit: most outputs per example; the cost grows with them.
        scope: which rows the column covers.
        name: the name that the strength is listed under.
    """
    check_type("weighted", weighted, bool, "True or False")

    def penalties(call: "_Call", loss: Loss) -> Tensor:
        outputs, leaves = call.with_input_leaves()
        curvature = call.loss_curvature(loss) if weighted else None
        total = outputs.new_zeros(len(outputs))
        for z in _units(outputs, limit, name):  # Σ_z ⟨Jᵀz, Jᵀℓ″z⟩ = tr Jᵀℓ″J
            row = _pull_back(outputs, leaves, z)
            curved = row if curvature is None else _pull_back(outputs, leaves, curvature(z))
            total = total + _products(row, curved)
        return total

    penalty = _mean(objective, penalties, inputs, limit, scope, name)
    return replace(penalty, definition=f"input_jacobian(weighted={weighted}, inputs={inputs!r})")


def input_laplacian(
    objective: Objective,
    *,
    inputs: int | Sequence[int] | None = None,
    limit: int = LIMIT,
    scope: Scope = None,
    name: str = "input_laplacian",
) -> Regularizer:
    """The Laplacian by the inputs along the loss gradient, R(θ) = mean_i ⟨∂ℓ_i/∂f, Δ_x f(x_i; θ)⟩.

    Δ_x f = Σ_j ∂²f/∂x_j². For squared error with ½ per example and residuals r = f − y,
    R = mean_i ⟨r_i, Δ_x f_i⟩. Gaussian noise of variance σ² on the inputs adds σ²/2 times
    `input_jacobian` and σ²/2 times this to the mean loss, to second order in σ (Bishop 1995).

    ∇R includes how ∂ℓ/∂f changes with θ. The sum takes one double backward pass per entry of an
    input, all in one graph; reduce the objective's batch_size if memory runs out.

    Traps:
        The outputs of a ReLU network are piecewise linear in the inputs. Its Laplacian lies on the
        kinks, where autograd does not see it: it counts as zero here, while noise does cross them.

        Torch's third derivatives are wrong in some fused layers. The first gradient is
        compared with a finite difference, and such models are refused.

    Args:
        objective: an Objective(model, loss, data) of floating-point inputs. Its model is evaluated
            in eval mode.
        inputs: which of the model's inputs, counted from 0, where it has several.
        limit: most entries per example of these inputs; the cost grows with them.
        scope: which rows the column covers.
        name: the name that the strength is listed under.
    """

    def penalties(call: "_Call", loss: Loss) -> Tensor:
        outputs, leaves = call.with_input_leaves()
        slopes = _pull_back(outputs, leaves, call.loss_gradient(loss)[1])
        total = outputs.new_zeros(len(outputs))
        for slope, leaf in zip(slopes, leaves, strict=True):
            for z in _units(leaf, limit, name):
                (bend,) = _pull_back(slope, [leaf], z)
                total = total + _products([bend], [z])
        if not total.requires_grad:
            raise InputError(
                "the outputs are linear in these inputs, so that input_laplacian is zero: leave it "
                "out."
            )
        return total

    penalty = _mean(objective, penalties, inputs, limit, scope, name)
    return replace(penalty, definition=f"input_laplacian(inputs={inputs!r})")


class _Call:
    """One call of the model on a batch, with a choice among its inputs."""

    def __init__(self, model: nn.Module, batch: Any, chosen: int | Sequence[int] | None, name: str):
        self._model, self._name = model, name
        self._inputs, self._target = split_batch(batch)
        self._count = count_examples(batch)
        self._chosen = _choose(self._inputs, chosen, self._count, name)

    def with_input_leaves(self) -> tuple[Tensor, list[Tensor]]:
        """The outputs, and the chosen inputs as leaves of their graph."""
        inputs = list(self._inputs)
        leaves = [inputs[i].detach().clone().requires_grad_() for i in self._chosen]
        for i, leaf in zip(self._chosen, leaves, strict=True):
            inputs[i] = leaf
        return self._run(inputs), leaves

    def loss_gradient(self, loss: Loss) -> tuple[Tensor, Tensor]:
        """The outputs as a function of θ alone, and ∂ℓ_i/∂f_i of every example there."""
        outputs = self._run(self._inputs)
        total = self._count * loss(outputs, self._target)
        if not total.requires_grad:
            raise InputError(
                "the loss does not depend on the outputs: it detaches them, or computes outside "
                "torch. Use a loss that autograd can differentiate twice."
            )
        (gradient,) = torch.autograd.grad(total, outputs, create_graph=True)
        return outputs, gradient

    def loss_curvature(self, loss: Loss) -> Callable[[Tensor], Tensor]:
        """ℓ″_i times a direction of the outputs, of every example, as a function of θ alone."""
        outputs, gradient = self.loss_gradient(loss)

        def product(direction: Tensor) -> Tensor:
            (curved,) = _pull_back(gradient, [outputs], direction)
            return curved

        if not gradient.requires_grad:
            raise InputError(
                "the loss is linear in the outputs and has no curvature there: leave "
                f"{self._name} out, or pass weighted=False for the plain Jacobian."
            )
        return product

    def _run(self, inputs: Sequence[Any]) -> Tensor:
        outputs = self._model(*inputs)
        if not isinstance(outputs, Tensor) or not outputs.ndim or len(outputs) != self._count:
            raise InputError(
                f"the model returned {describe(outputs)} for {self._count} examples: {self._name} "
                "needs one tensor with one row per example. Wrap the model in a module that "
                "returns such a tensor."
            )
        return outputs


def _mean(
    objective: Objective,
    penalties: Callable[[_Call, Loss], Tensor],
    inputs: int | Sequence[int] | None,
    limit: int,
    scope: Scope,
    name: str,
) -> Regularizer:
    """The mean over examples of penalties(call, loss)."""
    check_whole("limit", limit)
    needed = "the tacit.Objective of the model and its data"
    check_type(f"the objective of {name}", objective, Objective, needed)
    if objective.batch_norm == "batch":
        raise InputError(
            f"{name} needs outputs that depend on one example each, and batch_norm='batch' mixes "
            "those of a batch: pass an objective with batch_norm='running'."
        )
    loss = objective.loss

    def batch_penalties(model: nn.Module, batch: Any) -> Tensor:
        assert loss is not None  # `per_example` refuses others
        return penalties(_Call(model, batch, inputs, name), loss)

    derived = per_example(name, objective, batch_penalties)
    return mean_penalty(derived, objective, scope=scope, name=name, cost="second-order")


def _choose(
    inputs: Sequence[Any], chosen: int | Sequence[int] | None, count: int, name: str
) -> list[int]:
    """The indices of the chosen inputs; refused unless they are floating-point rows."""
    if chosen is None and len(inputs) > 1:
        raise InputError(
            f"the model has {len(inputs)} inputs: pass inputs=, the numbers of those that "
            f"{name} differentiates by, counted from 0, as in inputs=0 or inputs=[0, 1]."
        )
    indices = [0] if chosen is None else [chosen] if isinstance(chosen, int) else list(chosen)
    known = range(len(inputs))
    if not indices or any(isinstance(i, bool) or i not in known for i in indices):
        raise InputError(
            f"inputs is {chosen!r} for a model of {len(inputs)} inputs: pass their numbers, "
            f"counted from 0 to {len(inputs) - 1}."
        )
    for i in indices:
        if not isinstance(inputs[i], Tensor) or not inputs[i].is_floating_point():
            shown = describe(inputs[i])
            kinds = {str(t.dtype) for t in tensors_in(inputs[i])}
            raise InputError(
                f"input {i} is {shown} of {', '.join(sorted(kinds)) or 'no numbers'}: {name} needs "
                "floating-point inputs. For token ids, make the embeddings the data, and the rest "
                "of the network the model."
            )
        if not inputs[i].ndim or len(inputs[i]) != count:
            raise InputError(
                f"input {i} has shape {tuple(inputs[i].shape)} for {count} examples: one row per "
                "example is needed."
            )
    return indices


def _units(tensor: Tensor, limit: int, name: str) -> Iterator[Tensor]:
    """The unit vectors of an example's entries, the same in all rows of the tensor."""
    entries = tensor[:1].numel()
    if entries > limit:
        raise InputError(
            f"{name} has {entries} directions per example (shape {tuple(tensor.shape[1:])}), each "
            f"a backward pass with a graph, and limit={limit}: pass limit={entries} and a small "
            "batch_size to the objective if that is affordable, or a model and data of fewer; "
            "random directions would bias its strength towards zero."
        )
    for k in range(entries):
        unit = tensor.new_zeros(len(tensor), entries)
        unit[:, k] = 1
        yield unit.reshape(tensor.shape)


def _pull_back(outputs: Tensor, inputs: Sequence[Tensor], cotangent: Tensor) -> list[Tensor]:
    """Jᵀ·cotangent by the inputs, with its graph."""
    if not outputs.requires_grad:
        return [torch.zeros_like(t) for t in inputs]
    products = torch.autograd.grad(outputs, inputs, cotangent, create_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if p is None else p for t, p in zip(inputs, products, strict=True)]


def _products(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Inner products row by row, over all tensors."""
    products = [(x * y).reshape(len(x), -1).sum(1) for x, y in zip(a, b, strict=True)]
    return torch.stack(products).sum(0)

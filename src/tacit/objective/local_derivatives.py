"""Derivatives of every example from its gradients at the operations that read parameters.

If the examples of a batch do not interact, the gradient of Σ ℓ_i at the output of an operation has
those of the single ℓ_i in its rows. One backward pass that stops there, without any gradient of a
weight, therefore gives the derivatives of all examples along all directions, as a sum of
`local_products` over the operations that read parameters.

Trap: this is wrong for losses whose examples interact. Where a parameter is read is learned from
batches of two and three examples, and used only if the derivatives of these agree with the
gradients of the single examples, and only in batches with the same operations and shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from tacit.objective.derivatives import pull_back
from tacit.objective.graph_places import (
    Graph,
    Output,
    Place,
    Places,
    find_places,
    graph_of,
    may_permute,
    place_rows,
)
from tacit.objective.local_products import NoLocalProductError, Use, local_product
from tacit.objective.losses import ExampleOutputs
from tacit.objective.params import Params, norm, to_float64

FEW, MANY = 2, 3
"""Sizes of the batches from which the places of parameters are learned."""
ROUNDING = 64
"""Rounding errors that are accepted, in epsilons of the sum of absolute terms."""


class OtherGraphError(NoLocalProductError):
    """A batch has other operations or shapes than those that were learned."""


Gradients = dict[str, Tensor | None]
Uses = list[tuple[Output, Use]]
"""Every operation that reads a shared tensor, with the origin of that tensor."""


class Derivatives(NamedTuple):
    """The derivatives of a batch, and a sum of its gradients."""

    columns: Tensor
    """(examples, directions), in float64."""
    gradient: Gradients | None
    """Σ c_i ∇ℓ_i for coefficients c of the examples."""


class _Directions:
    """The changes of shared tensors along directions; those of parameters are stacked once."""

    def __init__(self, leaves: Params, directions: Sequence[Params]):
        self.leaves, self.directions = leaves, directions
        count = len(directions)
        self.stored = isinstance(directions, list | tuple)
        """Whether all are in memory; otherwise they are made one at a time."""
        self.groups = [range(count)] if self.stored else [range(j, j + 1) for j in range(count)]
        self._stacked: dict[str, Tensor | None] = {}

    def tangents(
        self, graph: Graph, sources: Sequence[Output], group: range
    ) -> dict[Output, Tensor | None]:
        """The changes of shared tensors, (directions, *shape); None where they are zero."""
        directions = [self.directions[j] for j in group]
        parameters = {source: _parameter(graph, source, self.leaves) for source in sources}
        tangents: dict[Output, Tensor | None] = {}
        for source, parameter in parameters.items():
            if parameter is not None:
                name, transposed = parameter
                stacked = self._of_parameter(name, directions)
                tangents[source] = stacked.mT if transposed and stacked is not None else stacked
        others = [source for source, parameter in parameters.items() if parameter is None]
        columns = [_changes(graph, others, self.leaves, v) for v in directions] if others else []
        tangents |= {s: torch.stack([c[i] for c in columns]) for i, s in enumerate(others)}
        return tangents

    def _of_parameter(self, name: str, directions: Sequence[Params]) -> Tensor | None:
        if name in self._stacked:
            return self._stacked[name]
        leaf, stacked = self.leaves[name].detach(), None
        if any(name in v for v in directions):
            zeros = torch.zeros_like(leaf)
            stacked = torch.stack([v[name].to(leaf) if name in v else zeros for v in directions])
        if self.stored:
            self._stacked[name] = stacked
        return stacked


@dataclass(eq=False)
class LocalDerivatives:
    """D ℓ_i[v_j] of batches from local products."""

    directions: _Directions
    places: Places
    checked: bool = field(default=False, init=False)
    """Whether the derivatives of a whole batch have been compared."""

    def of_batch(self, examples: ExampleOutputs, coefficients: Tensor | None) -> Derivatives:
        """The derivatives of one batch, and Σ c_i ∇ℓ_i for coefficients c.

        Raises OtherGraphError for a batch with other operations or shapes. The first batch, and
        every batch of a model that may permute examples, is compared with a backward pass.
        """
        derivatives = self._from_products(examples, coefficients)
        if not self.checked or self.places.always_check:
            self._check_batch(examples, derivatives.columns)
            self.checked = True
        return derivatives

    def _check_batch(self, examples: ExampleOutputs, columns: Tensor) -> None:
        """Compare Σ u_i D ℓ_i[v_j] with ⟨∇ Σ u_i ℓ_i, v_j⟩, for random u.

        Equal u would not tell examples in another order.
        """
        u = torch.randn(examples.size, generator=torch.Generator().manual_seed(0))
        leaves = self.directions.leaves
        gradients = _backward(examples, u, list(leaves.values()))
        gradient = dict(zip(leaves, gradients, strict=True))
        sums = u.to(columns.dtype) @ columns.cpu()
        _check_close(sums, gradient, self.directions, self.places.epsilon)

    def check_examples(self, examples: ExampleOutputs, gradients: Sequence[Gradients]) -> None:
        """Compare derivatives, and a sum of gradients, with the gradients of single examples."""
        coefficients = torch.linspace(-1, 2, examples.size).to(examples.outputs[0])
        epsilon = self.places.epsilon
        columns, total = self._from_products(examples, coefficients)
        for i, gradient in enumerate(gradients):
            _check_close(columns[i].cpu(), gradient, self.directions, epsilon)
        weighted = [
            {n: float(c) * to_float64(g) for n, g in gradient.items() if g is not None}
            for c, gradient in zip(coefficients, gradients, strict=True)
        ]
        rounding = ROUNDING * epsilon * sum(map(norm, weighted))
        for name, value in (total or {}).items():
            terms = [gradient[name] for gradient in weighted if name in gradient]
            size = sum(float(term.norm()) for term in terms)
            error = sum(terms) - (0.0 if value is None else to_float64(value))
            allowed = rounding + epsilon**0.5 * size
            if not float(torch.as_tensor(error).norm()) <= allowed:
                raise NoLocalProductError("a sum of gradients is not that of single examples")

    def _from_products(self, examples: ExampleOutputs, coefficients: Tensor | None) -> Derivatives:
        graph = graph_of(examples.outputs, self.directions.leaves)
        if graph.signature != self.places.signature:
            raise OtherGraphError("the operations differ from batch to batch")
        uses = _uses(graph, self.places.places, examples)
        sources = list(dict.fromkeys(source for source, _ in uses))
        parts, gradient = [], None
        for group in self.directions.groups:
            tangents = self.directions.tangents(graph, sources, group)
            zeros = torch.zeros(examples.size, len(group), dtype=torch.float64)
            total, cotangents = _sum_products(uses, tangents, coefficients, zeros)
            parts.append(total)
            if coefficients is not None:
                gradient = _to_leaves(graph, cotangents, self.directions.leaves)
                coefficients = None
        return Derivatives(torch.cat(parts, dim=1), gradient)


def learn_places(
    evaluate: Callable[[int, Callable[[ExampleOutputs], Any]], Any],
    leaves: Params,
    directions: Sequence[Params],
) -> LocalDerivatives:
    """How to compute derivatives of batches from local products.

    Raises NoLocalProductError, or whatever a model raises for two or three examples, where that is
    impossible or does not agree with the gradients of the single examples.

    Args:
        evaluate: evaluate(count, use) is use(examples of a batch with that many).
        leaves: the parameters.
        directions: the directions v_j.
    """

    def graph_of_rows(examples: ExampleOutputs, rows: int) -> Graph:
        if examples.size != rows:
            raise NoLocalProductError("a row of the batch does not have one loss")
        return graph_of(examples.outputs, leaves)

    smaller = evaluate(FEW, lambda examples: graph_of_rows(examples, FEW))

    def compare(examples: ExampleOutputs) -> LocalDerivatives:
        if any(leaf._backward_hooks for leaf in leaves.values()):
            raise NoLocalProductError("hooks change the gradients of parameters")
        graph = graph_of_rows(examples, MANY)
        places = find_places(smaller, graph)
        edges = [graph.edge(place.output) for place in places]
        ones = torch.eye(examples.size)
        singles = [_backward(examples, one, [*edges, *leaves.values()]) for one in ones]
        placed = [
            place_rows(place, [gradients[number] for gradients in singles])
            for number, place in enumerate(places)
        ]
        always_check = may_permute(graph) or any(two_orders for _, two_orders in placed)
        of_batch = tuple(place for place, _ in placed)
        known = Places(graph.signature, of_batch, graph.epsilon(), always_check)
        local = LocalDerivatives(_Directions(leaves, directions), known)
        by_name = [dict(zip(leaves, g[len(edges) :], strict=True)) for g in singles]
        local.check_examples(examples, by_name)
        return local

    return evaluate(MANY, compare)


def _backward(
    examples: ExampleOutputs, coefficients: Tensor, inputs: Sequence[Tensor | GradientEdge]
) -> list[Tensor | None]:
    """The gradients of Σ c_i ℓ_i."""
    pairs = zip(examples.outputs, examples.scaled_gradients(coefficients), strict=True)
    return list(pull_back(pairs, inputs, retain_graph=True))


def _uses(graph: Graph, places: Sequence[Place], examples: ExampleOutputs) -> Uses:
    """Where the batch reads shared tensors, with the gradients there."""
    edges = [graph.edge(place.output) for place in places]
    gradients = _backward(examples, torch.ones(examples.size), edges)
    uses: Uses = []
    for place, gradient in zip(places, gradients, strict=True):
        if gradient is None:
            continue
        shape = list(place.shape)
        shape[place.rows.dim] *= examples.size
        if list(gradient.shape) != shape:
            raise OtherGraphError("the shapes differ from batch to batch")
        node, nr = graph.nodes[place.output.node], place.output.nr
        uses += [
            (source, Use(node, nr, slot, gradient, place.rows, graph.sizes(source)))
            for slot, source in place.shared
        ]
    return uses


def _sum_products(
    uses: Uses,
    tangents: dict[Output, Tensor | None],
    coefficients: Tensor | None,
    total: Tensor,
) -> tuple[Tensor, dict[Output, Tensor]]:
    """D ℓ_i[v_j] as a sum over uses, added to `total`, and Σ c_i G_i by shared tensor."""
    cotangents: dict[Output, Tensor] = {}
    for source, use in uses:
        along = tangents[source]
        if along is None and coefficients is None:
            continue
        if along is None:
            along = use.zeros(total.shape[1])
        product = local_product(use, along, coefficients)
        columns = to_float64(product.columns)
        total = total.to(columns.device) + columns
        if product.cotangent is not None:
            cotangents[source] = product.cotangent + cotangents.get(source, 0)
    return total, cotangents


def _parameter(graph: Graph, source: Output, leaves: Params) -> tuple[str, bool] | None:
    """The parameter that a shared tensor is, and whether transposed; None for other tensors."""
    name, inputs = graph.names[source.node], graph.inputs[source.node]
    if name in leaves:
        return name, False
    if name == "TBackward0" and inputs[0] is not None:
        name = graph.names[inputs[0].node]
        return (name, True) if name in leaves else None
    return None


def _changes(
    graph: Graph, sources: Sequence[Output], leaves: Params, direction: Params
) -> list[Tensor]:
    """Changes of shared tensors along a direction: the derivatives of ⟨Jᵀc, v⟩ by c, at any c."""
    cotangents = [graph.zeros(source).requires_grad_() for source in sources]
    edges = [graph.edge(source) for source in sources]
    with torch.enable_grad():
        gradients = _pull_back_edges(edges, leaves, cotangents, create_graph=True)
        pairs = [(gradients[name], direction[name]) for name in leaves if name in direction]
        columns = pull_back(pairs, cotangents)
    pairs = zip(cotangents, columns, strict=True)
    return [torch.zeros_like(c) if t is None else t for c, t in pairs]


def _to_leaves(graph: Graph, cotangents: dict[Output, Tensor], leaves: Params) -> Gradients:
    """Gradients by shared tensors, pulled back to the parameters."""
    gradients: Gradients = dict.fromkeys(leaves)
    others = [source for source in cotangents if graph.names[source.node] not in leaves]
    if others:
        edges = [graph.edge(source) for source in others]
        parts = [cotangents[source].to(graph.zeros(source)) for source in others]
        gradients = _pull_back_edges(edges, leaves, parts, retain_graph=True)
    for source, cotangent in cotangents.items():
        name = graph.names[source.node]
        if name in leaves:
            before = gradients[name]
            gradients[name] = cotangent if before is None else before + cotangent
    return gradients


def _pull_back_edges(
    edges: Sequence[GradientEdge], leaves: Params, cotangents: Sequence[Tensor], **options: bool
) -> Gradients:
    """The gradient of Σ ⟨tensor, cotangent⟩ by the parameters, for tensors given by their edges."""
    gradients = torch.autograd.grad(
        edges, list(leaves.values()), cotangents, allow_unused=True, **options
    )
    return dict(zip(leaves, gradients, strict=True))


def _check_close(
    columns: Tensor, gradient: Gradients, directions: _Directions, epsilon: float
) -> None:
    """Refuse columns that are not ⟨gradient, v_j⟩ up to rounding."""
    for j, column in enumerate(columns.tolist()):
        expected, size, direction = 0.0, 0.0, directions.directions[j]
        for name, tensor in gradient.items():
            if tensor is not None and name in direction:
                terms = to_float64(tensor) * to_float64(direction[name].to(tensor.device))
                expected += float(terms.sum())
                size += float(terms.abs().sum())
        allowed = epsilon**0.5 * abs(expected) + ROUNDING * epsilon * size
        if not abs(column - expected) <= allowed:
            raise NoLocalProductError("derivatives are not those of single examples")

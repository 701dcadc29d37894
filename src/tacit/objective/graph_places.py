"""Where the graph of a batch reads parameters, and which dimension there holds the examples.

It is the dimension whose size grows with the number of examples, in batches of two and three. A
dimension of (examples · tokens) rows may have either of them first; the gradients of single
examples' losses, which are zero in the rows of all others, tell which.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from tacit.objective.local_products import NoLocalProductError, Rows
from tacit.objective.params import Params

PERMUTING = ("Index", "Gather", "Scatter", "MaskedSelect", "Sort", "Topk", "Take", "Pack")
"""Parts of names of operations that may change the order of examples from batch to batch."""
MOST_SHARED = 3
"""Shared tensors that an operation may read; fused recurrent layers read more."""


class Output(NamedTuple):
    """An output of an operation: the operation's index in the graph, and which output it is."""

    node: int
    nr: int


@dataclass(frozen=True, eq=False)
class Graph:
    """The graph of a batch's outputs, with its operations in an order that is always the same."""

    nodes: list[Any]
    inputs: list[tuple[Output | None, ...]]
    names: list[str]
    """Of the operations; of a parameter, its own."""
    roots: list[Output]

    @property
    def signature(self) -> tuple[Any, ...]:
        """What two batches of the same operations have in common."""
        return self.names, self.inputs, self.roots

    def sizes(self, output: Output) -> tuple[int, ...]:
        """The shape of an operation's output."""
        return tuple(_outputs_of(self.nodes[output.node])[output.nr].shape)

    def zeros(self, output: Output) -> Tensor:
        """Zeros of the shape, dtype and device of an operation's output."""
        like = _outputs_of(self.nodes[output.node])[output.nr]
        return torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)

    def epsilon(self) -> float:
        """Of the least precise dtype in the graph: below float32 nothing could be compared."""
        dtypes = {like.dtype for node in self.nodes for like in _outputs_of(node)}
        epsilon = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
        if epsilon > torch.finfo(torch.float32).eps:
            raise NoLocalProductError("the precision is too low to compare derivatives")
        return epsilon

    def edge(self, output: Output) -> GradientEdge:
        """The place in autograd's graph where the gradient by an output arrives."""
        return GradientEdge(self.nodes[output.node], output.nr)


class Place(NamedTuple):
    """An operation that reads shared tensors, and where its output has the examples."""

    output: Output
    rows: Rows
    shape: tuple[int, ...]
    """That of the output for one example."""
    shared: tuple[tuple[int, Output], ...]
    """The position of each shared tensor among the operation's inputs, and where it comes from."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where the graph of a batch reads parameters."""

    signature: tuple[Any, ...]
    places: tuple[Place, ...]
    epsilon: float
    """That of the least precise dtype in the graph."""
    always_check: bool
    """Whether the order of the examples may change from batch to batch."""


def graph_of(outputs: Sequence[Tensor], leaves: Params) -> Graph:
    """The graph of a batch's outputs down to the parameters."""
    names_of_leaves = {id(leaf): name for name, leaf in leaves.items()}
    nodes: list[Any] = []
    index: dict[Any, int] = {}
    stack = [t.grad_fn for t in reversed(outputs) if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in index:
            continue
        index[node] = len(nodes)
        nodes.append(node)
        stack += [child for child, _ in node.next_functions if child is not None]
    inputs = [
        tuple(None if c is None else Output(index[c], nr) for c, nr in node.next_functions)
        for node in nodes
    ]
    names = [_name(node, names_of_leaves) for node in nodes]
    roots = [Output(index[t.grad_fn], t.output_nr) for t in outputs if t.grad_fn is not None]
    return Graph(nodes, inputs, names, roots)


def _outputs_of(node: Any) -> Sequence[Any]:
    """The shapes, dtypes and devices of an operation's outputs, or of a leaf."""
    return [node.variable] if _is_leaf(node) else node._input_metadata


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _name(node: Any, names_of_leaves: dict[int, str]) -> str:
    if not _is_leaf(node):
        return node.name()
    return names_of_leaves.get(id(node.variable), "(constant)")


def find_places(smaller: Graph, larger: Graph) -> list[Place]:
    """The operations that read shared tensors, from the graphs of two and of three examples."""
    if smaller.signature != larger.signature or not larger.roots:
        raise NoLocalProductError("the operations depend on the number of examples")
    outputs = dict.fromkeys(larger.roots)
    for inputs in larger.inputs:
        outputs |= dict.fromkeys(output for output in inputs if output is not None)
    rows = {output: _rows(smaller.sizes(output), larger.sizes(output)) for output in outputs}
    if any(rows[root] is None for root in larger.roots):
        raise NoLocalProductError("an output does not depend on the examples")
    places = [place for o in outputs if (place := _place(larger, o, rows)) is not None]
    if len({place.output.node for place in places}) < len(places):
        raise NoLocalProductError("an operation with several outputs reads a parameter")
    return places


def _place(graph: Graph, output: Output, rows: dict[Output, Rows | None]) -> Place | None:
    """The operation of an output, if it reads shared tensors and its output is not shared."""
    inputs, here = graph.inputs[output.node], rows[output]
    shared = [(slot, i) for slot, i in enumerate(inputs) if i is not None and rows[i] is None]
    if here is not None:
        if not shared and graph.names[output.node] == "EmbeddingBackward0":
            raise NoLocalProductError("rows of the examples are read by index")
        if len(shared) > MOST_SHARED:
            raise NoLocalProductError("an operation reads many parameters, as recurrent layers do")
        shape = list(graph.sizes(output))
        shape[here.dim] = here.per_example
        return Place(output, here, tuple(shape), tuple(shared)) if shared else None
    if len(shared) < len([i for i in inputs if i is not None]):
        raise NoLocalProductError("examples interact")
    return None


def _rows(smaller: tuple[int, ...], larger: tuple[int, ...]) -> Rows | None:
    """Where a tensor has its examples; None if its shape does not depend on their number."""
    if smaller == larger:
        return None
    changed = [d for d, sizes in enumerate(zip(smaller, larger, strict=True)) if len({*sizes}) > 1]
    if len(changed) != 1 or smaller[changed[0]] * 3 != larger[changed[0]] * 2:
        raise NoLocalProductError("a tensor has no dimension of examples")
    return Rows(changed[0], smaller[changed[0]] // 2)


def may_permute(graph: Graph) -> bool:
    """Whether an operation may change the order of examples, differently in each batch."""
    custom = any(isinstance(node, BackwardCFunction) for node in graph.nodes)
    return custom or any(part in name for name in graph.names for part in PERMUTING)


def place_rows(place: Place, gradients: Sequence[Tensor | None]) -> tuple[Place, bool]:
    """The place with the order of its rows, from the gradients of the single examples' losses.

    Also whether these leave two orders possible. Refuses losses that depend on other examples.
    """
    possible = []
    orders = (True, False) if place.rows.per_example > 1 else (True,)
    for example_first in orders:
        rows = place.rows._replace(example_first=example_first)
        if all(_only(rows, gradient, i) for i, gradient in enumerate(gradients)):
            possible.append(rows)
    if not possible:
        raise NoLocalProductError("examples interact")
    return place._replace(rows=possible[0]), len(possible) > 1


def _only(rows: Rows, gradient: Tensor | None, example: int) -> bool:
    """Whether a gradient is zero in the rows of all other examples."""
    if gradient is None:
        return True
    parts = rows.split(gradient)
    return not parts[:example].any() and not parts[example + 1 :].any()

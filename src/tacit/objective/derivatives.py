"""Derivatives of one batch's mean loss, and the attention backend that double backward needs.

Torch's derivatives of higher order can be wrong without an error, for custom functions and in some
fused layers: `check_gradient` and `check_product` compare
them with finite differences.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tacit.errors import InputError
from tacit.objective.closed_forms import ClosedForms
from tacit.objective.params import Params, entries, layer_of, norm, same_buffers

DIRECTIONS = 4
"""Directions along which a gradient is compared: along one, an error may be small by chance."""
STEP = 1e-6
"""Step of finite differences in float64, as a part of the weights' size."""
TOLERANCE = 0.01
"""Relative error above which a derivative is wrong."""
MOST_WAITING, DEVICE_MOST_WAITING = 2**25, 2**27
"""Entries of gradients that may wait for the end of the backward pass, on the CPU and on other
devices: those of the smallest leaves. Others are used and released as soon as they are complete."""
MOST_ENTRIES = 2**26
"""Derivatives of models with more parameters than this are not compared with differences."""

NO_DEPENDENCE = "the loss does not depend on the parameters: they are detached, or under no_grad."


def leaves(params: Params) -> Params:
    """The same values as new leaves of the autograd graph; memory is shared.

    They are parameters: a forward pass may ask for that, or assign one to another module.
    """
    return same_buffers({n: nn.Parameter(p.detach()) for n, p in params.items()}, params)


def gradient(mean: Tensor, leaves: Params, *, graph: bool = False) -> tuple[Tensor | None, ...]:
    """Gradient of a batch's mean loss, one tensor per leaf; None where a leaf is not used."""
    if not mean.requires_grad:
        raise InputError(NO_DEPENDENCE)
    return torch.autograd.grad(mean, list(leaves.values()), allow_unused=True, create_graph=graph)


def stream_gradient(
    mean: Tensor,
    leaves: Params,
    use: Callable[[Params], None],
    *,
    large: Collection[str] | None = None,
) -> None:
    """Call use(gradients) with those of all leaves that the mean depends on, part by part.

    Those of large leaves are used as soon as they are complete and then released, so that the
    gradients of all leaves are never in memory together. The others are used together.

    Args:
        mean: the mean loss of a batch.
        leaves: what it is differentiated by.
        use: takes gradients by name.
        large: what `large_leaves` returned for them, where it is known.
    """
    if not mean.requires_grad:
        raise InputError(NO_DEPENDENCE)

    def use_at_once(leaf: Tensor, name: str) -> None:
        vector, leaf.grad = leaf.grad, None
        if vector is not None:
            use({name: vector})

    hooks = [
        leaves[name].register_post_accumulate_grad_hook(partial(use_at_once, name=name))
        for name in (large_leaves(leaves) if large is None else large)
    ]
    try:
        mean.backward(inputs=list(leaves.values()))
        rest = {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}
    finally:
        for hook in hooks:
            hook.remove()
        for leaf in leaves.values():
            leaf.grad = None
    use(rest)


def large_leaves(leaves: Params) -> list[str]:
    """The leaves whose gradients do not wait for the end of the backward pass."""
    on_cpu = all(leaf.is_cpu for leaf in leaves.values())
    by_size = sorted(leaves, key=lambda name: leaves[name].numel())
    ends = accumulate(leaves[name].numel() for name in by_size)
    most = MOST_WAITING if on_cpu else DEVICE_MOST_WAITING
    return [name for name, end in zip(by_size, ends, strict=True) if end > most]


def graph_dtypes(output: Tensor) -> set[torch.dtype]:
    """The dtypes of all operations that an output is computed by from the parameters.

    Some are less precise than the parameters: many norm layers and losses compute in float32.
    """
    nodes: list[Any] = [output.grad_fn]
    visited, dtypes = set(), set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        results = [node.variable] if hasattr(node, "variable") else node._input_metadata
        dtypes |= {r.dtype for r in results if r.dtype.is_floating_point}
        nodes += [following for following, _ in node.next_functions]
    return dtypes


def gradient_with_graph(function: Tensor, leaves: Params) -> Sequence[Tensor | None] | None:
    """The gradient of a penalty, which can be differentiated; None if it can not.

    A function that can be differentiated only once puts an error node into the graph of its
    gradient if the incoming gradient requires a graph too; otherwise it would look linear. The
    factor `one` makes the incoming gradient require one.
    """
    one = torch.ones((), dtype=torch.float64, requires_grad=True)
    gradients = gradient(function * one.to(function.device), leaves, graph=True)
    nodes, visited = [g.grad_fn for g in gradients if g is not None], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.name() == "torch::autograd::Error":
            return None
        nodes += [following for following, _ in node.next_functions]
    return gradients


def pull_back(
    pairs: Iterable[tuple[Tensor | None, Tensor]],
    inputs: Sequence[Any],
    **options: bool,
) -> Sequence[Tensor | None]:
    """Gradient of Σ ⟨tensor, cotangent⟩ by the inputs, which are tensors or edges of the graph.

    Tensors without a graph are constants.
    """
    pairs = [(t, c.to(t)) for t, c in pairs if t is not None and t.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    tensors, cotangents = zip(*pairs, strict=True)
    return torch.autograd.grad(tensors, inputs, cotangents, allow_unused=True, **options)


def hessian_product(mean: Tensor, leaves: Params, direction: Params) -> Sequence[Tensor | None]:
    """Hessian of a batch's mean loss times a direction, by double backward."""
    try:
        gradients = gradient(mean, leaves, graph=True)
        pairs = zip(gradients, direction.values(), strict=True)
        return pull_back(pairs, list(leaves.values()))
    except RuntimeError as error:
        if not lacks_double_backward(error):
            raise
        raise InputError(
            f"a Hessian product needs double backward, which an operator here lacks: {error}. "
            "Attention must be able to run on torch's math backend (attn_implementation='sdpa' or "
            "'eager' in Hugging Face models); custom functions need a differentiable backward."
        ) from error


def lacks_double_backward(error: RuntimeError) -> bool:
    """Whether torch complains that an operator cannot be differentiated twice."""
    return "derivative" in str(error) or "differentiate twice" in str(error)


@contextmanager
def math_attention() -> Iterator[None]:
    """Run attention on torch's math backend, and restore the previous setting.

    Fused attention kernels have no second derivative, and the fast path of
    nn.TransformerEncoderLayer bypasses the layer's submodules and their hooks.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Attention on the math backend, cross-entropy and layer norm in closed form.

    The second are for memory and speed; see `closed_forms`.
    """
    with math_attention(), ClosedForms():
        yield


def wrong_gradient(
    value: Callable[[Params], Tensor], params: Params, scope: Sequence[str]
) -> tuple[str, ...]:
    """The layers in which autograd's gradient of a function is not its finite difference.

    Everything is computed in float64, in any precision of the parameters, along a few random
    directions; where one disagrees, in each layer by itself. Nothing is reported where differences
    cannot tell: at a kink or a jump, or where the function does not run in float64.

    Args:
        value: value(params) returns one number.
        params: the point.
        scope: names of the parameters that it is differentiated by.
    """

    def compare(point: Params, direction: Params) -> tuple[str, ...]:
        inputs = leaves(point)
        gradients = gradient(value(inputs).sum(), inputs)
        products = {
            n: torch.zeros(()) if g is None else (g * direction[n]).sum()
            for n, g in zip(point, gradients, strict=True)
        }

        def value_at(moved: Params) -> list[Tensor]:
            return [value(moved).detach().cpu().reshape(1)]

        def disagrees(names: Sequence[str]) -> bool:
            along = {n: v if n in names else torch.zeros_like(v) for n, v in direction.items()}
            exact = torch.stack([products[n].cpu() for n in names])
            return bool(_compare(value_at, [exact.sum().reshape(1)], point, along, exact.norm()))

        if not disagrees(scope):
            return ()
        layers = dict.fromkeys(map(layer_of, scope))
        wrong = [k for k in layers if disagrees([n for n in scope if layer_of(n) == k])]
        return tuple(wrong or layers)

    return _in_double(compare, params, DIRECTIONS) or ()


def wrong_product(
    function: Callable[[Params], Sequence[Tensor | None]],
    product: Callable[[Params, Params], Sequence[Tensor | None]],
    params: Params,
) -> tuple[str, ...] | None:
    """The layers in which a Hessian product is not the finite difference of a gradient.

    As `wrong_gradient`, but None where differences cannot be computed; `function(params)` is the
    gradient, `product(params, direction)` the product, both with one tensor per parameter, or None
    for zeros.
    """

    def compare(point: Params, direction: Params) -> tuple[str, ...]:
        def dense(tensors: Sequence[Tensor | None]) -> list[Tensor]:
            pairs = zip(tensors, point.values(), strict=True)
            return [torch.zeros_like(p) if t is None else t.detach() for t, p in pairs]

        exact = dense(product(point, direction))
        size = torch.stack([e.norm().cpu() for e in exact]).norm()
        wrong = _compare(lambda moved: dense(function(moved)), exact, point, direction, size)
        names = list(point)
        return tuple(dict.fromkeys(layer_of(names[i]) for i in wrong))

    return _in_double(compare, params)


def _in_double(
    compare: Callable[[Params, Params], tuple[str, ...]], params: Params, directions: int = 1
) -> tuple[str, ...] | None:
    """compare(point, direction) in float64, for random directions; None if that is impossible."""
    if entries(params) > MOST_ENTRIES or any(p.device.type == "mps" for p in params.values()):
        return None  # mps has no float64
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            point = same_buffers({n: p.detach().double() for n, p in params.items()}, params)
            along = [_random_direction(point, seed) for seed in range(directions)]
            with InFloat64() as mode:
                wrong = next(filter(None, (compare(point, d) for d in along)), ())
            return None if mode.lowered else wrong
    except (RuntimeError, TypeError, ValueError):  # mixed precision, or an error of the user's own
        return None


class InFloat64(TorchFunctionMode):
    """Call every torch function with float64 in place of a lower precision.

    `lowered` tells whether a function returned less than that all the same, as under autocast.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lowered = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Convert all tensors among the arguments."""
        kwargs = kwargs or {}
        if not all(map(_is_double, (*args, *kwargs.values()))):
            args, kwargs = tree_map_only(Tensor, _to_double, (args, kwargs))
        result = func(*args, **kwargs)
        tensors = result if isinstance(result, tuple | list) else (result,)
        lower = [t for t in tensors if isinstance(t, Tensor) and _to_double(t) is not t]
        self.lowered |= any(t.requires_grad and t.numel() for t in lower)
        return result


def _is_double(value: Any) -> bool:
    """Whether an argument needs no conversion: faster than mapping over all of them."""
    if isinstance(value, Tensor):
        return _to_double(value) is value
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _to_double(tensor: Tensor) -> Tensor:
    low = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.double() if low else tensor


def _random_direction(point: Params, seed: int) -> Params:
    """A Gaussian direction, in each tensor of the size of its weights."""
    generator = torch.Generator().manual_seed(seed)
    overall = norm(point) / math.sqrt(entries(point)) or 1.0
    direction = {}
    for name, p in point.items():
        size = max(norm({name: p}) / math.sqrt(max(entries({name: p}), 1)), 0.1 * overall)
        normal = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        direction[name] = size * normal.to(p.device)
    return direction


def _compare(
    function: Callable[[Params], Sequence[Tensor]],
    exact: Sequence[Tensor],
    point: Params,
    direction: Params,
    size: Tensor,
) -> list[int]:
    """Which tensors of a derivative along a direction are not the finite difference.

    They differ by more than the difference is uncertain: by what it changes with the step, by what
    its two sides differ, as at a kink, and by rounding. `size` is the derivative's size.
    """

    def at(step: float) -> Sequence[Tensor]:
        moved = {n: p + step * direction[n] for n, p in point.items()}
        return function(leaves(same_buffers(moved, point)))  # some functions differentiate

    rounding = 100 * torch.finfo(torch.float64).eps / STEP
    wrong = []
    values = zip(exact, *(at(step) for step in (0, STEP, -STEP, 2 * STEP, -2 * STEP)), strict=True)
    for i, (derivative, here, ahead, behind, far_ahead, far_behind) in enumerate(values):
        difference = (ahead - behind) / (2 * STEP)
        change = (difference - (far_ahead - far_behind) / (4 * STEP)).norm()
        sides = (ahead - 2 * here + behind).norm() / STEP
        uncertain = 10 * torch.maximum(change, sides) + rounding * here.norm()
        error = (derivative - difference).norm()
        if error > uncertain + TOLERANCE * torch.maximum(size.to(error), difference.norm()):
            wrong.append(i)
    return wrong

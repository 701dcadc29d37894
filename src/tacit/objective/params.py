"""Parameters as a dictionary of named tensors, and scopes that select among them."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import InputError, check_type
from tacit.objective.ranks import current_ranks

Params = dict[str, Tensor]
Scope = str | Collection[str] | Callable[[str], bool] | Callable[[str, Tensor], bool] | None
"""Which parameters: a name pattern, a list of them, or a predicate of (name) or (name, tensor)."""

SLICE, DEVICE_SLICE = 2**20, 2**24
"""Entries of a tensor that are converted to float64 at once: on the CPU, and on other devices."""
ROOT = "(model)"
"""The layer of parameters that the outermost module owns itself."""


class Point(Params):
    """Parameters with the buffers of their time, such as batch norm's running statistics."""

    def __init__(self, params: Mapping[str, Tensor], buffers: Params):
        super().__init__(params)
        self.buffers = buffers


def same_buffers(params: Params, point: Mapping[str, Tensor]) -> Params:
    """The parameters with the buffers of another point, if it has any."""
    return Point(params, point.buffers) if isinstance(point, Point) else params


def layer_of(name: str) -> str:
    """The module that owns a parameter: `blocks.0.mlp` for `blocks.0.mlp.weight`."""
    module, parametrised, _ = f".{name}".partition(".parametrizations.")
    return (module if parametrised else module.rpartition(".")[0])[1:] or ROOT


def matrices(name: str, tensor: Tensor) -> bool:
    """Whether a tensor has two or more dimensions: as a scope, weights without biases and norms.

    >>> import tacit
    >>> model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    >>> tuple(tacit.l2(scope=tacit.matrices).bind(dict(model.named_parameters())).active)
    ('0.weight',)
    """
    return tensor.ndim >= 2


def select(
    params: Mapping[str, Tensor], scope: Scope, *, what: str, whole: bool = True
) -> tuple[str, ...]:
    """Names of the parameters that a scope covers, in their order; None covers all.

    A pattern matches a parameter (`*.bias`) or a module that contains it (`encoder`), and a list
    is what any of its patterns matches. A predicate is called with the name, or with the name and
    the tensor if it requires two arguments.

    Args:
        params: the parameters, by name.
        scope: the scope.
        what: the argument's name, for messages.
        whole: whether these are all parameters of a model, so that every pattern of a list must
            match one.
    """
    if scope is None:
        return tuple(params)
    if isinstance(scope, str) or not callable(scope):
        chosen = _match(tuple(params), scope, what=what, whole=whole)
    else:
        covers = _predicate(scope, what)
        chosen = tuple(n for n, p in params.items() if covers(n, p))
    if not chosen:
        raise InputError(
            f"{what}={scope!r} covers no parameter. There are: {shorten(params)}. "
            "Patterns are matched against whole names, as in '*.weight'."
        )
    return chosen


NEEDED_SCOPE = (
    "a name pattern such as '*.weight', a list of patterns, or a function of a parameter's name or "
    "of (name, tensor), such as tacit.matrices"
)


def _match(names: tuple[str, ...], scope: Any, *, what: str, whole: bool) -> tuple[str, ...]:
    """Names that a pattern, or any pattern of a list, matches."""
    check_type(what, scope, Collection, NEEDED_SCOPE)
    patterns = (scope,) if isinstance(scope, str) else tuple(scope)
    matches = {}
    for pattern in patterns:
        check_type(f"an entry of {what}", pattern, str, NEEDED_SCOPE)
        matches[pattern] = {
            n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, pattern + ".*")
        }
    unmatched = [repr(pattern) for pattern, matched in matches.items() if not matched]
    if whole and unmatched and len(patterns) > 1:
        raise InputError(
            f"{what}: {shorten(unmatched)} of the list matches no parameter. There are: "
            f"{shorten(names)}. Patterns are matched against whole names, as in '*.weight'."
        )
    covered = set().union(*matches.values())
    return tuple(n for n in names if n in covered)


def _predicate(scope: Callable[..., Any], what: str) -> Callable[[str, Tensor], Any]:
    """A predicate as a function of (name, tensor), whichever of the two it requires."""
    if isinstance(scope, type | nn.Module):
        kind = scope.__name__ if isinstance(scope, type) else type(scope).__name__
        raise InputError(f"{what} is the module or class {kind}: pass {NEEDED_SCOPE}.")
    try:
        signature = inspect.signature(scope)
    except ValueError:  # some built-in functions have none
        return lambda name, _: scope(name)
    # A second argument with a default is the predicate's own, as in lambda name, layer=layer: ….
    required = [
        p
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    arguments = ("name", "tensor")[: max(1, len(required))]
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise InputError(
            f"{what} is a function {signature}, which cannot be called with {arguments} ({error}): "
            f"pass {NEEDED_SCOPE}."
        ) from error
    return scope if len(arguments) == 2 else lambda name, _: scope(name)


def check_params(params: Mapping[str, Tensor], reference: Params, *, what: str) -> Params:
    """The parameters with the reference's device and dtype; refused if names or shapes differ."""
    check_alike(params, reference, what=what)
    converted = {n: params[n].detach().to(t) for n, t in reference.items()}
    check_finite(converted, what=what)
    return converted


def check_alike(params: Mapping[str, Tensor], reference: Params, *, what: str) -> None:
    """Refuse anything but named tensors, and other names or shapes than the reference's."""
    if not isinstance(params, Mapping):
        raise InputError(
            f"{what} is a {type(params).__name__}: pass a dictionary of named tensors, such as "
            "dict(model.named_parameters())."
        )
    missing = [n for n in reference if n not in params]
    unknown = [n for n in params if n not in reference]
    if missing or unknown:
        raise InputError(
            f"{what} belongs to another model: missing {shorten(missing) or 'nothing'}, "
            f"unknown {shorten(unknown) or 'nothing'}. Trainable parameters here are: "
            f"{shorten(reference)}."
        )
    for name, tensor in reference.items():
        if not isinstance(params[name], Tensor):
            raise InputError(
                f"{what}[{name!r}] is {describe(params[name])}: pass a tensor, as in "
                "torch.as_tensor(…)."
            )
        if params[name].shape != tensor.shape:
            raise InputError(
                f"{what}[{name!r}] is {describe(params[name])}: pass a tensor of shape "
                f"{tuple(tensor.shape)}, from the same architecture."
            )


def check_finite(tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Refuse NaN and infinities, naming the tensor."""
    real = {n: torch.view_as_real(t) if t.is_complex() else t for n, t in tensors.items()}
    # The largest is NaN where an entry is; reading it is faster than looking at every entry.
    for name, largest in read_numbers(_norms(real, math.inf)).items():
        if not math.isfinite(largest):
            tensor = tensors[name]
            bad = int((~torch.isfinite(tensor)).sum())
            raise InputError(
                f"{what} of {name!r} holds {bad} NaN or infinite of {tensor.numel()} values: "
                "training has diverged or overflowed. Use an earlier checkpoint, a smaller step "
                "size or a wider dtype."
            )


def to_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64; on the CPU if its device has no float64."""
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    return tensor.to(torch.float64)


def float64_zeros(params: Params) -> Params:
    """A float64 accumulator for every parameter."""
    return zero_sums(params, torch.float64)


def zero_sums(params: Params, dtype: torch.dtype) -> Params:
    """An accumulator for every parameter; on the CPU if its device has no float64."""
    return {
        n: torch.zeros(p.shape, dtype=dtype, device="cpu" if p.device.type == "mps" else p.device)
        for n, p in params.items()
    }


def add_scaled(totals: Sequence[Tensor], vectors: Sequence[Tensor], factor: float) -> None:
    """Add factor·vector to each total, which may have another dtype, in place.

    All on a GPU are added by one call. On the CPU torch converts all of such a vector first; in
    slices that takes a tenth of the time.
    """
    pairs = list(zip(totals, vectors, strict=True))
    if pairs and all(t.is_cuda and t.device == v.device for t, v in pairs):
        torch._foreach_add_(list(totals), list(vectors), alpha=factor)  # pyright: ignore[reportPrivateImportUsage]
        return
    for total, vector in pairs:
        vector = vector.to(total.device)
        if vector.dtype == total.dtype or not total.is_cpu or total.numel() <= SLICE:
            total.add_(vector, alpha=factor)
            continue
        slices = zip(total.view(-1).split(SLICE), vector.flatten().split(SLICE), strict=True)
        for here, part in slices:
            here.add_(part, alpha=factor)


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Euclidean norm over all tensors, accumulated in float64.

    This and the next ones are of all rows where processes share them (`with ranks:`).
    """
    return math.sqrt(sum(square_norms(tensors).values()))


def square_norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Sums of squares by tensor, accumulated in float64, and read from the device once."""
    return read_square_norms(norms_on_device(tensors), tensors)


def norms_on_device(tensors: Mapping[str, Tensor]) -> Params:
    """Norms by tensor, accumulated in float64; a device is not waited for."""
    return _norms(tensors, 2)


def read_square_norms(norms: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, float]:
    """The squares of norms on a device, zero for names without one."""
    numbers = read_numbers(norms)
    return sum_over_parts({n: numbers.get(n, 0.0) ** 2 for n in names})


def sum_over_parts(numbers: dict[str, Any]) -> dict[str, Any]:
    """Numbers by tensor that are sums over rows, each over the rows of all processes."""
    ranks = current_ranks()
    if ranks.shards is None or not numbers:
        return numbers
    sums = ranks.sum_parts(torch.tensor(list(numbers.values()), dtype=torch.float64))
    return dict(zip(numbers, sums.tolist(), strict=True))


def entries(tensors: Mapping[str, Tensor]) -> int:
    """The number of entries of all tensors."""
    return int(sum_over_parts({"": sum(t.numel() for t in tensors.values())})[""])


@torch.no_grad()
def _norms(tensors: Mapping[str, Tensor], order: float) -> Params:
    """Norms of order 2 or ∞ by tensor, on their devices; those of a GPU with one kernel for many.

    The former are accumulated in float64; empty tensors have none.
    """
    present = {n: t for n, t in tensors.items() if t.numel()}
    norms: Params = {}
    on_gpus = {n: t for n, t in present.items() if t.is_cuda}
    for device in {t.device for t in on_gpus.values()}:
        here = {n: t for n, t in on_gpus.items() if t.device == device}
        dtype = torch.float64 if order == 2 else None
        together = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
            list(here.values()), order, dtype=dtype
        )
        norms |= zip(here, together, strict=True)
    for name, tensor in present.items():
        if order == 2 and name not in norms:
            norms[name] = square_sum(tensor).sqrt()
        elif name not in norms:
            norms[name] = torch.stack(tensor.aminmax()).abs().max()
    return norms


def largest_entry(tensors: Mapping[str, Tensor]) -> float:
    """The largest magnitude of an entry of any tensor; 0 where there is none."""
    here = max(read_numbers(_norms(tensors, math.inf)).values(), default=0.0)
    return current_ranks().largest_of_parts(here)


def square_sum(tensor: Tensor) -> Tensor:
    """The sum of squares as a tensor on the device, accumulated in float64 in slices."""
    slices = tensor.detach().flatten().split(SLICE if tensor.is_cpu else DEVICE_SLICE)
    parts = map(to_float64, slices)
    return torch.stack([torch.dot(part, part) for part in parts]).sum()


def read_on_cpu(tensors: Mapping[str, Tensor]) -> Params:
    """The tensors on the CPU; those of one device, dtype and shape are read at once."""
    alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.device, tensor.dtype, tensor.shape), []).append(name)
    read: Params = {}
    for names in alike.values():
        read |= zip(names, torch.stack([tensors[n] for n in names]).cpu(), strict=True)
    return {n: read[n] for n in tensors}


def read_numbers(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """As `read_on_cpu`, as Python's numbers."""
    return {n: tensor.tolist() for n, tensor in read_on_cpu(tensors).items()}


def entries_of(tensor: Tensor, part: slice) -> Tensor:
    """A slice of a flattened tensor.

    Of a tensor whose entries lie in another order in memory (channels_last, a transpose) only the
    slice is copied: `flatten` would copy the tensor for every slice of it.
    """
    if tensor.is_contiguous():
        return tensor.flatten()[part]
    return tensor.take(torch.arange(part.start, part.stop, device=tensor.device))


def coarsest_dtype(*tensors: Tensor, others: Iterable[torch.dtype] = ()) -> torch.dtype:
    """The least precise dtype in use, autocast included."""
    dtypes = [*(t.dtype for t in tensors), *others]
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


@torch.no_grad()
def perturb_last_digit(params: Params, eps: float | None = None) -> Params:
    """Every entry moved up or down at random by one epsilon, of the coarsest dtype in use."""
    eps = torch.finfo(coarsest_dtype(*params.values())).eps if eps is None else eps
    devices = {p.device for p in params.values()}
    generators = {device: torch.Generator(device).manual_seed(0) for device in devices}
    up = [
        torch.randint(0, 2, p.shape, generator=generators[p.device], device=p.device, dtype=p.dtype)
        for p in params.values()
    ]
    # In place and for all tensors at once: a GPU takes longer to start a kernel than to run it.
    for change, by in (("mul", 2 * eps), ("add", 1 - eps), ("mul", list(params.values()))):
        getattr(torch, f"_foreach_{change}_")(up, by)
    return same_buffers(dict(zip(params, up, strict=True)), params)


def fingerprint(params: Mapping[str, Tensor]) -> tuple[float, ...]:
    """Two numbers per tensor that change when its entries change or are permuted.

    The small tensors on a GPU have two numbers together, because starting kernels takes the time.
    On the CPU slices are so small that torch sums each on one thread: the numbers do not depend on
    the number of threads.
    """
    sums: Params = {}
    for name, tensor in _join_small(params).items():
        size = 2**14 if tensor.is_cpu else DEVICE_SLICE
        square = weighted = torch.zeros((), dtype=torch.float64)
        for number, part in enumerate(tensor.detach().flatten().split(size), 1):
            part = to_float64(part)
            ramp = torch.linspace(1, 2, len(part), dtype=part.dtype, device=part.device)
            square = square + part.square().sum()
            weighted = weighted + number * (part * ramp).sum()
        sums[name] = torch.stack([square, weighted])
    return tuple(number for pair in read_numbers(sums).values() for number in pair)


def _join_small(tensors: Mapping[str, Tensor]) -> Params:
    """The tensors, the small ones of each GPU joined to one."""
    small = {n: t for n, t in tensors.items() if t.is_cuda and t.numel() < SLICE}
    joined = {n: t for n, t in tensors.items() if n not in small}
    for device in dict.fromkeys(t.device for t in small.values()):
        here = [t.detach().flatten() for t in small.values() if t.device == device]
        joined[f"small ones on {device}"] = torch.cat(here)
    return joined


def describe(value: Any) -> str:
    """A value's type for a message, or its shape if it is a tensor."""
    tensor = isinstance(value, Tensor)
    return f"a tensor of shape {tuple(value.shape)}" if tensor else f"a {type(value).__name__}"


def move_like(state: Any, params: Params) -> Any:
    """A copy of nested values, with tensors under a parameter's name moved to its device."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, Mapping):
        return {
            key: value.clone().to(params[key].device)
            if key in params and isinstance(value, Tensor)
            else move_like(value, params)
            for key, value in state.items()
        }
    if isinstance(state, list | tuple):
        return type(state)(move_like(value, params) for value in state)
    return state


def shorten(names: Iterable[str], most: int = 6) -> str:
    """The first few names for a message, and the number of further ones."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

"""Parameters as a dictionary of named tensors, and scopes that select among them."""

import math
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import InputError, check_type

Params = dict[str, Tensor]
Scope = str | Callable[[str], bool] | None

ROOT = "(model)"
"""The layer of parameters that the outermost module owns itself."""


def trainable(model: nn.Module) -> Params:
    """Parameters with requires_grad=True, tied ones once, as views that share their memory."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InputError(
                f"parameter {name!r} of a lazy module has no shape: run one batch through it."
            )
    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    if not params:
        raise InputError(
            f"{type(model).__name__} has no trainable parameters, with requires_grad=True: "
            "unfreeze the ones that were trained."
        )
    return params


def layer_of(name: str) -> str:
    """The module that owns a parameter: `blocks.0.mlp` for `blocks.0.mlp.weight`."""
    module, parametrised, _ = f".{name}".partition(".parametrizations.")
    return (module if parametrised else module.rpartition(".")[0])[1:] or ROOT


def point_of(model: nn.Module, params: Mapping[str, Tensor] | None, *, what: str) -> Params:
    """The point to evaluate a model at: the given parameters, checked, or the model's current ones.

    Frozen parameters and second names of tied ones may be among them if their values agree.
    """
    current = trainable(model)
    if params is None:
        check_finite(current, what="the model's value")
        return current
    if isinstance(params, Mapping):
        redundant = _redundant_names(model, params)
        params = {n: p for n, p in params.items() if n not in redundant}
    return check_params(params, current, what=what)


def _redundant_names(model: nn.Module, params: Mapping[str, Tensor]) -> set[str]:
    """Names of frozen parameters with the model's value, and of tied ones with their owner's."""
    owners = {id(p): n for n, p in model.named_parameters()}
    redundant = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners[id(parameter)]
        if name not in params or (parameter.requires_grad and owner == name):
            continue
        expected = params.get(owner, parameter) if parameter.requires_grad else parameter
        if _equal(params[name], expected):
            redundant.add(name)
    return redundant


def _equal(a: Any, b: Any) -> bool:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return tensors and a.shape == b.shape and bool((a.to(b) == b).all())


def select(names: Iterable[str], scope: Scope, *, what: str) -> tuple[str, ...]:
    """Names that a scope covers, in their order.

    A pattern matches a parameter (`*.bias`) or a module that contains it (`encoder`); a predicate
    is called with the name. None covers all.
    """
    names = tuple(names)
    if scope is None:
        return names
    needed = "a name pattern such as '*.weight', or a function of a parameter's name"
    check_type(what, scope, str | Callable, needed)
    if isinstance(scope, str):
        chosen = tuple(n for n in names if fnmatchcase(n, scope) or fnmatchcase(n, scope + ".*"))
    else:
        chosen = tuple(n for n in names if scope(n))
    if not chosen:
        raise InputError(
            f"{what}={scope!r} covers no parameter. There are: {shorten(names)}. "
            "Patterns are matched against whole names, as in '*.weight'."
        )
    return chosen


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
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
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
    return {n: to_float64(p.new_zeros(p.shape)) for n, p in params.items()}


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Euclidean norm over all tensors, accumulated in float64."""
    return math.sqrt(sum(square_norm(t) for t in tensors.values()))


def square_norm(tensor: Tensor) -> float:
    """Sum of squares, accumulated in float64 in slices."""
    return sum(
        float(to_float64(part).square().sum()) for part in tensor.detach().flatten().split(2**20)
    )


def coarsest_dtype(*tensors: Tensor) -> torch.dtype:
    """The least precise dtype in use, autocast included."""
    dtypes = [t.dtype for t in tensors]
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def perturb_last_digit(params: Params) -> Params:
    """Every entry moved up or down at random by one epsilon of the coarsest dtype in use."""
    eps = torch.finfo(coarsest_dtype(*params.values())).eps
    generator = torch.Generator().manual_seed(0)
    perturbed = {}
    for name, p in params.items():
        up = torch.randint(0, 2, (p.numel(),), generator=generator, dtype=torch.int8).view(p.shape)
        perturbed[name] = p * (1 + (2 * up.to(p.device, p.dtype) - 1) * eps)
    return perturbed


def fingerprint(params: Mapping[str, Tensor]) -> tuple[float, ...]:
    """Two numbers per tensor that change when its entries change or are permuted.

    On the CPU slices are so small that torch sums each on one thread: the numbers do not depend on
    the number of threads.
    """
    numbers: list[float] = []
    for tensor in params.values():
        size = 2**14 if tensor.device.type in ("cpu", "mps") else 2**24
        square, weighted = 0.0, 0.0
        for number, part in enumerate(tensor.detach().flatten().split(size), 1):
            part = to_float64(part)
            ramp = torch.linspace(1, 2, len(part), dtype=part.dtype, device=part.device)
            square += float(part.square().sum())
            weighted += number * float((part * ramp).sum())
        numbers += [square, weighted]
    return tuple(numbers)


def describe(value: Any) -> str:
    """A value's type for a message, or its shape if it is a tensor."""
    tensor = isinstance(value, Tensor)
    return f"a tensor of shape {tuple(value.shape)}" if tensor else f"a {type(value).__name__}"


def shorten(names: Iterable[str], most: int = 6) -> str:
    """The first few names for a message, and the number of further ones."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

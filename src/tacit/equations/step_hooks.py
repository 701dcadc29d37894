"""Functions that are called before and after every update of an optimizer, and may change."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

StepHook = Callable[..., None]


class StepHooks:
    """Hooks of an optimizer that may add and remove each other.

    torch's own must not: it goes through all of them after an update, also those of others, and
    stops with an error if one was added or removed meanwhile. These are one pair of torch's.
    """

    def __init__(self, optimizer: Optimizer):
        self._before: OrderedDict[int, StepHook] = OrderedDict()
        self._after: OrderedDict[int, StepHook] = OrderedDict()
        self._handles = (
            optimizer.register_step_pre_hook(lambda *args: _call(self._before, args)),
            optimizer.register_step_post_hook(lambda *args: _call(self._after, args)),
        )

    def register_step_pre_hook(self, hook: StepHook) -> RemovableHandle:
        """Call a function before every update; the handle removes it."""
        return _add(self._before, hook)

    def register_step_post_hook(self, hook: StepHook) -> RemovableHandle:
        """Call a function after every update; the handle removes it."""
        return _add(self._after, hook)

    def close(self) -> None:
        """Call none of them any more."""
        for handle in self._handles:
            handle.remove()


def _add(hooks: "OrderedDict[int, StepHook]", hook: StepHook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _call(hooks: "OrderedDict[int, StepHook]", args: tuple[Any, ...]) -> None:
    for number, hook in [*hooks.items()]:
        if number in hooks:  # else one before it removed it
            hook(*args)

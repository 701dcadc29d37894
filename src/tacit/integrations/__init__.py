"""Callbacks that watch the training loops of other packages; each is imported when it is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.integrations import huggingface, lightning

__all__ = ["huggingface", "lightning"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tacit.integrations' has no attribute {name!r}")
    return import_module(f"tacit.integrations.{name}")

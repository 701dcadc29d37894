"""Estimate the regularization that a training run applied without writing it down.

The public names are those that `__init__.pyi` imports, where type checkers look for them. At run
time each is imported when it is first used, so that `tacit --help` does not wait for torch.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_IMPORTS = [statement for statement in _STUB.body if isinstance(statement, ast.ImportFrom)]
_HOMES = {alias.name: str(line.module) for line in _IMPORTS for alias in line.names}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll] # it reads the stub


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tacit' has no attribute {name!r}")
    if _HOMES[name] == "tacit":
        return import_module(f"tacit.{name}")
    globals()[name] = getattr(import_module(_HOMES[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""A fit as flat numbers with names that loggers of experiments accept."""

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tacit.errors import InputError, check_type

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit

PREFIX = re.compile(r"(?:[A-Za-z0-9_]+/)*[A-Za-z0-9_]*")
"""No empty part, which MLflow refuses."""


def metrics_of(fit: "Fit", prefix: str) -> dict[str, float]:
    """The numbers of a fit that are worth a curve along training; see `Fit.to_metrics`."""
    check_type("prefix", prefix, str, "a text such as 'tacit/'")
    if not PREFIX.fullmatch(prefix):
        raise InputError(
            f"prefix is {prefix!r}: pass letters (A to Z), digits and underscores, in parts that "
            "end in one slash, such as 'tacit/'. Loggers refuse other names."
        )
    values = {"explained": fit.explained, "problems": float(len(fit.problems))}
    intervals = fit.intervals()
    intervals.pop("layers", None)  # these do not say how precisely a strength is known
    errors = fit.standard_errors
    for name, label in _unique_labels(fit.strengths).items():
        values[f"strength/{label}"] = fit.strengths[name]
        if (kind := widest(intervals, name)) is not None:
            low, high = intervals[kind][name]
            values[f"standard_error/{label}"] = errors[kind][name]
            values[f"low/{label}"], values[f"high/{label}"] = low, high
    return {prefix + name: value for name, value in values.items() if math.isfinite(value)}


def widest(intervals: Mapping[str, Mapping[str, tuple[float, float]]], name: str) -> str | None:
    """The kind of error bars with the widest interval for a strength.

    None without any, and where one says that the strength is not determined.
    """
    widths = {kind: by_name[name][1] - by_name[name][0] for kind, by_name in intervals.items()}
    if not widths or not all(map(math.isfinite, widths.values())):
        return None
    return max(widths, key=lambda kind: widths[kind])


def _unique_labels(names: Iterable[str]) -> dict[str, str]:
    """A label of letters, digits and underscores for each name; equal ones are numbered."""
    labels: dict[str, str] = {}
    for name in names:
        cleaned, number = _clean(name), 1
        label = cleaned
        while label in labels.values():
            number += 1
            label = f"{cleaned}_{number}"
        labels[name] = label
    return labels


def _clean(name: str) -> str:
    """The name with Greek letters spelt out, accents dropped, and underscores for other signs."""
    letters = "".join(_spell(letter) for letter in unicodedata.normalize("NFKD", name))
    return re.sub(r"[^A-Za-z0-9]+", "_", letters).strip("_") or "regularizer"


def _spell(letter: str) -> str:
    full_name = unicodedata.name(letter, "")
    if full_name.startswith("GREEK "):
        return f"_{full_name.split()[-1].lower().replace('lamda', 'lambda')}_"
    return "" if unicodedata.combining(letter) else letter

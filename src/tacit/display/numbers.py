"""Numbers in words, and with error bars, rounded so that the error bars can be read."""

import math

DIGITS = 5
"""Significant digits of the largest number, at most: nobody reads more."""


def count_of(number: int, unit: str) -> str:
    """`1 layer`, `2 layers`."""
    return f"{number} {unit}" if number != 1 else f"1 {unit.removesuffix('s')}"


def show_interval(low: float, high: float) -> str:
    """`[0.129, 0.179]`: the ends of an interval, to two digits of half its width."""
    _, *ends = round_with_ends((high + low) / 2, low, high)
    return f"[{', '.join(ends)}]"


def show_with_interval(value: float, low: float, high: float) -> str:
    """`0.154 [0.129, 0.179]`: a number with its interval, all with the same decimals."""
    shown, *ends = round_with_ends(value, low, high)
    return f"{shown} [{', '.join(ends)}]"


def round_with_ends(value: float, low: float, high: float) -> tuple[str, ...]:
    """A number and the ends of its interval, all down to the second digit of half its width."""
    numbers = value, low, high
    largest = max(map(abs, numbers))
    if not math.isfinite(largest) or not largest:
        return tuple(f"{number:.4g}".replace("inf", "∞") for number in numbers)
    exponent = math.floor(math.log10(largest))
    width = (high - low) / 2
    last = math.floor(math.log10(width)) - 1 if width > 0 else exponent - 3
    last = min(max(last, exponent - DIGITS + 1), exponent - 1)  # the power of ten of the last digit
    if -4 <= exponent < 6:
        return tuple(f"{number:.{max(0, -last)}f}" for number in numbers)
    return tuple(
        f"{number / 10**exponent:.{exponent - last}f}e{exponent:+03d}" for number in numbers
    )

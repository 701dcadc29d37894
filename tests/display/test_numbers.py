"""Numbers with intervals have the decimals that tell the ends apart."""

import math

import pytest

from tacit.display.numbers import show_interval, show_with_interval


@pytest.mark.parametrize(("numbers", "shown"), [
    ((0.1543, 0.1291, 0.1788), "0.154 [0.129, 0.179]"),
    ((0.25104, 0.25061, 0.25144), "0.25104 [0.25061, 0.25144]"),
    ((0.2510, 0.2471, 0.2551), "0.2510 [0.2471, 0.2551]"),
    ((0.3, -0.25, 0.77), "0.30 [-0.25, 0.77]"),
    ((0.005, 0.005 - 4e-14, 0.005 + 4e-14), "0.0050000 [0.0050000, 0.0050000]"),
    ((12.0, 8.0, 16.0), "12.0 [8.0, 16.0]"),
    ((1200.0, 800.0, 1600.0), "1200 [800, 1600]"),
    ((-6.6e-12, -2.15e-11, 8.34e-12), "-0.7e-11 [-2.2e-11, 0.8e-11]"),
    ((2.0, -300.0, 304.0), "2 [-300, 304]"),
    ((0.0, 0.0, 0.0), "0 [0, 0]"),
    ((1.5, 1.5, 1.5), "1.500 [1.500, 1.500]"),
    ((1.0, -math.inf, math.inf), "1 [-∞, ∞]"),
])  # fmt: skip
def test_a_number_and_its_interval_have_the_same_decimals(numbers, shown):
    assert show_with_interval(*numbers) == shown


def test_an_interval_alone_is_rounded_alike():
    assert show_interval(0.24896, 0.25076) == "[0.24896, 0.25076]"
    assert show_interval(0.0855, 0.1149) == "[0.086, 0.115]"

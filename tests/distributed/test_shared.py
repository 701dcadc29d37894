"""Models that several processes share, compared with the same computation in one process."""

import math
import re

import pytest
from support import shared_cases
from support.processes import run_processes

pytestmark = pytest.mark.slow

KINDS = ["copies on 2", "fully_shard on 2", "fully_shard on 4", "hybrid on 4"]


def words(summary):
    """A summary without its numbers, whose last digits may be rounding."""
    return re.sub(r"[-+]?\d[\d.e+-]*", "", summary).split()


@pytest.fixture(scope="module")
def alone():
    return shared_cases.all_cases("alone")


@pytest.fixture(scope="module", params=KINDS)
def together(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    return run_processes(shared_cases.all_cases, request.param, folder)


def test_strengths_and_error_bars_are_those_of_one_process(alone, together):
    assert len(alone) > 20
    for results in together:
        assert results.keys() <= alone.keys()
        assert len(results) >= 10
        for case in results:
            expected = alone[case]
            for what, numbers in expected.items():
                if what == "summary":
                    assert words(results[case][what]) == words(numbers), case
                    continue
                assert results[case][what] == pytest.approx(
                    numbers, rel=1e-10, abs=1e-12, nan_ok=True
                ), (case, what)


def test_every_process_says_the_same(together):
    first, *others = together
    for results in others:
        for case, expected in first.items():
            for what, numbers in expected.items():
                same = results[case][what] == numbers
                assert same or any(map(math.isnan, numbers)), (case, what)

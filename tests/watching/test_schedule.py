"""When windows are observed: as often as a budget allows, on machines of any speed."""

import pytest

from tacit.watching.schedule import LEAST_SHARE, Schedule


def run(schedule, windows, *, training=1.0, cost=0.1, trial=0.01):
    """The windows that are observed, those with a row, and the seconds of watching."""
    observed, rows, watching = [], [], 0.0
    schedule.trial = trial
    for window in range(1, windows + 1):
        is_observed = schedule.begin((window - 1) * training, watching)
        seconds = cost if is_observed else None
        watching += seconds or 0.0
        observed += [window] if is_observed else []
        rows += [window] if schedule.end(seconds) else []
    return observed, rows, watching


def test_without_a_budget_every_row_comes_when_it_is_due():
    observed, rows, _ = run(Schedule(10, None), 30)
    assert rows == [10, 20, 30]
    assert observed == [*range(5, 11), *range(15, 21), *range(25, 31)]


def test_rows_that_are_due_soon_share_their_windows():
    observed, rows, _ = run(Schedule(2, None), 10)
    assert observed == [*range(1, 11)]
    assert rows == [4, 6, 8, 10]


@pytest.mark.parametrize("every", [1, 5, 20, 100])
@pytest.mark.parametrize("budget", [0.01, 0.02, 0.1])
@pytest.mark.parametrize("cost", [1e-3, 0.02, 0.3])
def test_the_budget_holds_at_the_end_of_every_run_of_windows(every, budget, cost):
    """Up to the first run, whose cost is a guess."""
    windows = 2000
    _, rows, watching = run(Schedule(every, budget), windows, cost=cost, trial=cost)
    assert rows
    assert watching <= budget * windows + 1e-9


def test_rows_are_later_where_watching_is_dear():
    counts = [
        len(run(Schedule(20, 0.02), 2000, cost=cost, trial=cost)[1]) for cost in (0.01, 0.2, 1.0)
    ]
    assert counts[0] >= 99  # the first window only shows what time it takes
    assert counts == sorted(counts, reverse=True)
    assert counts[2] >= 5


def test_the_share_of_examples_follows_from_the_arguments():
    assert Schedule(60, 0.02).share == pytest.approx(0.1)
    assert Schedule(600, 0.02).share == 1
    assert Schedule(3, 0.02).share == LEAST_SHARE
    assert Schedule(3, None).share == 1


def test_the_forecast_is_when_the_first_row_comes():
    for every, budget, cost in ((10, None, 0.1), (10, 0.02, 0.1), (60, 0.02, 0.1), (5, 0.1, 0.4)):
        schedule = Schedule(every, budget)
        run(schedule, 3, cost=cost, trial=cost)
        forecast = schedule.window + schedule.windows_to_first_row(3.0, 0.0)
        fresh = Schedule(every, budget)
        _, rows, _ = run(fresh, 1000, cost=cost, trial=cost)
        assert rows[0] == pytest.approx(forecast, rel=0.35)


def test_a_restored_schedule_goes_on():
    through = run(Schedule(10, 0.05), 400)
    first = Schedule(10, 0.05)
    observed, rows, watching = run(first, 177)
    second = Schedule(10, 0.05)
    second.load_state_dict(first.state_dict())
    for window in range(178, 401):
        seconds = 0.1 if second.begin(window - 1.0, watching) else None
        watching += seconds or 0.0
        observed += [window] if seconds else []
        rows += [window] if second.end(seconds) else []
    assert (observed, rows) == through[:2]


def test_a_first_window_that_takes_longer_than_expected_is_the_only_one_for_now():
    observed, rows, watching = run(Schedule(20, 0.02), 1000, cost=1.0, trial=0.01)
    first, second = observed[:2]
    assert second > first + 10  # it was four at once, which took 13 % of the time
    assert rows[0] >= second + 3
    assert watching <= 0.02 * 1000

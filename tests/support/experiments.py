"""The rows of an experiment, without files."""


def run(experiment, config, *, finished=(), device="cpu"):
    """Rows of every unit of work that is not finished, each with its unit's name in `unit`."""
    for unit, make_rows in experiment.work(config, device).items():
        if unit not in finished:
            yield from ({"unit": unit, **row} for row in make_rows())

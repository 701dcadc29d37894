"""Finished results of made-up experiments."""

from tacit_paper import store


def store_result(folder, experiment, preset, rows):
    """Write rows as the finished result of an experiment and preset."""
    settings = {"experiment": experiment, "preset": preset, "config": {experiment: preset}}
    metadata = {**settings, "device": preset, "made_with": {}}
    metadata["config_hash"] = store._config_hash(metadata)
    tables = [store._write_part(folder, 0, [{"unit": preset, **row} for row in rows], "0")]
    store._join_parts(folder, tables, metadata)

"""Settings for all tests."""

import os

import torch

# Matrices this small take longer on several threads, and two workers share two cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the commands that tests start


def pytest_collection_modifyitems(config, items):
    """Let parallel workers start with the longest files: the reproduction, then all slow ones."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda i: (i.path.name != "test_reproduction.py", i.path not in slow))

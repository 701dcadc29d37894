"""The summary of stacked equations and of one layer says what it describes."""

from support.models import random_data, tanh_mlp
from torch.nn import functional as F

import tacit


def test_a_summary_of_stacked_equations_lists_where_their_sources_differ():
    small = tacit.Objective(tanh_mlp(7), F.mse_loss, random_data(7, count=10))
    large = tacit.Objective(tanh_mlp(7), F.mse_loss, random_data(8, count=64))
    first = tacit.endpoint_equations(small, [tacit.l2()])
    second = tacit.endpoint_equations(large, [tacit.l2()], known={tacit.l1(): 0.1})
    text = tacit.fit(tacit.stack([first, second])).summary()
    assert "differ: 10, 64" in text
    assert "differ: no penalties, l1 = 0.1" in text
    assert "layer 2" in tacit.fit(first).layers["2"].summary()

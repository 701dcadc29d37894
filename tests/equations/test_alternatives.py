"""Other families are written beside the candidates, only where something is left to explain."""

from dataclasses import replace

import pytest
import torch
from support.models import minimise, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.equations import alternatives
from tacit.equations.alternatives import BIASES, WEIGHTS


def wide(equations):
    """The equations with the columns of other families."""
    names = (*equations.names, *equations.other_families)
    return replace(equations, names=names, blocks=equations.alternatives)


def explained_by(written, column, blocks):
    """The fraction that one column explains, restricted to some blocks."""
    parts = [
        (b.factor[:, column] * (b.layer in blocks), b.factor[:, len(written.names)])
        for b in written.blocks
    ]
    design, target = (torch.cat(part) for part in zip(*parts, strict=True))
    return float((design @ target) ** 2 / (design @ design) / (target @ target))


def test_alternatives_are_what_a_fit_of_them_would_be():
    objective = tacit.Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    target = tacit.endpoint_target(objective)
    written = wide(target.equations([tacit.smooth_l1(0.3)]))
    for name, family in {"l2()": tacit.l2, "l1()": tacit.l1}.items():
        column = written.names.index(name)
        for scope, blocks in {None: (WEIGHTS, BIASES), tacit.matrices: (WEIGHTS,)}.items():
            fit = tacit.fit(target.equations([family(scope=scope)]))
            assert explained_by(written, column, blocks) == pytest.approx(fit.explained)


def test_nothing_is_written_where_everything_is_explained():
    model, data = tanh_mlp(1), random_data(1)
    minimise(model, F.mse_loss, data, {tacit.l2(): 0.01})
    fit = tacit.estimate(model, F.mse_loss, data, [tacit.l2()])
    assert fit.equations.alternatives == ()


def test_known_penalties_are_subtracted():
    model, data = tanh_mlp(2), random_data(2)
    minimise(model, F.mse_loss, data, {tacit.l2(): 0.01, tacit.smooth_l1(0.1): 0.01})
    objective, known = tacit.Objective(model, F.mse_loss, data), {tacit.smooth_l1(0.1): 0.01}
    equations = tacit.endpoint_equations(objective, [tacit.smooth_l1(0.1)], known=known)
    written = wide(equations)
    column = written.names.index("l2()")
    assert explained_by(written, column, (WEIGHTS, BIASES)) == pytest.approx(1)


def test_files_and_stacks_have_alternatives(tmp_path):
    objective = tacit.Objective(tanh_mlp(4), F.mse_loss, random_data(4))
    equations = tacit.endpoint_equations(objective, [tacit.l2()])
    equations.save(tmp_path / "equations.safetensors")
    loaded = tacit.Equations.load(tmp_path / "equations.safetensors")
    assert tacit.fit(loaded) == tacit.fit(equations)
    assert "None of l2()" in tacit.fit(loaded).problems[0].message
    stacked = tacit.stack([equations, loaded])
    assert [block.source for block in stacked.alternatives] == [0, 0, 1, 1]
    assert "None of l2()" in tacit.fit(stacked).problems[0].message
    assert not equations.layer("0").alternatives


def test_large_tensors_are_read_in_part(monkeypatch):
    torch.manual_seed(0)
    model = nn.Linear(400, 100).double()
    objective = tacit.Objective(model, F.mse_loss, random_data(3, inputs=400, outputs=100))
    target = tacit.endpoint_target(objective)
    part = wide(target.equations([tacit.l2()]))
    monkeypatch.setattr(alternatives, "MOST_ROWS", 40_000)
    whole = wide(target.equations([tacit.l2()]))
    for a, b in zip(whole.blocks, part.blocks, strict=True):
        assert a.rows == b.rows
        norms, sampled = a.factor.norm(dim=0), b.factor.norm(dim=0)
        assert torch.allclose(norms, sampled, rtol=0.1)
    assert not torch.equal(whole.blocks[0].factor, part.blocks[0].factor)

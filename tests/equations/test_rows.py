"""Rows of the design are read in slices, assigned to layers and stored in a few numbers.

Parameters that the loss does not reach have no rows.
"""

import math

import pytest
import torch
from support.candidates import dense_rows, make_candidates, network_with_objective
from support.descent import descend
from support.models import UnusedHead, minimise, params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tacit
from tacit import InputError, Objective, reference
from tacit.equations import Equations, candidates, factors, rows


@pytest.mark.parametrize("small", [0, 20, 2**16])
@pytest.mark.parametrize("direct", [0, 20, 2**16])
@pytest.mark.parametrize("chunk", [1, 7, 64, 2**21])
def test_slices_of_any_size_give_the_dense_inner_products(chunk, direct, small, monkeypatch):
    monkeypatch.setattr(candidates, "CHUNK", chunk)
    monkeypatch.setattr(rows, "SMALL", small)
    monkeypatch.setattr(rows, "MOST_SMALL", 20)
    monkeypatch.setattr(factors, "DIRECT", direct)
    model, data, objective = network_with_objective()
    equations = tacit.endpoint_equations(objective, make_candidates())
    dense = dense_rows(model, data, make_candidates())
    factor = equations.factor()
    torch.testing.assert_close(factor.T @ factor, dense.T @ dense, rtol=1e-11, atol=1e-13)
    assert equations.rows == len(dense)


@pytest.mark.parametrize("small", [0, 2**16])
def test_weights_at_kinks_have_no_equations_however_tensors_are_read(small, monkeypatch):
    monkeypatch.setattr(rows, "SMALL", small)
    model, _, objective = network_with_objective()
    with torch.no_grad():
        for p in model.parameters():
            p.view(-1)[:2] = 0.0
    equations = tacit.endpoint_equations(objective, [tacit.l1(), tacit.l2(scope="*.bias")])
    theta, slope = (reference.flat(v) for v in (params_of(model), objective.gradient()))
    biases = reference.flat({n: 0 * p + n.endswith("bias") for n, p in params_of(model).items()})
    dense = torch.stack([theta.sign(), 2 * theta * biases, -slope], dim=1)[theta != 0]
    factor = equations.factor()
    torch.testing.assert_close(factor.T @ factor, dense.T @ dense, rtol=1e-11, atol=1e-13)
    left_out = {b.layer: b.left_out for b in equations.blocks}
    assert left_out == {"0": 4, "2": 4, "4": 3}


def test_a_block_holds_a_few_numbers_for_any_parameter_count():
    _, _, objective = network_with_objective(sizes=(5, 300, 300, 1))
    equations = tacit.endpoint_equations(objective, make_candidates())
    assert equations.rows > 90_000
    assert sum(block.factor.numel() for block in equations.blocks) <= 3 * 4 * 4


class LargestCopy(TorchDispatchMode):
    """The largest number of entries of a tensor that was copied."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.entries = max(self.entries, result.numel())
        return result


def test_slices_of_tensors_in_another_order_do_not_copy_the_tensor(monkeypatch):
    """Kernels in channels_last, or a transpose: flattened for every slice, they took hours."""
    monkeypatch.setattr(candidates, "CHUNK", 2**8)
    monkeypatch.setattr(rows, "SMALL", 0)
    generator = torch.Generator().manual_seed(0)
    weight, target = torch.randn(2, 40, 6, 3, 3, generator=generator)
    families = [
        tacit.smooth_l1(0.1),
        tacit.regularizers.distance_to({"weight": torch.ones(40, 6, 3, 3)}),
        tacit.regularizers.spline([-1.0, 0.0, 1.0]),
    ]
    factor = {}
    for layout in (torch.contiguous_format, torch.channels_last):
        params, vector = ({"weight": t.to(memory_format=layout)} for t in (weight, target))
        for name, several in {"one": families[:1], "several": families}.items():
            bound = candidates.check_candidates(several, None).bind(params)
            with LargestCopy() as copies:
                (block,) = rows.write_blocks(bound, [vector], floors={"weight": 0.0})
            factor[layout, name] = block.factor.T @ block.factor
            assert copies.entries <= 2**8
    for name in ("one", "several"):
        both = [factor[k, name] for k in (torch.contiguous_format, torch.channels_last)]
        torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)


def test_parametrised_weights_belong_to_their_layer():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), nn.Linear(3, 1))
    objective = tacit.Objective(model.double(), F.mse_loss, random_data(10))
    assert tacit.endpoint_equations(objective, [tacit.l2()]).layers == ("0", "1")


HEAD = ("head.weight", "head.bias")
RIDGE = 0.01


def ridge_networks(seed=0, body=None):
    """A network at an optimum with a ridge, and the same network with an unused head."""
    body, data = body or tanh_mlp(seed), random_data(seed)
    minimise(body, F.mse_loss, data, {tacit.l2(): RIDGE})
    model = UnusedHead(body, seed)
    norms = [
        torch.cat([p.flatten() for p in part.parameters()]).norm() for part in (body, model.head)
    ]
    with torch.no_grad():  # in the equations, a head of this norm would give 0.0085
        for p in model.head.parameters():
            p.mul_((RIDGE / 0.0085 - 1) ** 0.5 * norms[0] / norms[1])
    return body, model, data


def test_parameters_that_the_loss_does_not_reach_have_no_equations(tmp_path):
    body, model, data = ridge_networks()
    design = reference.design([tacit.l2()], params_of(model))
    target = -reference.flat(Objective(model, F.mse_loss, data).gradient())
    assert float(reference.fit(design, target)) == pytest.approx(0.0085)
    equations = tacit.endpoint_equations(Objective(model, F.mse_loss, data), tacit.l2())
    without = tacit.endpoint_equations(Objective(body, F.mse_loss, data), tacit.l2())
    assert torch.equal(equations.factor(), without.factor())
    fit = tacit.fit(equations)
    assert fit.strengths["l2"] == pytest.approx(RIDGE, rel=1e-8)
    assert (fit.sources[0].unreached, fit.sources[0].tensors) == (HEAD, 4)
    assert "0 tied; float64;\n" in fit.summary()
    assert "not reached by the loss: head.weight, head.bias\n" in fit.summary()
    assert all(len(line) <= 88 for line in fit.summary().splitlines())
    assert "not reached" not in tacit.fit(without).summary()
    equations.save(tmp_path / "equations")
    assert Equations.load(tmp_path / "equations").sources == equations.sources


def test_rows_of_unreached_parameters_are_refused_only_if_there_are_no_others():
    body, model, data = ridge_networks()
    objective = Objective(model, F.mse_loss, data)
    with pytest.raises(InputError, match=r"reaches none of the parameters.*head\.weight"):
        tacit.endpoint_equations(objective, tacit.l2(), rows="head")
    some = tacit.endpoint_equations(objective, tacit.l2(), rows=["head", "body.0.weight"])
    assert (some.layers, some.rows) == (("body.0",), body[0].weight.numel())


def test_a_penalty_of_unreached_parameters_has_a_problem_that_names_them():
    _, model, data = ridge_networks()
    fit = tacit.estimate(model, F.mse_loss, data, tacit.layerwise(tacit.l2()))
    assert fit.strengths["l2[body.0]"] == pytest.approx(RIDGE, rel=1e-6)
    (problem,) = (problem for problem in fit.problems if problem.names == ("l2[head]",))
    assert "the loss reaches (not head.weight, head.bias)" in problem.message


class Switched(nn.Module):
    """Two heads, one for each kind of batch, and a unit that no input activates."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)]).double()
        self.dead = nn.Linear(3, 1).double()

    def forward(self, x, kind):
        inactive = torch.relu(self.dead(x) - 1e6)
        return self.heads[kind](x) + inactive


def test_parameters_reached_in_some_batches_or_with_a_zero_gradient_stay():
    X, y = random_data(1, count=12, inputs=3)
    batches = [(X[:4], 0, y[:4]), (X[4:], 1, y[4:])]
    model = Switched()
    objective = Objective.from_batch_loss(
        model, lambda m, batch: (m(*batch[:2]) - batch[2]).square()[:, 0], batches
    )
    source = tacit.endpoint_equations(objective, tacit.l2()).sources[0]
    assert source.unreached == ("heads.2.weight", "heads.2.bias")
    assert source.parameters == 3 * 4
    assert not objective.gradient()["dead.weight"].any()


def test_a_difference_leaves_out_what_neither_objective_reaches():
    _, model, (X, y) = ridge_networks()

    def with_auxiliary(model, batch):
        return (model(batch[0]) - batch[1]).square()[:, 0] + model.head(
            batch[0][:, :4]
        ).square().mean(1)

    plain = Objective(model, F.mse_loss, (X, y))
    technique = Objective.from_batch_loss(model, with_auxiliary, (X, y))
    reached = tacit.difference_equations(technique, plain, tacit.l2())
    assert reached.sources[0].unreached == ()
    assert "head" in reached.layers
    other = Objective(model, lambda output, target: 2 * F.mse_loss(output, target), (X, y))
    unreached = tacit.difference_equations(other, plain, tacit.l2())
    assert unreached.sources[0].unreached == HEAD
    assert tacit.fit(unreached).strengths["l2"] == pytest.approx(-RIDGE, rel=1e-6)


@pytest.mark.parametrize("flow", [tacit.equations.euler, tacit.rk4(1)])
def test_trajectories_leave_out_what_the_loss_does_not_reach(flow):
    _, model, data = ridge_networks()
    path = descend(model, data, 0.05, 4, ridge=0.2)
    bodies = [
        {n.removeprefix("body."): p for n, p in point.items() if "body" in n} for point in path
    ]
    equations, expected = (
        tacit.trajectory_equations(
            Objective(network, F.mse_loss, data),
            tacit.Trajectory.from_positions(positions, 0.05),
            tacit.l2(),
            reference=flow,
        )
        for network, positions in ((model, path), (model.body, bodies))
    )
    assert torch.equal(equations.factor(), expected.factor())
    assert equations.sources[0].unreached == HEAD
    target = tacit.trajectory_target(
        Objective(model, F.mse_loss, data),
        tacit.Trajectory.from_positions(path, 0.05),
        reference=flow,
    )
    assert torch.equal(target.equations(tacit.l2()).factor(), expected.factor())


def test_averaged_epochs_leave_out_what_the_loss_does_not_reach():
    model, (X, y) = UnusedHead(tanh_mlp(2)), random_data(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.2)
    averages = tacit.average_epochs(model, optimizer)
    for rows_of_batch in torch.arange(64).split(16):
        optimizer.zero_grad()
        F.mse_loss(model(X[rows_of_batch]), y[rows_of_batch]).backward()
        optimizer.step()
    averages.end_epoch()
    equations = averages.equations(Objective(model, F.mse_loss, (X, y)), tacit.l2())
    assert equations.sources[0].unreached == HEAD
    assert equations.layers == ("body.0", "body.2")


def test_what_is_built_on_a_fit_agrees_that_a_head_is_unused():
    body, model, data = ridge_networks(body=nn.Sequential(nn.Linear(5, 1).double()))
    unused, plain = (
        tacit.estimate(network, F.mse_loss, data, tacit.l2(), population=math.inf)
        for network in (model, body)
    )
    assert unused.error_bars["sampling"].covariance == pytest.approx(
        plain.error_bars["sampling"].covariance
    )
    nulls = [tacit.null_distribution(fit, "l2", shuffles=50) for fit in (unused, plain)]
    assert nulls[0] == nulls[1]
    validations = [
        tacit.validate(fit, start=params_of(network))
        for fit, network in ((unused, model), (plain, body))
    ]
    for name in ("recovered", "penalised", "control", "certificate"):
        assert getattr(validations[0], name) == getattr(validations[1], name)
    assert validations[0].recovered > 0.999

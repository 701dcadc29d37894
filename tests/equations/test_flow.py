"""Reference displacements against the dense flow, alone and with known penalties."""

import pytest
import torch
from support.descent import descend
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective, reference
from tacit.regularizers import gradient_norm


def test_runge_kutta_equals_the_dense_flow():
    model, data = tanh_mlp(2), random_data(2)
    objective, point = tacit.Objective(model, F.mse_loss, data, batch_size=20), params_of(model)
    displacement = tacit.rk4(substeps=3)(objective, point, 0.1)
    expected = reference.flow_displacement(loss_of(model, F.mse_loss, data), point, 0.1, substeps=3)
    torch.testing.assert_close(reference.flat(displacement), expected, rtol=1e-12, atol=1e-14)


def test_an_euler_reference_of_two_substeps_halves_the_strength():
    model, data, step = tanh_mlp(3), random_data(3), 1e-4
    objective = tacit.Objective(model, F.mse_loss, data)
    positions = descend(model, data, step, 1)

    def two_steps(objective, point, time, step):
        first = tacit.equations.euler(objective, point, time / 2)
        second = tacit.equations.euler(objective, {n: point[n] + first[n] for n in point}, time / 2)
        return {n: first[n] + second[n] for n in point}

    fit = tacit.fit(
        tacit.trajectory_equations(
            objective,
            tacit.Trajectory.from_positions(positions, step),
            [tacit.regularizers.gradient_norm(objective)],
            reference=two_steps,
        )
    )
    assert fit.strengths["gradient_norm"] == pytest.approx(step / 8, rel=0.01)


RIDGE, STEP = 0.07, 1e-3
UPDATES = [1, 10, 50]
BESIDE_THE_LOSS = {1: 0.999, 10: 0.46, 50: -1.5}
"""Strength of ‖∇L‖² over η/4, if the flow is that of L and the ridge is subtracted at its start."""
WITH_THE_PENALTY = {1: 0.999, 10: 0.968, 50: 0.848}
"""The same with the flow of L + known. That of many updates falls because ‖∇‖² does on the way."""


class Recorded:
    """Descent on L + RIDGE·‖θ‖², recorded every so many updates."""

    def __init__(self, updates, seed=6, ridge=RIDGE):
        self.model, self.data = tanh_mlp(seed), random_data(seed)
        self.objective = Objective(self.model, F.mse_loss, self.data)
        self.time, self.ridge = updates * STEP, ridge
        positions = descend(self.model, self.data, STEP, 2 * updates, ridge=ridge)[::updates]
        self.path = tacit.Trajectory.from_positions(positions, self.time)

    def equations(self, penalty=None, **options):
        candidates = [gradient_norm(self.objective)]
        known = {penalty or tacit.l2(): self.ridge}
        return tacit.trajectory_equations(
            self.objective, self.path, candidates, known=known, **options
        )

    def dense_loss(self, params):
        plain = loss_of(self.model, F.mse_loss, self.data)
        return plain(params) + self.ridge * sum(p.square().sum() for p in params.values())

    def dense_target(self, loss, substeps):
        """(flow − displacement)/time of every step, as one vector."""
        steps = zip(self.path.points, self.path.displacements, strict=True)
        parts = [
            reference.flow_displacement(loss, point, self.time, substeps=substeps)
            - reference.flat(displacement)
            for point, displacement in steps
        ]
        return torch.cat(parts) / self.time

    def dense_column(self, loss):
        """∇‖∇loss‖² = 2 H ∇loss at the start of every step, as one vector."""
        return torch.cat(
            [
                2 * reference.hessian(loss, point) @ reference.gradient(loss, point)
                for point in self.path.points
            ]
        )


def over_theory(strength):
    return float(strength) / (STEP / 4)


@pytest.mark.parametrize("updates", UPDATES)
def test_a_flow_follows_known_penalties(updates):
    run = Recorded(updates)
    fit = tacit.fit(run.equations(reference=tacit.rk4(2)))
    column, target = run.dense_column(run.dense_loss), run.dense_target(run.dense_loss, 2)
    expected = float(column @ target / (column @ column))
    assert fit.strengths["gradient_norm"] == pytest.approx(expected, rel=1e-7)
    assert over_theory(expected) == pytest.approx(WITH_THE_PENALTY[updates], abs=0.01)
    assert fit.sources[0].known == {"l2": RIDGE}


@pytest.mark.parametrize("updates", UPDATES)
def test_a_flow_of_the_loss_alone_leaves_the_penalty_in_the_strength(updates):
    run = Recorded(updates)
    loss = loss_of(run.model, F.mse_loss, run.data)
    ridge = torch.cat([2 * RIDGE * reference.flat(point) for point in run.path.points])
    column, target = run.dense_column(loss), run.dense_target(loss, 2) - ridge
    strength = column @ target / (column @ column)
    assert over_theory(strength) == pytest.approx(BESIDE_THE_LOSS[updates], abs=0.1)


def test_known_penalties_in_a_flow_are_those_of_an_objective_that_has_them():
    run = Recorded(10)

    def penalised(model, batch):
        ridge = run.ridge * sum(p.square().sum() for p in model.parameters())
        return (model(batch[0]) - batch[1]).square().mean(1) + ridge

    whole = Objective.from_batch_loss(run.model, penalised, run.data)
    expected = tacit.trajectory_equations(
        whole, run.path, [gradient_norm(whole)], reference=tacit.rk4(2)
    )
    factor, expected = run.equations(reference=tacit.rk4(2)).factor(), expected.factor()
    torch.testing.assert_close(factor.T @ factor, expected.T @ expected, rtol=1e-8, atol=1e-18)


def test_an_explicit_step_subtracts_known_penalties_as_the_flow_follows_them():
    run, penalty = Recorded(10), tacit.l2()
    subtracted = run.equations(penalty, reference=tacit.equations.euler)
    target = tacit.trajectory_target(run.objective, run.path)
    later = target.equations([gradient_norm(run.objective)], known={penalty: RIDGE})
    assert torch.equal(subtracted.factor(), later.factor())
    known = tacit.trajectory_target(run.objective, run.path, known={penalty: RIDGE})
    followed = known.equations([gradient_norm(run.objective)]).factor()
    gram = subtracted.factor().T @ subtracted.factor()
    torch.testing.assert_close(followed.T @ followed, gram, rtol=1e-9, atol=1e-18)


def test_a_target_follows_its_known_penalties_and_is_computed_again_for_others():
    run, penalty = Recorded(10), tacit.l2()
    norm, flow = gradient_norm(run.objective), tacit.rk4(2)
    plain = tacit.trajectory_target(run.objective, run.path, reference=flow)
    known = tacit.trajectory_target(run.objective, run.path, reference=flow, known={penalty: RIDGE})
    with_ridge, without = (
        tacit.trajectory_equations(run.objective, run.path, norm, reference=flow, known=k)
        for k in ({penalty: RIDGE}, {})
    )
    for equations in (
        known.equations(norm),
        known.equations(norm, known={penalty: RIDGE}),
        plain.equations(norm, known={penalty: RIDGE}),
    ):
        assert torch.equal(equations.factor(), with_ridge.factor())
        assert equations.sources == with_ridge.sources
    for equations in (plain.equations(norm), known.equations(norm, known={})):
        assert torch.equal(equations.factor(), without.factor())
        assert equations.sources[0].known == {}
    stacked = tacit.stack([known.equations(norm), plain.equations(norm, known={penalty: RIDGE})])
    assert tacit.fit(stacked).strengths == pytest.approx(tacit.fit(with_ridge).strengths)


def test_a_known_penalty_may_be_any_that_has_second_derivatives():
    run, flow = Recorded(1), tacit.rk4(1)
    coupled = tacit.regularizer("product", lambda p: p["0.weight"].sum() * p["2.weight"].sum())
    for penalty in (tacit.smooth_l1(0.1), tacit.l1(), coupled, tacit.l2(scope="*.bias")):
        known = gradient_norm(run.objective, known={penalty: 0.3})
        point = run.path.points[0]
        loss = loss_of(run.model, F.mse_loss, run.data)

        def total(params, penalty=penalty, loss=loss):
            return loss(params) + 0.3 * penalty.value(params)[0]

        expected = 2 * reference.hessian(total, point) @ reference.gradient(total, point)
        column = reference.flat(known.gradient(point)["gradient_norm"])
        torch.testing.assert_close(column, expected, rtol=1e-9, atol=1e-12)
    once = gradient_norm(run.objective, name="once")
    with pytest.raises(InputError, match=r"second derivatives of the known penalties \(once\)"):
        tacit.trajectory_equations(
            run.objective, run.path, gradient_norm(run.objective), reference=flow, known={once: 0.1}
        )
    with pytest.raises(InputError, match="has 2 coefficients"):
        run.equations(tacit.layerwise(tacit.l2()), reference=flow)


def test_a_reference_of_ones_own_follows_known_penalties_or_is_refused():
    run = Recorded(1)

    def by_gradient(objective, point, time, step):
        return {n: -time * g for n, g in objective.gradient(point).items()}

    def by_value(objective, point, time, step):
        return {n: -time * g for n, g in objective.value_and_gradient(point)[1].items()}

    def by_product(objective, point, time, step):
        gradient = objective.gradient(point)
        return {n: -time * p for n, p in objective.hvp(gradient, point).items()}

    def elsewhere(objective, point, time, step):
        return by_gradient(run.objective, point, time, step)

    expected = run.equations(reference=by_gradient)
    assert tacit.fit(expected).problems[0].kind == "no signal"  # one step is the whole step
    assert torch.equal(run.equations(reference=by_value).factor(), expected.factor())
    with pytest.raises(InputError, match="reads 'hvp' of the objective"):
        run.equations(reference=by_product)
    with pytest.raises(InputError, match=r"did not ask for objective\.gradient"):
        run.equations(reference=elsewhere)
    for flow in (by_product, elsewhere):  # without known penalties it may use all of an objective
        tacit.trajectory_equations(run.objective, run.path, tacit.l2(), reference=flow)

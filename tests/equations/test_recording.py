"""Recorded training loops give the same trajectory as their positions."""

from functools import partial

import pytest
import torch
from support.descent import descend
from support.models import params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.equations.clipping import GradientSizes, clipped_part


def test_a_recorded_loop_has_the_trajectory_of_its_positions():
    model, data, step = tanh_mlp(6), random_data(6), 1e-2
    positions = descend(tanh_mlp(6), data, step, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=step)
    by_hand, by_optimizer = tacit.record(model), tacit.record(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
        by_hand.step(step)
        by_optimizer.step()
    expected = tacit.Trajectory.from_positions(positions, step)
    for recorded in (by_hand.trajectory(), by_optimizer.trajectory()):
        assert list(recorded.times) == list(expected.times)
        for name in positions[0]:
            for kind in ("points", "displacements"):
                for a, b in zip(getattr(recorded, kind), getattr(expected, kind), strict=True):
                    assert torch.equal(a[name], b[name])


def test_momentum_multiplies_the_recorded_time():
    model = tanh_mlp(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    recorder = tacit.record(model, optimizer)
    X, y = random_data(7)
    for updates in (1, 2):
        for _ in range(updates):
            optimizer.zero_grad()
            F.mse_loss(model(X), y).backward()
            optimizer.step()
            scheduler.step()  # the time is read at the update, not here
        recorder.step()
    assert recorder.trajectory().times == pytest.approx([1.0, 0.5 + 0.25])


def test_dampening_counts_only_with_momentum():
    model = tanh_mlp(7)
    X, y = random_data(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, dampening=0.5)
    recorder = tacit.record(model, optimizer)
    F.mse_loss(model(X), y).backward()
    optimizer.step()
    recorder.step()
    assert recorder.trajectory().times == pytest.approx([0.1])


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's: holds the optimizer that steps, and has no hooks of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def ridge_of(model, data, recorder, **options):
    objective = tacit.Objective(model, F.mse_loss, data)
    trajectory = recorder.trajectory()
    return tacit.fit(tacit.trajectory_equations(objective, trajectory, tacit.l2(), **options))


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_take_no_time_and_are_not_recorded(fused):
    """Under a GradScaler; they gave 0.168 [0.160, 0.177] for 0.2 when their time was counted."""
    data, model = tuple(part.float() for part in random_data(3)), tanh_mlp(3).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.4, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    recorder, every_second = tacit.record(model, optimizer), tacit.record(model, optimizer)
    for step in range(16):
        optimizer.zero_grad()
        overflow = torch.inf if step % 4 == 0 else 1.0
        scaler.scale(F.mse_loss(model(data[0]), data[1]) * overflow).backward()
        scaler.step(optimizer)
        scaler.update()
        recorder.step()
        if step % 2:
            every_second.step()
    assert recorder.trajectory().times == pytest.approx([0.1] * 12)
    assert every_second.trajectory().times == pytest.approx([0.1, 0.2] * 4)
    assert ridge_of(model, data, recorder).strengths["l2"] == pytest.approx(0.2, rel=1e-3)


def test_closures_and_wrapped_optimizers_are_recorded():
    data, model = random_data(3), tanh_mlp(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.4)
    recorder = tacit.record(model, Wrapped(optimizer))

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(data[0]), data[1])
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
        recorder.step()
    fit = ridge_of(model, data, recorder)
    assert fit.strengths["l2"] == pytest.approx(0.2, rel=1e-9)
    assert not fit.problems


def test_weights_that_are_loaded_before_the_first_update_are_no_displacement():
    data, model, start = random_data(3), tanh_mlp(3), tanh_mlp(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.4)
    recorder = tacit.record(model, optimizer)
    averages = tacit.average_epochs(model, Wrapped(optimizer))
    model.load_state_dict(start.state_dict())
    for _ in range(5):
        optimizer.zero_grad()
        F.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
        recorder.step()
    averages.end_epoch()
    assert ridge_of(model, data, recorder).strengths["l2"] == pytest.approx(0.2, rel=1e-9)
    objective = tacit.Objective(model, F.mse_loss, data)
    fit = tacit.fit(averages.equations(objective, [tacit.l2()]))
    assert fit.strengths["l2"] == pytest.approx(0.2, rel=0.1)
    hooks = len(optimizer._optimizer_step_pre_hooks)
    averages.close()
    assert (
        len(optimizer._optimizer_step_pre_hooks) == hooks - 3
    )  # its own, of sizes, of the wrapper


@pytest.mark.parametrize(
    ("options", "first"), [({}, 0.9), ({"nesterov": True}, 0.81), ({"dampening": 0.5}, 0.8)]
)
def test_an_empty_momentum_buffer_is_named_and_a_filled_one_is_not(options, first):
    data, model = random_data(3), tanh_mlp(3)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.02, **options
    )
    recorder, later, one_record = (
        tacit.record(model, optimizer),
        None,
        tacit.record(model, optimizer),
    )
    for step in range(120):
        if step == 100:
            later = tacit.record(model, optimizer)
        optimizer.zero_grad()
        F.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
        recorder.step()
        if later:
            later.step()
    one_record.step()
    young = recorder.trajectory().young_momentum
    assert young[:3] == pytest.approx([first, first * 0.9, first * 0.81])
    assert one_record.trajectory().young_momentum == pytest.approx([sum(young) / 120])
    for began_empty in (recorder, one_record):
        problems = ridge_of(model, data, began_empty, reference=tacit.rk4(1)).problems
        (problem,) = [p for p in problems if "still settling" in p.message]
        assert problem.kind == "unsettled"
        assert "Record later: skip the first 5/(1−β)" in problem.remedy
    problems = ridge_of(model, data, later, reference=tacit.rk4(1)).problems
    assert not any("still settling" in p.message for p in problems)
    assert not ridge_of(model, data, recorder).problems  # a step's own gradient is known at once


def clip_norm(max_norm):
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def clip_value(model):
    nn.utils.clip_grad_value_(model.parameters(), 0.02)


def clip_each(model):
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_(parameter, 0.05)


def sgd(params):
    return torch.optim.SGD(params, lr=0.02, momentum=0.5, weight_decay=0.02)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def clipped_problems(clip, optimizer, *, model, data, loss=F.mse_loss, batch=8, epochs=6):
    """Problems of clipping, of averaged epochs and (for SGD) of a recorded loop."""
    optimizer = optimizer(model.parameters())
    averages = tacit.average_epochs(model, optimizer, epochs=3)
    recorder = tacit.record(model, optimizer) if isinstance(optimizer, torch.optim.SGD) else None
    generator = torch.Generator().manual_seed(0)

    def closure(rows):
        optimizer.zero_grad()
        value = loss(model(data[0][rows]), data[1][rows])
        value.backward()
        clip(model)
        return value

    for epoch in range(epochs):
        for rows in torch.randperm(len(data[0]), generator=generator).split(batch):
            if epoch % 2:
                closure(rows)
                optimizer.step()
            else:
                optimizer.step(partial(closure, rows))
        if recorder:
            recorder.step()
        averages.end_epoch()
    objective = tacit.Objective(model, loss, data)
    equations = [averages.equations(objective, [tacit.l2()])]
    if recorder:
        path = recorder.trajectory()
        equations.append(tacit.trajectory_equations(objective, path, [tacit.l2()]))
    fits = [tacit.fit(e) for e in equations]
    return [[p for p in fit.problems if "clipped" in p.message] for fit in fits]


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("clip", [clip_norm(0.1), clip_norm(0.02), clip_value, clip_each])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipped_gradients_are_named(clip, optimizer, dtype):
    """Clipped to a norm of 0.1, SGD gave 0.0506 for 0.01, with 99 % explained and no Problem."""
    data, model = tuple(part.to(dtype) for part in random_data(3)), tanh_mlp(3).to(dtype)
    for problems in clipped_problems(clip, optimizer, model=model, data=data):
        (problem,) = problems
        assert problem.kind == "objective"
        assert "look clipped in 100% of the updates" in problem.message
        assert "larger max_norm" in problem.remedy


@pytest.mark.parametrize("seed", range(4))
def test_clipped_entries_of_single_tensors_are_named(seed):
    """One entry or bias at a time, not in every update: half of the runs were silent."""

    def clip(model):
        nn.utils.clip_grad_value_(model.parameters(), 0.15)

    model, data = tanh_mlp(seed), random_data(seed)
    for problems in clipped_problems(clip, sgd, model=model, data=data, epochs=12):
        (problem,) = problems
        assert problem.kind == "objective"


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("clip", [lambda _: None, clip_norm(100.0)])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_that_were_not_clipped_are_not_called_so(clip, optimizer, seed):
    model, data = tanh_mlp(seed), random_data(seed)
    assert not any(clipped_problems(clip, optimizer, model=model, data=data))


def hinge(outputs, targets):
    return F.relu(1 - outputs * targets.sign()).mean()


FEW_GRADIENTS = {
    "full batch, to its rest": (lambda: tanh_mlp(1), F.mse_loss, 64),
    "hinge": (lambda: nn.Linear(5, 1).double(), hinge, 8),
    "absolute error": (lambda: nn.Linear(5, 1).double(), F.l1_loss, 8),
    "absolute error of a network": (lambda: tanh_mlp(1), F.l1_loss, 4),
    "one example at a time": (lambda: nn.Linear(5, 1, bias=False).double(), F.l1_loss, 1),
    "one weight": (lambda: nn.Linear(1, 1, bias=False).double(), F.l1_loss, 8),
}


@pytest.mark.parametrize("name", FEW_GRADIENTS)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_equal_gradients_are_not_called_clipped(name, optimizer):
    make_model, loss, batch = FEW_GRADIENTS[name]
    model, (X, y) = make_model(), random_data(1)
    data = (X[:, :1], y) if name == "one weight" else (X, y)
    epochs = {64: 150, 1: 3}.get(batch, 10)
    options = {"model": model, "data": data, "loss": loss, "batch": batch, "epochs": epochs}
    assert not any(clipped_problems(lambda _: None, optimizer, **options))


def test_parts_of_a_model_without_gradients_do_not_hide_clipping():
    """No gradient, an empty one, a frozen one, and half precision beside full."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.empty = tanh_mlp(2), nn.Parameter(torch.zeros(0))
            self.shift = nn.Parameter(torch.zeros(3, dtype=torch.float16))

        def forward(self, X):
            return self.body(X) + self.shift.sum() + self.empty.sum()

    model, (X, y) = Odd(), random_data(2)
    model.body[0].bias.requires_grad_(False)
    optimizer = sgd(model.parameters())
    sizes = GradientSizes(optimizer)
    optimizer.step()  # without any gradient
    for rows in torch.arange(40).split(8):
        optimizer.zero_grad()
        F.mse_loss(model(X[rows]), y[rows]).backward()
        clip_norm(0.01)(model.body)
        model.shift.grad = None
        optimizer.step()
    assert sizes.last().shape == (5, 3 + 4)  # the norms of three tensors, and four facts
    assert clipped_part(sizes.last()) == 1.0


def test_what_is_recorded_must_be_moved_by_known_steps():
    model = tanh_mlp(3)
    for optimizer, words in (
        (torch.optim.LBFGS(model.parameters()), "LBFGS has a step of its own"),
        (Wrapped(torch.optim.RMSprop(model.parameters())), "RMSprop has a step of its own"),
        (torch.optim.SGD(model[0].parameters(), lr=1e-2), "does not train '2.weight'"),
        ("SGD", "optimizer is 'SGD'"),
    ):
        with pytest.raises(tacit.InputError, match=words):
            tacit.record(model, optimizer)


def test_weights_that_moved_without_the_optimizer_are_refused():
    model = tanh_mlp(3)
    recorder = tacit.record(model, torch.optim.SGD(model.parameters(), lr=0.1))
    recorder.step()  # nothing has moved: nothing is recorded
    with pytest.raises(tacit.InputError, match="nothing was recorded"):
        recorder.trajectory()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(tacit.InputError, match="changed without an update"):
        recorder.step()


@pytest.mark.parametrize("updates", [1, 3])
def test_the_metric_of_adam_and_of_groups_is_recorded(updates):
    """A step moves by −T·M⁻¹(g + s·wθ): with one update each, exactly that of torch."""
    model, (X, y) = tanh_mlp(3), random_data(3)
    decay = 0.03
    groups = [
        {"params": model[0].parameters(), "lr": 2e-3},
        {"params": model[2].parameters(), "lr": 5e-3},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=decay, betas=(0.0, 0.99), eps=1e-3)
    recorder, scales, forces = tacit.record(model, optimizer), [], []
    for number in range(updates * 2):
        optimizer.zero_grad()
        F.mse_loss(model(X), y).backward()
        before = params_of(model)
        optimizer.step()
        scales.append(tacit.regularizers.weight_decay.adam_metric(optimizer, model))
        forces.append(
            {n: p.grad + scales[-1][n] * decay * before[n] for n, p in model.named_parameters()}
        )
        if number % updates == updates - 1:
            recorder.step()
    path = recorder.trajectory()
    assert path.times == [updates * 5e-3] * 2
    for t in range(2):
        window = slice(t * updates, (t + 1) * updates)
        for name, moved in path.displacements[t].items():
            rate = 2e-3 if name.startswith("0") else 5e-3
            reach = sum(rate / s[name] for s in scales[window])
            torch.testing.assert_close(path.metrics[t][name], path.times[t] / reach)
            torch.testing.assert_close(path.scales[t][name], updates * rate / reach)
            if updates == 1:
                expected = -path.times[t] / path.metrics[t][name] * forces[t][name]
                torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-12)


def test_plain_steps_have_no_metric_and_rates_of_groups_are_one():
    model, (X, y) = tanh_mlp(3), random_data(3)
    for rates in ((1e-2, 1e-2), (1e-2, 4e-2)):
        layers = zip((model[0], model[2]), rates, strict=True)
        optimizer = torch.optim.SGD([{"params": m.parameters(), "lr": r} for m, r in layers])
        recorder = tacit.record(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(model(X), y).backward()
            optimizer.step()
            recorder.step()
        path = recorder.trajectory()
        assert path.times == [max(rates)] * 2
        if rates[0] == rates[1]:
            assert not path.metrics
        else:
            assert {n: float(m) for n, m in path.metrics[1].items()} == pytest.approx(
                {"0.weight": 4, "0.bias": 4, "2.weight": 1, "2.bias": 1}
            )
        assert not path.scales


def test_adamw_does_not_move_a_head_without_gradients():
    """It has no state; wrappers give the others other names."""
    model, (X, y) = tanh_mlp(3), random_data(3)
    wrapped = torch.nn.ModuleDict({"net": model})
    for head in (None, torch.nn.Linear(2, 2).double()):
        model.head = head
        model.forward = lambda x: model[2](model[1](model[0](x)))
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.3)
        recorder = tacit.record(wrapped, adamw)
        for _ in range(3):
            adamw.zero_grad()
            F.mse_loss(model(X), y).backward()
            adamw.step()
            recorder.step()
        path, objective = recorder.trajectory(), tacit.Objective(model, F.mse_loss, (X, y))
        ridge = tacit.regularizers.metric_ridge(adamw, model)
        fit = tacit.fit(tacit.trajectory_equations(objective, path, ridge))
        assert fit.strengths["metric_ridge"] == pytest.approx(0.15, rel=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_rate_of_zero_is_refused(kind):
    model, (X, y) = tanh_mlp(3), random_data(3)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer = kind(groups, lr=1e-3)
    recorder = tacit.record(model, optimizer)
    F.mse_loss(model(X), y).backward()
    optimizer.step()
    with pytest.raises(tacit.InputError, match=r"the rate of 0\.weight, 0\.bias is zero"):
        recorder.step()

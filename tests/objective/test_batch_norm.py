"""Batch norm: the statistics of every batch, as in training, or the running ones."""

import copy

import pytest
import torch
from support import models
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit import InputError, Objective


def random_data(seed=1, outputs=1):
    return models.random_data(seed, count=60, outputs=outputs)


def network(seed=0, *layers):
    """A layer before batch norm and one after it, with running statistics that are not trivial."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), *layers)
    model.append(nn.Linear(6, 1)).double()
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    return model


def loop_gradient(model, batches):
    """The mean gradient over the steps of the user's own loop, in training mode."""
    model = copy.deepcopy(model).train()
    losses = [F.mse_loss(model(X), y) for X, y in batches]
    gradients = torch.autograd.grad(sum(losses) / len(losses), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), gradients, strict=True))


def split(data, size):
    return list(zip(*(tensor.split(size) for tensor in data), strict=True))


def assert_equal(gradient, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(gradient[name], tensor, rtol=1e-10, atol=1e-12)


def test_a_model_with_batch_norm_and_no_choice_is_refused_with_both_remedies():
    model, data = network(), random_data()
    for make in (Objective, Objective.from_batch_loss):
        with pytest.raises(InputError, match=r"batch norm \(1\).*'batch'.*'running'"):
            make(model, F.mse_loss, data)
    with pytest.raises(InputError, match="batch_norm='running'"):
        tacit.estimate(model, F.mse_loss, data, [tacit.l2()])
    with pytest.raises(InputError, match="batch_norm is 'train'"):
        Objective(model, F.mse_loss, data, batch_norm="train")


LAYERS = {
    "batch": nn.BatchNorm1d(5),
    "lazy": nn.LazyBatchNorm1d(),
    "synchronised": nn.SyncBatchNorm(5),
    "without statistics": nn.BatchNorm1d(5, track_running_stats=False),
    "instance": nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()
    ),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_every_layer_with_batch_or_running_statistics_needs_the_choice(layer):
    model, data = nn.Sequential(layer, nn.Linear(5, 1)).double(), random_data()
    model(data[0])
    with pytest.raises(InputError, match="choose its statistics"):
        Objective(model, F.mse_loss, data)
    batches = split(data, 20)
    gradient = Objective(model, F.mse_loss, batches, batch_norm="batch").gradient()
    assert_equal(gradient, loop_gradient(model, batches))


def test_norms_of_single_examples_need_no_choice():
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Unflatten(1, (2, 3)))
    model += nn.Sequential(nn.InstanceNorm1d(2), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(6, 1))
    model, data = model.double(), random_data()
    chosen = Objective(model, F.mse_loss, data, batch_norm="running")
    assert chosen.value() == Objective(model, F.mse_loss, data).value()


def test_layers_without_running_statistics_cannot_use_them():
    model = nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 1)).double()
    with pytest.raises(InputError, match=r"0 keeps no running statistics.*batch_norm='batch'"):
        Objective(model, F.mse_loss, random_data(), batch_norm="running")


def test_some_frozen_layers_are_refused():
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5), nn.BatchNorm1d(5)).double().train()
    model[0].eval()
    with pytest.raises(InputError, match="0 is in eval mode and other batch-norm layers"):
        Objective(model, F.mse_loss, random_data(outputs=5), batch_norm="batch", batch_size=9)


def test_layers_that_are_all_frozen_in_training_use_the_running_statistics():
    model = network().train()
    model[1].eval()
    with pytest.raises(InputError, match=r"1 is in eval mode.*frozen: pass batch_norm='running'"):
        Objective(model, F.mse_loss, random_data(), batch_norm="batch", batch_size=9)


class OwnBatchNorm(nn.Module):
    """Written by hand, with statistics under other names."""

    def __init__(self):
        super().__init__()
        self.register_buffer("moving_mean", torch.zeros(6))

    def forward(self, x):
        if not self.training:
            return x - self.moving_mean
        self.moving_mean.lerp_(x.detach().mean(0), 0.1)
        return x - x.mean(0)


class Counter(OwnBatchNorm):
    """Writes a statistic that nothing depends on."""

    def forward(self, x):
        if self.training:
            self.moving_mean.lerp_(x.detach().mean(0), 0.1)
        return x


def test_batch_norm_that_is_written_by_hand_is_refused():
    model, data = network(), random_data()
    model[1] = OwnBatchNorm().double()
    for options in ({}, {"training": True}, {"batch_norm": "batch", "batch_size": 20}):
        with pytest.raises(InputError, match=r"OwnBatchNorm writes 'moving_mean'.*running_mean"):
            Objective(model, F.mse_loss, data, **options)
    assert not model[1].moving_mean.any()
    Objective(model, F.mse_loss, data, batch_norm="running")
    model[1] = Counter().double()
    Objective(model, F.mse_loss, data)


@pytest.mark.parametrize("training", [False, True])
def test_batch_statistics_give_the_gradient_of_the_training_loop(training):
    """Also of a ragged last batch: every step of training has the same weight."""
    model, batches = network(), split(random_data(), 25)
    assert [len(X) for X, _ in batches] == [25, 25, 10]
    before = copy.deepcopy(model.state_dict())
    options = {"training": training, "batch_norm": "batch"}
    objective = Objective(model.eval(), F.mse_loss, batches, **options)
    assert_equal(objective.gradient(), loop_gradient(model, batches))
    assert objective.count == 3
    assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())

    def example_losses(model, batch):
        return (model(batch[0]) - batch[1]).square().mean(1)

    by_example = Objective.from_batch_loss(model, example_losses, batches, **options)
    assert_equal(by_example.gradient(), loop_gradient(model, batches))


def test_weights_before_batch_norm_are_orthogonal_to_their_gradient():
    model, data = network(), random_data()
    model[1].eps = 1e-300
    products = {}
    for choice in ("batch", "running"):
        options = {"batch_norm": choice, "batch_size": 20}
        gradient = Objective(model, F.mse_loss, data, **options).gradient()["0.weight"]
        product = (gradient * model[0].weight.detach()).sum()
        products[choice] = abs(float(product / gradient.norm() / model[0].weight.detach().norm()))
    assert products["batch"] < 1e-12
    assert products["running"] > 1e-2


def test_data_in_tensors_needs_the_batch_size():
    model, data = network(), random_data()
    for source in (data, TensorDataset(*data)):
        with pytest.raises(InputError, match="batch_size is missing"):
            Objective(model, F.mse_loss, source, batch_norm="batch")


@pytest.mark.parametrize("batch_size", [59, 1])
def test_a_batch_of_one_example_is_refused(batch_size):
    model, data = network(), random_data()
    options = {"batch_norm": "batch", "batch_size": batch_size}
    with pytest.raises(InputError, match="has one example, and batch norm has no statistics"):
        Objective(model, F.mse_loss, data, **options).gradient()
    with pytest.raises(InputError, match="has one example, and batch norm has no statistics"):
        Objective(model, F.mse_loss, split(data, batch_size), batch_norm="batch").gradient()


def test_one_image_has_statistics():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 1))
    images, y = torch.randn(7, 1, 6, 6, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)
    batches = split((images, y), 3)
    objective = Objective(model.double(), F.mse_loss, batches, batch_norm="batch")
    assert_equal(objective.gradient(), loop_gradient(model, batches))


class Reader:
    """Batches that an iterable groups anew at every pass."""

    def __init__(self, data, size):
        self.data, self.size = data, size

    def __iter__(self):
        order = torch.randperm(len(self.data[0])).split(self.size)
        return iter([tuple(t[rows] for t in self.data) for rows in order])


SOURCES = {
    "tensors": lambda data: data,
    "data set": lambda data: TensorDataset(*data),
    "loader": lambda data: DataLoader(TensorDataset(*data), 20, shuffle=True),
    "loader with a generator": lambda data: DataLoader(
        TensorDataset(*data), 20, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "dropping loader": lambda data: DataLoader(
        TensorDataset(*data), 22, shuffle=True, drop_last=True
    ),
    "iterable": lambda data: Reader(data, 20),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_draws_regroup_the_examples_and_depend_only_on_seed_and_draw(source):
    model, data = network(), random_data()
    options = {"batch_norm": "batch", "batch_size": 20}
    objectives = [
        Objective(model, F.mse_loss, source(data), draws=draws, seed=seed, **options)
        for draws, seed in ((4, 0), (1, 0), (1, 1))
    ]
    torch.manual_seed(9)
    values = [objectives[0].value_and_gradient(draws=[draw])[0] for draw in range(4)]
    assert len(set(values)) == 4
    assert objectives[0].value() == pytest.approx(sum(values) / 4, rel=1e-12)
    assert objectives[1].value() == values[0] != objectives[2].value()
    average = objectives[0].gradient()
    by_draw = [objectives[0].value_and_gradient(draws=[draw])[1] for draw in range(4)]
    assert_equal(average, {n: sum(g[n] for g in by_draw) / 4 for n in average})


def test_draws_of_fixed_batches_are_refused_without_other_randomness():
    batches, options = split(random_data(), 20), {"batch_norm": "batch", "draws": 2}
    for data in (batches, DataLoader(TensorDataset(*random_data()), 20)):
        with pytest.raises(InputError, match="draws=2, but every pass over the data has the same"):
            Objective(network(), F.mse_loss, data, **options)
    dropout = Objective(network(0, nn.Dropout(0.5)), F.mse_loss, batches, training=True, **options)
    assert dropout.value_and_gradient(draws=[0])[0] != dropout.value_and_gradient(draws=[1])[0]


def test_an_endpoint_has_error_bars_of_the_draws():
    """They agree with the spread over seeds of the strength from as many draws."""
    model, data = network(), random_data()

    def fit_of(seed):
        options = {"batch_norm": "batch", "batch_size": 10, "draws": 8, "seed": seed}
        objective = Objective(model, F.mse_loss, data, **options)
        return tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()]))

    fits = [fit_of(seed) for seed in range(12)]
    strengths = torch.tensor([fit.strengths["l2"] for fit in fits])
    errors = torch.tensor([fit.standard_errors["draws"]["l2"] for fit in fits])
    assert float(errors.square().mean().sqrt() / strengths.std()) == pytest.approx(1, abs=0.5)
    single = Objective(model, F.mse_loss, data, batch_norm="batch", batch_size=10)
    fit = tacit.fit(tacit.endpoint_equations(single, [tacit.l2()]))
    assert "draws" not in fit.standard_errors


def test_what_dropout_adds_has_the_same_batches_with_and_without_it():
    model, data = network(0, nn.Dropout(0.2)), random_data()
    options = {"batch_norm": "batch", "batch_size": 20, "draws": 8}
    technique = Objective(model, F.mse_loss, data, training=True, **options)
    plain = Objective(model, F.mse_loss, data, **options)
    fit = tacit.fit(tacit.difference_equations(technique, plain, [tacit.l2()]))
    assert "draws" in fit.standard_errors
    same = tacit.difference_target(plain, plain)
    assert all(not tensor.any() for v in same.points[0].vectors for tensor in v.values())
    single = Objective(model, F.mse_loss, data, batch_norm="batch", batch_size=20)
    with pytest.raises(InputError, match="1 draws cannot make 2 groups"):
        tacit.difference_equations(technique, single, [tacit.l2()])


def test_scores_are_per_batch():
    """Leaving one batch out equals a fit of the other batches."""
    model, batches = network(), split(random_data(), 10)

    def fit_of(data):
        objective = Objective(model, F.mse_loss, data, batch_norm="batch")
        return tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()]))

    scores = tacit.score_examples(fit_of(batches))
    assert scores.count == 6
    assert scores.error_bars().basis == "6 batches of an infinite population"
    assert (
        tacit.score_examples(fit_of(batches), population=6).error_bars().standard_errors["l2"] == 0
    )
    with pytest.raises(InputError, match="the unit here is a batch, and there are 6"):
        tacit.score_examples(fit_of(batches), population=60)
    without = [fit_of(batches[:i] + batches[i + 1 :]).strengths["l2"] for i in range(6)]
    assert scores.leave_one_out()[:, 0].tolist() == pytest.approx(without, rel=1e-9)
    options = {"batch_norm": "batch", "batch_size": 10, "draws": 2}
    objective = Objective(model, F.mse_loss, random_data(), **options)
    with pytest.raises(InputError, match=r"no independent sample: .* draws=1"):
        tacit.score_examples(tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()])))


def minimise(model, data, penalised):
    """Train in the model's mode to the optimum of L + 0.0122 ‖θ‖² of these parameters."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=2000, tolerance_grad=1e-11, line_search_fn="strong_wolfe",
        tolerance_change=0.0,
    )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        penalty = 0.0122 * sum(p.square().sum() for p in penalised)
        loss = F.mse_loss(model(data[0]), data[1]) + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    return copy.deepcopy(model.state_dict())


def test_running_statistics_belong_to_the_point():
    """Weights of another time with the statistics of now gave 0.0045 for 0.0122, and the like."""
    model, data = network().eval(), random_data()  # frozen batch norm
    then = minimise(model, data, list(model.parameters()))
    with torch.no_grad():  # the model trains on
        for tensor in (*model.parameters(), model[1].running_var):
            tensor.mul_(1.5)
    objective = Objective(model, F.mse_loss, data, batch_norm="running")
    weights = {n: then[n] for n, _ in model.named_parameters()}
    point = objective.point(then)
    fits = tacit.time_varying(objective, {"then": then, "again": point}, [tacit.l2()])
    for fit in fits.values():
        assert fit.strengths["l2"] == pytest.approx(0.0122, rel=1e-6)
        assert fit.explained == pytest.approx(1, abs=1e-9)
    calls = {
        "gradient": objective.gradient,
        "hvp": lambda point: objective.hvp(weights, point),
        "rounding": objective.rounding,
        "predictions": objective.predictions,
        "derivatives": lambda point: objective.directional_derivatives([weights], point),
        "time_varying": lambda point: tacit.time_varying(objective, {0: point}, [tacit.l2()]),
        "trajectory": lambda point: tacit.trajectory_equations(
            objective, tacit.Trajectory([point], [point], [0.1]), [tacit.l2()]
        ),
    }
    for call in calls.values():
        call(then)
        with pytest.raises(InputError, match=r"no running statistics.*state_dict\(\).*'batch'"):
            call(weights)
    current = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert_equal(objective.gradient(current), objective.gradient())
    # The statistics of now, which were used silently, give another strength.
    now = {**then, **{n: b.clone() for n, b in model.named_buffers()}}
    silent = tacit.time_varying(objective, {0: now}, [tacit.l2()])[0].strengths["l2"]
    assert abs(silent - 0.0122) > 0.2 * 0.0122


def test_batch_statistics_need_no_buffers_at_points_of_another_time():
    model, data = network().train(), random_data()
    then = minimise(model, data, list(model[-1].parameters()))
    with torch.no_grad():  # the model trains on
        for tensor in (*model.parameters(), *model[1].buffers()):
            tensor.copy_(1.5 * tensor)
    objective = Objective(model, F.mse_loss, data, batch_norm="batch", batch_size=60)
    weights = {n: then[n] for n, _ in model.named_parameters()}
    ridge = tacit.l2(scope="3.*")
    for point in (weights, then):
        fit = tacit.fit(tacit.endpoint_equations(objective, [ridge], params=point))
        assert fit.strengths["l2"] == pytest.approx(0.0122, rel=1e-6)


def recorded_steps(model, data):
    """Three steps of SGD with weight decay 0.04, in the model's mode, recorded and averaged."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.04)
    recorder, averages = tacit.record(model, optimizer), tacit.average_epochs(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
        recorder.step()
    averages.end_epoch()
    return optimizer, recorder, averages


def test_trajectories_of_frozen_batch_norm():
    """Recorded positions have the running statistics; a flow through them keeps them."""
    model, data = network().eval(), random_data()
    optimizer, recorder, averages = recorded_steps(model, data)
    objective = Objective(model, F.mse_loss, data, batch_norm="running")
    equations = tacit.trajectory_equations(objective, recorder.trajectory(), [tacit.l2()])
    assert tacit.fit(equations).strengths["l2"] == pytest.approx(0.02, rel=1e-9)
    options = {"reference": tacit.rk4(1)}
    tacit.trajectory_equations(objective, recorder.trajectory(), [tacit.l2()], **options)
    fit = tacit.fit(averages.equations(objective, [tacit.l2()]))
    assert fit.strengths["l2"] == pytest.approx(0.02, rel=0.3)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
    averages.end_epoch()
    with pytest.raises(InputError, match="no running statistics"):
        averages.equations(objective, [tacit.l2()])


def test_the_statistics_that_recorded_steps_used_must_be_chosen():
    for mode, used, other in (("train", "batch", "running"), ("eval", "running", "batch")):
        model, data = network(), random_data()
        getattr(model, mode)()
        _, recorder, averages = recorded_steps(model, data)
        right, wrong = (
            Objective(model.eval(), F.mse_loss, [data], batch_norm=choice)
            for choice in (used, other)
        )
        equations = tacit.trajectory_equations(right, recorder.trajectory(), [tacit.l2()])
        assert tacit.fit(equations).strengths["l2"] == pytest.approx(0.02, rel=1e-9)
        with pytest.raises(InputError, match=f"training used batch_norm='{used}'"):
            tacit.trajectory_equations(wrong, recorder.trajectory(), [tacit.l2()])
        averages.equations(right, [tacit.l2()])
        with pytest.raises(InputError, match=f"batch_norm='{used}'"):
            averages.equations(wrong, [tacit.l2()])


def linear_network():
    model = nn.Sequential(nn.BatchNorm1d(5, affine=False), nn.Linear(5, 1)).double()
    model(3 * random_data(2)[0])
    return model.eval()


def test_validation_keeps_the_running_statistics():
    model, data = linear_network(), random_data()
    minimise(model, data, list(model.parameters()))
    objective = Objective(model, F.mse_loss, data, batch_norm="running")
    fit = tacit.estimate(objective, [tacit.l2()])
    validation = tacit.validate(fit)
    assert validation.penalised.distance < 1e-6 * validation.control.distance
    assert validation.certificate is not None


def test_the_bootstrap_takes_the_choice():
    model, data = linear_network(), random_data()

    def train(data, seed):
        return minimise(model, data, list(model.parameters()))

    options = {"replicates": 1, "batch_norm": "running"}
    for kind in ("pairs", "residual"):
        equations = tacit.bootstrap(
            model, F.mse_loss, data, train, [tacit.l2()], kind=kind, **options
        )
        assert tacit.fit(equations).strengths["l2"] == pytest.approx(0.0122, rel=1e-6)
    options = {"replicates": 1, "batch_norm": "batch", "batch_size": 20}
    with pytest.raises(InputError, match="there are no residuals"):
        tacit.bootstrap(model, F.mse_loss, data, train, [tacit.l2()], kind="residual", **options)


def test_models_that_return_their_mean_loss():
    model, data = network(), random_data()
    batches = split(data, 25)
    objective = Objective.from_mean_loss(
        model,
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        batches,
        count=lambda batch: len(batch[0]),
        batch_norm="batch",
    )
    assert_equal(objective.gradient(), loop_gradient(model, batches))


def test_a_null_distribution_averages_the_draws():
    options = {"batch_norm": "batch", "batch_size": 20, "draws": 4}
    objective = Objective(network(), F.mse_loss, random_data(), **options)
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()]))
    null = tacit.null_distribution(fit, "l2", shuffles=9)
    gradient, weights = objective.gradient(), objective.params
    product = sum((gradient[n] * p).sum() for n, p in weights.items())
    lengths = [sum(t.square().sum() for t in v.values()) for v in (gradient, weights)]
    assert null.observed == pytest.approx(float(product**2 / lengths[0] / lengths[1]), rel=1e-9)


def test_a_loss_that_is_no_mean_over_examples_is_refused():
    """Compared on parts of a batch with running statistics, which parts do not change."""
    model, (X, y) = network(), random_data()
    options = {"batch_norm": "batch", "batch_size": 20}
    with pytest.raises(InputError, match="sum"):
        Objective(model, lambda a, b: F.mse_loss(a, b, reduction="sum"), (X, y), **options)
    with pytest.raises(InputError):
        Objective(model, F.mse_loss, (X, y[:, 0]), **options).gradient()

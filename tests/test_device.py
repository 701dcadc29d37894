"""Everything runs on the device of the model and gives the same answer there as on the CPU."""

import pytest
import torch
from support.models import params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

pytestmark = pytest.mark.parametrize("device", DEVICES)


def network(device, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)
    ).double().to(device)  # fmt: skip


def candidates(objective):
    start = {n: 0.5 * p for n, p in objective.params.items()}
    return [
        tacit.l2(),
        tacit.l1(),
        tacit.smooth_l1(0.1),
        tacit.regularizers.distance_to(start),
        tacit.regularizers.group_l2(),
        tacit.regularizers.nuclear_norm(),
        tacit.regularizers.power(0.5),
        tacit.regularizers.hypentropy(0.1),
        tacit.regularizers.spline(3),
        tacit.regularizers.spline(3, even=True, convex=True, name="even"),
        tacit.regularizers.spectral_spline(2),
        tacit.regularizers.schatten(0.5),
        tacit.regularizers.spectral_norm(),
        tacit.regularizers.stable_rank(),
        tacit.regularizers.orthogonality(),
        tacit.regularizers.balance(biases=True),
        tacit.regularizers.gradient_norm(objective),
        tacit.regularizers.hessian_trace(objective),
        tacit.regularizers.hessian_trace(objective, 4, name="probed"),
        tacit.layerwise(tacit.l2(name="ridge")),
        tacit.regularizers.diagonal(scope="3.bias"),
        tacit.regularizers.symmetric(scope="3.bias"),
        tacit.regularizers.explicit_dropout(objective),
        tacit.regularizers.dropout_moments(objective),
        tacit.regularizer("fourth", lambda params: sum((p**4).sum() for p in params.values())),
        tacit.regularizers.mean_of(objective),
        tacit.regularizers.gradient_norm(objective, power=1, of="0", name="norm"),
        tacit.regularizers.gradient_l1(objective, eps=0.1),
        tacit.regularizers.gradient_variance(objective),
        tacit.regularizers.input_jacobian(objective),
        tacit.regularizers.input_laplacian(objective),
        tacit.regularizers.activation_norm(objective),
        tacit.regularizers.activation_norm(objective, layers="3", weighted=True, name="weighted"),
    ]


def test_every_regularizer_gives_the_answer_of_the_cpu(device):
    data = random_data(1, outputs=2)
    factors = []
    for where in ("cpu", device):
        model = network(where)
        with torch.no_grad():
            model[0].weight[0, 0] = 0  # at the kink of l1
        # The data stays on the CPU.
        objective = tacit.Objective(model, F.mse_loss, data, batch_size=20)
        # Random probes depend on the point to its last digit, which differs between devices.
        exact = [r for r in candidates(objective) if r.name != "probed"]
        equations = tacit.endpoint_equations(objective, exact)
        factors.append(equations.factor())
        assert equations.rows == sum(p.numel() for p in model.parameters()) - 1
    first, second = (factor.T @ factor for factor in factors)
    torch.testing.assert_close(second, first, rtol=1e-9, atol=1e-11)


def test_the_contract_can_be_checked_on_the_device(device):
    if device == "cpu":
        pytest.skip("on the CPU, tests/regularizers/test_contract.py checks every family")
    data = random_data(1, outputs=2)
    objective = tacit.Objective(network(device), F.mse_loss, data, batch_size=20)
    params = dict(objective.params)
    params["3.weight"] = torch.eye(
        2, 8, dtype=torch.float64, device=device
    )  # equal singular values
    for regularizer in candidates(objective):
        if regularizer.kind not in ("diagonal", "symmetric"):
            tacit.regularizers.check_contract(regularizer, params)


def test_trajectories_and_weights_follow_the_model(device):
    data, step = random_data(2), 1e-2
    model = tanh_mlp(2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=step, weight_decay=0.2)
    recorder = tacit.record(model, optimizer)
    inputs, target = (part.to(device) for part in data)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), target).backward()
        optimizer.step()
        recorder.step()
    objective = tacit.Objective(model, F.mse_loss, data)
    equations = tacit.trajectory_equations(objective, recorder.trajectory(), [tacit.l2()])
    assert tacit.fit(equations).strengths["l2"] == pytest.approx(0.1, rel=1e-9)
    weighted = tacit.Objective(model, F.mse_loss, data, weights=torch.ones(len(data[0])))
    assert weighted.value() == pytest.approx(objective.value(), rel=1e-12)


def test_draws_repeat_and_the_random_state_stays(device):
    model, data = network(device), random_data(3, outputs=2)
    noisy = tacit.Objective(model, F.mse_loss, data, training=True, draws=2, seed=4)
    if device == "cuda":
        before = torch.cuda.get_rng_state()
    first, second = noisy.gradient(), noisy.gradient()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-12, atol=1e-14)
    if device == "cuda":
        assert torch.equal(before, torch.cuda.get_rng_state())
    plain = tacit.Objective(model, F.mse_loss, data)
    fit = tacit.fit(tacit.difference_equations(noisy, plain, [tacit.l2()]))
    assert fit.equations.targets == 2


def test_float32_and_autocast_run(device):
    model = network(device).float()
    data = tuple(part.float() for part in random_data(5, outputs=2))
    plain = tacit.estimate(model, F.mse_loss, data, [tacit.l2()])
    with torch.autocast(device, torch.bfloat16):
        cast = tacit.estimate(model, F.mse_loss, data, [tacit.l2()])
    assert cast.strengths["l2"] != plain.strengths["l2"]
    assert cast.strengths["l2"] == pytest.approx(plain.strengths["l2"], rel=0.1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 5, batch_first=True), nn.Linear(5, 8)

    def forward(self, x):
        return self.head(self.cell(x)[0])


SECOND_ORDER = {
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "recurrent": Recurrent,
    "convolution": lambda: nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)),
}


@pytest.mark.parametrize("make", SECOND_ORDER.values(), ids=SECOND_ORDER.keys())
def test_second_derivatives_equal_differences_of_first(make, device):
    torch.manual_seed(6)
    model = make().double().to(device)
    X = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    objective = tacit.Objective(model, F.mse_loss, (X, X), batch_norm="running")
    direction = {n: torch.ones_like(p) for n, p in objective.params.items()}
    product = objective.hvp(direction)
    h, params = 1e-5, params_of(model)
    ahead, behind = (
        objective.gradient(
            {n: p + sign * h * direction[n] for n, p in params.items()}
            | dict(model.named_buffers())
        )
        for sign in (1, -1)
    )
    for name, values in product.items():
        difference = (ahead[name] - behind[name]) / (2 * h)
        torch.testing.assert_close(values, difference, rtol=1e-6, atol=1e-8)


def test_error_bars_are_those_of_the_cpu(device):
    data = random_data(3, count=40, outputs=2)
    answers = []
    for where in ("cpu", device):
        objective = tacit.Objective(network(where), F.mse_loss, data)
        regularizers = [tacit.l2(), tacit.regularizers.gradient_norm(objective)]
        fit = tacit.fit(tacit.endpoint_equations(objective, regularizers))
        scores = tacit.score_examples(fit, population=100)
        answers.append((scores.values, scores.error_bars().covariance))
    for on_cpu, on_device in zip(*answers, strict=True):
        torch.testing.assert_close(on_device, on_cpu, rtol=1e-7, atol=1e-12)


def test_epochs_and_nulls_are_those_of_the_cpu(device):
    data = random_data(4, count=40, outputs=2)
    strengths, null_strengths = [], []
    for where in ("cpu", device):
        model = network(where).eval()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        penalty = tacit.smooth_l1(0.1)
        epochs = tacit.average_epochs(model, optimizer, averaged=[penalty], epochs=2)
        inputs, target = (part.to(where) for part in data)
        for _ in range(3):
            for rows in torch.arange(40).split(10):
                optimizer.zero_grad()
                F.mse_loss(model(inputs[rows]), target[rows]).backward()
                optimizer.step()
            epochs.end_epoch()
        objective = tacit.Objective(model, F.mse_loss, data)
        strengths.append(tacit.fit(epochs.equations(objective, penalty)).strengths["smooth_l1"])
        endpoint_fit = tacit.fit(tacit.endpoint_equations(objective, tacit.l2()))
        null = tacit.null_distribution(endpoint_fit, "l2", shuffles=9)
        null_strengths.append(null.draws)
    assert strengths[1] == pytest.approx(strengths[0], rel=1e-7)
    assert list(null_strengths[1]) == pytest.approx(list(null_strengths[0]), rel=1e-6)


def test_augmentation_on_the_device_is_seeded_by_draw(device):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            return X[index] + torch.randn(5, device=device, dtype=torch.float64), Y[index]

    X, Y = (tensor.to(device) for tensor in random_data(1, count=16, outputs=2))
    model = network(device)
    with pytest.raises(tacit.InputError, match="differs between two reads"):
        tacit.Objective(model, F.mse_loss, Noisy())
    state = torch.get_rng_state()
    objective = tacit.Objective(model, F.mse_loss, Noisy(), training=True, draws=2)
    values = [objective.value_and_gradient(draws=[draw])[0] for draw in (0, 1, 0)]
    assert values[0] == values[2] != values[1]
    assert torch.equal(torch.get_rng_state(), state)


def scale_inputs(inputs, generator):
    factors = torch.rand(len(inputs), 1, generator=generator, device=generator.device)
    return inputs * (1 + 0.1 * factors.to(inputs))


@pytest.mark.parametrize("name", ["input_noise", "weight_noise", "sam", "mixup", "augment"])
def test_techniques_draw_on_the_device_of_the_model(device, name):
    X, _ = random_data(1, count=12)
    data = X, torch.arange(12) % 2  # on the CPU
    objective = tacit.Objective(network(device), F.cross_entropy, data)
    options = {"augment": scale_inputs, "mixup": 1.0}
    technique = getattr(tacit.techniques, name)
    tacit.techniques.check_contract(
        lambda plain: technique(plain, options.get(name, 0.1)), objective, derivative=name != "sam"
    )
    smoothed = tacit.techniques.label_smoothing(objective, 0.1)
    dropped = tacit.techniques.stochastic_depth(smoothed, 0.2, layers="0")
    assert dropped.value() != smoothed.value()

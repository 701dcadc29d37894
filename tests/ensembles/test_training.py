"""A member of an ensemble ends where a plain loop over one module ends, for every option."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from support.ensembles import ensemble_and_data, small_networks, train_briefly
from support.hard_to_borrow import FromFunction
from support.models import random_data
from torch import Tensor, nn
from torch.nn import functional as F

import tacit
from tacit import ensembles
from tacit.ensembles import SGD, Adam, Data, Plan, Stopping

MEMBERS, EXAMPLES, BATCH_SIZE, EPOCHS = 4, 22, 8, 3
SEEDS = [3, 5, 5, 11]
RATES = [0.05, 0.1, 0.02, 0.2]


class SeededDropout(nn.Module):
    """Dropout with masks from the generator of one member, for the plain loop."""

    def __init__(self, rate: float, generator: torch.Generator):
        super().__init__()
        self.rate, self.generator = rate, generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = torch.rand(x.shape, generator=self.generator) >= self.rate
        return x * mask / (1 - self.rate)


@dataclass
class PlainLoop:
    """A plain training loop over one module."""

    module: nn.Module
    X: Tensor
    y: Tensor
    seed: int
    optimizer: torch.optim.Optimizer
    penalty: Callable[[dict[str, Tensor]], Tensor] | None = None
    epochs: int = EPOCHS
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss
    milestones: tuple[int, ...] = ()
    stopping: dict = field(default_factory=dict)

    def train(self) -> dict:
        """Train, and return what a Run has of one member."""
        order = ensembles.order_generator(self.seed)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, list(self.milestones), 0.5)
        lowest, waited, best, history = float("inf"), 0, None, []
        start, points = {}, []
        for _ in range(self.epochs):
            start, points = copy_params(self.module), []
            monitored = self.train_epoch(order, points)
            scheduler.step()
            history.append(monitored)
            if monitored < lowest - self.stopping.get("min_delta", 0.0):
                lowest, waited, best = monitored, 0, copy_params(self.module)
            else:
                waited += 1
            if self.stopping and waited >= self.stopping["patience"]:
                break
        end = copy_params(self.module)
        return {
            "last": end,
            "best": best,
            "average": {n: torch.stack([p[n] for p in points]).mean(0) for n in end},
            "displacement": {n: end[n] - start[n] for n in end},
            "epochs": len(history),
            "history": history,
        }

    def train_epoch(self, order: torch.Generator, points: list) -> float:
        """Train one epoch, append the points stepped from, and return the monitored value."""
        self.module.train()
        monitor = self.stopping.get("monitor", "objective")
        permutation, total = torch.randperm(len(self.X), generator=order), 0.0
        for batch in permutation.split(BATCH_SIZE):
            points.append(copy_params(self.module))
            loss = self.loss(self.module(self.X[batch]), self.y[batch])
            penalty = (
                0.0 if self.penalty is None else self.penalty(dict(self.module.named_parameters()))
            )
            self.optimizer.zero_grad()
            (loss + penalty).backward()
            self.optimizer.step()
            monitored = loss + penalty if monitor == "objective" else loss
            total += float(monitored.detach()) * len(batch) / len(self.X)
        if monitor != "validation":
            return total
        self.module.eval()
        with torch.no_grad():
            inputs, targets = self.stopping["validation"]
            return float(self.loss(self.module(inputs), targets))


def copy_params(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 2)).double()


class ConvolutionWithSkip(nn.Module):
    """Not a chain of linear layers, so it is evaluated with vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x.unsqueeze(1)).relu().flatten(1)
        return self.head(hidden) + x[:, :2]


def draw_data(seed: int, examples: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(examples, 3, generator=generator, dtype=torch.float64)
    return X, torch.randn(examples, 2, generator=generator, dtype=torch.float64)


def with_seeded_dropout(module: nn.Module, rate: float, seed: int) -> nn.Module:
    """The module with the masks of one member in every dropout layer."""
    module, generator = copy.deepcopy(module), ensembles.mask_generator(seed)
    children = [SeededDropout(rate, generator) if isinstance(m, nn.Dropout) else m for m in module]
    return nn.Sequential(*children)


def assert_matches_plain_loops(run: ensembles.Run, results: list[dict]) -> None:
    epoch = run.recorded_epochs[-1]
    for m, result in enumerate(results):
        for kind in ("last", "best", "average"):
            for name, expected in result[kind].items():
                actual = getattr(run, kind).params[name][m]
                assert torch.allclose(actual, expected, rtol=0, atol=1e-10), (kind, name, m)
        for name, expected in result["displacement"].items():
            assert torch.allclose(epoch.displacement[name][m], expected, rtol=0, atol=1e-10)
        assert int(run.epochs[m]) == result["epochs"]
        history = run.history[: result["epochs"], m]
        assert history.tolist() == pytest.approx(result["history"], abs=1e-10)
        assert run.history[result["epochs"] :, m].isnan().all()


@pytest.mark.parametrize(
    ("optimizer", "torch_optimizer"),
    [
        (SGD(0.1), partial(torch.optim.SGD, lr=0.1)),
        (SGD(0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        (Adam(0.01), partial(torch.optim.Adam, lr=0.01)),
        (
            Adam(0.01, betas=(0.8, 0.9), epsilon=1e-3),
            partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.9), eps=1e-3),
        ),
    ],
)
def test_optimizers_are_those_of_torch(optimizer, torch_optimizer):
    X, y = draw_data(0)
    ensemble = ensembles.initialise(build, range(MEMBERS))
    plan = Plan(optimizer, EPOCHS, BATCH_SIZE)
    run = ensembles.train(ensemble, F.mse_loss, (X, y), plan, seeds=SEEDS)
    results = []
    for m, seed in enumerate(SEEDS):
        module = with_seeded_dropout(ensemble.module(m), 0.2, seed)
        results.append(PlainLoop(module, X, y, seed, torch_optimizer(module.parameters())).train())
    assert_matches_plain_loops(run, results)


@pytest.mark.parametrize("optimizer", [SGD, Adam])
def test_each_member_has_its_step_size_and_schedule(optimizer):
    X, y = draw_data(1)
    ensemble = ensembles.initialise(build, [0] * MEMBERS)
    plan = Plan(optimizer(RATES, milestones=(1, 2), factor=0.5), EPOCHS, BATCH_SIZE)
    run = ensembles.train(ensemble, F.mse_loss, (X, y), plan, seeds=SEEDS)
    torch_optimizer = torch.optim.SGD if optimizer is SGD else torch.optim.Adam
    results = []
    for m in range(MEMBERS):
        module = with_seeded_dropout(ensemble.module(m), 0.2, SEEDS[m])
        member_optimizer = torch_optimizer(module.parameters(), lr=RATES[m])
        loop = PlainLoop(module, X, y, SEEDS[m], member_optimizer, milestones=(1, 2))
        results.append(loop.train())
    assert_matches_plain_loops(run, results)
    expected_time = 3 * 0.25 * torch.tensor(RATES).double()
    assert torch.allclose(run.recorded_epochs[-1].time, expected_time)


def test_each_member_has_its_penalties():
    X, y = draw_data(2)
    ensemble = ensembles.initialise(build, range(MEMBERS))
    lasso, ridge = tacit.smooth_l1(1e-2), tacit.layerwise(tacit.l2())
    ridge_strengths = torch.rand(MEMBERS, 2, generator=torch.Generator().manual_seed(0)) / 5
    penalties = {lasso: [0.0, 0.1, 0.2, 0.3], ridge: ridge_strengths}
    plan = Plan(SGD(0.1), EPOCHS, BATCH_SIZE)
    run = ensembles.train(ensemble, F.mse_loss, (X, y), plan, seeds=SEEDS, penalties=penalties)
    results = []
    for m in range(MEMBERS):
        module = with_seeded_dropout(ensemble.module(m), 0.2, SEEDS[m])
        first, second = ridge_strengths[m].double().tolist()
        strengths = {"smooth_l1": 0.1 * m, "l2[0]": first, "l2[3]": second}
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        penalty = tacit.validation.penalty([lasso, ridge], strengths)
        results.append(PlainLoop(module, X, y, SEEDS[m], optimizer, penalty).train())
    assert_matches_plain_loops(run, results)


def test_each_member_has_its_data_and_dropout_rate():
    sets = [draw_data(0), draw_data(1), draw_data(2)]
    assignment, dropout = [2, 0, 1, 0], [0.0, 0.1, 0.5, 0.9]
    data = Data(torch.stack([X for X, _ in sets]), torch.stack([y for _, y in sets]), assignment)
    ensemble = ensembles.initialise(build, range(MEMBERS))
    plan = Plan(SGD(0.1), EPOCHS, BATCH_SIZE)
    run = ensembles.train(ensemble, F.mse_loss, data, plan, seeds=SEEDS, dropout=dropout)
    results = []
    for m in range(MEMBERS):
        module = with_seeded_dropout(ensemble.module(m), dropout[m], SEEDS[m])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        results.append(PlainLoop(module, *sets[assignment[m]], SEEDS[m], optimizer).train())
    assert_matches_plain_loops(run, results)


@pytest.mark.parametrize("monitor", ["objective", "loss", "validation"])
@pytest.mark.parametrize("min_delta", [0.0, 0.02])
def test_each_member_stops_when_its_plain_loop_stops(monitor, min_delta):
    (X, y), validation = draw_data(3), draw_data(4, 7)
    ensemble = ensembles.initialise(build, range(MEMBERS))
    rates, epochs, ridge = [1.2, 0.5, 0.01, 0.9], [30, 30, 30, 5], tacit.l2()
    stopping = Stopping(2, min_delta, monitor, validation if monitor == "validation" else None)
    plan = Plan(SGD(rates), epochs, BATCH_SIZE, stopping)
    run = ensembles.train(
        ensemble, F.mse_loss, (X, y), plan, seeds=SEEDS, penalties={ridge: 0.1}, dropout=0.3
    )
    rule = {"patience": 2, "min_delta": min_delta, "monitor": monitor, "validation": validation}
    penalty = tacit.validation.penalty([ridge], {"l2": 0.1})
    results = []
    for m in range(MEMBERS):
        module = with_seeded_dropout(ensemble.module(m), 0.3, SEEDS[m])
        optimizer = torch.optim.SGD(module.parameters(), lr=rates[m])
        loop = PlainLoop(
            module, X, y, SEEDS[m], optimizer, penalty, epochs=epochs[m], stopping=rule
        )
        results.append(loop.train())
    assert len({result["epochs"] for result in results}) > 1
    assert_matches_plain_loops(run, results)


def test_classifiers_that_are_not_chains_match_the_plain_loop():
    X, _ = draw_data(5)
    y = torch.arange(EXAMPLES) % 2
    ensemble = ensembles.initialise(lambda: ConvolutionWithSkip().double(), range(MEMBERS))
    plan = Plan(SGD(0.1, momentum=0.5), EPOCHS, BATCH_SIZE)
    run = ensembles.train(ensemble, F.cross_entropy, (X, y), plan, seeds=SEEDS)
    results = []
    for m in range(MEMBERS):
        module = ensemble.module(m)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        loop = PlainLoop(module, X, y, SEEDS[m], optimizer, loss=F.cross_entropy)
        results.append(loop.train())
    assert_matches_plain_loops(run, results)


def residual_network():
    layer, head = nn.Linear(3, 3), nn.Linear(3, 2)
    return FromFunction(lambda m, x: m.head(m.layer(x).tanh() + x), layer=layer, head=head).double()


def test_a_layer_under_two_names_is_not_compiled():
    X, y = draw_data(6)
    layer = nn.Linear(3, 3)
    ensemble = ensembles.from_models([nn.Sequential(layer, layer, nn.Linear(3, 2)).double()])
    with pytest.raises(tacit.InputError, match="leave compile= out"):
        ensembles.train(
            ensemble, F.mse_loss, (X, y), Plan(SGD(0.1), 1, 8, compile=torch.compile), seeds=[0]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double(),
        residual_network,
    ],
    ids=["chain", "mapped"],
)
def test_compiled_training_gives_the_same_weights_and_compiles_once(build):
    X, y = draw_data(6)
    compiled = []

    def compile_eagerly(function):
        compiled.append(function)
        return torch.compile(function, backend="aot_eager")

    ensemble = ensembles.initialise(build, range(MEMBERS))
    runs = [
        ensembles.train(
            ensemble, F.mse_loss, (X, y), Plan(SGD(0.1), EPOCHS, BATCH_SIZE, compile=compiler),
            seeds=SEEDS, penalties={tacit.l2(): 0.1},
        )
        for compiler in (None, compile_eagerly)
    ]  # fmt: skip
    assert len(compiled) == 1  # not once per epoch
    for name, expected in runs[0].last.params.items():
        assert torch.allclose(runs[1].last.params[name], expected, rtol=0, atol=1e-10)


def test_equal_seeds_give_equal_bytes():
    X, y = (part.float() for part in draw_data(7))
    ensemble = ensembles.initialise(build, range(MEMBERS)).to(torch.float32)
    plan = Plan(Adam(0.01), EPOCHS, BATCH_SIZE)
    runs = [ensembles.train(ensemble, F.mse_loss, (X, y), plan, seeds=SEEDS) for _ in range(2)]
    for name, expected in runs[0].last.params.items():
        assert torch.equal(runs[1].last.params[name], expected)
    other = ensembles.train(ensemble, F.mse_loss, (X, y), plan, seeds=[3, 5, 5, 12])
    assert not torch.equal(other.last.params["0.weight"][3], runs[0].last.params["0.weight"][3])
    assert torch.equal(other.last.params["0.weight"][2], runs[0].last.params["0.weight"][2])


def test_training_changes_neither_the_ensemble_nor_the_random_state():
    X, y = draw_data(8)
    torch.manual_seed(1)
    random_state = torch.get_rng_state()
    ensemble = ensembles.initialise(build, range(MEMBERS))
    start = {n: p.clone() for n, p in ensemble.params.items()}
    ensembles.train(ensemble, F.mse_loss, (X, y), Plan(SGD(0.1), 1, BATCH_SIZE), seeds=SEEDS)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(ensemble.params[n], start[n]) for n in start)


def test_a_diverged_member_stops_and_does_not_affect_the_others():
    X, y = draw_data(9)
    ensemble = ensembles.initialise(build, range(2))
    plan = Plan(SGD([1e200, 0.1]), 10, BATCH_SIZE)
    run = ensembles.train(ensemble, F.mse_loss, (X, y), plan, seeds=[0, 1])
    assert run.diverged.tolist() == [True, False]
    assert int(run.epochs[0]) < 10
    separate = ensembles.train(
        ensemble.select([1]), F.mse_loss, (X, y), Plan(SGD(0.1), 10, BATCH_SIZE), seeds=[1]
    )
    for name, stacked in run.last.params.items():
        assert torch.allclose(stacked[1], separate.last.params[name][0], rtol=0, atol=1e-12)


def test_a_spline_is_a_penalty_of_every_member():
    """s′ = 0.02x on three knots is ridge of strength 0.01."""
    ensemble, data = small_networks(), random_data(0)
    strengths = torch.tensor([[-0.01, 0, 0.01]] * 3, dtype=torch.float64)
    shape = tacit.regularizers.spline([-0.5, 0, 0.5])
    with_spline = train_briefly(ensemble, data, penalties={shape: strengths}).last.params
    with_ridge = train_briefly(ensemble, data, penalties={tacit.l2(): 0.01}).last.params
    for name, params in with_ridge.items():
        torch.testing.assert_close(with_spline[name], params, rtol=1e-7, atol=1e-9)


def test_a_diverged_member_does_not_break_families_that_fail_on_nan():
    nuclear, data = tacit.regularizers.nuclear_norm(), random_data(0)
    plan = Plan(SGD([1e200, 0.01, 0.01]), 4, 16, averaged=[nuclear])
    run = train_briefly(small_networks(), data, plan=plan, penalties={nuclear: 0.1})
    assert run.diverged.tolist() == [True, False, False]
    separate = train_briefly(
        small_networks().select([1]), data, plan=Plan(SGD(0.01), 4, 16), seeds=[1],
        penalties={nuclear: 0.1},
    )  # fmt: skip
    for name, expected in separate.last.params.items():
        assert torch.allclose(run.last.params[name][1], expected[0], rtol=0, atol=1e-12)
    with pytest.raises(tacit.InputError, match=r"members 0 are not finite.*run\.select\(members\)"):
        ensembles.epoch_equations(run, F.mse_loss, data, tacit.l2())
    rest = run.select([1, 2])
    assert len(ensembles.epoch_equations(rest, F.mse_loss, data, tacit.l2())) == 2


def test_a_batch_penalty_must_return_one_value_per_member():
    with pytest.raises(tacit.InputError, match="one value per member"):
        train_briefly(
            small_networks(), random_data(0),
            batch_penalty=lambda params, *_: params["0.weight"].square().sum(),
        )  # fmt: skip


REFUSED = {
    "an optimizer instead of a plan": ({"plan": SGD(0.1)}, "plan is a SGD"),
    "one seed instead of a list": ({"seeds": 3}, "seeds is 3"),
    "fewer seeds than members": ({"seeds": [1]}, "1 seeds for 5 members"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_arguments_are_refused_with_a_remedy(options, message):
    ensemble, data, _ = ensemble_and_data()
    with pytest.raises(tacit.InputError, match=message):
        train_briefly(ensemble, data, **options)

"""A member of an ensemble ends where a plain loop over one module ends, for every option."""

import copy
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tacit
from tacit import ensembles
from tacit.ensembles import SGD, Adam, Data, Plan, Stopping

MEMBERS, EXAMPLES, BATCH, EPOCHS = 4, 22, 8, 3
SEEDS = [3, 5, 5, 11]


class Masked(nn.Module):
    """Dropout with masks from the member's own generator, for the plain loop."""

    def __init__(self, rate: float, generator: torch.Generator):
        super().__init__()
        self.rate, self.generator = rate, generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(x.shape, generator=self.generator) >= self.rate
        return x * kept / (1 - self.rate)


@dataclass
class Alone:
    """How one member is trained by a plain loop, and what it gives."""

    module: nn.Module
    X: Tensor
    y: Tensor
    seed: int
    optimizer: torch.optim.Optimizer
    penalty: object = None
    epochs: int = EPOCHS
    loss: object = F.mse_loss
    schedule: tuple[int, ...] = ()
    stopping: dict = field(default_factory=dict)

    def train(self) -> dict:
        order = ensembles.order_generator(self.seed)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, list(self.schedule), 0.5)
        lowest, waited, best, history = float("inf"), 0, None, []
        start, points = {}, []
        for _ in range(self.epochs):
            start, points = state(self.module), []
            value = self.epoch(order, points)
            scheduler.step()
            history.append(value)
            if value < lowest - self.stopping.get("min_delta", 0.0):
                lowest, waited, best = value, 0, state(self.module)
            else:
                waited += 1
            if self.stopping and waited >= self.stopping["patience"]:
                break
        end = state(self.module)
        return {
            "last": end,
            "best": best,
            "average": {n: torch.stack([p[n] for p in points]).mean(0) for n in end},
            "displacement": {n: end[n] - start[n] for n in end},
            "epochs": len(history),
            "history": history,
        }

    def epoch(self, order: torch.Generator, points: list) -> float:
        self.module.train()
        monitor = self.stopping.get("monitor", "objective")
        permutation, total = torch.randperm(len(self.X), generator=order), 0.0
        for index in permutation.split(BATCH):
            points.append(state(self.module))
            value = self.loss(self.module(self.X[index]), self.y[index])
            penalty = (
                0.0 if self.penalty is None else self.penalty(dict(self.module.named_parameters()))
            )
            self.optimizer.zero_grad()
            (value + penalty).backward()
            self.optimizer.step()
            whole = value + penalty if monitor == "objective" else value
            total += float(whole.detach()) * len(index) / len(self.X)
        if monitor != "validation":
            return total
        self.module.eval()
        with torch.no_grad():
            inputs, targets = self.stopping["validation"]
            return float(self.loss(self.module(inputs), targets))


def state(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 2)).double()


class Residual(nn.Module):
    """No chain of linear layers: goes through vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x.unsqueeze(1)).relu().flatten(1)
        return self.head(hidden) + x[:, :2]


def draw(seed: int, examples: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(examples, 3, generator=generator, dtype=torch.float64)
    return X, torch.randn(examples, 2, generator=generator, dtype=torch.float64)


def with_masks(module: nn.Module, rate: float, seed: int) -> nn.Module:
    """The module with every Dropout replaced by one with the member's masks."""
    module, generator = copy.deepcopy(module), ensembles.mask_generator(seed)
    children = [Masked(rate, generator) if isinstance(m, nn.Dropout) else m for m in module]
    return nn.Sequential(*children)


def compare(run: ensembles.Run, alone: list[dict]) -> None:
    for m, found in enumerate(alone):
        for kind in ("last", "best", "average"):
            for name, expected in found[kind].items():
                got = getattr(run, kind).params[name][m]
                assert torch.allclose(got, expected, rtol=0, atol=1e-10), (kind, name, m)
        for name, expected in found["displacement"].items():
            assert torch.allclose(run.tail[-1].displacement[name][m], expected, rtol=0, atol=1e-10)
        assert int(run.epochs[m]) == found["epochs"]
        got = run.history[: found["epochs"], m]
        assert got.tolist() == pytest.approx(found["history"], abs=1e-10)
        assert run.history[found["epochs"] :, m].isnan().all()


RATES = [0.05, 0.1, 0.02, 0.2]


@pytest.mark.parametrize(
    ("ours", "theirs"),
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
def test_optimizers(ours, theirs):
    X, y = draw(0)
    ensemble = ensembles.initialise(build, range(MEMBERS))
    run = ensembles.train(ensemble, F.mse_loss, (X, y), Plan(ours, EPOCHS, BATCH), seeds=SEEDS)
    modules = [with_masks(ensemble.module(m), 0.2, SEEDS[m]) for m in range(MEMBERS)]
    compare(
        run,
        [
            Alone(a, X, y, s, theirs(a.parameters())).train()
            for a, s in zip(modules, SEEDS, strict=True)
        ],
    )


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_rates_and_schedules_of_each_member(kind):
    X, y = draw(1)
    ensemble = ensembles.initialise(build, [0] * MEMBERS)
    ours = kind(RATES, milestones=(1, 2), factor=0.5)
    run = ensembles.train(ensemble, F.mse_loss, (X, y), Plan(ours, EPOCHS, BATCH), seeds=SEEDS)
    theirs = torch.optim.SGD if kind is SGD else torch.optim.Adam
    alone = []
    for m in range(MEMBERS):
        module = with_masks(ensemble.module(m), 0.2, SEEDS[m])
        optimizer = theirs(module.parameters(), lr=RATES[m])
        alone.append(Alone(module, X, y, SEEDS[m], optimizer, schedule=(1, 2)).train())
    compare(run, alone)
    assert torch.allclose(run.tail[-1].time, 3 * 0.25 * torch.tensor(RATES).double())


def test_penalties_of_each_member():
    X, y = draw(2)
    ensemble = ensembles.initialise(build, range(MEMBERS))
    lasso, ridge = tacit.smooth_l1(1e-2), tacit.layerwise(tacit.l2())
    strengths = torch.rand(MEMBERS, 2, generator=torch.Generator().manual_seed(0)) / 5
    penalties = {lasso: [0.0, 0.1, 0.2, 0.3], ridge: strengths}
    plan = Plan(SGD(0.1), EPOCHS, BATCH)
    run = ensembles.train(ensemble, F.mse_loss, (X, y), plan, seeds=SEEDS, penalties=penalties)
    alone = []
    for m in range(MEMBERS):
        module = with_masks(ensemble.module(m), 0.2, SEEDS[m])
        own = {"smooth_l1": 0.1 * m}
        own |= dict(zip(("l2[0]", "l2[3]"), strengths[m].double().tolist(), strict=True))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        penalty = tacit.validation.penalty([lasso, ridge], own)
        alone.append(Alone(module, X, y, SEEDS[m], optimizer, penalty).train())
    compare(run, alone)


def test_own_data_and_dropout_rates():
    sets = [draw(0), draw(1), draw(2)]
    owner, dropout = [2, 0, 1, 0], [0.0, 0.1, 0.5, 0.9]
    data = Data(torch.stack([X for X, _ in sets]), torch.stack([y for _, y in sets]), owner)
    ensemble = ensembles.initialise(build, range(MEMBERS))
    plan = Plan(SGD(0.1), EPOCHS, BATCH)
    run = ensembles.train(ensemble, F.mse_loss, data, plan, seeds=SEEDS, dropout=dropout)
    alone = []
    for m in range(MEMBERS):
        module = with_masks(ensemble.module(m), dropout[m], SEEDS[m])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        alone.append(Alone(module, *sets[owner[m]], SEEDS[m], optimizer).train())
    compare(run, alone)


@pytest.mark.parametrize("monitor", ["objective", "loss", "validation"])
@pytest.mark.parametrize("min_delta", [0.0, 0.02])
def test_each_member_stops_on_its_own(monitor, min_delta):
    (X, y), validation = draw(3), draw(4, 7)
    ensemble = ensembles.initialise(build, range(MEMBERS))
    rates = [1.2, 0.5, 0.01, 0.9]
    validating = validation if monitor == "validation" else None
    stopping = Stopping(2, min_delta, monitor, validating)
    plan = Plan(SGD(rates), [30, 30, 30, 5], BATCH, stopping)
    ridge = tacit.l2()
    run = ensembles.train(
        ensemble, F.mse_loss, (X, y), plan, seeds=SEEDS, penalties={ridge: 0.1}, dropout=0.3
    )
    alone = []
    for m in range(MEMBERS):
        module = with_masks(ensemble.module(m), 0.3, SEEDS[m])
        optimizer = torch.optim.SGD(module.parameters(), lr=rates[m])
        rule = {
            "patience": 2, "min_delta": min_delta, "monitor": monitor, "validation": validation
        }  # fmt: skip
        one = Alone(
            module, X, y, SEEDS[m], optimizer, tacit.validation.penalty([ridge], {"l2": 0.1}),
            epochs=[30, 30, 30, 5][m], stopping=rule,
        )  # fmt: skip
        alone.append(one.train())
    assert len({found["epochs"] for found in alone}) > 1
    compare(run, alone)


def test_architectures_that_are_no_chain_and_classification():
    X, _ = draw(5)
    y = torch.arange(EXAMPLES) % 2
    ensemble = ensembles.initialise(lambda: Residual().double(), range(MEMBERS))
    plan = Plan(SGD(0.1, momentum=0.5), EPOCHS, BATCH)
    run = ensembles.train(ensemble, F.cross_entropy, (X, y), plan, seeds=SEEDS)
    alone = []
    for m in range(MEMBERS):
        module = ensemble.module(m)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        alone.append(Alone(module, X, y, SEEDS[m], optimizer, loss=F.cross_entropy).train())
    compare(run, alone)


def test_compiled_training_is_the_same():
    X, y = draw(6)
    functions = []

    def compiled(function):
        functions.append(function)
        return torch.compile(function, backend="aot_eager")

    chain = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)]
    ensemble = ensembles.initialise(lambda: nn.Sequential(*chain).double(), range(MEMBERS))
    runs = [
        ensembles.train(
            ensemble, F.mse_loss, (X, y), Plan(SGD(0.1), EPOCHS, BATCH, compile=how),
            seeds=SEEDS, penalties={tacit.l2(): 0.1},
        )
        for how in (None, compiled)
    ]  # fmt: skip
    assert len(functions) == 1  # not once an epoch
    for name, expected in runs[0].last.params.items():
        assert torch.allclose(runs[1].last.params[name], expected, rtol=0, atol=1e-10)


def test_seeds_reproduce_bytes():
    X, y = (part.float() for part in draw(7))
    ensemble = ensembles.initialise(build, range(MEMBERS)).to(torch.float32)
    plan = Plan(Adam(0.01), EPOCHS, BATCH)
    runs = [ensembles.train(ensemble, F.mse_loss, (X, y), plan, seeds=SEEDS) for _ in range(2)]
    for name, expected in runs[0].last.params.items():
        assert torch.equal(runs[1].last.params[name], expected)
    other = ensembles.train(ensemble, F.mse_loss, (X, y), plan, seeds=[3, 5, 5, 12])
    assert not torch.equal(other.last.params["0.weight"][3], runs[0].last.params["0.weight"][3])
    assert torch.equal(other.last.params["0.weight"][2], runs[0].last.params["0.weight"][2])


def test_the_ensemble_and_the_random_state_are_left_alone():
    X, y = draw(8)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    ensemble = ensembles.initialise(build, range(MEMBERS))
    start = {n: p.clone() for n, p in ensemble.params.items()}
    ensembles.train(ensemble, F.mse_loss, (X, y), Plan(SGD(0.1), 1, BATCH), seeds=SEEDS)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(ensemble.params[n], start[n]) for n in start)


def test_a_diverged_member_stops_and_leaves_the_others_alone():
    X, y = draw(9)
    ensemble = ensembles.initialise(build, range(2))
    plan = Plan(SGD([1e200, 0.1]), 10, BATCH)
    run = ensembles.train(ensemble, F.mse_loss, (X, y), plan, seeds=[0, 1])
    assert run.diverged.tolist() == [True, False]
    assert int(run.epochs[0]) < 10
    alone = ensembles.train(
        ensemble.chosen([1]), F.mse_loss, (X, y), Plan(SGD(0.1), 10, BATCH), seeds=[1]
    )
    for name, tensor in run.last.params.items():
        assert torch.allclose(tensor[1], alone.last.params[name][0], rtol=0, atol=1e-12)

"""What several processes compute together, to be compared with one process: see test_shared."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import tacit
from support.models import random_data, tanh_mlp
from support.processes import mesh_of, number, own, processes, share
from tacit import regularizers, techniques
from tacit.regularizers import metric_ridge, optimizer_penalties

DATA = random_data(0, count=60)


class Block(nn.Module):
    """Attention-like: layer norm, a matrix that is read twice, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        x = x + self.frozen(torch.tanh(self.mix(x)))
        return F.linear(x, self.embed.weight)


def token_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Block()).double()


def token_losses(model: nn.Module, batch: Any) -> torch.Tensor:
    (tokens,) = batch
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")


def objective_of(model: nn.Module, kind: str, **options: Any) -> tacit.Objective:
    rows = own(len(DATA[0]), kind)
    part = DATA[0][rows], DATA[1][rows]
    return tacit.Objective(model, F.mse_loss, part, batch_size=16, **options)


def families(kind: str) -> dict[str, Any]:
    """Candidates by name; each of the two ways to share by four processes has half of them."""

    def reference() -> dict[str, torch.Tensor]:
        return dict(share(tanh_mlp(5, sizes=(5, 7, 6, 1)), kind).named_parameters())

    made = {
        "entries": lambda o: [tacit.l2(), tacit.l1()],
        "by layer": lambda o: [tacit.layerwise(tacit.smooth_l1(0.1))],
        "rows": lambda o: [regularizers.group_l2(scope=tacit.matrices), tacit.l2()],
        "matrices": lambda o: [regularizers.nuclear_norm(), regularizers.spectral_norm()],
        "curve": lambda o: [regularizers.spline(5)],
        "distance": lambda o: [regularizers.distance_to(reference()), tacit.l2()],
        "gradient": lambda o: [regularizers.gradient_norm(o), tacit.l2()],
        "norm": lambda o: [regularizers.gradient_norm(o, power=1), tacit.l2()],
        "known": lambda o: [tacit.smooth_l1(0.05)],
    }
    if processes(kind) < 4:
        return made
    names = [*made][kind.startswith("hybrid") :: 2]
    return {name: made[name] for name in names}


def describe(fit: tacit.Fit) -> dict[str, Any]:
    """Everything that a fit says, as numbers and texts."""
    bars = {f"±{kind}": list(errors.values()) for kind, errors in fit.standard_errors.items()}
    return {
        "strengths": list(fit.strengths.values()),
        "shares": list(fit.shares.values()),
        "explained": [fit.explained, fit.cosine],
        "summary": fit.summary(),
        **bars,
    }


def all_cases(kind: str) -> dict[str, Any]:
    """Every case by its name; of four processes, which are slow on two cores, a few."""
    cases = endpoints, tokens, epochs
    if processes(kind) < 4:
        cases += low_rank, differences, steps, watched, products, data_families, screened
        cases += losses, gathered
    return {f"{case.__name__}: {name}": value for case in cases for name, value in case(kind)}


def endpoints(kind: str) -> Iterator[tuple[str, Any]]:
    model = share(tanh_mlp(0, sizes=(5, 7, 6, 1)), kind)
    objective = objective_of(model, kind)
    target = tacit.endpoint_target(objective)
    for name, family in families(kind).items():
        known = {tacit.l2(): 0.01} if name == "known" else None
        fit = tacit.fit(target.equations(family(objective), known=known))
        scores = tacit.score_examples(fit)
        yield name, describe(fit.with_error_bars(scores.error_bars(), *scores.problems))
    fit = tacit.fit(target.equations(tacit.l2()))
    labels = [number // 4 for number in range(len(DATA[0]))][own(len(DATA[0]), kind)]
    yield (
        "clusters",
        describe(fit.with_error_bars(tacit.score_examples(fit, clusters=labels).error_bars())),
    )
    weights = torch.linspace(0.5, 2, len(DATA[0])).double()[own(len(DATA[0]), kind)]
    fit = tacit.fit(
        tacit.endpoint_equations(objective_of(model, kind, weights=weights), tacit.l2())
    )
    yield "weights", describe(fit.with_error_bars(tacit.score_examples(fit).error_bars()))


class Encoder(nn.Module):
    """Runs by a method of another name than forward, and has a matrix with two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = tanh_mlp(0, sizes=(5, 5)), tanh_mlp(1, sizes=(5, 1))
        self.again = nn.Linear(5, 5).double()
        self.again.weight = self.first[0].weight

    def encode(self, x):
        return self.second(torch.tanh(self.again(torch.tanh(self.first(x)))))


def losses(kind: str) -> Iterator[tuple[str, Any]]:
    """Losses that read all parameters, and that call another method of the model than forward."""
    model = Encoder()
    if kind.startswith("fully_shard"):
        from torch.distributed.fsdp import register_fsdp_forward_method

        model = fully_shard(model, mesh=mesh_of(kind))
        register_fsdp_forward_method(model, "encode")
    else:
        model = share(model, kind)

    def penalised(model: nn.Module, batch: Any) -> torch.Tensor:
        predictions = getattr(model, "module", model).encode(batch[0])
        penalty = sum(p.square().sum() for p in model.parameters())
        return (predictions - batch[1]).square().mean(1) + 0.05 * penalty

    rows = own(len(DATA[0]), kind)
    part = DATA[0][rows], DATA[1][rows]
    objective = tacit.Objective.from_batch_loss(model, penalised, part, batch_size=16)
    fit = tacit.fit(tacit.endpoint_equations(objective, tacit.l2()))
    yield "penalty", {**describe(fit), "loss": [objective.value()]}


def gathered(kind: str) -> Iterator[tuple[str, Any]]:
    """Whole matrices, some of which have no row in the last process."""
    objective = objective_of(share(tanh_mlp(0, sizes=(5, 7, 6, 1)), kind), kind)
    known = {regularizers.nuclear_norm(): 0.01}
    fit = tacit.fit(tacit.endpoint_equations(objective, tacit.l2(), known=known))
    yield "known", describe(fit.with_error_bars(tacit.score_examples(fit).error_bars()))
    model = share(tanh_mlp(0, sizes=(5, 7, 6, 1)), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.2)
    averaged = [regularizers.nuclear_norm(), tacit.l1(zero_width=0.2), regularizers.spline(4)]
    averages = tacit.average_epochs(model, optimizer, epochs=3, averaged=averaged)
    train(model, optimizer, kind, lambda ended: ended and averages.end_epoch(), 3)
    objective = objective_of(model, kind)
    yield "averaged", describe(tacit.fit(averages.equations(objective, averaged)))
    at_mean = [regularizers.orthogonality(), tacit.l2()]
    yield "epochs", describe(tacit.fit(averages.equations(objective, at_mean)))


def low_rank(kind: str) -> Iterator[tuple[str, Any]]:
    """A matrix of low rank has equations along its row and column space."""
    model = tanh_mlp(0, sizes=(5, 7, 6, 1))
    with torch.no_grad():
        u, s, v = torch.linalg.svd(model[2].weight, full_matrices=False)
        model[2].weight.copy_((u[:, :3] * s[:3]) @ v[:3])
        model[0].weight[2:4] = 0.0
    objective = objective_of(share(model, kind), kind)
    for name, family in {
        "nuclear norm": [regularizers.nuclear_norm(), tacit.l2()],
        "rows of zeros": [regularizers.group_l2(), tacit.l1(name="lasso")],
    }.items():
        yield name, describe(tacit.fit(tacit.endpoint_equations(objective, family)))


def tokens(kind: str) -> Iterator[tuple[str, Any]]:
    """Per-token losses of a model with shared and frozen matrices."""
    generator = torch.Generator().manual_seed(1)
    sequences = torch.randint(0, 11, (24, 6), generator=generator)[own(24, kind)]
    batches = [(part,) for part in sequences.split(4)]
    model = share(token_model(0), kind)
    objective = tacit.Objective.from_batch_loss(model, token_losses, batches)
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2(), tacit.l1(name="lasso")]))
    scores = tacit.score_examples(fit)
    yield "endpoint", describe(fit.with_error_bars(scores.error_bars(), *scores.problems))


def differences(kind: str) -> Iterator[tuple[str, Any]]:
    """What a technique adds, without randomness."""
    model = share(tanh_mlp(0, sizes=(5, 7, 6, 1)), kind)
    plain = objective_of(model, kind)
    sam = techniques.sam(plain, 0.01)
    penalty = regularizers.gradient_norm(plain, power=1)
    yield "sam", describe(tacit.fit(tacit.difference_equations(sam, plain, penalty)))


def train(model: nn.Module, optimizer: Any, kind: str, after: Any, epochs: int) -> None:
    """Epochs over equal parts of every batch, so that all ways of sharing take the same steps."""
    orders = torch.Generator().manual_seed(0)
    each = 12 // processes(kind)
    for _ in range(epochs):
        for rows in torch.randperm(len(DATA[0]), generator=orders).split(12):
            mine = rows[number(kind) * each : (number(kind) + 1) * each]
            optimizer.zero_grad()
            F.mse_loss(model(DATA[0][mine]), DATA[1][mine]).backward()
            optimizer.step()
            after(False)
        after(True)


def steps(kind: str) -> Iterator[tuple[str, Any]]:
    """Recorded steps of SGD, and the flow that they follow."""
    model = share(tanh_mlp(0, sizes=(5, 7, 6, 1)), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.2)
    recorder = tacit.record(model, optimizer)
    train(model, optimizer, kind, lambda ended: None if ended else recorder.step(), 1)
    path = recorder.trajectory()
    objective = objective_of(model, kind)
    yield "steps", describe(tacit.fit(tacit.trajectory_equations(objective, path, tacit.l2())))
    flow = tacit.trajectory_equations(objective, path, tacit.l2(), reference=tacit.rk4(substeps=2))
    yield "flow", describe(tacit.fit(flow))


def epochs(kind: str) -> Iterator[tuple[str, Any]]:
    """Epochs of SGD with momentum, of AdamW, and with a layer norm after the weights."""
    for name, make, rate in (
        ("momentum", torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.2}),
        ("AdamW", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.2}),
    ):
        net = tanh_mlp(0, sizes=(5, 7, 6, 1))
        if name == "momentum":
            net = nn.Sequential(*net[:3], nn.LayerNorm(6).double(), *net[3:])
        model = share(net, kind)
        optimizer = make(model.parameters(), **rate)
        averages = tacit.average_epochs(model, optimizer, epochs=4)
        train(model, optimizer, kind, lambda ended, a=averages: ended and a.end_epoch(), 6)
        objective = objective_of(model, kind)
        decay = [metric_ridge(optimizer, model)] if name == "AdamW" else [tacit.l2()]
        yield name, describe(tacit.fit(averages.equations(objective, decay)))
        if name == "AdamW":
            penalties = list(optimizer_penalties(optimizer, model))
            yield "last", describe(tacit.fit(tacit.endpoint_equations(objective, penalties)))


def watched(kind: str) -> Iterator[tuple[str, Any]]:
    model = share(tanh_mlp(0, sizes=(5, 7, 6, 1)), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.2)
    objective = objective_of(model, kind)
    watch = tacit.watch(model, optimizer, objective, [tacit.l2()], every=4, budget=None)
    train(model, optimizer, kind, lambda ended: ended and watch.end_epoch(), 8)
    for row in watch.rows:
        yield str(row.update), describe(row.fit)


def products(kind: str) -> Iterator[tuple[str, Any]]:
    """Value, and norms of the gradient and of Hessian products."""
    objective = objective_of(share(tanh_mlp(0, sizes=(5, 7, 6, 1)), kind), kind)
    value, gradient = objective.value_and_gradient()
    product = objective.hvp(gradient)
    numbers = [value]
    for vector in (gradient, product):
        with objective.ranks:
            numbers.append(tacit.objective.params.norm(vector))
    yield "derivatives", {"strengths": [*numbers, float(objective.count)]}


def data_families(kind: str) -> Iterator[tuple[str, Any]]:
    """Penalties of the data, where every process has all parameters."""
    if kind != "alone" and not kind.startswith("copies"):
        return
    objective = objective_of(share(tanh_mlp(0, sizes=(5, 7, 6, 1)), kind), kind)
    for family in (
        regularizers.mean_of(objective),
        regularizers.input_jacobian(objective),
        regularizers.gradient_l1(objective, eps=1e-6),
        regularizers.hessian_trace(objective),
    ):
        fit = tacit.fit(tacit.endpoint_equations(objective, [family, tacit.l2()]))
        yield family.name, describe(fit)


def screened(kind: str) -> Iterator[tuple[str, Any]]:
    objective = objective_of(share(tanh_mlp(0, sizes=(5, 7, 6, 1)), kind), kind)
    screen = tacit.screen(objective, cost="weights")
    alone = {row.name: row.alone for row in screen.table}
    shared = [name for name in alone if name.startswith(("l2", "l1", "smooth", "power"))]
    yield "screen", {"strengths": [alone[name] for name in sorted(shared)]}

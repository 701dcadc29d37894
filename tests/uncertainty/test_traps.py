"""What once gave plausible wrong numbers: shuffled loaders, zero weights, schedules, rounding."""

import json
import math

import pytest
import torch
from support.models import random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit.equations.equations import EARLIER
from tacit.identifiability import ordered_shares, unique_shares


def scored(objective, regularizers, **options):
    found = tacit.fit(tacit.endpoint_equations(objective, regularizers))
    return tacit.score_examples(found, objective, regularizers, **options)


def grouped():
    groups = torch.arange(200) // 20
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(10, 3, generator=generator).double()[groups]
    y = X.sum(1, keepdim=True) + torch.randn(10, 1, generator=generator).double()[groups]
    torch.manual_seed(1)
    return nn.Linear(3, 1).double(), X, y, groups


def test_labels_beside_a_shuffled_loader_are_refused():
    model, X, y, groups = grouped()
    whole = scored(tacit.Objective(model, F.mse_loss, (X, y)), tacit.l2(), clusters=groups)
    assert whole.error_bars().freedom == 9
    loader = DataLoader(TensorDataset(X, y), batch_size=50, shuffle=True)
    shuffled = tacit.Objective(model, F.mse_loss, loader)
    with pytest.raises(tacit.InputError, match="another order"):
        scored(shuffled, tacit.l2(), clusters=groups)
    alone = scored(shuffled, tacit.l2()).error_bars().standard_errors["l2"]
    assert alone == pytest.approx(
        scored(tacit.Objective(model, F.mse_loss, (X, y)), tacit.l2())
        .error_bars()
        .standard_errors["l2"]
    )
    still = DataLoader(TensorDataset(X, y), batch_size=50)
    again = scored(tacit.Objective(model, F.mse_loss, still), tacit.l2(), clusters=groups)
    torch.testing.assert_close(again.values, whole.values)


def test_examples_without_weight_were_not_drawn():
    model, (X, y) = tanh_mlp(1), random_data(1, count=60)
    weights = torch.zeros(60).double()
    weights[5:17] = 1
    weighted = scored(
        tacit.Objective(model, F.mse_loss, (X, y), weights=weights), tacit.l2(), population=60
    )
    cut = scored(tacit.Objective(model, F.mse_loss, (X[5:17], y[5:17])), tacit.l2(), population=60)
    assert weighted.error_bars().basis == cut.error_bars().basis == "12 of 60 examples"
    assert weighted.error_bars().freedom == 11
    assert weighted.error_bars().standard_errors == pytest.approx(
        cut.error_bars().standard_errors, rel=1e-9
    )
    one = torch.zeros(60).double()
    one[3] = 1
    with pytest.raises(tacit.InputError, match="one example with weight"):
        scored(tacit.Objective(model, F.mse_loss, (X, y), weights=one), tacit.l2())


@pytest.mark.parametrize("rates", [[0.1] * 20, [0.1 * (1 - t / 20) for t in range(20)]])
def test_an_epoch_with_a_schedule_weighs_points_by_their_steps(rates):
    """With the full batch, a quadratic loss and ridge the summed steps are an exact equation."""
    X, y = random_data(2)
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.2)
    watch = tacit.average_epochs(model, optimizer)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        F.mse_loss(model(X), y).backward()
        optimizer.step()
    watch.end_epoch()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    found = tacit.fit(watch.equations(objective, tacit.l2()))
    assert found.strengths["l2"] == pytest.approx(0.1, rel=1e-9)


def test_epochs_survive_unused_frozen_and_skipped_parameters():
    X, y = random_data(3)
    model = nn.ModuleDict({"used": nn.Linear(5, 1).double(), "idle": nn.Linear(2, 2).double()})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    watch = tacit.average_epochs(model, optimizer)

    def step():
        optimizer.zero_grad()
        F.mse_loss(model["used"](X), y).backward()
        optimizer.step()

    step()
    watch.end_epoch()
    assert len(watch) == 1
    model["used"].bias.requires_grad_(False)
    step()
    watch.end_epoch()
    assert len(watch) == 1  # what was kept before is of another system
    step()
    model["used"].bias.requires_grad_(True)
    with pytest.raises(tacit.InputError, match="within an epoch"):
        step()
    optimizer.param_groups[0]["lr"] = 0.0
    fresh = tacit.average_epochs(model, optimizer)
    step_error = pytest.raises(tacit.InputError, match="step size of zero")
    model["used"].bias.requires_grad_(False)
    watch.close()
    step()
    with step_error:
        fresh.end_epoch()


def test_epochs_beside_an_endpoint_keep_their_allowance():
    X, y = random_data(4, count=64)
    torch.manual_seed(0)
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.2)
    watch = tacit.average_epochs(model, optimizer, epochs=6)
    for _ in range(40):
        for rows in torch.randperm(64).split(8):
            optimizer.zero_grad()
            F.mse_loss(model(X[rows]), y[rows]).backward()
            optimizer.step()
        watch.end_epoch()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    epochs = watch.equations(objective, tacit.l2())
    more = tacit.stack([epochs, tacit.endpoint_equations(objective, tacit.l2())])
    bars = tacit.fit(more).error_bars["training"]
    assert "allowance" in bars.basis
    assert bars.measured


def test_unequal_groups_of_draws_score_the_target_that_was_fitted():
    """Against the derivative of λ̂ by an example's weight."""
    X, y = random_data(5, count=12, outputs=2)
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Dropout(0.4), nn.Linear(4, 2)).double()

    def fitted(weights):
        plain = tacit.Objective(model, F.mse_loss, (X, y), weights=weights)
        options = {"training": True, "draws": 9, "seed": 1, "weights": weights}
        technique = tacit.Objective(model, F.mse_loss, (X, y), **options)
        regularizers = [tacit.l2(), tacit.regularizers.explicit_dropout(plain)]
        found = tacit.fit(tacit.difference_equations(technique, plain, regularizers))
        return found, technique, plain, regularizers

    ones = torch.ones(12).double()
    found, technique, plain, regularizers = fitted(ones)
    scores = tacit.score_examples(found, technique, regularizers, plain=plain)
    size = 1e-5
    for place in (0, 7):
        ends = []
        for sign in (1, -1):
            weights = ones.clone()
            weights[place] += sign * size
            moved = fitted(weights)[0].strengths
            ends.append(torch.tensor(list(moved.values()), dtype=torch.float64))
        slope = (ends[0] - ends[1]) / (2 * size)
        torch.testing.assert_close(scores.values[place] / 12, slope, rtol=1e-4, atol=1e-8)


def test_penalties_that_the_loss_does_not_feel_are_scored():
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(5, 32, bias=False), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1)
    )
    X, y = (part.float() for part in random_data(6))
    family = tacit.layerwise(tacit.l2())
    found = tacit.estimate(model, F.mse_loss, (X, y), family, population=math.inf)
    assert "sampling" in found.standard_errors


def test_batches_that_pull_nowhere_and_weights_of_some_batches():
    X = torch.eye(4).double()
    y = torch.tensor([[1.0], [2.0], [0.0], [0.0]]).double()
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data = torch.tensor([[0.5, 1.0, 0.0, 0.0]]).double()
    scores = scored(tacit.Objective(model, F.mse_loss, (X, y), batch_size=2), tacit.l2())
    assert scores.values[2:].abs().max() == scores.values[2:].abs().min()

    def losses(model, batch):
        each = (model(batch[0]) - batch[1]).square()[:, 0]
        return (each, torch.full_like(each, 2.0)) if len(each) == 3 else each

    data = [(X[:3], y[:3]), (X[3:], y[3:] + 1)]
    mixed = scored(tacit.Objective.from_batch_loss(model, losses, data), tacit.l2())
    assert mixed.weights is not None
    assert mixed.weights.tolist() == [2, 2, 2, 1]


def test_a_fit_held_at_zero_is_returned_and_says_so():
    X = random_data(7)[0]
    model = tanh_mlp(0)
    negative = tacit.regularizer(
        "up", lambda params: -sum(p.square().sum() for p in params.values())
    )
    target = model(X).detach() * 2  # weights want to grow: ridge comes out below zero
    for candidate in (tacit.l2(), negative):
        found = tacit.estimate(
            model, F.mse_loss, (X, target), candidate, nonnegative=True, population=1000
        )
        if not any(found.strengths.values()):
            assert "holds every strength at zero" in found.summary()
            break
    else:
        pytest.fail("neither sign was held at zero")


def test_new_error_bars_of_sampling_replace_what_the_old_ones_said():
    model, data = tanh_mlp(1), random_data(1, count=20)
    objective = tacit.Objective(model, F.mse_loss, data)
    found = tacit.fit(tacit.endpoint_equations(objective, tacit.l2()))
    rough = tacit.score_examples(found, objective, tacit.l2())
    whole = tacit.score_examples(found, objective, tacit.l2(), population=20.0)
    noisy = found.with_error_bars(rough.error_bars(), tacit.Problem("noisy", "n", "r", ("l2",)))
    assert any(problem.kind == "noisy" for problem in noisy.problems)
    settled = noisy.with_error_bars(whole.error_bars(), *whole.problems)
    assert not any(problem.kind == "noisy" for problem in settled.problems)
    assert "nothing was sampled" in settled.summary()
    assert json.dumps(settled.to_dict(), allow_nan=False)
    with pytest.raises(tacit.InputError, match="one dimension"):
        tacit.score_examples(found, objective, tacit.l2(), clusters=torch.zeros(20, 1))


def test_files_of_the_earlier_format_still_load(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    objective = tacit.Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    equations = tacit.endpoint_equations(objective, tacit.l2())
    equations.save(tmp_path / "new")
    with safe_open(tmp_path / "new", framework="pt") as file:
        factors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        head = json.loads(file.metadata()["head"])
    for source in head["sources"]:
        del source["epoch"]
    save_file(factors, tmp_path / "old", metadata={"format": EARLIER, "head": json.dumps(head)})
    old = tacit.Equations.load(tmp_path / "old")
    assert torch.equal(old.factor(), equations.factor())
    assert not old.sources[0].epoch


def test_families_of_one_name_are_all_there():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).double()
    X = torch.randn(40, 4).double()
    scopes = [lambda n, a=a: n[0] in (str(a), str(a + 1)) for a in (0, 2, 4)]
    families = [tacit.layerwise(tacit.l2(scope=scope)) for scope in scopes]
    found = tacit.estimate(model, F.mse_loss, (X, X.flip(1)), families)
    assert sum(ordered_shares(found).values()) == pytest.approx(found.explained)
    assert list(unique_shares(found)) == ["l2", "l2[*]", "l2[*2]"]


def test_a_near_pair_is_named_beside_an_exact_one_and_split_signs_mean_nothing():
    X, y = random_data(8, count=80)
    model = tanh_mlp(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    lasso = tacit.smooth_l1(0.1)
    for _ in range(400):
        optimizer.zero_grad()
        added = 0.01 * lasso.value(dict(model.named_parameters())).sum()
        (F.mse_loss(model(X), y) + added).backward()
        optimizer.step()
    candidates = [
        tacit.l2(),
        tacit.l2(name="copy"),
        lasso,
        tacit.smooth_l1(0.101, name="near"),
    ]
    found = tacit.estimate(model, F.mse_loss, (X, y), candidates)
    pairs = {frozenset(p.names) for p in found.problems if p.kind == "collinear"}
    assert pairs == {frozenset({"l2", "copy"}), frozenset({"smooth_l1", "near"})}
    assert not any(p.kind == "chance" and "smooth_l1" in p.names for p in found.problems)
    down = tacit.regularizer("down", lambda p: -sum(t.square().sum() for t in p.values()))
    split = tacit.estimate(model, F.mse_loss, (X, y), [tacit.l2(), down])
    assert not any(p.kind == "negative" for p in split.problems)


def test_steps_that_a_fused_optimizer_skips_take_no_time():
    """As GradScaler has it: step() is called, `found_inf` is set, and nothing moves."""
    X, y = random_data(9)
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.2, fused=True)
    watch = tacit.average_epochs(model, optimizer)
    for step in range(10):
        optimizer.zero_grad()
        F.mse_loss(model(X), y).backward()
        optimizer.found_inf = torch.tensor(float(step % 2))
        optimizer.step()
    watch.end_epoch()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    found = tacit.fit(watch.equations(objective, tacit.l2()))
    assert found.strengths["l2"] == pytest.approx(0.1, rel=1e-9)

"""The model is only borrowed: nothing of it changes, and its randomness is the seed's alone."""

import random

import numpy as np
import pytest
import torch
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tacit
from tacit import Objective, reference


class Counting(nn.Module):
    """Writes into its buffers at every forward pass, in all the ways there are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", None)

    def forward(self, x):
        self.calls += 1
        self.mean = x.detach().mean(0)
        self.cache = x.detach()
        return x


class Restless:
    """Batches that draw from every global random state on their way."""

    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        for batch in self.batches:
            random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002 # the global state
            yield batch


def lived_in_model():
    """A model as training leaves it: modes mixed, one layer frozen, gradients in place."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Counting(), nn.Linear(4, 4), nn.Tanh()
    )
    model.append(nn.Linear(4, 1)).double().train()
    model[2].eval()
    model[4].requires_grad_(False)
    model[0].weight.grad = torch.full_like(model[0].weight, 7.0)
    return model


def batches(seed, sizes=(9, 9, 2)):
    X, y = random_data(seed, count=sum(sizes))
    return list(zip(X.split(sizes), y.split(sizes), strict=True))


def state(model):
    """All that a borrower could leave changed, as one comparable value."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "modes": [module.training for module in model.modules()],
        "values": {n: t.tolist() for n, t in tensors.items()},
        "objects": {n: id(t) for n, t in tensors.items()},
        "gradients": [p.grad if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "trainable": [p.requires_grad for p in model.parameters()],
        "random": (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()),  # noqa: NPY002 # the global state
    }


CALLS = {
    "value": lambda o: o.value(),
    "gradient": lambda o: o.gradient(),
    "hvp": lambda o: o.hvp(o.params),
    "rounding": lambda o: o.rounding(),
    "another point": lambda o: o.gradient({n: p + 1 for n, p in o.params.items()}),
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_of_the_model_or_the_random_states_changes(call, training):
    model = lived_in_model()
    before = state(model)
    call(Objective(model, F.mse_loss, Restless(*batches(1)), training=training, draws=2))
    assert state(model) == before


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_changes_after_a_failure_in_the_middle_of_a_pass(call, training):
    def loss(output, target):
        if armed:
            torch.rand(1)
            raise RuntimeError("out of memory")
        return F.mse_loss(output, target)

    armed = False
    model = lived_in_model()
    before = state(model)
    objective = Objective(model, loss, Restless(*batches(1)), training=training)
    armed = True
    with pytest.raises(RuntimeError, match="out of memory"):
        call(objective)
    assert state(model) == before


def test_nothing_changes_after_a_failure_of_the_data():
    def halting():
        yield from batches(1)
        if armed:
            raise OSError("disk gone")

    class Halting:
        def __iter__(self):
            return halting()

    armed = False
    model = lived_in_model()
    objective = Objective(model, F.mse_loss, Halting())
    before, armed = state(model), True
    with pytest.raises(OSError, match="disk gone"):
        objective.gradient()
    assert state(model) == before


def test_derivatives_are_taken_under_no_grad_too():
    objective = Objective(tanh_mlp(0), F.mse_loss, random_data(1))
    expected = CALLS["gradient"](objective), CALLS["hvp"](objective)
    with torch.no_grad():
        found = CALLS["gradient"](objective), CALLS["hvp"](objective)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(reference.flat(a), reference.flat(b))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 3), nn.Linear(3, 6)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.embedding(x)))


def test_tied_weights_count_once():
    torch.manual_seed(0)
    model, x = Tied().double(), torch.arange(18) % 6
    gradient = Objective(model, F.cross_entropy, (x, (x + 1) % 6), batch_size=5).gradient()
    F.cross_entropy(model(x), (x + 1) % 6).backward()
    assert list(gradient) == ["embedding.weight", "head.bias"]
    for name, tensor in gradient.items():
        torch.testing.assert_close(tensor, model.get_parameter(name).grad, rtol=1e-12, atol=1e-15)


def test_frozen_parameters_are_left_out_and_still_used():
    model, data = tanh_mlp(0), random_data(1)
    model[0].weight.requires_grad_(False)
    gradient = Objective(model, F.mse_loss, data).gradient()
    assert list(gradient) == ["0.bias", "2.weight", "2.bias"]
    oracle = reference.gradient(loss_of(model, F.mse_loss, data), params_of(model))
    torch.testing.assert_close(reference.flat(gradient), oracle, rtol=1e-12, atol=1e-15)


def by_submodule(model):
    return lambda m, batch: (m[2](m[1](m[0](batch[0]))) - batch[1]).square()[:, 0]


def by_closure(model):
    return lambda m, batch: (model(batch[0]) - batch[1]).square()[:, 0]


def by_captured_submodule(model):
    body, head = model[:2], model[2]
    return lambda m, batch: (head(body(batch[0])) - batch[1]).square()[:, 0]


@pytest.mark.parametrize("make", [by_submodule, by_closure, by_captured_submodule])
def test_every_reference_to_the_model_sees_the_swapped_parameters(make):
    model, data = tanh_mlp(0), random_data(1)
    there = {n: p + 0.5 for n, p in params_of(model).items()}
    found = Objective.from_batch_loss(model, make(model), data, batch_size=9)
    oracle = reference.gradient(loss_of(model, F.mse_loss, data), there)
    torch.testing.assert_close(
        reference.flat(found.gradient(there)), oracle, rtol=1e-12, atol=1e-14
    )


def noisy_mlp(seed=0):
    model = tanh_mlp(seed)
    return nn.Sequential(model[0], model[1], nn.Dropout(0.5), model[2])


def drawn(data, *, model=None, **options):
    return Objective(model or noisy_mlp(), F.mse_loss, data, training=True, **options)


def test_training_makes_dropout_active():
    model, (X, _) = noisy_mlp(), random_data(1, count=8)
    data = X, model.eval()(X).detach()
    assert Objective(model, F.mse_loss, data).value() == 0
    values = [drawn(data, model=model, seed=s, draws=50).value() for s in range(20)]
    # The variance of Σ w h m/½ over fair masks m is Σ (w h)².
    expected = (model[3].weight * model[:2](X)).detach().square().sum(1).mean()
    error = np.std(values) / len(values) ** 0.5
    assert np.mean(values) == pytest.approx(expected.item(), abs=4 * error)
    assert expected > 20 * error


def test_batch_norm_and_its_statistics_stay_in_eval():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().train()
    data = random_data(1)
    value = Objective(model, F.mse_loss, data, training=True).value()
    assert value == Objective(model, F.mse_loss, data).value()
    assert value == pytest.approx(F.mse_loss(model.eval()(data[0]), data[1]).item(), rel=1e-12)


def test_the_same_seed_gives_the_same_bytes_whatever_the_global_state():
    data = random_data(1)
    model = noisy_mlp()
    found = []
    for global_seed, seed in [(0, 3), (1, 3), (0, 4)]:
        objective = drawn(data, model=model, seed=seed, draws=2, batch_size=9)
        torch.manual_seed(global_seed)
        found.append(reference.flat(objective.gradient()))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2], rtol=1e-3)


def test_several_draws_are_the_mean_of_single_ones():
    objective = drawn(random_data(1), draws=4, seed=5, batch_size=9)
    value, gradient = objective.value_and_gradient()
    singles = [objective.value_and_gradient(draws=[i]) for i in range(4)]
    assert value == pytest.approx(np.mean([v for v, _ in singles]), rel=1e-12)
    gradients = torch.stack([reference.flat(g) for _, g in singles])
    assert len(gradients.unique(dim=0)) == 4
    torch.testing.assert_close(reference.flat(gradient), gradients.mean(0), rtol=1e-12, atol=1e-15)
    assert value == objective.value()


def test_the_draws_of_a_batch_do_not_depend_on_other_batches():
    (a, b), (c,) = batches(1, sizes=(8, 8)), batches(2, sizes=(5,))

    def sum_over(*parts):
        return drawn(list(parts)).value() * sum(len(part[0]) for part in parts)

    second = sum_over(a, b) - sum_over(a)
    assert second == pytest.approx(sum_over(c, b) - sum_over(c), rel=1e-12)
    assert second != pytest.approx(sum_over(b), rel=1e-3)  # as the first batch it has other masks


def test_dropout_called_as_a_function_is_refused_with_its_cause_and_averaged_in_training():
    class Forgetful(nn.Linear):
        def forward(self, x):
            return super().forward(F.dropout(x))

    torch.manual_seed(0)
    model, data = Forgetful(5, 1).double(), random_data(1)
    with pytest.raises(tacit.InputError, match=r"not deterministic.*dropout.*training=True"):
        Objective(model, F.mse_loss, data)
    assert drawn(data, model=model).value() == drawn(data, model=model).value()


def test_noise_that_no_torch_seed_reaches_is_refused_in_training_too():
    class Loud(nn.Linear):
        def forward(self, x):
            return super().forward(x) + random.random()

    with pytest.raises(tacit.InputError, match=r"not deterministic.*torch's seed does not control"):
        drawn(random_data(1), model=Loud(5, 1).double())


@pytest.mark.parametrize(
    "noise",
    [lambda: torch.rand(()), lambda: np.random.rand(), random.random],  # noqa: NPY002 # the global state
    ids=["torch", "numpy", "python"],
)
def test_a_randomly_augmenting_data_set_is_refused(noise):
    class Augmented(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"pair": (torch.ones(5, dtype=torch.float64) * noise(), torch.ones(1))}

    with pytest.raises(tacit.InputError, match=r"first item differs.*without augmentation"):
        Objective.from_batch_loss(tanh_mlp(0), lambda m, b: m(b["pair"][0])[:, 0], Augmented())


def test_data_that_changes_length_between_passes_is_refused():
    data = batches(1)
    objective = Objective(tanh_mlp(0), F.mse_loss, data)
    objective.gradient()
    data.pop()
    with pytest.raises(tacit.InputError, match=r"gave 18 examples.*earlier pass gave 20.*the same"):
        objective.gradient()
    data.clear()
    with pytest.raises(tacit.InputError, match=r"gave 0 examples.*starts anew"):
        objective.value()


def test_a_loaders_own_generator_stays_where_it_was():
    data = TensorDataset(*random_data(30))
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
    before = generator.get_state()
    Objective(tanh_mlp(0), F.mse_loss, loader).gradient()
    assert torch.equal(generator.get_state(), before)


def test_frozen_parameters_may_be_given_as_they_are_and_not_otherwise():
    model = tanh_mlp(1)
    model[0].requires_grad_(False)
    objective = Objective(model, F.mse_loss, random_data(31))
    everything = {n: p.clone() for n, p in model.named_parameters()}
    assert objective.value(everything) == objective.value()
    everything["0.bias"] += 1
    with pytest.raises(tacit.InputError, match=r"unknown 0\.bias"):
        objective.value(everything)


def test_gradients_are_taken_under_inference_mode_too():
    objective = Objective(tanh_mlp(2), F.mse_loss, random_data(32))
    expected = objective.gradient()
    with torch.inference_mode():
        found = objective.gradient()
    assert all(torch.equal(found[n], expected[n]) for n in expected)

"""The model is only borrowed: a call changes neither the model nor any random state."""

import random

import numpy as np
import pytest
import torch
from support.models import loss_of, params_of, random_data, tanh_mlp
from support.objectives import random_batches
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tacit import Objective, reference


class BufferWriter(nn.Module):
    """Writes into its buffers at every forward pass, in place, by assignment and from None."""

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


class RandomReader:
    """Batches that draw from every global random state while they are read."""

    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        for batch in self.batches:
            random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002 # the global state
            yield batch


def model_after_training():
    """A model as training leaves it: modes mixed, one layer frozen, gradients in place."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 4),
        nn.BatchNorm1d(4),
        nn.Dropout(0.5),
        BufferWriter(),
        nn.Linear(4, 4),
        nn.Tanh(),
    )
    model.append(nn.Linear(4, 1)).double().train()
    model[2].eval()
    model[4].requires_grad_(False)
    model[0].weight.grad = torch.full_like(model[0].weight, 7.0)
    return model


def state_of(model):
    """Everything that a call could leave changed, as one comparable value."""
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
def test_a_call_changes_neither_the_model_nor_random_states(call, training):
    model = model_after_training()
    before = state_of(model)
    call(Objective(model, F.mse_loss, RandomReader(*random_batches(1)), training=training, draws=2))
    assert state_of(model) == before


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_loss_that_raises_leaves_everything_unchanged(call, training):
    def loss(output, target):
        if failing:
            torch.rand(1)
            raise RuntimeError("out of memory")
        return F.mse_loss(output, target)

    failing = False
    model = model_after_training()
    before = state_of(model)
    objective = Objective(model, loss, RandomReader(*random_batches(1)), training=training)
    failing = True
    with pytest.raises(RuntimeError, match="out of memory"):
        call(objective)
    assert state_of(model) == before


def test_data_that_raises_leaves_everything_unchanged():
    class FailingData:
        def __iter__(self):
            yield from random_batches(1)
            if failing:
                raise OSError("disk gone")

    failing = False
    model = model_after_training()
    objective = Objective(model, F.mse_loss, FailingData())
    before, failing = state_of(model), True
    with pytest.raises(OSError, match="disk gone"):
        objective.gradient()
    assert state_of(model) == before


def loss_by_submodules(model):
    return lambda m, batch: (m[2](m[1](m[0](batch[0]))) - batch[1]).square()[:, 0]


def loss_by_closure(model):
    return lambda m, batch: (model(batch[0]) - batch[1]).square()[:, 0]


def loss_by_captured_submodules(model):
    body, head = model[:2], model[2]
    return lambda m, batch: (head(body(batch[0])) - batch[1]).square()[:, 0]


@pytest.mark.parametrize(
    "make_loss", [loss_by_submodules, loss_by_closure, loss_by_captured_submodules]
)
def test_every_reference_to_the_model_sees_the_swapped_parameters(make_loss):
    model, data = tanh_mlp(0), random_data(1)
    point = {n: p + 0.5 for n, p in params_of(model).items()}
    objective = Objective.from_batch_loss(model, make_loss(model), data, batch_size=9)
    expected = reference.gradient(loss_of(model, F.mse_loss, data), point)
    torch.testing.assert_close(
        reference.flat(objective.gradient(point)), expected, rtol=1e-12, atol=1e-14
    )


class Checkpointed(nn.Module):
    """Runs its first half a second time during the backward pass."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        first, activation, last = self.model
        return last(checkpoint(lambda z: activation(first(z)), x, use_reentrant=False))


def test_activation_checkpointing_sees_the_same_parameters_in_the_backward_pass():
    model, data = tanh_mlp(0), random_data(0)
    plain = Objective(model, F.mse_loss, data)
    checkpointed = Objective(Checkpointed(model), F.mse_loss, data)
    params = {n: p + 0.5 for n, p in params_of(model).items()}
    prefixed = {f"model.{n}": p for n, p in params.items()}
    for name, expected in plain.gradient(params).items():
        torch.testing.assert_close(checkpointed.gradient(prefixed)[f"model.{name}"], expected)
    product = checkpointed.hvp(prefixed, prefixed)
    for name, expected in plain.hvp(params, params).items():
        torch.testing.assert_close(product[f"model.{name}"], expected)


def test_batch_norm_stays_in_eval_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().train()
    data = random_data(1)
    value = Objective(model, F.mse_loss, data, training=True).value()
    assert value == Objective(model, F.mse_loss, data).value()
    assert value == pytest.approx(F.mse_loss(model.eval()(data[0]), data[1]).item(), rel=1e-12)


def test_the_state_of_a_loaders_generator_is_restored():
    data = TensorDataset(*random_data(30))
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
    before = generator.get_state()
    Objective(tanh_mlp(0), F.mse_loss, loader).gradient()
    assert torch.equal(generator.get_state(), before)

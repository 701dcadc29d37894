"""The model is only borrowed: a call changes neither the model nor any random state."""

import copy
import functools
import operator
import random

import numpy as np
import pytest
import torch
from support import hard_to_borrow
from support.models import loss_of, params_of, random_data, tanh_mlp
from support.objectives import random_batches
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import tacit
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
    data = RandomReader(*random_batches(1))
    draws = 2 if training else 1
    call(Objective(model, F.mse_loss, data, training=training, draws=draws, batch_norm="batch"))
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
    data = RandomReader(*random_batches(1))
    objective = Objective(model, loss, data, training=training, batch_norm="batch")
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
    objective = Objective(model, F.mse_loss, FailingData(), batch_norm="batch")
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


def test_batch_norm_with_running_statistics_stays_in_eval_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().train()
    data = random_data(1)
    value = Objective(model, F.mse_loss, data, training=True, batch_norm="running").value()
    assert value == Objective(model, F.mse_loss, data, batch_norm="running").value()
    assert value == pytest.approx(F.mse_loss(model.eval()(data[0]), data[1]).item(), rel=1e-12)


def test_the_state_of_a_loaders_generator_is_restored():
    data = TensorDataset(*random_data(30))
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
    before = generator.get_state()
    Objective(tanh_mlp(0), F.mse_loss, loader).gradient()
    assert torch.equal(generator.get_state(), before)


def brute_force_gradient(model, data, shift):
    """The gradient of the user's own loop, with all weights moved by the shift."""
    params = dict(model.eval().named_parameters())
    with torch.no_grad():
        for parameter in params.values():
            parameter += shift
    gradients = torch.autograd.grad(F.mse_loss(model(data[0]), data[1]), list(params.values()))
    return dict(zip(params, gradients, strict=True))


def attributes_of(model):
    """The identities of all attributes of all modules, and of what their lists and dicts hold."""
    states = []
    for module in model.modules():
        for name, value in vars(module).items():
            states.append((id(module), name, id(value)))
            if isinstance(value, dict):
                states += [(key, id(item)) for key, item in value.items()]
            if isinstance(value, list):
                states += [id(item) for item in value]
    return states


WRONG_SECOND_DERIVATIVES = (
    "weight_norm", "shared weight_norm", "old weight_norm", "hooks", "gradient hook",
)  # fmt: skip
"""Torch's own double backward through these is not the derivative of their gradient."""


@pytest.mark.parametrize("name", hard_to_borrow.MODELS)
def test_gradients_are_exact_and_the_model_is_untouched(name):
    data = random_data(3, inputs=4, outputs=4)
    model = hard_to_borrow.build(name)
    expected = brute_force_gradient(hard_to_borrow.build(name), data, 0.1)
    before = state_of(model), attributes_of(model), str(model.state_dict())
    objective = Objective(model, F.mse_loss, data, batch_size=16)
    gradient = objective.gradient({n: p + 0.1 for n, p in objective.params.items()})
    if name in WRONG_SECOND_DERIVATIVES:
        with pytest.raises(tacit.InputError, match="second derivatives of the loss are wrong in 0"):
            objective.hvp(objective.params)
    else:
        objective.hvp(objective.params)
    objective.directional_derivatives([objective.params])
    assert list(gradient) == list(expected)
    for tensor, by_brute_force in zip(gradient.values(), expected.values(), strict=True):
        torch.testing.assert_close(tensor, by_brute_force, rtol=1e-12, atol=1e-15)
    assert (state_of(model), attributes_of(model), str(model.state_dict())) == before


@pytest.mark.parametrize("name", ["[l, tanh, l]", "ModuleList([b]*3)", "siamese", "LSTM"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_optimizers_still_train_a_shared_model_after_an_interruption(name, error):
    def loss(output, target):
        if failing and not next(calls, 0):
            raise error
        return F.mse_loss(output, target)

    failing, calls = False, iter([1])
    data = random_data(3, inputs=4, outputs=4)
    model = hard_to_borrow.build(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    objective = Objective(model, loss, data, batch_size=16)
    before, failing = (state_of(model), attributes_of(model)), True
    with pytest.raises(error):
        objective.gradient()
    assert (state_of(model), attributes_of(model)) == before
    weights = [p.clone() for p in model.parameters()]
    optimizer.zero_grad()
    F.mse_loss(model(data[0]), data[1]).backward()
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    assert not any(map(torch.equal, weights, model.parameters()))


def test_a_module_under_two_names_gives_the_strength_that_trained_it():
    torch.manual_seed(0)
    model, (X, _) = hard_to_borrow.shared_in_sequential().double(), random_data(3, inputs=4)
    data = (X, torch.sin(2 * X.roll(1, 1)))
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        ridge = sum(p.square().sum() for p in model.parameters())
        value = F.mse_loss(model(data[0]), data[1]) + 0.014 * ridge
        value.backward()
        return value

    optimizer.step(closure)
    fit = tacit.estimate(model, F.mse_loss, data, [tacit.l2()])
    assert fit.strengths["l2"] == pytest.approx(0.014, rel=1e-4)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_the_strength_is_that_of_all_parameters_of_a_shared_layer():
    """Before, the second pass saw a plain tensor in the layer, and left it out of the equations."""
    torch.manual_seed(0)
    layer, (X, y) = nn.Linear(4, 4), random_data(3, inputs=4)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 1)).double()
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(F.mse_loss(model(X), y), parameters)
    theta, gradient = (
        torch.cat([t.detach().flatten() for t in tensors]) for tensors in (parameters, gradients)
    )
    for _ in range(2):
        fit = tacit.estimate(model, F.mse_loss, (X, y), [tacit.l2()])
        assert fit.strengths["l2"] == pytest.approx(float(-gradient @ theta / (2 * theta @ theta)))
    assert all(map(operator.is_, model.parameters(), parameters))


def parameter_in_a_closure():
    model, weight = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4).weight
    model.weight = weight
    model.forward = lambda x: model[0](x) @ weight
    return model


def parameter_in_partial():
    model = nn.Sequential(nn.Linear(4, 4))
    model.forward = functools.partial(lambda w, x: model[0](x) @ w, model[0].weight)
    return model


def view_made_beforehand():
    model = hard_to_borrow.FromFunction(lambda m, x: x @ m.view)
    model.flat = nn.Parameter(torch.randn(16))
    model.__dict__["view"] = model.flat.view(4, 4)
    return model


def unregistered_modules():
    model = hard_to_borrow.FromFunction(lambda m, x: m.parts[0](m.layer(x)), layer=nn.Linear(4, 4))
    model.parts = [nn.Linear(4, 4)]
    return model


def unregistered_parameter():
    model = hard_to_borrow.FromFunction(
        lambda m, x: m.layer(x) * m.scales[0], layer=nn.Linear(4, 4)
    )
    model.scales = [nn.Parameter(torch.ones(4))]
    return model


def forward_of_another_model():
    original = hard_to_borrow.patched_closure()
    return copy.deepcopy(original)


def clamped_in_forward():
    def forward(m, x):
        m.layer.weight.data.clamp_(-0.1, 0.1)
        return m.layer(x)

    return hard_to_borrow.FromFunction(forward, layer=nn.Linear(4, 4))


def rescaled_embedding():
    embedding = nn.Embedding(2, 4, max_norm=100.0)
    return hard_to_borrow.FromFunction(lambda m, x: m.layer((x > 0).long()).sum(1), layer=embedding)


def reentrant_checkpoint():
    def forward(m, x):
        return checkpoint(m.inner, x.requires_grad_(), use_reentrant=True) + m.layer(x)

    return hard_to_borrow.FromFunction(forward, layer=nn.Linear(4, 4), inner=nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (parameter_in_a_closure, "by a reference outside of the model's modules"),
        (parameter_in_partial, "by a reference outside of the model's modules"),
        (view_made_beforehand, "by a reference outside of the model's modules"),
        (unregistered_modules, "'parts' that are not registered"),
        (unregistered_parameter, "'scales' that are not registered"),
        (forward_of_another_model, "parameters of another model"),
        (clamped_in_forward, r"writes into parameter 'layer\.weight'"),
        (rescaled_embedding, r"writes into parameter 'layer\.weight'"),
        (reentrant_checkpoint, "use_reentrant=False"),
    ],
)
def test_parameters_that_cannot_be_swapped_are_refused(build, message):
    torch.manual_seed(0)
    model, (X, y) = build(), random_data(3, inputs=4, outputs=4)
    before = state_of(model), attributes_of(model)
    with pytest.raises(tacit.InputError, match=message):
        tacit.estimate(model, F.mse_loss, (X.float(), y.float()), [tacit.l2()])
    assert (state_of(model), attributes_of(model)) == before


def test_parameters_may_be_tied_in_forward():
    model, data = hard_to_borrow.tied_in_forward().double(), random_data(3, inputs=4, outputs=4)
    gradient = Objective(model, F.mse_loss, data).gradient()
    expected = brute_force_gradient(model, data, 0.0)
    for name, tensor in expected.items():
        torch.testing.assert_close(gradient[name], tensor, rtol=1e-12, atol=1e-15)


def test_nested_logs_and_counters_do_not_grow():
    model = hard_to_borrow.build("nested log and counter")
    data = random_data(3, inputs=4, outputs=4)
    Objective(model, F.mse_loss, data, batch_size=16).gradient()
    assert (model.log, model.count.tolist(), len(model.words)) == ({"calls": []}, [0.0], 10000)


def test_a_user_s_cache_of_parametrizations_is_not_used():
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 1)).double()
    objective = Objective(layer, F.mse_loss, random_data(1))
    expected = objective.gradient()
    with nn.utils.parametrize.cached():
        layer(random_data(1)[0])
        gradient = objective.gradient()
    for name, tensor in expected.items():
        assert torch.equal(gradient[name], tensor)


def test_hooks_after_the_gradient_is_accumulated_are_refused():
    model = nn.Linear(5, 1).double()
    model.weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1, 1))
    with pytest.raises(tacit.InputError, match=r"'weight' has a hook.*register_hook"):
        Objective(model, F.mse_loss, random_data(1))


def test_estimate_works_in_inference_mode():
    model, data = tanh_mlp(0), random_data(1)
    expected = tacit.estimate(model, F.mse_loss, data, [tacit.l2()]).strengths
    with torch.inference_mode():
        assert tacit.estimate(model, F.mse_loss, data, [tacit.l2()]).strengths == expected


def test_parts_in_eval_mode_of_a_model_in_training_stay_so():
    """The dropout of a frozen backbone is not active in training."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5))
    model, data = nn.Sequential(backbone, nn.Linear(4, 1)).double().train(), random_data(1)
    backbone.eval()
    objective = Objective(model, F.mse_loss, data, training=True, draws=2)
    assert objective.value() == pytest.approx(F.mse_loss(model(data[0]), data[1]).item())
    assert Objective(model.eval(), F.mse_loss, data, training=True).value() != objective.value()


def test_a_frozen_part_outside_of_the_model_is_a_constant():
    torch.manual_seed(0)
    backbone, head, data = nn.Linear(5, 4).double(), nn.Linear(4, 1).double(), random_data(1)

    def losses(model, batch):
        return (model(backbone(batch[0]).tanh()) - batch[1]).square()[:, 0]

    gradient = Objective.from_batch_loss(head, losses, data).gradient()
    losses(head, data).mean().backward()
    torch.testing.assert_close(gradient["weight"], head.weight.grad, rtol=1e-12, atol=1e-15)

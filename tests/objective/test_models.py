"""Wrapped models go by their own names; models without usable gradients are refused."""

import copy
import warnings
from unittest import mock

import pytest
import torch
from support import hard_to_borrow
from support.models import random_data, tanh_mlp
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import tacit
from tacit import Objective
from tacit.objective.models import named_modules, named_parameters


class BaseTuner(nn.Module):
    """As in peft, where `LoraModel` is one."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return self.model(*inputs)


class PeftModel(nn.Module):
    """As in peft: the tuner is `base_model`, the user's model is `base_model.model`."""

    def __init__(self, model):
        super().__init__()
        self.base_model = BaseTuner(model)

    def forward(self, *inputs):
        return self.base_model(*inputs)


class LoraLinear(nn.Module):
    """A frozen layer, and a trained product of two thin matrices."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.fixture
def process_group(tmp_path):
    address = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def compiled(model, backend="eager"):
    return torch.compile(model, backend=backend)


def with_wrapped_parts(model):
    model[0], model[2] = compiled(model[0]), checkpoint_wrapper(model[2])
    return model


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def data_parallel(model):
    """On the CPU, where it only calls the model, also on a machine with a GPU."""
    module = "torch.nn.parallel.data_parallel"
    with mock.patch(f"{module}._get_available_device_type", return_value=None):
        return nn.DataParallel(model)


WRAPPERS = {
    "compiled": compiled,
    "compiled without double backward": lambda model: compiled(model, "aot_eager"),
    "compiled in place": compiled_in_place,
    "compiled and checkpointed parts": with_wrapped_parts,
    "DataParallel": data_parallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "both": lambda model: compiled(nn.parallel.DistributedDataParallel(model)),
    "AveragedModel": AveragedModel,
    "PeftModel": PeftModel,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(wrap, id=name, marks=pytest.mark.slow if "without" in name else ())
        for name, wrap in WRAPPERS.items()
    ],
)
def test_a_wrapped_model_has_the_numbers_and_names_of_its_own(wrap, process_group):
    own, data = tanh_mlp(0), random_data(1)
    model = wrap(copy.deepcopy(own))
    F.mse_loss(model(data[0]), data[1]).backward()  # compiles, and fills the gradients
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference, objective = (Objective(m, F.mse_loss, data, batch_size=20) for m in (own, model))
    assert list(objective.params) == list(reference.params)
    for method in ("gradient", "hvp"):
        arguments = [reference.params] if method == "hvp" else []
        expected = getattr(reference, method)(*arguments)
        for name, tensor in getattr(objective, method)(*arguments).items():
            assert torch.equal(tensor, expected[name])
    objective.directional_derivatives([reference.params])
    point = {n: p + 0.1 for n, p in own.named_parameters()}
    expected = reference.value(point)
    assert objective.value(point) == expected
    assert objective.value({n: p + 0.1 for n, p in model.named_parameters()}) == expected
    assert objective.value(model.state_dict()) == reference.value()
    for _ in range(2):  # communication and compiled code are as before
        optimizer.zero_grad()
        F.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
    assert reference.value(model.state_dict()) < reference.value()


def test_lora_weights_go_by_the_names_of_the_users_model():
    torch.manual_seed(0)
    own, data = tanh_mlp(0), random_data(1)
    own[0] = LoraLinear(own[0]).double()
    model = PeftModel(own)
    fit = tacit.estimate(model, F.mse_loss, data, [tacit.l2(scope="0.lora_A")])
    assert (
        fit.strengths
        == tacit.estimate(own, F.mse_loss, data, [tacit.l2(scope="0.lora_A")]).strengths
    )
    assert next(iter(Objective(model, F.mse_loss, data).params)) == "0.lora_A.default.weight"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_averaged_weights_are_a_point_of_the_model():
    model, data = tanh_mlp(0), random_data(1)
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for shift in (0.0, 0.1, 0.2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(shift)
        average.update_parameters(model)
    objective = Objective(model, F.mse_loss, data)
    expected = F.mse_loss(average(data[0]), data[1]).item()
    state = average.state_dict()
    assert "n_averaged" in state
    for params in (
        state,
        dict(average.named_parameters()),
        average.module.state_dict(),
        compiled(average).state_dict(),
        {f"ema_model.{name}": tensor for name, tensor in average.module.state_dict().items()},
    ):
        assert objective.value(params) == pytest.approx(expected, rel=1e-14)
        wrapped = Objective(data_parallel(model), F.mse_loss, data)
        assert wrapped.value(params) == pytest.approx(expected, rel=1e-14)
    both = {f"{key}.{n}": t for key in ("online", "ema") for n, t in model.state_dict().items()}
    with pytest.raises(tacit.InputError, match=r"unknown online\.0\.weight"):
        objective.value(both)
    with pytest.raises(tacit.InputError, match=r"unknown step"):
        objective.value({**average.module.state_dict(), "step": torch.zeros(())})


def test_trajectories_and_distances_take_the_names_of_the_wrapped_model():
    model, data, positions = data_parallel(tanh_mlp(0)), random_data(1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.02)
    recorder = tacit.record(model, optimizer)
    averages = tacit.average_epochs(model, optimizer)
    for _ in range(4):
        positions.append({n: p.detach().clone() for n, p in model.named_parameters()})
        optimizer.zero_grad()
        F.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
        recorder.step()
    averages.end_epoch()
    objective = Objective(model, F.mse_loss, data)
    trajectory = tacit.Trajectory.from_positions(positions, 0.1)
    for steps in (trajectory, recorder.trajectory()):
        fit = tacit.fit(tacit.trajectory_equations(objective, steps, tacit.l2()))
        assert fit.strengths["l2"] == pytest.approx(0.01, rel=1e-9)
    tacit.fit(averages.equations(objective, [tacit.l2()]))
    start = tacit.regularizers.distance_to(positions[0])
    assert float(start.value(objective.params)) > 0


def test_names_are_torchs_for_a_model_without_wrappers():
    for name in hard_to_borrow.MODELS:
        model = hard_to_borrow.build(name)
        assert list(named_parameters(model)) == [n for n, _ in model.named_parameters()]
        assert list(named_modules(model)) == [n for n, _ in model.named_modules()]


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1))
        return torch.ao.quantization.quantize_dynamic(model, {"0"})


def scripted(part=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if part:
            return nn.Sequential(nn.Linear(5, 5), torch.jit.script(nn.Linear(5, 1)))
        return torch.jit.script(nn.Linear(5, 1))


def traced():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(nn.Linear(5, 1), torch.zeros(2, 5))


def made_in_inference_mode():
    with torch.inference_mode():
        return nn.Linear(5, 1)


def complex_parameter():
    model = nn.Linear(5, 1)
    model.filter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return model


def sparse_parameter():
    model = nn.Linear(5, 1)
    model.filter = nn.Parameter(torch.eye(3).to_sparse())
    return model


def meta_buffer():
    model = nn.Linear(5, 1)
    model.register_buffer("positions", torch.zeros(3, device="meta"))
    return model


def tied_by_memory():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].weight.data = model[0].weight.data.T
    return model


def left_by_functional_call():
    layer = nn.Linear(5, 5)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    params = {n: p.detach() + 1 for n, p in model.named_parameters()}
    torch.func.functional_call(model, params, (torch.zeros(1, 5),))
    return model


class FullyShardedDataParallel(PeftModel):
    """A stand-in: the real one needs several devices."""


REFUSED = {
    "complex": (complex_parameter, "'filter' is complex.*view_as_complex"),
    "meta": (lambda: nn.Linear(5, 1, device="meta"), "'weight' is on the meta device.*load"),
    "meta buffer": (meta_buffer, "buffer 'positions' is on the meta device"),
    "lazy": (lambda: nn.LazyLinear(1), "'weight' belongs to a lazy module.*run one batch"),
    "sparse gradient": (
        lambda: nn.Sequential(nn.Embedding(5, 2, sparse=True)),
        "module '0' .Embedding. has sparse gradients.*sparse = False.*the same gradient",
    ),
    "sparse bag": (lambda: nn.EmbeddingBag(5, 2, sparse=True), "the model .EmbeddingBag. has spar"),
    "sparse parameter": (sparse_parameter, "'filter' is stored as a sparse tensor"),
    "scripted": (scripted, "is scripted or traced.*pass the Python module"),
    "scripted part": (lambda: scripted(part=True), "module '1' .* is scripted"),
    "traced": (traced, "is scripted or traced"),
    "quantised": (quantised, "module '0' .* is quantised.*before the quantisation"),
    "inference mode": (made_in_inference_mode, "was made in inference mode"),
    "sharded": (lambda: FullyShardedDataParallel(nn.Linear(5, 1)), "is sharded"),
    "after functional_call": (left_by_functional_call, "'0.weight' is a plain tensor"),
    "tied by memory": (tied_by_memory, "'0.weight' and '1.weight' are two tensors in the same"),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_a_model_without_usable_gradients_is_refused(build, message):
    X, y = random_data(0)
    with pytest.raises(tacit.InputError, match=message):
        tacit.estimate(build(), F.mse_loss, (X.float(), y.float()), [tacit.l2()])


def test_a_sparse_embedding_gives_its_gradient_once_it_is_dense():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 6)), torch.arange(18) % 6
    F.cross_entropy(model(x), x).backward()
    model[0].sparse = False
    gradient = Objective(model, F.cross_entropy, (x, x)).gradient()["0.weight"]
    torch.testing.assert_close(gradient, model[0].weight.grad.to_dense().double())

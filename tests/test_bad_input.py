"""Wrong calls raise InputError, in words that say what was given, what is needed, what to do."""

import math

import pytest
import torch
from safetensors.torch import save_file
from support.problems import params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tacit
from tacit import InputError, Objective, Trajectory

X, Y = random_data(1, count=8)
NAN, INF, ONES = math.nan, math.inf, torch.ones(8)
IMAGES, CONV = (X.float()[:, None], Y[:, None]), nn.Conv1d(1, 1, 5).double()
EACH = nn.MSELoss(reduction="none")
MODEL = tanh_mlp(0)
PARAMS = params_of(MODEL)
BENT = {**PARAMS, "2.bias": torch.zeros(4)}
OBJECTIVE = Objective(MODEL, F.mse_loss, (X, Y))
TWO = Objective(MODEL, F.mse_loss, (X, Y), training=True, draws=2)
EQUATIONS = tacit.endpoint_equations(OBJECTIVE, tacit.l2())
PATH = Trajectory.from_positions([PARAMS, {n: p.clone() for n, p in PARAMS.items()}], 0.1)


def spoilt(tensor, value, place=0):
    tensor = tensor.clone()
    tensor.view(-1)[place] = value
    return tensor


def broken(value, name="2.bias"):
    return {**PARAMS, name: spoilt(PARAMS[name], value)}


def build(data=(X, Y), *, model=MODEL, loss=F.mse_loss, **options):
    return Objective(model, loss, data, **options)


def units(batch_loss, data=(X, Y), **options):
    return Objective.from_batch_loss(MODEL, batch_loss, data, **options)


def squares(model, batch):
    return (model(batch[0]) - batch[1]).square()[:, 0]


def weighed(count):
    return lambda model, batch: (squares(model, batch), torch.ones(count))


def flat_root(output, target):
    return (output * 0).abs().sqrt().mean()


def frozen():
    return tanh_mlp(0).requires_grad_(False)


def diverged():
    model = tanh_mlp(0)
    model[0].weight.data[0, 0] = NAN
    return model


def plain_mean(output, target):
    return (output - target).square().mean()


class Once:
    """Re-iterable to look at, but every pass goes on where the last one stopped."""

    def __init__(self):
        self.batches = iter([(X[:4], Y[:4]), (X[4:], Y[4:])])

    def __iter__(self):
        return self.batches


class Stream(Once, IterableDataset):
    pass


DATA = [
    (lambda: build((X[:0], Y[:0])), r"data is empty.*no rows.*at least one example"),
    (lambda: build([]), r"data is empty.*no batch.*at least one example"),
    (lambda: build(TensorDataset(X[:0], Y[:0])), r"data is empty.*at least one"),
    (lambda: build((X, Y[:5])), r"inputs and targets differ in length.*8.*5.*one row"),
    (lambda: build([(X, Y[:5])]), r"differ in length: 8 and 5 in one batch"),
    (lambda: units(squares, {"x": X, "y": Y[:5]}), r"'x': 8, 'y': 5"),
    (lambda: build(b for b in [(X, Y)]), r"generator.*only once.*list\(data\)"),
    (lambda: build(zip([X], [Y], strict=True)), r"a zip, .*only once.*list\(data\)"),
    (lambda: build(Once()), r"a Once that gives .*only once.*list\(data\)"),
    (lambda: build(DataLoader(Stream(), None)), r"Stream .*list\(data\)"),
    (lambda: build((spoilt(X, NAN), Y)), r"1 NaN or infinite.*batch 0.*drop or impute"),
    (lambda: build((X, spoilt(Y, INF))), r"1 NaN or infinite.*batch 0.*drop or impute"),
    (lambda: build((spoilt(X, -INF), Y)), r"1 NaN or infinite.*batch 0.*drop or impute"),
    (lambda: build((spoilt(X, NAN, -1), Y), batch_size=3).value(), r"NaN.*in batch 2"),
    (lambda: build(TensorDataset(spoilt(X, NAN), Y)), r"1 NaN or infinite.*batch 0"),
    (lambda: units(squares, [{"x": [spoilt(X, NAN)]}]), r"1 NaN or infinite.*batch 0"),
    (lambda: build(3), r"data is a int: pass a tuple of tensors.*DataLoader"),
    (lambda: build([X, Y]), r"a batch is a Tensor.*pass a tuple \(X, y\)"),
    (lambda: build((X,)), r"a batch is a tuple.*\(inputs, …, target\) is needed"),
    (lambda: build({"x": X, "y": Y}), r"a batch is a dict.*from_batch_loss"),
    (lambda: build([(X, "cat")]), r"target of a batch holds no tensor.*Stack"),
    (lambda: build((X.float(), Y)), r"float32 and the model is.*float64: cast"),
    (lambda: build(IMAGES, model=CONV), r"float32 and the model is.*float64: cast"),
    (lambda: build(batch_size=0), r"batch_size is 0.*whole number of at least 1"),
    (lambda: build(weights=torch.ones(5)), r"\(5,\) for 8.*one weight an example"),
    (lambda: build(weights=-ONES), r"weights must be finite and not negative"),
    (lambda: build(weights=ONES * 0), r"with one above zero"),
    (lambda: build(weights=ONES * NAN), r"weights must be finite and not negative"),
    (lambda: build([(X, Y)], weights=ONES), r"held in tensors.*return \(losses, weights\) from"),
    (lambda: units(weighed(8), weights=ONES), r"weights were given twice.*Leave one out"),
    (lambda: units(weighed(3)), r"shape \(3,\) for losses of shape \(8,\).*one weight per loss"),
    (
        lambda: units(lambda m, b: (squares(m, b), -ONES)),
        r"weights must be finite and not negative",
    ),
]
OBJECTIVES = [
    (lambda: build(model=torch.relu), r"model is a builtin.*torch\.nn\.Module"),
    (lambda: build(model=nn.Tanh()), r"Tanh has no trainable.*unfreeze"),
    (lambda: build(model=frozen()), r"no trainable.*requires_grad=True; unfreeze"),
    (lambda: build(model=nn.LazyLinear(1)), r"'weight' of a lazy.*one batch through"),
    (lambda: build(model=diverged()), r"'0\.weight' holds 1 NaN.*checkpoint"),
    (lambda: build(loss="mse"), r"the loss is a str: pass a function"),
    (lambda: build(loss=nn.MSELoss(reduction="sum")), r"sum-reduced.*reduction='mean'"),
    (lambda: build(loss=EACH), r"shape \(8, 1\): a scalar is needed"),
    (lambda: build(loss=lambda o, t: 1.0), r"returned float: a scalar is needed"),
    (lambda: build((X, Y[:, 0]), loss=plain_mean), r"not a mean.*broadcast.*from_batch"),
    (lambda: build(loss=EACH, weights=ONES), r"one example has shape \(1, 1\).*mean-reduced"),
    (lambda: units(lambda m, b: squares(m, b).mean()), r"shape \(\): a 1-D tensor"),
    (lambda: units(lambda m, b: None), r"returned NoneType: a 1-D tensor is needed"),
    (lambda: build(loss=lambda o, t: o.mean() * NAN).value(), r"loss is nan on batch 0"),
    (lambda: build(loss=flat_root).gradient(), r"derivative .*'0\.weight' holds"),
    (lambda: build(loss=lambda o, t: o.detach().mean()).gradient(), r"does not depend.*detached"),
    (lambda: build(draws=0), r"draws is 0: pass a whole number, at least 1"),
    (lambda: build(draws=1.5), r"draws is 1\.5: pass a whole number"),
    (lambda: build(draws=True), r"draws is True: pass a whole number"),
    (lambda: build(seed=-1), r"seed is -1: pass a whole number, at least 0"),
    (lambda: OBJECTIVE.value([1.0]), r"params is a list: pass a dictionary of named"),
    (lambda: OBJECTIVE.value(dict.fromkeys(PARAMS, 1)), r"'0\.weight'\] is a int: pass a tensor"),
    (lambda: OBJECTIVE.value({"w": X}), r"another model: missing 0\.weight.*unknown w"),
    (lambda: OBJECTIVE.gradient(BENT), r"'2\.bias'\] has shape \(4,\); the model's has \(1,\)"),
    (lambda: OBJECTIVE.value(broken(NAN)), r"params of '2\.bias' holds 1 NaN"),
    (lambda: OBJECTIVE.gradient(broken(INF)), r"params of '2\.bias' holds 1 NaN or"),
    (lambda: OBJECTIVE.hvp({"w": X}), r"direction belongs to another model"),
    (lambda: OBJECTIVE.hvp(broken(NAN)), r"direction of '2\.bias' holds 1 NaN"),
]


def bind(regularizer, params=PARAMS):
    return regularizer.bind(params)


def custom(function, **options):
    return bind(tacit.regularizer("r", function, **options))


def wide(size):
    return {"w": torch.ones(size)}


FAMILIES = [
    *(
        (lambda beta=beta: tacit.smooth_l1(beta), r"beta is .*number above zero")
        for beta in (0, -1.0, NAN, INF, "1e-3", None, True)
    ),
    (lambda: tacit.l2(name=" "), r"name is ' ': pass a string that is not empty"),
    (lambda: tacit.regularizers.diagonal(name=None), r"name is None: pass a string"),
    (lambda: bind(tacit.l2(scope="conv*")), r"scope of l2='conv\*' covers no par.*0\.w"),
    (lambda: bind(tacit.l1(scope=lambda n: False)), r"l1=.* covers no param"),
    (lambda: bind(tacit.l2(scope=3)), r"scope of l2 was given int: pass a name"),
    (
        lambda: bind(tacit.regularizers.nuclear_norm(scope="*.bias")),
        r"none.*two or more dim.*Widen",
    ),
    (lambda: tacit.regularizers.distance_to(MODEL), r"given a Sequential.*dictionary"),
    (lambda: tacit.regularizers.distance_to({"w": 1}), r"pass a dictionary of named"),
    (lambda: tacit.regularizers.distance_to(broken(NAN)), r"reference value of '2\.bias' holds"),
    (
        lambda: bind(tacit.regularizers.distance_to({"w": X})),
        r"no such tensor.*'0\.weight'.*limit the sc",
    ),
    (lambda: bind(tacit.regularizers.distance_to(BENT)), r"\(4,\) for '2\.bias', the model \(1,\)"),
    (lambda: tacit.layerwise(3), r"given 'int'.*not a sum.*Pass l2\(\)"),
    (lambda: tacit.layerwise(tacit.regularizers.diagonal()), r"'diagonal', which is not a sum"),
    (lambda: tacit.layerwise(tacit.layerwise(tacit.l2())), r"not a sum"),
    (lambda: tacit.regularizers.gradient_norm(MODEL), r"given a Sequential: pass the tacit\.Obj"),
    (lambda: tacit.regularizer("r", 3), r"'r' was given a int: pass a function"),
    (lambda: custom(lambda p: p["0.weight"]), r"\(8, 5\): a scalar tensor is needed\. Sum"),
    (lambda: custom(lambda p: 1.0), r"'r' returned float: a scalar"),
    (lambda: custom(lambda p: torch.tensor(p["2.bias"].item())), r"'r' does not .*without \.item"),
    (lambda: custom(lambda p: p["2.bias"].sum(), scope="0"), r"'r' does not .* it covers"),
    (lambda: custom(lambda p: (p["2.bias"] * 0).sqrt()), r"regularizer 'r' of '2\.bias' holds"),
    (
        lambda: bind(tacit.regularizers.diagonal(), wide(5001)),
        r"p = 5001 .*at most 5000.*Limit its",
    ),
    (lambda: bind(tacit.regularizers.symmetric(), wide(100)), r"p\(p\+1\)/2 = 5050 .*at most 5000"),
    (lambda: bind(tacit.regularizers.symmetric(), wide(10**6)), r"p = 1000000 .*at most 5000"),
]
RIDGE, FULL = tacit.l2(), tacit.regularizers.symmetric(scope="2")


def endpoint(regularizers=RIDGE, **options):
    return tacit.endpoint_equations(OBJECTIVE, regularizers, **options)


def difference(technique=TWO, plain=OBJECTIVE, **options):
    return tacit.difference_equations(technique, plain, tacit.l2(), **options)


def steps(trajectory=PATH, **options):
    return tacit.trajectory_equations(OBJECTIVE, trajectory, tacit.l2(), **options)


def path(positions, step_sizes):
    return Trajectory.from_positions(positions, step_sizes)


def recorder(optimizer=None):
    return tacit.record(MODEL, optimizer)


def two_rates():
    groups = [{"params": [MODEL[0].weight], "lr": 0.1}, {"params": [MODEL[0].bias], "lr": 0.2}]
    return recorder(torch.optim.SGD(groups)).step()


def all_zero():
    zero = {n: torch.zeros_like(p) for n, p in PARAMS.items()}
    return tacit.fit(endpoint(tacit.l1(), params=zero))


ROWS = [
    (lambda: endpoint([]), r"regularizers is \[\]: pass at least one"),
    (lambda: endpoint(None), r"regularizers is None: pass at least one"),
    (lambda: endpoint([tacit.l2]), r"a regularizer is a function.*Call it, as in"),
    (lambda: endpoint(["l2"]), r"a regularizer is a str: pass what tacit\.l2\(\)"),
    (lambda: endpoint([tacit.l2(), tacit.l2()]), r"named l2: give each its own.*name="),
    (lambda: endpoint(known=[tacit.l2()]), r"known is a list: pass a dictionary"),
    (lambda: endpoint(known={"l2": 1.0}), r"a regularizer is a str: pass what"),
    (lambda: endpoint(known={tacit.l1(): NAN}), r"strength of 'l1' is nan.*weight_decay"),
    (lambda: endpoint(known={tacit.l1(): "1"}), r"'l1' is '1': pass a finite number"),
    (lambda: endpoint(known={tacit.layerwise(tacit.l1()): 1.0}), r"has 2 coefficients.*one stre"),
    (lambda: endpoint(rows="conv*"), r"rows='conv\*' covers no parameter.*There are"),
    (lambda: endpoint(params={"w": X}), r"another model: missing 0\.weight"),
    (lambda: tacit.endpoint_equations(MODEL, tacit.l2()), r"is a Sequential: pass tacit"),
    (lambda: difference(plain=MODEL), r"is a Sequential: pass tacit\.Objective"),
    (lambda: difference(plain=build(model=nn.Linear(5, 1).double())), r"another model"),
    (lambda: difference(groups=0), r"groups is 0: pass a whole number, at least 1"),
    (lambda: difference(groups=1.5), r"groups is 1\.5: pass a whole number"),
    (lambda: difference(groups=3), r"2 draws cannot make 3 groups.*draws=3.*fewer"),
    (lambda: path([PARAMS], 0.1), r"1 position .*two or more"),
    (lambda: path([], 0.1), r"0 position .*two or more"),
    (lambda: path([PARAMS] * 3, [0.1]), r"2 steps, but 1 step sizes.*one a step, or"),
    *(
        (lambda time=time: Trajectory([PARAMS], [PARAMS], [time]), r"took time .*above zero")
        for time in (0.0, -0.1, NAN, INF, "0.1", True)
    ),
    (lambda: Trajectory([PARAMS], [PARAMS], []), r"1 points, 1 displacements and 0 times"),
    (lambda: Trajectory([], [], []), r"without steps: pass at least one displacement"),
    (lambda: Trajectory([PARAMS], [{"w": X}], [1]), r"displacement 0 .*same names"),
    (lambda: path([X, X], 1), r"position 0 .*is a Tensor: pass a"),
    (lambda: path([PARAMS, broken(NAN)], 1), r"position 1 of .*'2\.bias' holds 1 NaN"),
    (lambda: path([PARAMS, PARAMS], 1), r"positions 0 and 1 share their memory.*keep copies"),
    (lambda: steps([PARAMS]), r"trajectory is a list: pass tacit\.Trajectory"),
    (lambda: steps(path([{"w": X}, {"w": X + 1}], 1)), r"point belongs to another .*unknown w"),
    (lambda: steps(reference=tacit.rk4), r"reference is .*tacit\.rk4\(substeps=10\)"),
    (lambda: steps(reference=None), r"reference is None: pass tacit\.euler"),
    (lambda: tacit.rk4(0), r"substeps is 0: pass a whole number, at least 1"),
    (lambda: tacit.rk4(2.5), r"substeps is 2\.5: pass a whole number"),
    (lambda: recorder(torch.optim.Adam([X])), r"Adam rescales.*Train with SGD, or use endp"),
    (lambda: recorder("sgd"), r"given a str as optimizer: pass a torch\.optim\.SGD"),
    (two_rates, r"different flow times \[0\.1, 0\.2\].*Use the same lr"),
    (lambda: tacit.record(PARAMS), r"record was given a dict: pass a torch\.nn\.Module"),
    (lambda: recorder().step(), r"does not know the step size: pass it, or"),
    (lambda: recorder().step(0), r"took time 0: pass a finite number above zero"),
    (lambda: recorder().trajectory(), r"nothing was recorded: call recorder\.step"),
    (lambda: tacit.stack([]), r"given no equations: pass at least one"),
    (lambda: tacit.stack(EQUATIONS), r"given a Equations: pass a list of equations"),
    (lambda: tacit.stack([tacit.fit(EQUATIONS)]), r"a Fit among.*pass what endpoint"),
    (lambda: tacit.stack([EQUATIONS, endpoint(tacit.l1())]), r"l1.*stacked on .*l2.*same reg"),
    (lambda: tacit.stack([EQUATIONS, difference()]), r"2 target columns cannot be"),
    (lambda: tacit.fit(OBJECTIVE), r"fit was given a Objective: pass what endpoint"),
    (all_zero, r"no equations: every row .* kink.*Widen rows=, or use smooth_l1"),
    (lambda: tacit.fit(endpoint(FULL), nonnegative=True), r"True with symmetric\(\).*Fit freely"),
    (lambda: tacit.fit(EQUATIONS).matrix(), r"exactly one diagonal.*has 0 among: l2"),
    (lambda: EQUATIONS.layer("1"), r"no layer '1': there are 0, 2"),
]
CASES = [*DATA, *OBJECTIVES, *FAMILIES, *ROWS]


@pytest.mark.parametrize(("call", "words"), CASES, ids=[words for _, words in CASES])
def test_a_wrong_call_says_what_was_given_and_what_to_do(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_second_order_where_attention_cannot_be_differentiated_twice_names_the_math_backend():
    def forced(model, batch):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            q = model(batch)[:, None]
            return F.scaled_dot_product_attention(q, q, q).square().mean((1, 2, 3))

    torch.manual_seed(0)
    tokens = torch.randn(6, 3, 8)
    objective = Objective.from_batch_loss(nn.Linear(8, 8), forced, [tokens])
    with pytest.raises(InputError, match=r"double backward.*math backend"):
        tacit.endpoint_equations(objective, tacit.regularizers.gradient_norm(objective))


def test_minus_infinity_is_welcome_as_a_mask_in_batches_of_the_users_own():
    batch = {"x": X, "mask": spoilt(torch.zeros(8, 1), -INF)}
    masked = units(lambda m, b: (m(b["x"]) + b["mask"])[:, 0].softmax(0), batch)
    assert masked.value() == pytest.approx(1 / 8, rel=1e-12)
    with pytest.raises(InputError, match=r"data holds 1 NaN"):
        units(lambda m, b: b["mask"][:, 0], {**batch, "mask": spoilt(batch["mask"], INF)})


def test_files_that_hold_no_equations_are_refused(tmp_path):
    whole = tmp_path / "whole"
    EQUATIONS.save(whole)
    contents = {"cut": whole.read_bytes()[:-9], "empty": b"", "text": b"strengths: many" * 9}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    save_file({"w": X}, tmp_path / "foreign", metadata={"format": "pt"})
    for name in [*contents, "missing", ""]:
        with pytest.raises(InputError, match=r"no equations that can be read.*Equations\.save"):
            tacit.Equations.load(tmp_path / name)
    with pytest.raises(InputError, match=r"foreign was not written by Equations\.save.*'pt'"):
        tacit.Equations.load(tmp_path / "foreign")


def test_a_failed_save_leaves_nothing_behind(tmp_path):
    with pytest.raises(InputError, match=r"cannot be written to .*nowhere.*folder that exists"):
        EQUATIONS.save(tmp_path / "nowhere" / "equations")
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match=r"cannot be written to .*taken"):
        EQUATIONS.save(tmp_path / "taken")
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]

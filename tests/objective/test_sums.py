"""Sums of vectors over batches: against a plain loop, and in both dtypes."""

import pytest
import torch
from support.models import random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective
from tacit.objective.sums import SMALL, VectorSum


def random_vectors(names_by_vector):
    params = {
        "large": torch.zeros(SMALL // 8, 8),
        "bias": torch.zeros(5),
        "scale": torch.zeros(2, 3),
        "scalar": torch.zeros(()),
    }
    generator = torch.Generator().manual_seed(0)
    vectors = [
        {n: torch.randn(params[n].shape, generator=generator) for n in names}
        for names in names_by_vector
    ]
    return params, vectors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "names",
    [
        [("large", "bias", "scale", "scalar")] * 3,
        [("scalar", "bias", "scale", "large"), ("bias",), ("large", "scale")],
        [("scale",), ()],
    ],
    ids=["all", "some", "few"],
)
def test_a_sum_is_that_of_a_plain_loop(names, dtype):
    params, vectors = random_vectors(names)
    factors = [0.3, -1.7, 2.5]
    total = VectorSum(params, dtype)
    expected = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in params.items()}
    for vector, factor in zip(vectors, factors, strict=False):
        for name, tensor in vector.items():
            expected[name] += factor * tensor.double()
        total.add(vector, factor)
    assert set(total.unreached) == params.keys() - {n for vector in vectors for n in vector}
    result = total.divided(2.0)
    assert list(result) == list(params)
    for name, tensor in result.items():
        assert tensor.dtype == dtype
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(tensor.double(), expected[name] / 2, rtol=0, atol=tolerance)
        # Views of the common accumulator would be written to files as a whole.
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_sums_in_float32_give_the_same_strengths_to_five_digits():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(),
                          nn.Linear(300, 5))  # fmt: skip
    data = torch.randn(640, 20), torch.randint(5, (640,))
    regularizers = [tacit.l2(), tacit.smooth_l1(1e-2)]
    fits = {
        accumulate: tacit.fit(
            tacit.endpoint_equations(
                Objective(model, F.cross_entropy, data, batch_size=16, accumulate=accumulate),
                regularizers,
            )
        )
        for accumulate in ("float64", "float32")
    }
    wide, narrow = fits["float64"], fits["float32"]
    assert wide.strengths != narrow.strengths
    assert narrow.strengths == pytest.approx(wide.strengths, rel=1e-5)
    assert narrow.explained == pytest.approx(wide.explained, rel=1e-5)


def test_float32_sums_are_of_gradients_only_and_saved_in_float64(tmp_path):
    model, data = tanh_mlp(0), random_data(0, count=30)
    objective = Objective(model, F.mse_loss, data, accumulate="float32")
    assert {g.dtype for g in objective.gradient().values()} == {torch.float32}
    product = objective.hvp(objective.params)
    assert {p.dtype for p in product.values()} == {torch.float64}
    target = tacit.endpoint_target(objective)
    target.save(tmp_path / "target.safetensors")
    loaded = tacit.Target.load(tmp_path / "target.safetensors")
    strengths = [tacit.fit(t.equations(tacit.l2())).strengths["l2"] for t in (target, loaded)]
    assert strengths[0] == pytest.approx(strengths[1], rel=1e-12)


def test_other_dtypes_of_sums_are_refused():
    with pytest.raises(InputError, match=r"accumulate.*float16.*float32"):
        Objective(tanh_mlp(0), F.mse_loss, random_data(0, count=5), accumulate="float16")

"""Moments of outputs under masks, against all masks and against random ones."""

import pytest
import torch
from support.dense_dropout import class_data
from support.masks import all_masks, dropout_chain, masked_outputs
from support.models import params_of
from torch import nn

from tacit.regularizers.dropout.chain import read_chain
from tacit.regularizers.dropout.propagation import output_moments, third_cumulants


def moments_of_masks(model, x, widths):
    """Mean, covariance and third cumulants over all masks."""
    masks, chances = all_masks(model, widths)
    z = masked_outputs(model, params_of(model), x, masks)
    mean = torch.einsum("m,mno->no", chances, z)
    d = z - mean
    covariance = torch.einsum("m,mna,mnb->nab", chances, d, d)
    return mean, covariance, torch.einsum("m,mna,mnb,mnc->nabc", chances, d, d, d)


def propagated(model, x):
    moments = output_moments(read_chain(model), params_of(model), x, None)
    rows = torch.eye(moments.mean.shape[-1], dtype=x.dtype).expand_as(moments.covariance)
    return moments.mean, moments.covariance, third_cumulants(moments, rows)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
@pytest.mark.parametrize(
    ("layers", "widths"),
    [
        ([nn.Dropout(), nn.Linear(4, 3)], [4]),
        ([nn.Linear(4, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 3, bias=False)], [6]),
        ([nn.Linear(4, 6), nn.Dropout(), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3)], [6]),
        ([nn.Linear(4, 3), nn.GELU(), nn.Dropout()], [3]),
    ],
    ids=["inputs", "hidden", "two linear layers", "outputs"],
)
def test_all_cumulants_of_one_layer_of_masks_are_exact(layers, widths, rate):
    torch.manual_seed(1)
    model = nn.Sequential(*layers).double()
    for module in model:
        if isinstance(module, nn.Dropout):
            module.p = rate
    x = class_data(1, count=3)[0]
    for ours, exact in zip(propagated(model, x), moments_of_masks(model, x, widths), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)


def test_gains_that_multiply_have_the_skewness_of_their_shares():
    """Of a product of L gains of variances κ_l²: κ₃ = 3(κ⁴ − Σ κ_l⁴) for symmetric small ones.

    A chain of single linear units is such a product. Its third cumulant is exact to leading order.
    """
    rates = (0.02, 0.05, 0.03)
    layers = []
    for rate in rates:
        layers += [nn.Dropout(rate), nn.Linear(1, 1, bias=False)]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    x = torch.ones(1, 1, dtype=torch.float64)
    _, _, third = propagated(model, x)
    variances = torch.tensor([q / (1 - q) for q in rates], dtype=torch.float64)
    own = torch.tensor([q * (2 * q - 1) / (1 - q) ** 2 for q in rates], dtype=torch.float64)
    leading = 3 * (variances.sum() ** 2 - variances.square().sum()) + own.sum()
    exact = moments_of_masks(model, x, [1, 1, 1])[2].squeeze()
    assert float(third) == pytest.approx(float(leading), rel=0.2)
    assert float(third) == pytest.approx(float(exact), rel=0.2)
    assert float(third - own.sum()) > 0


@pytest.mark.parametrize(
    ("activation", "rate", "variance_error", "third_error"),
    [
        (nn.ReLU, 0.2, 0.06, 0.06), (nn.ReLU, 0.5, 0.05, 0.08), (nn.GELU, 0.5, 0.05, 0.12),
        (nn.Tanh, 0.5, 0.05, 0.04),
    ],
)  # fmt: skip
def test_moments_of_wide_networks_are_those_of_random_masks(
    activation, rate, variance_error, third_error
):
    model = dropout_chain((4, 60, 60, 60, 3), activation, rate, seed=2, scale=1.6)
    x, params = class_data(1, count=4)[0], params_of(model)
    generator = torch.Generator().manual_seed(0)
    masks = [
        (torch.rand(20000, 60, generator=generator, dtype=torch.float64) >= rate).double()
        for _ in range(3)
    ]
    z = masked_outputs(model, params, x, masks)
    mean, covariance, third = propagated(model, x)
    d = z - z.mean(0)
    seen = torch.einsum("mna,mnb->nab", d, d) / len(d)
    seen_third = torch.einsum("mna,mnb,mnc->nabc", d, d, d) / len(d)
    size = seen.diagonal(dim1=1, dim2=2).sum(1).sqrt()
    assert ((mean - z.mean(0)).norm(dim=1) < 0.02 * size).all()
    assert (covariance - seen).norm() < variance_error * seen.norm()
    errors = (third - seen_third).flatten(1).norm(dim=1) / size**3
    assert (errors < third_error).all()

"""Outputs of small networks under all masks of their dropout layers, with the probabilities."""

from itertools import pairwise, product

import torch
from torch import nn
from torch.func import functional_call


def masked_outputs(model, params, x, masks):
    """The outputs (masks, examples, outputs) of a sequential model.

    Args:
        model: nn.Sequential.
        params: its parameters.
        x: the inputs.
        masks: for each dropout layer, in order, ones and zeros of shape (masks, width).
    """
    z, remaining = x.expand(len(masks[0]), *x.shape), iter(masks)
    for name, module in model.named_children():
        if isinstance(module, nn.Dropout):
            z = z * next(remaining).unsqueeze(1) / (1 - module.p)
        else:
            own = {n: params[f"{name}.{n}"] for n, _ in module.named_parameters()}
            z = functional_call(module, own, (z,))
    return z


def all_masks(model, widths):
    """Every mask of the dropout layers of these widths, and the masks' probabilities."""
    rates = [module.p for module in model if isinstance(module, nn.Dropout)]
    bits = torch.tensor(list(product((0.0, 1.0), repeat=sum(widths))), dtype=torch.float64)
    rate_of_unit = [q for w, q in zip(widths, rates, strict=True) for _ in range(w)]
    kept = 1 - torch.tensor(rate_of_unit, dtype=torch.float64)
    chances = torch.where(bits > 0, kept, 1 - kept).prod(1)
    return list(bits.split(widths, dim=1)), chances


def exact_penalty(model, loss, data, widths, params):
    """mean_i [E ℓ(z_i, y_i) − ℓ(f(x_i), y_i)] over all masks, for autograd."""
    X, y = data
    masks, chances = all_masks(model, widths)
    losses = torch.func.vmap(lambda z: loss(z, y))(masked_outputs(model, params, X, masks))
    return chances @ losses - loss(functional_call(model.eval(), params, (X,)), y)


def dropout_chain(widths, activation, rate, *, seed=0, scale=1.0):
    """Dropout after every hidden layer, with weights of torch's initialisation times the scale."""
    torch.manual_seed(seed)
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation(), nn.Dropout(rate)]
    model = nn.Sequential(*layers[:-2]).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model

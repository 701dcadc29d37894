"""Techniques that add noise to inputs or weights, and the objectives with and without them."""

import torch
from torch.func import functional_call

import tacit


def half_squared_errors(output, target):
    return (output - target).square().sum(1) / 2


def noiseless(model, batch):
    """The batch loss without a technique."""
    X, y = batch
    return half_squared_errors(model(X), y)


def noisy_inputs(sigma):
    def batch_loss(model, batch, noise):
        X, y = batch
        return half_squared_errors(model(X + sigma * noise.normal(X)), y)

    return batch_loss


def noisy_weights(sigma):
    def batch_loss(model, batch, noise):
        X, y = batch
        noisy_params = {n: p + sigma * noise.normal(p) for n, p in model.named_parameters()}
        return half_squared_errors(functional_call(model, noisy_params, (X,)), y)

    return batch_loss


def without_mirrors(batch_loss):
    """The same technique, with draws that are not mirrored in pairs."""

    class IndependentNoise:
        def normal(self, like):
            return torch.randn_like(like)

    return lambda model, batch: batch_loss(model, batch, IndependentNoise())


def noise_objective(model, batch_loss, data, **options):
    return tacit.Objective.from_batch_loss(model, batch_loss, data, **options)

"""Laws of dropout, at rate q: units are 0 with probability q, and divided by 1 − q otherwise."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit import Objective, average_epochs, endpoint_equations, fit, regularizer
from tacit.objective.params import Params
from tacit.regularizers import activation_norm, explicit_dropout
from tacit_paper.laws.expectations import expected, gaussian, masks, minimum
from tacit_paper.laws.law import Recovered, law
from tacit_paper.laws.small_models import (
    class_data,
    difference,
    draw,
    half_squares,
    linear_model,
    regression,
    regression_data,
    tanh_network,
)


def masked_inputs(model: nn.Module, inputs: Tensor, mask: Tensor) -> Tensor:
    """The outputs, with inputs times a mask."""
    return model(inputs * mask)


def masked_units(model: nn.Sequential, inputs: Tensor, mask: Tensor) -> Tensor:
    """The outputs, with the units of the last hidden layer times a mask."""
    return model[-1](model[:-1](inputs) * mask)


@law(
    "input dropout, linear regression",
    {"activation_norm": "q/(1−q) · ½ Σ_j (XᵀX/n)_jj θ_j²"},
    source="Srivastava et al. 2014; the optimum of the expected loss",
    parameter="q",
    values=(0.3,),
)
def input_dropout(q: float, seed: int) -> Recovered:
    """Trained over all masks, a linear model ends where L + q/(1−q) · ½ Σ_j S_jj θ_j² is least."""
    X, y = regression_data(seed, inputs=6)
    objective = Objective(linear_model(draw(seed, (1, 6))[0]), half_squares, (X, y))
    end = minimum(expected(objective, masked_inputs, masks(6, q)))
    penalty = activation_norm(objective, layers="", weighted=True)
    equations = endpoint_equations(objective, penalty, params=end)
    return Recovered(fit(equations), {"activation_norm": q / (1 - q) / 2})


@law(
    "input dropout, linear regression, SGD",
    {"activation_norm": "q/(1−q) · ½ Σ_j (XᵀX/n)_jj θ_j²"},
    source="Srivastava et al. 2014; means over the last epochs",
    parameter="q",
    values=(0.3,),
    draws=40,
    bars="training",
)
def input_dropout_by_sgd(q: float, seed: int, epochs: int) -> Recovered:
    """The mean iterate of SGD with masks is where the mean gradient vanishes."""
    X, weights = draw(seed, (2000, 6), (6, 1))
    y = X @ weights
    model = nn.Sequential(nn.Dropout(q), linear_model(weights.T))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    averages = average_epochs(model, optimizer, epochs=epochs)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for _ in range(epochs + 10):
            for rows in torch.randperm(len(X)).split(250):
                optimizer.zero_grad()
                half_squares(model(X[rows]), y[rows]).backward()
                optimizer.step()
            averages.end_epoch()
    objective = Objective(model, half_squares, (X, y))
    penalty = activation_norm(objective, layers="1", weighted=True)
    fitted = fit(averages.equations(objective, penalty))
    return Recovered(fitted, {"activation_norm": q / (1 - q) / 2})


@law(
    "input dropout, logistic regression",
    {"curvature": "q/(1−q) · ½ mean_i A″(x_i·β) Σ_j x_ij² β_j²"},
    source="Wager et al. 2013, second order in the size s of β",
    parameter="s",
    values=(0.03, 0.015, 0.0075),
    order=2,
)
def logistic_dropout(size: float, seed: int) -> Recovered:
    """E A(Σ_j m_j x_j β_j) = A + q/(1−q) · ½ A″ Σ_j x_j² β_j² + …, A(z) = log(1 + e^z)."""
    X, y = regression_data(seed, inputs=5)
    data, q = (X, (y > 0).double()), 0.3
    model = linear_model(size * draw(seed, (1, 5))[0])
    objective = Objective(model, F.binary_cross_entropy_with_logits, data)

    def curvature(params: Params) -> Tensor:
        chance = (X @ params["weight"].T).sigmoid()
        squares = X.square() @ params["weight"].T.square()
        return (chance * (1 - chance) * squares).mean() / 2

    technique = expected(objective, masked_inputs, masks(5, q))
    fit = difference(technique, objective, regularizer("curvature", curvature))
    return Recovered(fit, {"curvature": q / (1 - q)})


@law(
    "dropout of the last hidden layer",
    {"activation_norm": "q/(1−q) · ½ mean Σ_k a_k² h_k²"},
    source="½ Var of Σ_k a_k m_k h_k; squared loss",
    parameter="q",
    values=(0.3,),
)
def last_layer_dropout(q: float, seed: int) -> Recovered:
    """E ½(Σ_k a_k m_k h_k − y)² = ½(f − y)² + q/(1−q) · ½ Σ_k a_k² h_k²."""
    objective = regression(seed)
    penalty = activation_norm(objective, layers="2", weighted=True)
    fit = difference(expected(objective, masked_units, masks(5, q)), objective, penalty)
    return Recovered(fit, {"activation_norm": q / (1 - q) / 2})


@law(
    "Gaussian dropout of the last hidden layer",
    {"activation_norm": "q/(1−q) · ½ mean Σ_k a_k² h_k²"},
    source="Srivastava et al. 2014: factors of mean 1 and variance q/(1−q)",
    parameter="q",
    values=(0.3,),
)
def gaussian_dropout(q: float, seed: int) -> Recovered:
    """E ½(Σ_k a_k (1 + z_k) h_k − y)² = ½(f − y)² + ½ Var z · Σ_k a_k² h_k²."""
    objective = regression(seed)
    noise = gaussian(5, (q / (1 - q)) ** 0.5)
    factors = noise._replace(values=1 + noise.values)
    penalty = activation_norm(objective, layers="2", weighted=True)
    fit = difference(expected(objective, masked_units, factors), objective, penalty)
    return Recovered(fit, {"activation_norm": q / (1 - q) / 2})


@law(
    "dropout before a hidden layer, cross-entropy",
    {"explicit_dropout": "q/(1−q) · ½ mean_i Σ_j h_j² [JᵀHJ]_jj"},
    source="Wei et al. 2020, first order in the size s of the weights that read h",
    parameter="s",
    values=(4e-3, 2e-3, 1e-3),
    order=1,
)
def hidden_dropout(size: float, seed: int) -> Recovered:
    """E ℓ = ℓ + q/(1−q) · ½ Σ_j h_j² [JᵀHJ]_jj + …, where no single unit matters much."""
    q, (first, tanh, second, *last) = 0.3, tanh_network(seed, (3, 5, 4, 3))
    for p in second.parameters():
        p.data *= size
    model = nn.Sequential(first, tanh, nn.Dropout(q), second, *last)
    objective = Objective(model, F.cross_entropy, class_data(seed))

    def masked(model: nn.Sequential, inputs: Tensor, mask: Tensor) -> Tensor:
        return model[3:](model[:2](inputs) * mask)

    technique = expected(objective, masked, masks(5, q))
    fit = difference(technique, objective, explicit_dropout(objective))
    return Recovered(fit, {"explicit_dropout": q / (1 - q)})


@law(
    "dropout in a two-layer linear network",
    {"paths": "q/(1−q) · Σ_i ‖u_i‖² v_iᵀ(XᵀX/n)v_i"},
    source="Mianjy, Arora & Vidal 2018, for any inputs; loss without ½",
    parameter="q",
    values=(0.3,),
)
def linear_network_dropout(q: float, seed: int) -> Recovered:
    """E ‖U diag(m) Vᵀx − y‖² = ‖UVᵀx − y‖² + q/(1−q) · Σ_i ‖u_i‖² (v_iᵀx)²."""
    X, y, U, V = draw(seed, (40, 4), (40, 3), (3, 5), (5, 4))
    model = nn.Sequential(linear_model(V), linear_model(U))
    objective = Objective(model, squares, (X, y))

    def paths(params: Params) -> Tensor:
        V, U = params["0.weight"], params["1.weight"]
        return U.square().sum(0) @ (V @ (X.T @ X / len(X)) @ V.T).diagonal()

    technique = expected(objective, masked_units, masks(5, q))
    fit = difference(technique, objective, regularizer("paths", paths))
    return Recovered(fit, {"paths": q / (1 - q)})


def squares(output: Tensor, target: Tensor) -> Tensor:
    """‖f − y‖², a mean over examples."""
    return (output - target).square().sum(1).mean()


@law(
    "DropConnect in a linear model",
    {"ridge": "q/(1−q) · ½ Σ_kj (XᵀX/n)_jj W_kj²"},
    source="Wan et al. 2013; ½ Var of Σ_j m_kj W_kj x_j, for masks of single weights",
    parameter="q",
    values=(0.3,),
)
def drop_connect(q: float, seed: int) -> Recovered:
    """E ½‖(m ⊙ W)x − y‖² = ½‖Wx − y‖² + q/(1−q) · ½ Σ_kj W_kj² x_j²."""
    X, y, W = draw(seed, (40, 4), (40, 2), (2, 4))
    objective = Objective(linear_model(W), half_squares, (X, y))

    def connected(model: nn.Linear, inputs: Tensor, mask: Tensor) -> Tensor:
        return inputs @ (model.weight * mask.view_as(model.weight)).T

    def ridge(params: Params) -> Tensor:
        return (params["weight"].square() @ X.square().mean(0)).sum() / 2

    technique = expected(objective, connected, masks(8, q))
    fit = difference(technique, objective, regularizer("ridge", ridge))
    return Recovered(fit, {"ridge": q / (1 - q)})

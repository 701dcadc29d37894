"""Data, networks and losses that the laws share, all in float64.

The squared loss has a factor ½, as in most of the theory.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit import Fit, Objective, Regularizer, difference_equations, fit, trajectory_equations
from tacit.equations import Trajectory, rk4
from tacit.objective.params import Params
from tacit.regularizers import mean_of

Examples = tuple[Tensor, Tensor]


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Independent normal tensors of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def regression_data(seed: int, examples: int = 40, inputs: int = 3) -> Examples:
    """Inputs, and y = sin(Σ x_i) + noise."""
    X, noise = draw(seed, (examples, inputs), (examples, 1))
    return X, X.sum(1, keepdim=True).sin() + 0.3 * noise


def class_data(seed: int, examples: int = 40, inputs: int = 3, classes: int = 3) -> Examples:
    """Inputs, and classes by the largest of noisy linear scores."""
    X, weights, noise = draw(seed, (examples, inputs), (inputs, classes), (examples, classes))
    return X, (X @ weights + noise).argmax(1)


def tanh_network(seed: int, sizes: Sequence[int] = (3, 5, 1)) -> nn.Sequential:
    """Linear layers of these sizes, with tanh between them."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def linear_model(weight: Tensor) -> nn.Linear:
    """A linear model of this weight, without bias."""
    model = nn.Linear(*weight.shape[::-1], bias=False).double()
    model.weight.data = weight.detach().clone()
    return model


def half_squares(output: Tensor, target: Tensor) -> Tensor:
    """½(f − y)², a mean over examples."""
    return (output - target).square().sum(1).mean() / 2


def regression(seed: int) -> Objective:
    """The squared loss of a small tanh network."""
    return Objective(tanh_network(seed), half_squares, regression_data(seed))


def difference(technique: Objective, plain: Objective, *penalties: Regularizer) -> Fit:
    """The fit of what a technique adds to a loss."""
    return fit(difference_equations(technique, plain, penalties))


def move(point: Params, direction: Params, step: float) -> Params:
    """The point θ + step · direction."""
    return {n: p + step * direction[n] for n, p in point.items()}


def descend(
    gradient: Callable[[Params], Params], start: Params, step: float, count: int
) -> list[Params]:
    """Positions of gradient descent, the start among them."""
    positions = [{n: p.detach().clone() for n, p in start.items()}]
    for _ in range(count):
        positions.append(move(positions[-1], gradient(positions[-1]), -step))
    return positions


def against_flow(
    objective: Objective, path: Trajectory, *penalties: Regularizer, substeps: int = 4
) -> Fit:
    """The fit of what moved the weights beside the gradient flow."""
    return fit(trajectory_equations(objective, path, penalties, reference=rk4(substeps)))


def classification(seed: int) -> Objective:
    """The cross-entropy of a small tanh network with three classes."""
    return Objective(tanh_network(seed, (3, 5, 3)), F.cross_entropy, class_data(seed))


def mean_penalty(
    name: str, objective: Objective, function: Callable[[Tensor, Tensor], Tensor]
) -> Regularizer:
    """The mean over examples of function(output, target), as a penalty, in unequal batches."""
    examples = Objective(objective.model, function, objective.data, batch_size=16)
    return mean_of(examples, name=name)


def train(
    model: nn.Module, data: Examples, optimizer: torch.optim.Optimizer, steps: int
) -> Iterator[None]:
    """Train on the whole data by ½(f − y)²; an iterator that takes a step when it is advanced."""
    for _ in range(steps):
        optimizer.zero_grad()
        half_squares(model(data[0]), data[1]).backward()
        optimizer.step()
        yield

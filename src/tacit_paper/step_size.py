"""The step size of gradient descent: its penalty on ‖∇L‖², read off the steps themselves."""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tacit.equations.flow import rk4
from tacit.equations.trajectory import Trajectory, trajectory_equations
from tacit.errors import InputError
from tacit.fitting.fits import Fit, fit
from tacit.objective import derivatives
from tacit.objective.losses import Loss
from tacit.objective.objective import Objective
from tacit.objective.params import Params, norm
from tacit.regularizers import Regularizer, gradient_norm
from tacit.regularizers.family import Columns
from tacit_paper import Row, run_small
from tacit_paper import least_squares as ls
from tacit_paper.step_size_check import check as check
from tacit_paper.step_size_networks import Examples, Split, load, scores, train
from tacit_paper.step_size_plot import plot as plot

TITLE = "Implicit gradient regularization: the step size as a penalty"

CAPTION = """
A step of gradient descent of size η does not follow the gradient flow of the loss. It stays closer
to the flow of the loss plus (η/4)‖∇L‖², or λ‖∇L‖²/p with λ = ηp/4 (Barrett & Dherin 2021). Networks
of many widths and step sizes were trained, and from each five full-batch steps were compared with
the flow over the same time. (A) The mean squared gradient R_IG = ‖∇L‖²/p and (B) the test accuracy
of each network against the strength λ̂ found; a line is a width, and the step size grows along it.
(C) The strength found against the one predicted: on logarithmic scales they agree. (D) Their ratio
shows more. The prediction is the first term of a series in η times the curvature, so with the
column of ‖∇L‖² alone (open) the ratio lies below 1, by how much depends on where a network ended as
well as on η. With the next term of the flow as a second column, the change of H∇L along the flow
(filled), it comes back to a few percent, least well at the largest steps. Grey: least squares,
where the curvature is the same throughout and the ratio goes to 1 linearly in η.

As published: widths, step sizes, data, splits, batches, epochs, the choice of checkpoints, five
probe steps on 2,048 examples and a flow by ten Runge–Kutta steps. The text leaves three things
open: the hidden layers have no bias and the last one has; pixels are normalised; there is one seed.
Different: panel (D) and the second column are added. Networks that never reached 90 % on the
training set have no estimate, as published; here they are named below the panels and kept, with the
reason, in the rows. The quick preset uses scikit-learn's digits and smaller networks.
""".strip()

LEAST_SQUARES = "least squares"
NEXT = "change of H∇L along the flow"


@dataclass(frozen=True)
class Config:
    """Sizes and settings; the defaults are the paper's."""

    data: str = "mnist"
    """mnist, or digits, which need no download."""
    normalisation: tuple[float, float] = (0.1307, 0.3081)
    """Mean and standard deviation of a pixel."""
    train: int = 10_000
    validation: int = 1_000
    test: int = 5_000
    widths: tuple[int, ...] = (50, 100, 200, 400, 800, 1600)
    hidden: int = 5
    etas: tuple[float, ...] = (5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 1e-1, 5e-1)
    epochs: int = 50
    batch_size: int = 128
    seed: int = 0
    """Of initial weights and of batch orders, alike for all step sizes."""
    enough: float = 0.9
    """Training accuracy that a checkpoint needs."""
    probe: int = 2048
    """Training examples that steps and flow are computed on."""
    steps: int = 5
    substeps: int = 10
    """Runge–Kutta steps of the flow in the time of one step of descent."""
    plain_etas: tuple[float, ...] = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
    """Step sizes on least squares."""


PAPER = Config()
QUICK = Config(
    data="digits",
    normalisation=(0.3053, 0.3761),
    train=1200,
    validation=200,
    test=397,
    widths=(32, 64),
    etas=(1e-3, 1e-2, 5e-2, 1e-1),
    epochs=40,
    batch_size=16,
    probe=512,
)


def units(config: Config) -> list[str]:
    """A piece of work is a width, with all its step sizes; and least squares."""
    return [LEAST_SQUARES, *(f"width {width}" for width in config.widths)]


def run(config: Config, *, finished: Collection[str] = (), device: str = "cpu") -> Iterator[Row]:
    """Rows of every unit that is not finished: one a cell, whether it was trained or not.

    On one thread where the device is the CPU, which is best for the small networks of `QUICK`; the
    paper's are for a GPU.
    """
    split = cache(partial(_load, config, device))  # read once, and only if it is needed
    work: dict[str, Callable[[], Iterator[Row]]] = {LEAST_SQUARES: partial(_least_squares, config)}
    work |= {
        f"width {width}": lambda width=width: _width(config, split(), width)
        for width in config.widths
    }
    return run_small(work, finished)


def _load(config: Config, device: str) -> Split:
    return load(
        config.data, config.normalisation,
        train=config.train, validation=config.validation, test=config.test, device=device,
    )  # fmt: skip


def _width(config: Config, split: Split, width: int) -> Iterator[Row]:
    began = time.perf_counter()
    trained = train(config, split, width)
    test, _ = scores(trained.ensemble, split.test)
    columns = (trained.epoch, trained.accuracy, trained.validation, test)
    numbers = zip(*(column.tolist() for column in columns), strict=True)
    seconds = time.perf_counter() - began
    X, y = (part[: config.probe] for part in split.train)
    for m, (eta, (epoch, *accuracies)) in enumerate(zip(config.etas, numbers, strict=True)):
        model = trained.ensemble.module(m).double()
        size = sum(p.numel() for p in model.parameters())
        row: Row = {
            "kind": "network",
            "width": width,
            "eta": eta,
            "parameters": size,
            "trained": not trained.reason[m],
            "reason": trained.reason[m],
            "train_accuracy": accuracies[0],
            "train_seconds": seconds,  # of all step sizes together
        }
        if epoch:
            names = ("validation_accuracy", "test_accuracy")
            row |= {"epoch": epoch, **dict(zip(names, accuracies[1:], strict=True))}
            row |= probe(config, model, F.cross_entropy, (X.double(), y), eta)
        yield row


def _least_squares(config: Config) -> Iterator[Row]:
    """The same estimates where nothing is to be trained: mean squared error from zero."""
    X, _, y = ls.draw()
    for eta in config.plain_etas:
        model = nn.Linear(X.shape[1], 1, bias=False, dtype=X.dtype)
        nn.init.zeros_(model.weight)
        found = probe(config, model, F.mse_loss, (X, y[:, None]), eta)
        yield {"kind": LEAST_SQUARES, "eta": eta, "parameters": X.shape[1], **found}


def probe(config: Config, model: nn.Module, loss: Loss, data: Examples, eta: float) -> Row:
    """What a few full-batch steps of size η from here add to the flow, by one column and by two.

    (flow − step)/η = (η/2)Hg − (η²/6) D(Hg)[g] + …, where the columns are 2Hg and −D(Hg)[g]: the
    theory's strengths are η/4 and η²/6.
    """
    began = time.perf_counter()
    objective = Objective(model, loss, data, batch_size=len(data[0]))
    point = {n: p.clone() for n, p in objective.params.items()}
    size = sum(p.numel() for p in point.values())
    points, moves = [], []
    for _ in range(config.steps):
        points.append(point)
        moves.append({n: g.mul_(-eta) for n, g in objective.gradient(point).items()})
        point = {n: p + moves[-1][n] for n, p in point.items()}
    equations = trajectory_equations(
        objective,
        Trajectory(points, moves, [eta] * config.steps),
        [gradient_norm(objective), along_flow(model, loss, data)],
        reference=rk4(config.substeps),
    )
    first, second = fit(equations.select_columns([0])), fit(equations)
    ratio = first.strengths["gradient_norm"] / (eta / 4)
    return {
        "r_ig": (norm(moves[0]) / eta) ** 2 / size,
        "ratio_first": ratio,
        "ratio_second": second.strengths["gradient_norm"] / (eta / 4),
        "next_over_theory": second.strengths[NEXT] / (eta**2 / 6),
        "explained_first": first.explained,
        "explained_second": second.explained,
        "condition": second.condition,
        "problems": _kinds(first),
        "problems_second": _kinds(second),
        "lambda_hat": ratio * eta * size / 4,
        "lambda_theory": eta * size / 4,
        "probe_seconds": time.perf_counter() - began,
    }


def _kinds(found: Fit) -> str:
    return ", ".join(problem.kind for problem in found.problems)


def along_flow(model: nn.Module, loss: Loss, data: Examples) -> Regularizer:
    """The change of Hg along the flow, −D(Hg)[g], as a candidate.

    Trap: it is the gradient of no penalty in general. It can be matched, not retrained with.
    """

    def bind(params: Params) -> Columns:
        found = change_along_gradient(model, loss, data, params)
        return Columns(
            names=(NEXT,),
            active=dict.fromkeys(found, (0,)),
            rows=lambda tensor, part: -found[tensor].flatten()[part].unsqueeze(1),
        )

    def value(params: Params) -> Tensor:
        raise InputError(f"{NEXT} is the gradient of no penalty: match it, do not add it.")

    return Regularizer(NEXT, bind, value)


def change_along_gradient(model: nn.Module, loss: Loss, data: Examples, params: Params) -> Params:
    """D(Hg)[g], the derivative of H(θ)g(θ) along g, by a third backward.

    It is ∇(⟨H v, v⟩ + ⟨g, w⟩) with v = g and w = Hg held constant. Trap: torch's third derivatives
    are wrong through fused layer norm; linear layers and tanh are right.
    """
    leaves = derivatives.leaves(params)
    tensors = list(leaves.values())
    with torch.enable_grad():
        mean = loss(functional_call(model, leaves, (data[0],)), data[1])
        slope = torch.autograd.grad(mean, tensors, create_graph=True)
        v = [g.detach() for g in slope]
        force = torch.autograd.grad(slope, tensors, v, create_graph=True)
        pairs = (
            *zip(force, v, strict=True),
            *((g, f.detach()) for g, f in zip(slope, force, strict=True)),
        )
        both = torch.stack([(a * b).sum() for a, b in pairs]).sum()
        found = torch.autograd.grad(both, tensors)
    return dict(zip(leaves, found, strict=True))

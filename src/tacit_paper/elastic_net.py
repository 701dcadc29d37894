"""Elastic net: penalties that training did write down, found again from the weights alone."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import product

from torch.nn import functional as F

from tacit import ensembles
from tacit.ensembles import Ensemble
from tacit.equations.endpoint import endpoint_equations
from tacit.fitting.fits import Fit, fit
from tacit.objective.objective import Objective
from tacit.objective.params import Params
from tacit.regularizers import l2, smooth_l1
from tacit.validation import penalty, validate
from tacit.validation.minimising import minimise
from tacit.validation.penalised import Penalised
from tacit_paper import Row, run_units
from tacit_paper.elastic_net_check import check as check
from tacit_paper.elastic_net_plot import plot as plot
from tacit_paper.elastic_net_training import Config, Member, Sweep, draw
from tacit_paper.published_fit import Protocol, published_fit, statistics

TITLE = "Recovering explicit regularization"

CAPTION = """
Networks of one hidden layer were trained with a smoothed L1 penalty λ₁ and a ridge penalty λ₂, six
values each, on ten data sets. Both strengths are then read off the finished weights, without being
told. Lines are medians over data sets; open markers are cells whose fits carry a Problem in at
least half of the data sets, crosses are medians below zero. (A, B) Exact least squares at the last
weights, after SGD; bars are the middle half of the data sets. What is off there is not the
estimator but the point: the last weights of a run with a constant step are one noisy draw, and not
stationary. (C, D) The same runs, from means over each of the last five epochs and their drift: no
further training, and the error falls more than tenfold. Bars are 95 % intervals of training as one
run gives them, from how far its five epochs disagree (median ends over data sets). (E to H) Median
relative error of both by cell. At λ₂ = 10 many networks collapse to zero, where the two penalties
are one and the same. At λ₁ = 10 the step is too large for the penalty (η λ₁/β > 2): the weights
jump across its bend at every step, and no single point tells its strength. (I, J) How far the
published fit, Adam on log λ, stops from the exact answer to the same equations.

As published: sizes, data, step, batches, patience and the settings of the published fit. Different:
the text trains with SGD and the authors' code with Adam; the figure shows SGD, the rows have both.
Stopping watches loss and penalty together, as the published curves need. Polished rows: the same
objective minimised on by L-BFGS from the last weights gives both strengths to five digits in the
median of every cell, so what was missing is the end of training. Retrained rows: the same start and
batches again, with the true, the estimated and no penalty.
""".strip()

PAPER = Config()
QUICK = Config(
    strengths=(1e-2, 1e-1, 1.0, 10.0),
    seeds=2,
    epochs=30,
    shuffles=1,
    polished=((1, 1),),
    retrained=((0.1, 1, 1),),
)


def units(config: Config) -> list[str]:
    """Pieces of work, in order."""
    return list(_work(config))


def run(config: Config, *, finished: Collection[str] = (), device: str = "cpu") -> Iterator[Row]:
    """Rows of every unit that is not finished."""
    work = {unit: partial(piece, config, device) for unit, piece in _work(config).items()}
    return run_units(work, finished)


def _work(config: Config) -> dict[str, Callable[[Config, str], Iterator[Row]]]:
    step = config.polished_per_unit
    groups = [range(s, min(s + step, config.seeds)) for s in range(0, config.seeds, step)]
    return {
        **{f"{name}": partial(_sweep, optimizer=name) for name in config.optimizers},
        **{f"polished {g[0]} to {g[-1]}": partial(_polished, seeds=g) for g in groups},
        "retrained": _retrained,
    }


def _sweep(config: Config, device: str, *, optimizer: str) -> Iterator[Row]:
    """All cells and data sets: exact estimates of both kinds, and the published fit."""
    pairs = product(config.strengths, config.strengths, range(config.seeds))
    sweep = Sweep(config, [Member(*each) for each in pairs], device)
    regularizers = [smooth_l1(config.beta), l2()]
    began = time.perf_counter()
    trained = sweep.train(regularizers, optimizer=optimizer)
    between = time.perf_counter()
    data = sweep.data
    last = ensembles.fits(
        ensembles.endpoint_equations(trained.last, F.mse_loss, data, regularizers)
    )
    drift = ensembles.fits(ensembles.epoch_equations(trained, F.mse_loss, data, regularizers))
    exact = time.perf_counter()
    given = statistics(
        trained.last, F.mse_loss, data, regularizers,
        batch_size=config.batch_size, shuffles=config.shuffles,
    )  # fmt: skip
    protocol = Protocol(config.fit_rate, config.fit_epochs, config.fit_patience)
    strengths, epochs, _ = published_fit(given, protocol)
    ended = time.perf_counter()
    for m, member in enumerate(sweep.members):
        own = {"optimizer": optimizer, "epochs": int(trained.epochs[m]), **vars(member)}
        yield {**own, "estimate": "last", **_found(last[m])}
        yield {**own, "estimate": "drift", **_found(drift[m])}
        yield {
            **own, "estimate": "published", "fit_epochs": int(epochs[m]),
            **_published(strengths[m].tolist(), last[m]),
        }  # fmt: skip
    yield {
        "estimate": "time",
        "optimizer": optimizer,
        "members": len(sweep.members),
        "train_seconds": between - began,
        "exact_seconds": exact - between,
        "published_seconds": ended - exact,
    }


def _found(found: Fit) -> Row:
    """What a row keeps of a fit."""
    lasso, ridge = found.strengths.values()
    ends = found.intervals().get("training", {})
    limits = {
        f"{name}_{end}": value
        for name, own in zip(("l1", "l2"), ends.values(), strict=False)
        for end, value in zip(("low", "high"), own, strict=True)
    }
    return {
        "l1_hat": lasso,
        "l2_hat": ridge,
        "explained": found.explained,
        "residual_ratio": found.residual_ratio,
        "condition": found.condition,
        "gradient_norm": found.gradient_norm,
        **limits,
        "problems": ", ".join(problem.kind for problem in found.problems),
    }


def _published(strengths: Sequence[float], exact: Fit) -> Row:
    """The published fit, and how far it stopped from the exact answer to the same equations."""
    away = [
        abs(mine - theirs) / abs(theirs) if theirs else math.inf
        for mine, theirs in zip(strengths, exact.strengths.values(), strict=True)
    ]
    return {
        "l1_hat": strengths[0],
        "l2_hat": strengths[1],
        "l1_distance": away[0],
        "l2_distance": away[1],
        "problems": ", ".join(problem.kind for problem in exact.problems),
    }


def _polished(config: Config, device: str, *, seeds: Sequence[int]) -> Iterator[Row]:
    """The good cells, trained again and then minimised on by L-BFGS on the same objective."""
    members = [Member(*cell, seed) for cell, seed in product(config.polished, seeds)]
    sweep = Sweep(config, members, device)
    regularizers = [smooth_l1(config.beta), l2()]
    trained = sweep.train(regularizers)
    for m, member in enumerate(members):
        objective = _objective(sweep, trained.last, m)
        own = {"smooth_l1": member.l1, "l2": member.l2}
        began = time.perf_counter()
        function = Penalised(objective, penalty(regularizers, own))
        end = minimise(function, function.flat(objective.params))
        equations = endpoint_equations(objective, regularizers, params=function.unflat(end.theta))
        yield {
            "estimate": "polished",
            "optimizer": "sgd",
            "epochs": int(trained.epochs[m]),
            **vars(member),
            **_found(fit(equations)),
            "polish_seconds": time.perf_counter() - began,
        }


def _objective(sweep: Sweep, ensemble: Ensemble, index: int) -> Objective:
    """One member's loss over its data in float64."""
    X, y = draw(sweep.config, sweep.members[index].seed)
    model = ensemble.module(index).double()
    where = next(model.parameters()).device
    return Objective(model, F.mse_loss, (X.double().to(where), y.double().to(where)))


def _retrained(config: Config, device: str) -> Iterator[Row]:
    """Some runs again, from the same start and batches: with each penalty, and with none."""
    regularizers = [smooth_l1(config.beta), l2()]
    sweep = Sweep(config, [Member(*each) for each in config.retrained], device)
    first = sweep.train(regularizers)
    data = sweep.data
    last = ensembles.fits(ensembles.endpoint_equations(first.last, F.mse_loss, data, regularizers))
    drift = ensembles.fits(ensembles.epoch_equations(first, F.mse_loss, data, regularizers))
    true = [{"smooth_l1": m.l1, "l2": m.l2} for m in sweep.members]
    none = [{"smooth_l1": 0.0, "l2": 0.0} for _ in sweep.members]
    penalties = {
        "true": true,
        "drift": [found.strengths for found in drift],
        "last": [found.strengths for found in last],
        "none": none,
    }
    every = [
        Member(own["smooth_l1"], own["l2"], member.seed)
        for strengths in penalties.values()
        for own, member in zip(strengths, sweep.members, strict=True)
    ]
    epochs = first.epochs.tolist() * len(penalties)
    ends = Sweep(config, every, device).train(regularizers, epochs=epochs).last
    count = len(sweep.members)
    for m, member in enumerate(sweep.members):
        objective = _objective(sweep, first.last, m)
        control = ends.member((len(penalties) - 1) * count + m)
        for k, (name, strengths) in enumerate(list(penalties.items())[:-1]):
            retrained = ends.member(k * count + m)
            found = validate(
                strengths[m], objective, regularizers,
                train=partial(_ended, objective.params, retrained, control),
            )  # fmt: skip
            yield {
                "estimate": f"retrained {name}",
                "optimizer": "sgd",
                "epochs": int(first.epochs[m]),
                **vars(member),
                "l1_hat": strengths[m]["smooth_l1"],
                "l2_hat": strengths[m]["l2"],
                "distance": found.penalised.distance,
                "control_distance": found.control.distance,
                "verdict": "" if found.certificate is None else found.certificate.verdict,
                "problems": ", ".join(problem.kind for problem in found.problems),
            }


def _ended(original: Params, retrained: Params, control: Params, added) -> Params:
    """Where training with this penalty ended: all were trained together beforehand."""
    return control if float(added(original)) == 0 else retrained

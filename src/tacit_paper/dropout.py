"""Dropout: what one ridge strength says of it, what it adds to the loss, and what family it is."""

import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import pairwise, product

from torch.nn import functional as F

from tacit import ensembles
from tacit.ensembles import Ensemble, Run
from tacit_paper import Row, run_units
from tacit_paper.dropout_check import check as check
from tacit_paper.dropout_estimates import marginal, total
from tacit_paper.dropout_plot import plot as plot
from tacit_paper.dropout_retraining import retrained
from tacit_paper.dropout_training import Config, Images, accuracy, fast_products, load, plan, start

TITLE = "Implicit regularization of dropout"

CAPTION = """
Classifiers with dropout after every hidden layer but the last, one column an architecture. (Top)
As published: the ridge strength that Adam on log λ arrives at from 1, by its own schedule and
stopping; colour is its loss. (Second) The exact ridge strength at the same weights from the same
equations, and how much of the gradient it explains. It is many times smaller than the published
one: the published values and their rise with the rate are an artefact of a fit that stops before it
converges. Ridge explains little of the gradient at these weights, and less the higher the rate.
(Third) Dropout's own effect, the expected gradient with masks minus the gradient without at the
same weights: how much of it each family explains, free of the masks' noise. Ridge explains next to
nothing, mostly with a negative coefficient; ridge weighted by activations, and one strength a
layer, little more. The explicit regularizer of Wei, Kakade & Ma is the right family at small rates
and large widths. (Bottom) Its coefficient over the theory value q/(1−q). Open markers carry a
Problem: the second-order expansion that the regularizer comes from has broken down there. Both at
the weights of the best validation loss; dotted, means at the last weights, fifty epochs of
overfitting later, where the expansion holds less well. Lines are means over seeds, and bars their
95 % intervals of training: over networks that differ in start, batches and masks (t, ten networks
in the second row, six below). They say how far another seed would move a mean, not whether ridge
is the right family: that is what the explained fraction says.

As published: data split, networks, optimizer, schedule, patience, seeds and the fit's settings.
Different: the fit's minibatches are drawn from a few shuffles; training multiplies matrices in TF32
on CUDA. The lower three rows are new. Retrained rows: the same start and batches without dropout,
with the explicit regularizer as estimated at the best weights, with the ridge strength of the last,
and with nothing; compared are predictions with those of the dropout network's last weights. The
quick preset is a smoke test on small images: its networks are too narrow for the expansion, and its
published fit is cut off at 300 epochs, before it stops by itself.
""".strip()


PAPER = Config()
QUICK = Config(
    data="digits",
    depths=(3,),
    widths=(32, 64),
    rates=(0.0, 0.05, 0.1, 0.3, 0.5),
    seeds=(123, 42),
    train=1400,
    milestones=(60, 80),
    epochs=100,
    batch_size=128,
    best_seeds=2,
    last_seeds=1,
    noise=0.1,
    fit_epochs=300,
    shuffles=1,
    retrained=(3, 32),
    retrained_rates=(0.05, 0.1),
)


def units(config: Config) -> list[str]:
    """Pieces of work, in order: an architecture each, and the retrained networks."""
    return list(_work(config))


def run(config: Config, *, finished: Collection[str] = (), device: str = "cpu") -> Iterator[Row]:
    """Rows of every unit that is not finished."""
    work = {unit: partial(piece, config, device) for unit, piece in _work(config).items()}
    return run_units(work, finished)


def _work(config: Config) -> dict[str, Callable[[Config, str], Iterator[Row]]]:
    each = product(config.depths, config.widths)
    return {
        **{f"{d} layers of {w}": partial(_architecture, depth=d, width=w) for d, w in each},
        "retrained": retrained,
    }


def _architecture(config: Config, device: str, *, depth: int, width: int) -> Iterator[Row]:
    """All rates and seeds of one architecture: training, both fits of the total, the marginal."""
    images = load(config, device)
    members = list(product(config.rates, config.seeds))
    rates, seeds = [rate for rate, _ in members], [seed for _, seed in members]
    clock = [time.perf_counter()]
    with fast_products():
        trained = ensembles.train(
            start(config, depth, width, images, seeds), F.cross_entropy, images.train,
            plan(config, images), seeds=seeds, dropout=rates,
        )  # fmt: skip
    clock.append(time.perf_counter())
    rows: list[Row] = [
        {"kind": "model", "depth": depth, "width": width, "rate": rate, "seed": seed}
        for rate, seed in members
    ]
    whole = [m for m, lost in enumerate(trained.diverged.tolist()) if not lost]
    trained, rows, lost = (
        trained.chosen(whole),
        [rows[m] for m in whole],
        [{**row, "kind": "diverged"} for m, row in enumerate(rows) if m not in whole],
    )
    for found in (_accuracy(trained, images), total(config, trained.last, images)):
        for row, own in zip(rows, found, strict=True):
            row.update(own)
    clock.append(time.perf_counter())
    effects = [
        effect
        for point, ensemble, count in (
            ("best", trained.best, config.best_seeds), ("last", trained.last, config.last_seeds)
        )
        for effect in _effects(config, images, ensemble, rows, point, config.seeds[:count])
    ]  # fmt: skip
    clock.append(time.perf_counter())
    yield from (*rows, *lost, *effects)
    yield {
        "kind": "time",
        "depth": depth,
        "width": width,
        **{
            f"{name}_seconds": after - before
            for name, (before, after) in zip(
                ("train", "total", "marginal"), pairwise(clock), strict=True
            )
        },
    }


def _effects(
    config: Config,
    images: Images,
    ensemble: Ensemble,
    models: list[Row],
    weights: str,
    seeds: Collection[int],
) -> Iterator[Row]:
    """Dropout's own effect on the networks of some seeds that were trained with it."""
    chosen = [m for m, row in enumerate(models) if row["rate"] > 0 and row["seed"] in seeds]
    own = [models[m] for m in chosen]
    rates, masks = [row["rate"] for row in own], [row["seed"] for row in own]
    found = marginal(config, ensemble.chosen(chosen), images, rates, masks)
    for row, effect in zip(own, found, strict=True):
        place = {name: row[name] for name in ("depth", "width", "rate", "seed")}
        yield {"kind": "effect", "weights": weights, **place, **effect}


def _accuracy(trained: Run, images: Images) -> Iterator[Row]:
    """Epochs and accuracies of every member."""
    train, test = (accuracy(trained.last, data) for data in (images.train, images.test))
    for m, epochs in enumerate(trained.epochs.tolist()):
        yield {
            "epochs": epochs,
            "best_epochs": int(trained.best_epoch[m]) + 1,
            "train_accuracy": train[m],
            "test_accuracy": test[m],
        }

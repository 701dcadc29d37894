"""Networks of the elastic-net figure trained again with the true, estimated and no penalties."""

from collections.abc import Iterator
from functools import partial

from tacit import validate
from tacit.objective import Params
from tacit_paper import Row
from tacit_paper.elastic_net.config import Config
from tacit_paper.elastic_net.estimates import certificate_columns
from tacit_paper.elastic_net.training import Member, Sweep
from tacit_paper.problem_kinds import join_kinds


def retrained_rows(config: Config, device: str) -> Iterator[Row]:
    """How close retraining with each set of strengths comes to the original weights.

    Every network is trained again from the same initial weights and through the same batches: with
    the true strengths, with both estimates, and without a penalty as the control. All of these runs
    are trained as one ensemble.
    """
    sweep = Sweep(config, [Member(*network) for network in config.retrained], device)
    original = sweep.train()
    last, drift = sweep.fits(original)
    strengths = {
        "true": [{"smooth_l1": member.l1, "l2": member.l2} for member in sweep.members],
        "drift": [fit.strengths for fit in drift],
        "last": [fit.strengths for fit in last],
        "none": [{"smooth_l1": 0.0, "l2": 0.0} for _ in sweep.members],
    }
    members = [
        Member(penalty["smooth_l1"], penalty["l2"], member.seed)
        for penalties in strengths.values()
        for penalty, member in zip(penalties, sweep.members, strict=True)
    ]
    epochs = original.epochs.tolist() * len(strengths)
    retrained = Sweep(config, members, device).train(epochs=epochs).last
    count = len(sweep.members)
    for m, member in enumerate(sweep.members):
        objective = sweep.objective(original.last, m)
        control = retrained.member(3 * count + m)
        for k, name in enumerate(("true", "drift", "last")):
            penalties, weights = strengths[name][m], retrained.member(k * count + m)
            look_up = partial(_look_up_weights, objective.params, weights, control)
            validation = validate(penalties, objective, sweep.regularizers, train=look_up)
            yield {
                "estimate": f"retrained {name}",
                "optimizer": "sgd",
                "epochs": int(original.epochs[m]),
                **vars(member),
                "l1_hat": penalties["smooth_l1"],
                "l2_hat": penalties["l2"],
                "distance": validation.penalised.distance,
                "control_distance": validation.control.distance,
                **certificate_columns(validation.certificate),
                "problems": join_kinds(validation.problems),
            }


def _look_up_weights(original: Params, retrained: Params, control: Params, added) -> Params:
    """The weights that training with this added penalty reached; all were trained beforehand."""
    return control if float(added(original)) == 0 else retrained

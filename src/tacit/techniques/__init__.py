"""Training techniques as functions from an objective to an objective, for difference equations."""

from tacit.techniques.contract import check_contract
from tacit.techniques.depth import stochastic_depth
from tacit.techniques.examples import augment, input_noise, mixup
from tacit.techniques.labels import label_smoothing
from tacit.techniques.weights import sam, weight_noise

__all__ = [
    "augment",
    "check_contract",
    "input_noise",
    "label_smoothing",
    "mixup",
    "sam",
    "stochastic_depth",
    "weight_noise",
]

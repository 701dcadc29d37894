"""Many small networks of one architecture, trained and fitted as one batched program."""

from tacit.ensembles.data import Data
from tacit.ensembles.denormals import flushed_denormals
from tacit.ensembles.dropout import DropoutEquations, dropout_equations
from tacit.ensembles.equations import endpoint_equations, epoch_equations, fits
from tacit.ensembles.evaluation import gradients
from tacit.ensembles.members import Ensemble, from_models, initialise
from tacit.ensembles.optimizers import SGD, Adam
from tacit.ensembles.plan import Plan, Stopping
from tacit.ensembles.randomness import mask_generator, order_generator
from tacit.ensembles.run import Run
from tacit.ensembles.training import train

__all__ = [
    "SGD", "Adam", "Data", "DropoutEquations", "Ensemble", "Plan", "Run", "Stopping",
    "dropout_equations", "endpoint_equations", "epoch_equations", "fits", "flushed_denormals",
    "from_models", "gradients", "initialise", "mask_generator", "order_generator", "train",
]  # fmt: skip

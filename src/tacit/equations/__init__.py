"""Linear equations in the strengths, and the ways to write them."""

from tacit.equations.blocks import Block
from tacit.equations.difference import difference_equations, difference_target
from tacit.equations.epochs import EpochAverages, average_epochs
from tacit.equations.equations import Equations, stack
from tacit.equations.flow import adam_flow, euler, on_batches, rk4
from tacit.equations.recording import Recorder, record
from tacit.equations.resampling import bootstrap, less_collinear
from tacit.equations.sources import Family, Source
from tacit.equations.steps import accumulated_target, trajectory_equations, trajectory_target
from tacit.equations.target import Target, endpoint_equations, endpoint_target
from tacit.equations.trajectory import Trajectory

__all__ = [
    "Block",
    "EpochAverages",
    "Equations",
    "Family",
    "Recorder",
    "Source",
    "Target",
    "Trajectory",
    "accumulated_target",
    "adam_flow",
    "average_epochs",
    "bootstrap",
    "difference_equations",
    "difference_target",
    "endpoint_equations",
    "endpoint_target",
    "euler",
    "less_collinear",
    "on_batches",
    "record",
    "rk4",
    "stack",
    "trajectory_equations",
    "trajectory_target",
]

"""Linear equations in the strengths, and the ways to write them."""

from tacit.equations.difference import difference_equations
from tacit.equations.endpoint import endpoint_equations
from tacit.equations.epochs import EpochAverages, average_epochs
from tacit.equations.equations import Block, Equations, Family, Source, stack
from tacit.equations.flow import euler, rk4
from tacit.equations.recording import Recorder, record
from tacit.equations.resampling import bootstrap
from tacit.equations.trajectory import Trajectory, trajectory_equations

__all__ = [
    "Block",
    "EpochAverages",
    "Equations",
    "Family",
    "Recorder",
    "Source",
    "Trajectory",
    "average_epochs",
    "bootstrap",
    "difference_equations",
    "endpoint_equations",
    "euler",
    "record",
    "rk4",
    "stack",
    "trajectory_equations",
]

"""The public names: read by type checkers, and by `__init__.py`, which imports them when used."""

from tacit import bounds as bounds
from tacit import ensembles as ensembles
from tacit import equations as equations
from tacit import fitting as fitting
from tacit import identifiability as identifiability
from tacit import integrations as integrations
from tacit import objective as objective
from tacit import reference as reference
from tacit import regularizers as regularizers
from tacit import reporting as reporting
from tacit import techniques as techniques
from tacit import theory as theory
from tacit import uncertainty as uncertainty
from tacit import validation as validation
from tacit import watching as watching
from tacit.equations import Equations as Equations
from tacit.equations import Target as Target
from tacit.equations import Trajectory as Trajectory
from tacit.equations import average_epochs as average_epochs
from tacit.equations import bootstrap as bootstrap
from tacit.equations import difference_equations as difference_equations
from tacit.equations import difference_target as difference_target
from tacit.equations import endpoint_equations as endpoint_equations
from tacit.equations import endpoint_target as endpoint_target
from tacit.equations import record as record
from tacit.equations import rk4 as rk4
from tacit.equations import stack as stack
from tacit.equations import trajectory_equations as trajectory_equations
from tacit.equations import trajectory_target as trajectory_target
from tacit.errors import InputError as InputError
from tacit.errors import Problem as Problem
from tacit.estimating import estimate as estimate
from tacit.estimating import time_varying as time_varying
from tacit.fitting import Fit as Fit
from tacit.fitting import fit as fit
from tacit.fitting import fit_regularizer as fit_regularizer
from tacit.fitting import fit_shapes as fit_shapes
from tacit.identifiability import null_distribution as null_distribution
from tacit.identifiability import screen as screen
from tacit.objective import Objective as Objective
from tacit.objective import matrices as matrices
from tacit.regularizers import Regularizer as Regularizer
from tacit.regularizers import l1 as l1
from tacit.regularizers import l2 as l2
from tacit.regularizers import layerwise as layerwise
from tacit.regularizers import optimizer_penalties as optimizer_penalties
from tacit.regularizers import regularizer as regularizer
from tacit.regularizers import smooth_l1 as smooth_l1
from tacit.reporting import report as report
from tacit.uncertainty import score_examples as score_examples
from tacit.validation import validate as validate
from tacit.watching import settle as settle
from tacit.watching import watch as watch

__all__: list[str]
__version__: str

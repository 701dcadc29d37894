"""What is to be explained in every member, and the equations written from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tacit.ensembles.members import Ensemble, flatten_members, member_norms
from tacit.ensembles.penalties import Strengths, check_penalties, expand_strengths
from tacit.equations.blocks import Block
from tacit.equations.candidates import BoundCandidates, check_candidates
from tacit.equations.equations import Equations
from tacit.equations.factors import triangular_factor
from tacit.equations.rows import count_left_out, read_rows
from tacit.equations.sources import Source
from tacit.errors import InputError
from tacit.objective.losses import Loss
from tacit.objective.params import Params, layer_of, shorten
from tacit.regularizers.family import Columns, Regularizer


@dataclass(frozen=True, eq=False)
class MemberTargets:
    """The targets of all members, stacked.

    The counterpart of `tacit.equations.target.Target`, which refers to the objective of one model:
    the targets of all members are computed together, in one pass over their data.
    """

    mode: str
    """See `Source.mode`."""
    ensemble: Ensemble
    """The points, in float64."""
    vectors: Sequence[Params]
    """Stacked targets, one per group of draws."""
    floors: Params
    """For each tensor and member, the norm of a target that consists of rounding errors."""
    loss: Loss
    examples: int
    gradients: Params
    """∇L at the points, for its norm."""
    loss_values: Sequence[float] | None = None
    columns: Mapping[Regularizer, Params] = field(default_factory=dict)
    """Columns that were computed already (means over an epoch, gradients of a mean over the data)
    and replace those at the point; of regularizers with one strength per tensor."""
    unreached: frozenset[str] = frozenset()
    """Parameters that the loss does not reach, which have no equations."""

    def equations(
        self,
        regularizers: Regularizer | Sequence[Regularizer],
        known: Mapping[Regularizer, Strengths] | None = None,
    ) -> list[Equations]:
        """The equations of every member; `known` penalties may have one strength per member."""
        self._check_finite()
        strengths = {
            r: expand_strengths(r.name, value, 1, self.ensemble)[:, 0].tolist()
            for r, value in check_penalties("known", known).items()
        }
        layers: dict[str, list[str]] = {}
        for name in self._rows:
            layers.setdefault(layer_of(name), []).append(name)
        floors = {
            layer: member_norms({n: self.floors[n] for n in names})
            for layer, names in layers.items()
        }
        equations = []
        for m, source in enumerate(self._sources(strengths)):
            member_known = {r: values[m] for r, values in strengths.items()}
            candidates = check_candidates(regularizers, member_known)
            bound = candidates.bind(self.ensemble.member(m), averaged=self._member_columns(m))
            targets = [{n: t[m] for n, t in vector.items()} for vector in self.vectors]
            blocks = tuple(
                _layer_block(bound, layer, names, targets, floors[layer][m])
                for layer, names in layers.items()
            )
            sources = (replace(source, counts=bound.counts),)
            equations.append(
                Equations(bound.families, bound.columns.names, len(targets), blocks, sources)
            )
        return equations

    @property
    def _rows(self) -> list[str]:
        """Names of the parameters that have equations."""
        return [name for name in self.ensemble.params if name not in self.unreached]

    def _check_finite(self) -> None:
        stacked = [t for tensors in (self.ensemble.params, *self.vectors) for t in tensors.values()]
        finite = torch.stack([flatten_members(t).isfinite().all(1) for t in stacked]).all(0)
        diverged = [str(m) for m, is_finite in enumerate(finite.tolist()) if not is_finite]
        if diverged:
            raise InputError(
                f"weights or gradients of members {shorten(diverged)} are not finite: they have "
                "diverged. Leave them out with run.select(members) or ensemble.select(members)."
            )

    def _member_columns(self, member: int) -> dict[Regularizer, Columns]:
        """The columns of one member that were computed already."""
        columns = {}
        for regularizer, column in self.columns.items():
            flat = {n: t[member].flatten() for n, t in column.items()}
            at_point = regularizer.bind(self.ensemble.member(member))
            columns[regularizer] = Columns(
                at_point.names, at_point.active, lambda n, part, flat=flat: flat[n][part, None]
            )
        return columns

    def _sources(self, known: Mapping[Regularizer, Sequence[float]]) -> list[Source]:
        """The source of every member."""
        params, epoch = self.ensemble.params, self.mode == "trajectory"
        names = list(self.ensemble.model.named_parameters(remove_duplicate=False))
        unsettled = {r.name: self._distances_from_mean(r) for r in self.columns if epoch}
        norms = zip(member_norms(self.gradients), member_norms(params), strict=True)
        return [
            Source(
                mode=self.mode,
                loss=getattr(self.loss, "__name__", type(self.loss).__name__),
                examples=self.examples,
                parameters=sum(params[n][0].numel() for n in self._rows),
                tensors=len(self._rows),
                unreached=tuple(n for n in params if n in self.unreached),
                frozen=0,
                tied=len(names) - len(params),
                dtype="float64",
                gradient_norm=gradient_norm,
                parameter_norm=parameter_norm,
                loss_value=None if self.loss_values is None else self.loss_values[m],
                known={r.name: strengths[m] for r, strengths in known.items()},
                unsettled={name: distances[m] for name, distances in unsettled.items()},
                epoch=epoch,
            )
            for m, (gradient_norm, parameter_norm) in enumerate(norms)
        ]

    def _distances_from_mean(self, regularizer: Regularizer) -> list[float]:
        """‖mean of ∇R − ∇R at the mean point‖ / ‖mean of ∇R‖ of every member."""
        bound = [regularizer.bind(self.ensemble.member(m)) for m in range(len(self.ensemble))]
        mean = {n: flatten_members(self.columns[regularizer][n]) for n in bound[0].active}
        differences = {
            n: t - torch.stack([columns.rows(n, slice(0, t.shape[1]))[:, 0] for columns in bound])
            for n, t in mean.items()
        }
        pairs = zip(member_norms(differences), member_norms(mean), strict=True)
        return [distance / norm if norm else 0.0 for distance, norm in pairs]


def _layer_block(
    bound: BoundCandidates, layer: str, names: list[str], targets: Sequence[Params], floor: float
) -> Block:
    """The equations of one layer of a member.

    The same equations as those of `tacit.equations.rows.write_blocks`, which reads large tensors in
    slices. A member's tensors are small, so that each is factorised whole, and rows at kinks are
    set to zero: a row of zeros does not change a triangular factor.
    """
    active = sorted({c for name in names for c in bound.columns.active.get(name, ())})
    factor = torch.zeros(0, len(active) + len(targets), dtype=torch.float64)
    rows, left_out = 0, 0
    for name in names:
        whole = slice(0, bound.params[name].numel())
        design, values, kinks = read_rows(bound, name, whole, targets)
        matrix = values.new_zeros(len(values), factor.shape[1])
        matrix[:, [active.index(c) for c in bound.columns.active.get(name, ())]] = design
        matrix[:, len(active) :] = values
        if kinks is not None:
            matrix[kinks] = 0
        left_out += int(count_left_out(bound, name, kinks))
        factor = triangular_factor(torch.cat([factor, triangular_factor(matrix).cpu()]))
        rows += len(matrix)
    return Block(layer, tuple(active), factor, rows - left_out, left_out, floor)

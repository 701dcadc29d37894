"""What regularization is in a model, without candidates being named.

Candidates are correlated, and some fit anything a little. So they are tested in groups, over
clusters (layers, endpoints or epochs) and not over parameters, and a group is the answer only where
it explains what is to be explained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from tacit.display import Format, render
from tacit.display.frames import make_frame
from tacit.display.numbers import count_of
from tacit.equations.equations import Equations
from tacit.equations.target import Target, endpoint_target
from tacit.errors import InputError, ProblemKind
from tacit.fitting.error_bars import error_bars_from
from tacit.fitting.evidence import CLEARLY_EXPLAINED, MIN_EXPLAINED
from tacit.fitting.fits import Fit, fit
from tacit.fitting.lack_of_fit import ROUNDING
from tacit.fitting.solving import System
from tacit.fitting.summary import jsonable
from tacit.identifiability.comparison import ClusterKind
from tacit.identifiability.group_tests import ALL, LEVEL, GroupTests
from tacit.identifiability.proposals import propose
from tacit.identifiability.screen_plot import draw_screen
from tacit.identifiability.screen_text import screen_rows, summarize_screen
from tacit.identifiability.sign_flips import least_p
from tacit.objective.objective import Objective
from tacit.regularizers.family import Cost, Regularizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

SAME = 1 - 1e-9
"""|cosine| above which two candidates are the same column."""
ENOUGH = CLEARLY_EXPLAINED
"""A part of the target from which confirmed groups are the answer, whatever the rest is."""

LEAST_OF_SIGNAL = 0.9
"""A part of what is not noise below which confirmed groups are not the answer."""

A_REST = (
    "The rest is more than noise and rounding: a penalty much like this one may act, or training "
    "had not quite finished."
)
"""What is said of an answer that does not explain all."""
IMITATION = (
    "Two penalties that are alike, or of which one is negative, come close to many others, and "
    "these leave more than noise and rounding: another acts, or training had not finished."
)
"""Why candidates that explain much are not the answer."""
NOISE = (
    "The rest may be noise, which is too large here to say that nothing else acts: take more "
    "draws, or more epochs."
)
"""Why candidates are not the answer where noise could hide others."""
SHARED_EXAMPLES = (
    "acts on all layers through the same examples, as the loss of unfinished training does: layers "
    "cannot test it, and it leaves more than rounding"
)
"""Why candidates that depend on the data are left out."""

Verdict = Literal["answer", "aligned", "nothing", "ranked", "no signal"]


@runtime_checkable
class HasTarget(Protocol):
    """What watches a training loop, and has a target of its last epochs."""

    def target(self) -> Target:
        """What is to be explained."""
        ...


@dataclass(frozen=True)
class ScreenRow:
    """One candidate of a screen."""

    name: str
    group: int
    """The number of its group, from 1."""
    alone: float
    """What it explains by itself."""
    added: float
    """What it adds to the chosen candidates of the other groups."""
    held_out: float
    """What it explains, beside those, of clusters that it was not fitted to; like `alone`, net of
    noise that the target's points do not have in common."""
    p: float
    """Probability of what its group adds to all others, if that were chance; after Holm."""
    strength: float
    """Beside the chosen candidates of the other groups."""
    interval: tuple[float, float] | None
    """Of 95 %, by the error bars that `basis` names; None where clusters do not determine it."""
    chosen: bool
    """Whether it is in `Screen.fit`."""


@dataclass(frozen=True)
class Group:
    """Candidates whose columns are alike, those that explain most of held-out clusters first."""

    members: tuple[str, ...]
    p: float
    """Probability of what the group adds to all others, if that were chance; after Holm."""
    confirmed: bool
    """Whether p is at most 5 %, and a member adds at least 1 % of the target."""
    named: tuple[str, ...]
    """The chosen members that beat every other one by a test; where it is empty, the member is
    undecided."""


@dataclass(frozen=True)
class Screen:
    """What a screen found; print it."""

    verdict: Verdict
    """"answer": confirmed groups explain the target. "aligned": they explain a part of it, as
    unfinished training does, and are not the answer. "nothing": no group explains more than chance.
    "ranked": too few clusters for a test, or to tell the candidates apart. "no signal": the target
    is rounding or noise."""
    groups: tuple[Group, ...]
    """Confirmed ones first."""
    table: tuple[ScreenRow, ...]
    """One row per candidate, in the order of the groups."""
    fit: Fit | None = field(repr=False)
    """The chosen candidates together; None where none is chosen."""
    clusters: tuple[ClusterKind, int]
    """What the tests are over, and how many."""
    reason: str
    """The verdict in a sentence."""
    same: Mapping[str, tuple[str, ...]]
    """By candidate, others whose columns are the same here."""
    left_out: Mapping[str, str] = field(repr=False)
    """By family, why it was no candidate."""

    def summary(self, format: Format = "text") -> str:
        """The verdict, the groups and the table: as text, "markdown", "latex" or "html"."""
        return render(summarize_screen(self), format)

    def _repr_html_(self) -> str:
        return self.summary("html")

    def to_frame(self) -> "DataFrame":
        """One row per candidate, as a DataFrame of pandas: the columns of `ScreenRow`.

        `low` and `high` are the ends of the 95 % interval, and `confirmed` and `named` say whether
        the group is confirmed, and whether the candidate beats the others of its group.
        """
        return make_frame(screen_rows(self))

    def plot(self) -> "Figure":
        """What every candidate explains alone and adds, by group, as a matplotlib Figure."""
        return draw_screen(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON; values that are not finite become None."""
        kind, count = self.clusters
        return jsonable(
            {
                "verdict": self.verdict,
                "reason": self.reason,
                "clusters": {"kind": kind, "count": count},
                "groups": [asdict(group) for group in self.groups],
                "table": screen_rows(self),
                "same": self.same,
                "left_out": self.left_out,
                "fit": None if self.fit is None else self.fit.to_dict(),
            }
        )

    def __str__(self) -> str:
        return self.summary()


def screen(
    source: Objective | Target | Equations | HasTarget,
    *,
    start: Mapping[str, Tensor] | None = None,
    optimizer: Optimizer | None = None,
    known: Mapping[Regularizer, float] | None = None,
    cost: Cost = "pass",
) -> Screen:
    """What regularization is in a model? All families of the catalogue, tested without being named.

    Candidates whose columns have |cosine| > 0.7 form a group. A group is tested by what it adds to
    all others, with signs of its scores flipped by cluster (`sign_flips`), and confirmed where the
    p-value is at most 5 % after Holm. Its members are ranked by what they explain in clusters that
    they were not fitted to; the first is named if it beats each other member by the same test.
    Clusters are epochs or endpoints where the target has several, else layers.

    Trap: a confirmed group is no accident, but need not be what was applied: −∇L of unfinished
    training is aligned with ridge too. Where the confirmed groups leave something unexplained that
    is not noise, the verdict is "aligned", not "answer".

    Trap: G clusters give no p-value below 2^(1−G). With fewer than about nine, candidates are only
    ranked.

    Args:
        source: an objective (its endpoint is screened), a target of any kind, what watches a
            training loop and has a target of it, or equations, whose own candidates are screened.
        start: the parameters that training started from; the distance to them is a candidate.
        optimizer: the one that trained the model; what its weight decay applied is a candidate.
        known: penalties that training did apply, with their strengths; subtracted from the target.
        cost: "weights" for families that need only the weights, "pass" for those that take a pass
            over the data each too, "second-order" for all.

    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> generator = torch.Generator().manual_seed(0)
    >>> X = torch.randn(60, 3, generator=generator).double()
    >>> model = torch.nn.Linear(3, 1).double()
    >>> objective = Objective(model, mse_loss, (X, X.sum(1, True)))
    >>> screen(objective).verdict  # one layer cannot be tested
    'ranked'
    """
    if isinstance(source, Equations):
        _check_no_options(start=start, optimizer=optimizer, known=known)
        return _screen_equations(
            source, [(name, "") for name in source.names], source.select_columns
        )
    target = _target_of(source)
    with target.ranks:
        proposals = propose(target, start=start, optimizer=optimizer, cost=cost)
    regularizers = [candidate.regularizer for candidate in proposals.candidates]
    kinds = [(candidate.family, candidate.scope) for candidate in proposals.candidates]

    def write(columns: Sequence[int], of: Target = target) -> Equations:
        return of.equations([regularizers[c] for c in columns], known=known)

    to_test = replace(target, setting=replace(target.setting, diagnosed=False))
    equations = write(range(len(regularizers)), to_test)
    left_out = proposals.left_out | _without_gradient(equations, kinds)
    screened = _screen_equations(equations, kinds, write)
    of_data = {c for c, r in enumerate(regularizers) if r.cost != "weights"}
    untested = _due_to_shared_examples(screened, {regularizers[c].name for c in of_data}, target)
    if untested:
        others = [c for c in range(len(regularizers)) if c not in of_data]
        left_out = left_out | {proposals.candidates[c].family: SHARED_EXAMPLES for c in of_data}
        screened = _screen_equations(
            write(others, to_test),
            [kinds[c] for c in others],
            lambda cs: write([others[c] for c in cs]),
        )
        reason = f"{screened.reason} {' and '.join(untested)} was left out: it {SHARED_EXAMPLES}."
        screened = replace(screened, reason=reason)
    return replace(screened, left_out=left_out)


def _without_gradient(equations: Equations, kinds: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Candidates whose columns are zero, and that this is why they are left out."""
    norms = System(equations.factor()[:, : len(equations.names)]).norms.tolist()
    if any(kind == ("distance_to", "") and not n for kind, n in zip(kinds, norms, strict=True)):
        raise InputError(
            "start has the values of the weights that are screened, so that the distance to it has "
            "no gradient: pass copies from before training ({name: p.detach().clone() …}), or "
            "leave start= out."
        )
    zero = [name for name, n in zip(equations.names, norms, strict=True) if not n]
    return dict.fromkeys(zero, "its gradient is zero at these weights")


def _due_to_shared_examples(screened: Screen, of_data: set[str], target: Target) -> list[str]:
    """Candidates that depend on the data and were chosen at an endpoint without good reason.

    The loss and these candidates act on all layers through the outputs of the same examples, so
    that the layers agree on what they have in common, also where only training is unfinished: the
    signs of layers are then not random. Where a classifier fits all examples about equally well,
    label smoothing explains 99 % of −∇L. So these must leave no more than rounding.
    """
    if (
        screened.fit is None
        or screened.clusters[0] != "layers"
        or target.setting.mode != "endpoint"
        or _leaves_rounding(screened.fit)
    ):
        return []
    return [name for name in screened.fit.strengths if name in of_data]


def _target_of(source: Any) -> Target:
    if isinstance(source, Objective):
        return endpoint_target(source)
    if isinstance(source, Target):
        return source
    if isinstance(source, HasTarget):
        return source.target()
    raise InputError(
        f"screen was given a {type(source).__name__}: pass an Objective, a Target (as of "
        "endpoint_target, difference_target or average_epochs), Equations, or a watch."
    )


def _check_no_options(**options: Any) -> None:
    if names := [name for name, value in options.items() if value is not None]:
        raise InputError(
            f"screen was given equations and {', '.join(names)}: equations have their candidates "
            "already. Pass the target that they were written from, or leave these out."
        )


def _screen_equations(
    equations: Equations,
    kinds: Sequence[tuple[str, str]],
    write: Callable[[Sequence[int]], Equations],
) -> Screen:
    """The screen of these columns.

    Args:
        equations: with all candidates.
        kinds: the family and the scope of each.
        write: write(columns) returns the equations of some candidates.
    """
    distinct, same = _distinct(equations)
    tests = GroupTests(equations.select_columns(distinct), [kinds[c] for c in distinct])
    problems = fit(equations).problems
    no_signal = next((p for p in problems if p.kind == ProblemKind.NO_SIGNAL), None)
    chosen = [] if no_signal else tests.chosen
    chosen_fit = fit(write([distinct[c] for c in chosen])) if chosen else None
    groups, table = _groups_and_rows(tests, chosen)
    if no_signal is not None:
        verdict, reason = "no signal", no_signal.message
    elif chosen_fit is None:
        verdict, reason = _judge_none(tests)
    else:
        verdict, reason = _judge(chosen_fit, groups, tests)
    clusters = tests.cluster_kind, len(tests.factors)
    return Screen(verdict, groups, table, chosen_fit, clusters, reason, same, {})


def _distinct(equations: Equations) -> tuple[list[int], dict[str, tuple[str, ...]]]:
    """The columns without those that are zero or the same as an earlier one; which are the same."""
    system = System(equations.factor()[:, : len(equations.names)])
    first_of: dict[int, list[str]] = {}
    for column, name in enumerate(equations.names):
        if not system.norms[column]:
            continue
        twins = [c for c in first_of if abs(float(system.cosines[c, column])) >= SAME]
        if twins:
            first_of[twins[0]].append(name)
        else:
            first_of[column] = []
    same = {equations.names[c]: tuple(others) for c, others in first_of.items() if others}
    return list(first_of), same


def _judge(chosen: Fit, groups: Sequence[Group], tests: GroupTests) -> tuple[Verdict, str]:
    """Whether the confirmed candidates are the answer, in a sentence."""
    listed = " and ".join(_describe(name, groups) for name in chosen.strengths)
    digits = 3 if 0.999 <= chosen.explained < ALL else 1
    explained = f"{max(chosen.explained, 0.0):.{digits}%}"
    rest = next((p for p in chosen.problems if p.kind == ProblemKind.UNEXPLAINED), None)
    by_noise = tests.shows_noise and chosen.explained >= LEAST_OF_SIGNAL
    nothing_else = rest is None and (by_noise or _leaves_rounding(chosen))
    if nothing_else or chosen.explained >= (ALL if tests.imitates else ENOUGH):
        more = "" if nothing_else else f" {A_REST}"
        return "answer", f"{listed}: confirmed, with {explained} of the target explained.{more}"
    if rest is None and tests.shows_noise:
        remedy = NOISE
    else:
        remedy = IMITATION if rest is None or tests.imitates else rest.remedy
    return "aligned", (
        f"Aligned, not the answer: {explained} of the target is explained by {listed}, which is no "
        f"accident. {remedy}"
    )


def _leaves_rounding(chosen: Fit) -> bool:
    """Whether what a fit does not explain is no more than rounding."""
    equations = chosen.equations
    target = float(equations.factor()[:, len(equations.names) :].mean(1).norm())
    left = chosen.residual_ratio * target
    return chosen.explained >= ALL or left <= ROUNDING * equations.floor


def _describe(name: str, groups: Sequence[Group]) -> str:
    """A chosen candidate, and whether others of its group would do as well."""
    group = next(group for group in groups if name in group.members)
    if name in group.named:
        return name
    return f"{name} (or another of {len(group.members)} that are alike)"


def _judge_none(tests: GroupTests) -> tuple[Verdict, str]:
    """The verdict where no candidate is chosen."""
    groups, kind = len(tests.groups), tests.cluster_kind
    best = max(range(len(tests.names)), key=lambda c: tests.explained([c]))
    most = f"{tests.names[best]} ({tests.explained([best]):.1%})"
    clusters, telling = len(tests.factors), tests.telling(best)
    if groups * least_p(clusters) > LEVEL:
        return "ranked", (
            f"Candidates are ranked, and none is confirmed: {count_of(clusters, kind)} cannot give "
            f"a p-value below {least_p(clusters):.2g}, and {count_of(groups, 'groups')} would have "
            f"to have {LEVEL / groups:.2g}. Stack endpoints, or record more epochs."
        )
    if least_p(telling) > LEVEL:
        return "ranked", (
            f"Candidates are ranked, and none is confirmed: most is aligned with {most}, of which "
            f"{telling} of {clusters} {kind} have equations (zero weights have none), and so few "
            f"give no p-value below {least_p(telling):.2g}. Stack endpoints, or record more epochs."
        )
    if tests.explained([best]) >= MIN_EXPLAINED:
        return "ranked", (
            f"{most} explains most, but no group adds more than chance to all the others (p = "
            f"{min(tests.p_values):.2g} at best): {count_of(clusters, kind)} are too few to tell, "
            "so that candidates are ranked, and none is confirmed. Stack endpoints, or record more "
            "epochs."
        )
    rest = "What is to be explained is no rounding"
    if tests.signal < 1:
        rest = f"{1 - tests.signal:.0%} of the target is noise. As to the rest"
    return "nothing", (
        f"None of the candidates explains more than chance; most is aligned with {most}. {rest}: "
        "either a penalty that is not in the catalogue acts here, or training had not finished."
    )


def _groups_and_rows(
    tests: GroupTests, chosen: Sequence[int]
) -> tuple[tuple[Group, ...], tuple[ScreenRow, ...]]:
    """Groups with chosen members first, then by what their best member explains alone."""

    def order(group: Sequence[int]) -> tuple[bool, float]:
        return not set(group) & set(chosen), -max(tests.explained([c]) for c in group)

    groups, table = [], []
    for number, group in enumerate(sorted(tests.groups, key=order), 1):
        others = tests.beside(group, [c for c in chosen if c not in group])
        scores = dict(zip(group, tests.held_out([[c, *others] for c in group]), strict=True))
        ordered = sorted(group, key=lambda c: (c not in chosen, -round(scores[c], 12)))
        first = [c for c in ordered if c in chosen]
        names = tuple(tests.names[c] for c in ordered)
        named = tuple(tests.names[c] for c in first if tests.beats_rivals(c, group))
        p = tests.p_values[tests.groups.index(group)]
        groups.append(Group(names, p, confirmed=bool(first), named=named))
        for c in ordered:
            beside = [o for o in chosen if o != c] if c in first else others
            row = ScreenRow(
                tests.names[c], number, tests.explained([c]), tests.added(c, beside), scores[c], p,
                *_strength(tests.equations.select_columns([c, *beside])), c in first,
            )  # fmt: skip
            table.append(row)
    return tuple(groups), tuple(table)


def _strength(equations: Equations) -> tuple[float, tuple[float, float] | None]:
    """The first strength, with its interval."""
    factor, count = equations.factor(), len(equations.names)
    target = factor[:, count:].mean(1, keepdim=True)
    strengths = System(factor[:, :count]).solve(target)[:, 0]
    bars = next(iter(error_bars_from(equations, strengths).values()), None)
    by_name, name = dict(zip(equations.names, strengths.tolist(), strict=True)), equations.names[0]
    return by_name[name], None if bars is None else bars.intervals(by_name)[name]

"""Candidates tested in groups: which groups add more than chance, and which members to choose."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, compress

import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.fitting.error_bars import factors_by_label
from tacit.fitting.shares import equations_of, explained_by, products_of_points
from tacit.fitting.solving import System
from tacit.identifiability.comparison import ClusterKind, compare
from tacit.identifiability.sign_flips import NOTHING_LEFT, TIE, flip_test, holm

ALIKE = 0.7
"""|cosine| of two columns above which their candidates are in one group."""
LEVEL = 0.05
"""Probability of a false claim, over all groups (Holm)."""
LEAST_ADDED = 0.01
"""A candidate that adds less of the target than this is not chosen."""
MOST_LEFT = 0.8
"""Two members of a group are chosen where they leave at most this part of what the best leaves."""
ALL = 0.999
"""Two members of which one is negative are chosen where they explain at least this part."""
SWEEPS = 2
"""How often the members of a group are chosen anew beside those of the other groups."""


@dataclass(frozen=True, eq=False)
class GroupTests:
    """Tests of candidates in groups: which are confirmed, and which of their members are chosen."""

    equations: Equations
    kinds: Sequence[tuple[str, str]]
    """By column, its family and the scope of its sum; "" for all parameters."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return self.equations.names

    @cached_property
    def cluster_kind(self) -> ClusterKind:
        """What signs are flipped for: endpoints or epochs where there are several, else layers."""
        return "endpoints" if len(self.equations.sources) > 1 else "layers"

    @cached_property
    def factors(self) -> Tensor:
        """[design | mean target] of every cluster."""
        by_source = self.cluster_kind == "endpoints"
        labels = [block.source if by_source else block.layer for block in self.equations.blocks]
        return torch.stack(list(factors_by_label(self.equations, labels).values()))

    @cached_property
    def groups(self) -> list[list[int]]:
        """Columns that are connected by cosines above `ALIKE`."""
        system = System(self.equations.factor()[:, : len(self.names)])
        alike = system.cosines.abs() > ALIKE
        groups: list[list[int]] = []
        for column in range(len(self.names)):
            joined = [g for g in groups if alike[column, g].any()]
            groups = [g for g in groups if g not in joined]
            groups.append(sorted([column, *(c for g in joined for c in g)]))
        return groups

    @cached_property
    def p_values(self) -> list[float]:
        """Of every group, after Holm."""
        return holm([flip_test(self.factors, g, self.beside(g)) for g in self.groups])

    @cached_property
    def confirmed(self) -> list[list[int]]:
        """Groups that add more than chance to all others."""
        return [g for g, p in zip(self.groups, self.p_values, strict=True) if p <= LEVEL]

    def beside(self, group: Sequence[int], among: Sequence[int] | None = None) -> list[int]:
        """The columns that a group is tested beside: all others, but for families that contain it.

        `l2` is the sum of `l2[matrices]` and `l2[biases]`: beside it and one of these, the other
        has nothing left to explain.
        """
        among = range(len(self.names)) if among is None else among
        return [c for c in among if c not in group and not self._contains(c, group)]

    def _contains(self, column: int, group: Sequence[int]) -> bool:
        (family, scope), inner = self.kinds[column], [self.kinds[c] for c in group]
        return not scope and any(other == family and part for other, part in inner)

    @cached_property
    def explained(self) -> Callable[[Sequence[int]], float]:
        """A function from columns to the fraction of the target that they explain."""
        return explained_by(equations_of(self.equations, "screen"))

    @cached_property
    def signal(self) -> float:
        """The fraction of the target that its points have in common, and that is thus not noise.

        1 where there are no points to compare.
        """
        products = products_of_points(self.equations)
        if products is None:
            return 1.0
        targets = self.equations.factor()[:, len(self.names) :]
        return max(0.0, min(1.0, float(products[-1, -1] / targets.mean(1).square().sum())))

    def held_out(self, models: Sequence[Sequence[int]]) -> list[float]:
        """What models, as lists of columns, explain of clusters they were not fitted to.

        As a part of the signal: what they explain of the target, noise and all, over `signal`.
        """
        if len(self.factors) < 2:
            return [self.explained(list(columns)) for columns in models]
        named = {str(i): [self.names[c] for c in columns] for i, columns in enumerate(models)}
        scores = compare(self.equations, named, held_out=self.cluster_kind).explained
        return [score / (self.signal or 1.0) for score in scores.values()]

    @cached_property
    def chosen(self) -> list[int]:
        """The best members of confirmed groups, without those that the others make needless."""
        best: dict[int, list[int]] = {}
        for _ in range(SWEEPS):
            for group in self.confirmed:
                others = [c for first, kept in best.items() if first != group[0] for c in kept]
                best[group[0]] = self._best_members(group, self.beside(group, others))
        return self._needed([c for members in best.values() for c in members])

    def _best_members(self, group: Sequence[int], others: Sequence[int]) -> list[int]:
        """The member, or the two, that explain most of held-out clusters beside the others.

        Two, where these leave clearly less than the best one, and each adds to the other by a test.
        Not where one is negative, unless they explain all: two that are alike and nearly cancel
        come close to any third penalty.
        """
        pairs = list(combinations(group, 2))
        scores = self.held_out([[c, *others] for c in group] + [[*pair, *others] for pair in pairs])
        singles, scores = scores[: len(group)], scores[len(group) :]
        one = max(range(len(group)), key=lambda i: round(singles[i], 9))
        fair = [
            s >= ALL or self._is_positive(p, others) for p, s in zip(pairs, scores, strict=True)
        ]
        pairs, doubles = [*compress(pairs, fair)], [*compress(scores, fair)]
        if pairs:
            best = max(doubles)
            equal = [p for p, d in zip(pairs, doubles, strict=True) if best - d < TIE]
            a, b = max(equal, key=self._plainness)
            leaves_less = 1 - best <= MOST_LEFT * (1 - singles[one])
            p_values = self.p_beside([a], [b, *others]), self.p_beside([b], [a, *others])
            if leaves_less and max(p_values) <= LEVEL:
                return [a, b]
        return [group[one]]

    def _plainness(self, pair: tuple[int, int]) -> tuple[bool, float, float]:
        """How easily a pair is read, to choose among pairs that explain the same.

        Whether no strength of the two alone is negative, what they explain alone, and how unlike
        their columns are: the decays of two layers are read more easily than the decay of both and
        what one has besides.
        """
        cosines = System(self.equations.factor()[:, [*pair]]).cosines
        alone, unlike = self.explained(pair), -abs(float(cosines[0, 1]))
        return self._is_positive(pair, []), round(alone, 9), round(unlike, 9)

    def _is_positive(self, columns: Sequence[int], others: Sequence[int]) -> bool:
        """Whether no strength of some columns is negative, beside the others."""
        factor = self.equations.factor()
        target = factor[:, len(self.names) :].mean(1, keepdim=True)
        strengths = System(factor[:, [*columns, *others]]).solve(target)
        return bool((strengths[: len(columns)] >= 0).all())

    def telling(self, column: int) -> int:
        """The number of clusters that have anything of a column."""
        return int((self.factors[..., column].norm(dim=1) > 0).sum())

    def p_beside(self, columns: Sequence[int], others: Sequence[int]) -> float:
        """The p-value of what columns add to others, by `flip_test`."""
        return flip_test(self.factors, columns, others)

    def _needed(self, columns: list[int]) -> list[int]:
        """The columns without those that add hardly anything, or not more than chance would."""
        while columns:
            added = {c: self.added(c, columns) for c in columns}
            needless = [
                c
                for c in columns
                if added[c] < LEAST_ADDED
                or self.p_beside([c], [o for o in columns if o != c]) > LEVEL
            ]
            if not needless:
                break
            columns = [c for c in columns if c != min(needless, key=added.__getitem__)]
        return columns

    def added(self, column: int, beside: Sequence[int]) -> float:
        """What a column adds to others to the explained fraction."""
        others = [c for c in beside if c != column]
        return self.explained([column, *others]) - self.explained(others)

    def beats_rivals(self, column: int, group: Sequence[int]) -> bool:
        """Whether a chosen member of a group beats every other one, by tests corrected by Holm.

        A sum of chosen members is no rival: in place of one of them it gives the same model.
        """
        rivals = [c for c in group if c not in self.chosen and not self._is_sum_of_chosen(c)]
        others = self.beside(rivals, [c for c in self.chosen if c != column])
        p_values = holm([self.p_beside([column], [rival, *others]) for rival in rivals])
        return max(p_values, default=0.0) <= LEVEL

    def _is_sum_of_chosen(self, column: int) -> bool:
        factor = self.equations.factor()
        tested, design = factor[:, [column]], factor[:, self.chosen]
        rest = tested - design @ System(design).solve(tested)
        return float(rest.norm()) <= NOTHING_LEFT * float(tested.norm())

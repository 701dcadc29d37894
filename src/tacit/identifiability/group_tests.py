"""Candidates tested in groups: which groups add more than chance, and which members to choose."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, compress

import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.fitting.error_bars import factors_by_label
from tacit.fitting.fit_difference import holm
from tacit.fitting.shares import equations_of, explained_by, products_of_points
from tacit.fitting.solving import System
from tacit.identifiability.comparison import ClusterKind, compare
from tacit.identifiability.sign_flips import NOTHING_LEFT, TIE, flip_test

ALIKE = 0.7
"""|cosine| of two columns above which their candidates are in one group."""
SAME_WEIGHTS = 0.1
"""|cosine| of two columns of a group above which they are taken to act on the same weights."""
SAME_PART = 1e-9
"""A column whose part along another one is that one to this part contains it, in one family."""
LEVEL = 0.05
"""Probability of a false claim, over all groups (Holm)."""
LEAST_ADDED, NEARLY_ALL = 0.01, 0.95
"""A candidate is chosen if it adds this part of the target, or nearly all that the others leave."""
MOST_LEFT = 0.8
"""Two members of a group are chosen where they leave at most this part of what the best leaves."""
ALL = 1 - 1e-5
"""A part that counts as all. Two members that are alike explain up to 0.9999 of a third penalty."""
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
        alike = self._system.cosines.abs() > ALIKE
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
        has nothing left to explain. For biases, penalties of matrices are left out too: together
        with the same families of all parameters they would be families of biases, such as a smooth
        l1 that is wider than all biases, which is no candidate and has the column of `l2[biases]`.
        """
        among = range(len(self.names)) if among is None else among
        of_biases = all(self.kinds[c][1] == "biases" for c in group)
        among = [c for c in among if not (of_biases and self.kinds[c][1] == "matrices")]
        return [c for c in among if c not in group and not self._contains(c, group)]

    def _contains(self, column: int, group: Sequence[int]) -> bool:
        """Whether a column is that of the same family as a member, on its weights and on others."""
        products = self._system.cosines[column] * self._system.norms[column] / self._system.norms
        return any(
            self.kinds[column][0] == self.kinds[c][0] and abs(float(products[c]) - 1) < SAME_PART
            for c in group
        )

    @cached_property
    def _system(self) -> System:
        return System(self.equations.factor()[:, : len(self.names)])

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

    @property
    def shows_noise(self) -> bool:
        """Whether points or groups of draws show how much of the target is noise."""
        return self.signal < 1 or self.equations.targets > 1

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
        equal = [i for i, score in enumerate(singles) if max(singles) - score < TIE]
        one = max(equal, key=lambda i: self._plainness([group[i]], others))
        fair = [
            s >= ALL or self._is_positive(p, others) for p, s in zip(pairs, scores, strict=True)
        ]
        pairs, doubles = [*compress(pairs, fair)], [*compress(scores, fair)]
        if pairs:
            best = max(doubles)
            equal = [p for p, d in zip(pairs, doubles, strict=True) if best - d < TIE]
            a, b = max(equal, key=lambda pair: self._plainness(pair, others))
            leaves_less = 1 - best <= MOST_LEFT * (1 - singles[one])
            if leaves_less and self._matters(a, [b, *others]) and self._matters(b, [a, *others]):
                return [a, b]
        return [group[one]]

    def _plainness(
        self, members: Sequence[int], others: Sequence[int]
    ) -> tuple[int, bool, float, float]:
        """How easily members of a group are read, to choose among those that explain the same.

        How few candidates are needed, whether no strength is negative, how unlike the columns are,
        and what the members explain alone: the decays of two layers are read more easily than the
        decay of both and what one has besides.
        """
        columns = [*members, *others]
        cosines = self._system.cosines[columns][:, columns].abs().fill_diagonal_(0)
        return (
            -len(self._needed(columns)),
            self._is_positive(columns, []),
            -round(float(cosines.max()), 9),
            round(self.explained(members), 9),
        )

    def _is_positive(self, columns: Sequence[int], others: Sequence[int]) -> bool:
        """Whether no strength of some columns is negative, beside the others."""
        factor = self.equations.factor()
        target = factor[:, len(self.names) :].mean(1, keepdim=True)
        strengths = System(factor[:, [*columns, *others]]).solve(target)
        return bool((strengths[: len(columns)] >= 0).all())

    @cached_property
    def imitates(self) -> bool:
        """Whether the chosen may come close to a penalty that is not among the candidates.

        Two of one group on the same weights do, such as l2 and the fourth power to the third one,
        and so do those of which one is negative.
        """
        cosines = self._system.cosines.abs()
        pairs = (pair for g in self.groups for pair in combinations(set(g) & {*self.chosen}, 2))
        same_weights = any(float(cosines[a, b]) > SAME_WEIGHTS for a, b in pairs)
        return same_weights or not self._is_positive(self.chosen, [])

    def telling(self, column: int) -> int:
        """The number of clusters that have anything of a column."""
        return int((self.factors[..., column].norm(dim=1) > 0).sum())

    def p_beside(self, columns: Sequence[int], others: Sequence[int]) -> float:
        """The p-value of what columns add to others, by `flip_test`."""
        return flip_test(self.factors, columns, others)

    def _needed(self, columns: list[int]) -> list[int]:
        """The columns without those that add hardly anything, or not more than chance would."""
        while columns:
            beside = {c: [o for o in columns if o != c] for c in columns}
            needless = [c for c in columns if not self._matters(c, beside[c])]
            if not needless:
                break
            least = min(needless, key=lambda c: self.added(c, beside[c]))
            columns = beside[least]
        return columns

    def _matters(self, column: int, others: Sequence[int]) -> bool:
        """Whether a column adds enough to others, and more than chance would."""
        return self._adds_enough(column, others) and self.p_beside([column], others) <= LEVEL

    def _adds_enough(self, column: int, others: Sequence[int]) -> bool:
        """Whether it adds 1 % of the target, or nearly all of a rest that is no noise."""
        left = 1 - self.explained(others)
        no_noise = left > 1 - ALL and not self.shows_noise
        least = min(LEAST_ADDED, NEARLY_ALL * left) if no_noise else LEAST_ADDED
        return self.added(column, others) >= least

    def added(self, column: int, beside: Sequence[int]) -> float:
        """What a column adds to others to the explained fraction."""
        others = [c for c in beside if c != column]
        return self.explained([column, *others]) - self.explained(others)

    def beats_rivals(self, column: int, group: Sequence[int]) -> bool:
        """Whether a chosen member of a group beats every other one, by tests corrected by Holm.

        It has to add enough to each, too: what epochs have in common is not only the penalty. A
        sum of chosen members is no rival: in place of one of them it gives the same model.
        """
        rivals = [c for c in group if c not in self.chosen and not self._is_sum_of_chosen(c)]
        others = [c for c in self.chosen if c != column]
        p_values = holm([self.p_beside([column], [rival, *others]) for rival in rivals])
        return max(p_values, default=0.0) <= LEVEL and all(
            self._adds_enough(column, [rival, *others]) for rival in rivals
        )

    def _is_sum_of_chosen(self, column: int) -> bool:
        factor = self.equations.factor()
        tested, design = factor[:, [column]], factor[:, self.chosen]
        rest = tested - design @ System(design).solve(tested)
        return float(rest.norm()) <= NOTHING_LEFT * float(tested.norm())

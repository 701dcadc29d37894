"""What is refused before a fit: wrong arguments, and numbers that float64 cannot square."""

from collections.abc import Sequence

from torch import Tensor

from tacit.equations.equations import SMALLEST, Equations
from tacit.errors import InputError, check_type

LARGEST = 1 / SMALLEST
"""Entries of equations are at most this."""


def check_arguments(equations: Equations, nonnegative: bool, psd: bool) -> int:
    """The number of equations; wrong arguments are refused."""
    if not isinstance(equations, Equations):
        raise InputError(
            f"fit was given a {type(equations).__name__}: pass what endpoint_equations, "
            "difference_equations, trajectory_equations or stack return."
        )
    if not (rows := equations.rows):
        raise InputError(
            "there are no equations: every row was left out at a kink (all weights zero under l1, "
            "all groups under group_l2, all singular values under nuclear_norm). Widen rows=, pass "
            "a smaller zero_width=, or use a penalty without a kink, such as smooth_l1."
        )
    check_type("nonnegative", nonnegative, bool, "True or False")
    check_type("psd", psd, bool, "True or False")
    kinds = {family.kind for family in equations.families}
    if nonnegative and "symmetric" in kinds:
        raise InputError(
            "nonnegative=True with symmetric(): off-diagonal strengths of a penalty may well be "
            "negative. Fit freely and look at the eigenvalues of Fit.matrix(), or pass psd=True."
        )
    if nonnegative and any(f.shape is not None and not f.shape.even for f in equations.families):
        raise InputError(
            "nonnegative=True with a spline that is not even: s′ of negative weights is below zero "
            "for a penalty. Pass spline(even=True), or convex=True and leave nonnegative= out."
        )
    if psd:
        _check_matrices(equations, nonnegative)
    return rows


def _check_matrices(equations: Equations, nonnegative: bool) -> None:
    """Refuse Λ ⪰ 0 where there is no symmetric Λ, or where other strengths would be ambiguous."""
    kinds = {family.kind for family in equations.families}
    if nonnegative:
        raise InputError("nonnegative=True and psd=True are two different fits: pass one of them.")
    if "diagonal" in kinds:
        raise InputError(
            "psd=True with diagonal(): a diagonal Λ is positive semidefinite exactly if all of its "
            "strengths are at least zero. Pass nonnegative=True, without symmetric()."
        )
    if "symmetric" not in kinds:
        raise InputError(
            "psd=True without symmetric(): there is no matrix Λ. Pass nonnegative=True for "
            "strengths of at least zero, or write equations of regularizers.symmetric()."
        )
    if any(family.bounded for family in equations.families):
        raise InputError(
            "psd=True beside a convex spline is not solved: pass spline(convex=False), or fit the "
            "matrix and the curve one after the other, with the first as known=."
        )


def check_scale(names: Sequence[str], factor: Tensor) -> None:
    """Refuse numbers whose squares are zero or infinite in float64; a target may be that small."""
    sizes = factor.abs().amax(0).tolist() if len(factor) else []
    for column, size in enumerate(sizes):
        is_target = column >= len(names)
        if size > LARGEST or (0 < size < SMALLEST and not is_target):
            what = "the target" if is_target else f"the gradient of {names[column]!r}"
            raise InputError(
                f"{what} has entries of size {size:.1g}: squares of such numbers are not in the "
                "range of float64. Multiply the penalty, or the loss, by a constant, and the "
                "strength by what makes up for it."
            )

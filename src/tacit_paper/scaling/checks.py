"""Key numbers of the scaling figure, from its rows. Times are only judged on a GPU."""

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most

LARGE = 10**8
"""Parameters from which the time of a pass is that of its products, and bounds apply."""
PASSES = {
    "float32": {"gradient": 1.05, "estimate": 1.15, "layerwise": 1.15, "difference": 9.6},
    "bfloat16": {"gradient": 1.12, "estimate": 1.25, "layerwise": 1.25, "difference": 10.5},
}
"""Times in plain gradient passes, at most, by the dtype of the model."""
SCORE_PASSES = 3.0
ONCE = ("gradient_seconds", "layerwise_seconds")
"""Measured with one precision of sums."""
FIXED_BATCHES, FIXED_SECONDS = 2.0, 0.5
"""The fixed part of an estimate: batches of a plain pass, and seconds per billion parameters."""
SUM_BYTES = {"float64": 8, "float32": 4}
MODEL_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a parameter's sum of gradients, and of its gradient in `.grad`."""
GIB = 2**30
NAIVE_DISTANCE = {"float32": 1e-5, "bfloat16": 1e-3}
"""Distance from the naive strengths in units of ‖∇L‖, at most. The naive ones are less precise."""


def select(rows: Table, kind: str, *, sums: str | None = None, dtype: str | None = None) -> Table:
    """The rows of one kind, of all sums and dtypes or of one."""
    chosen = rows[rows.kind == kind]
    chosen = chosen if sums is None else chosen[chosen.sums == sums]
    return chosen if dtype is None else chosen[chosen.dtype == dtype]


def passes(rows: Table, name: str) -> Table:
    """The time of a computation in plain gradient passes."""
    return rows[f"{name}_seconds"] / rows.plain_seconds


def fixed_batches(rows: Table) -> Table:
    """The fixed part of an estimate in batches of a plain pass, beyond its seconds per weight."""
    allowed = FIXED_SECONDS * rows.parameters / 1e9
    return (rows.fixed_seconds - allowed) / (rows.plain_seconds / rows.batches)


def seconds_per_candidate(rows: Table) -> float:
    """What one more candidate takes: the slope from the fewest candidates to the most."""
    line = select(rows, "candidates").sort_values("candidates")
    first, last = line.iloc[0], line.iloc[-1]
    return float(
        (last.estimate_seconds - first.estimate_seconds) / (last.candidates - first.candidates)
    )


def memory_over_bound(rows: Table) -> Table:
    """GiB of an estimate's peak beyond a plain pass and the difference of the sums' sizes."""
    excess = rows.estimate_bytes - rows.plain_bytes
    per_parameter = rows.sums.map(SUM_BYTES) - rows.dtype.map(MODEL_BYTES)
    return (excess - per_parameter * rows.parameters) / GIB


def check(rows: Table) -> list[Check]:
    """Strengths on any device; times and memory where the rows are of a GPU."""
    models = rows[rows.kind.isin(["parameters", "largest"])]
    checks = [at_least("sizes of models", models.parameters.nunique(), 3)]
    for dtype, bound in NAIVE_DISTANCE.items():
        of_dtype = models[models.dtype == dtype]
        if len(of_dtype):
            label = f"largest distance from the naive strengths / ‖∇L‖, {dtype}"
            checks.append(at_most(label, of_dtype.naive_distance.max(), bound))
    if models.sums.nunique() > 1:
        parts = select(rows, "parameters").groupby(["parameters", "dtype"])
        spread = parts.l2_part.max() - parts.l2_part.min()
        label = "largest difference of λ‖∇R‖/‖∇L‖ between float64 and float32 sums"
        checks.append(at_most(label, spread.max(), 1e-4))
    return checks + _gpu_checks(rows) if "plain_bytes" in rows else checks


def _gpu_checks(rows: Table) -> list[Check]:
    """Times and memory, each the worst of all large models."""
    large = select(rows, "parameters")
    large = large[large.parameters >= LARGE]
    checks = []
    for dtype, bounds in PASSES.items():
        tables = {"difference": select(rows, "difference", dtype=dtype)}
        for name, bound in bounds.items():
            table = tables.get(name, large[large.dtype == dtype])
            if f"{name}_seconds" in ONCE:
                table = table[table.sums == "float64"]
            label = f"{name} / plain gradient pass, {dtype}"
            checks.append(at_most(label, _worst(passes(table, name)), bound))
    largest = select(rows, "largest")
    scores = passes(select(rows, "difference"), "score")
    label = "fixed part of an estimate, less 0.5 s per 10⁹ parameters, in batches"
    checks += [
        at_most("scores of all tokens / plain gradient pass", _worst(scores), SCORE_PASSES),
        at_most(label, _worst(fixed_batches(large)), FIXED_BATCHES),
        at_least("parameters of the largest model", largest.parameters.max(), 7e9),
    ]
    for sums in SUM_BYTES:
        for dtype, size in MODEL_BYTES.items():
            table = rows[(rows.sums == sums) & (rows.dtype == dtype)]
            table = table[table.index.isin([*large.index, *largest.index])]
            more = SUM_BYTES[sums] - size
            label = f"GiB above a plain pass and {more} bytes per parameter, {dtype}, {sums} sums"
            checks.append(at_most(label, _worst(memory_over_bound(table)), 1))
    return checks


def _worst(values: Table) -> float:
    """The largest value; not a number, which fulfils no bound, where one is missing."""
    return float(values.max(skipna=False))

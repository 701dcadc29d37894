"""Time of the columns that dropout adds, relative to a gradient pass over the same examples."""

from statistics import median

from passes import gradient_pass
from table import Row
from torch import nn
from torch.nn import functional as F
from workload import classification_data, mlp, seconds

import tacit

EXAMPLES = 512


def measure(*, quick: bool) -> list[Row]:
    """Ratios of median times; there is no bound, because the columns differ in what they sum."""
    repeats = 1 if quick else 5
    layers = [(m, nn.Dropout(0.3)) if isinstance(m, nn.ReLU) else (m,) for m in mlp()]
    model = nn.Sequential(*(module for group in layers for module in group)).eval()
    data = classification_data(EXAMPLES // 8 if quick else EXAMPLES)
    objective = tacit.Objective(model, F.cross_entropy, data)
    families = (
        tacit.regularizers.explicit_dropout(objective),
        tacit.regularizers.dropout_moments(objective),
    )
    pass_time = median(seconds(lambda: gradient_pass(model, *data)) for _ in range(repeats + 1))
    rows = []
    for family in families:
        times = [seconds(lambda f=family: f.gradient(objective.params)) for _ in range(repeats)]
        ratio = median(times) / pass_time
        measured = f"{ratio:.0f}× ({median(times):.3f} s over {pass_time:.4f} s)"
        rows.append(Row(f"column of {family.name}, 3×256 / one gradient pass", measured))
    return rows

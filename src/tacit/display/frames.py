"""Rows of a result as a DataFrame of pandas."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tacit.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame

Record = Mapping[str, Any]


def make_frame(rows: Sequence[Record], last: str = "") -> "DataFrame":
    """One row per record, and a column for every key; what a record does not have is missing.

    Args:
        rows: the records.
        last: the column to put last, which is otherwise where the first record has it.
    """
    try:
        import pandas
    except ImportError as error:
        raise InputError(
            "tables are made with pandas, which is not installed: pip install 'tacit[frames]'."
        ) from error
    columns = [c for c in dict.fromkeys(key for row in rows for key in row) if c != last]
    return pandas.DataFrame(list(rows), columns=[*columns, last] if last else columns)

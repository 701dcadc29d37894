"""Rows of a result as a DataFrame of pandas, or as text with commas."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tacit.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame

Record = Mapping[str, Any]


def make_frame(rows: Sequence[Record], last: str = "") -> "DataFrame":
    """One row per record, and a column for every key; what a record does not have is missing.

    None is missing too, so that a column of numbers is one.

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
    records = [{k: math.nan if v is None else v for k, v in row.items()} for row in rows]
    return pandas.DataFrame(records, columns=_columns(rows, last))


def write_csv(rows: Sequence[Record], last: str = "") -> str:
    """The same table as text with commas, also without pandas; what is missing is empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, _columns(rows, last), restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: "" if v is None or v != v else v for k, v in row.items()})
    return file.getvalue()


def _columns(rows: Sequence[Record], last: str) -> list[str]:
    columns = [c for c in dict.fromkeys(key for row in rows for key in row) if c != last]
    return [*columns, last] if last else columns

"""How results are shown: summaries in several formats, frames of pandas, and style of figures."""

from tacit.display.contents import Column, Note, Summary, Table
from tacit.display.rendering import FORMATS, Format, render

__all__ = ["FORMATS", "Column", "Format", "Note", "Summary", "Table", "render"]

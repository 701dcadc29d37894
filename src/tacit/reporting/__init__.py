"""Reports: one self-contained HTML page per result."""

from tacit.reporting.result_page import report

__all__ = ["report"]

"""Reports: one self-contained HTML page per result."""

from tacit.reporting.result_page import Reportable, report

__all__ = ["Reportable", "report"]

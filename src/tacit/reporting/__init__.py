"""Reports: one self-contained HTML page per result."""

from tacit.reporting.report import Reportable, report

__all__ = ["Reportable", "report"]

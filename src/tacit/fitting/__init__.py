"""From equations to strengths, with error bars, problems and a summary."""

from tacit.fitting.curves import Curve
from tacit.fitting.error_bars import ErrorBars
from tacit.fitting.fits import Fit, fit
from tacit.fitting.shares import ordered_shares, unique_shares

__all__ = ["Curve", "ErrorBars", "Fit", "fit", "ordered_shares", "unique_shares"]

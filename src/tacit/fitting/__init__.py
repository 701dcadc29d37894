"""From equations to strengths, with error bars, problems and a summary."""

from tacit.fitting.curves import Curve
from tacit.fitting.error_bars import ErrorBars
from tacit.fitting.fit_difference import FitDifference
from tacit.fitting.fits import Fit, fit
from tacit.fitting.learned import RegularizerFit, fit_regularizer
from tacit.fitting.shapes import ShapeFit, fit_shapes
from tacit.fitting.shares import ordered_shares, unique_shares

__all__ = [
    "Curve",
    "ErrorBars",
    "Fit",
    "FitDifference",
    "RegularizerFit",
    "ShapeFit",
    "fit",
    "fit_regularizer",
    "fit_shapes",
    "ordered_shares",
    "unique_shares",
]

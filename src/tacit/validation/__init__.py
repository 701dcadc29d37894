"""Validation of a fit by retraining, and the certificate of when retraining must succeed."""

from tacit.validation.certificate import (
    Certificate,
    LeastSquaresCertificate,
    certify,
    certify_least_squares,
)
from tacit.validation.penalised import penalty
from tacit.validation.retrained import Retrained
from tacit.validation.retraining import Validation, validate

__all__ = [
    "Certificate",
    "LeastSquaresCertificate",
    "Retrained",
    "Validation",
    "certify",
    "certify_least_squares",
    "penalty",
    "validate",
]

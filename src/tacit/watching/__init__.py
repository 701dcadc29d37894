"""Strengths from further training, watched from the outside by its own epochs."""

from tacit.watching.settling import settle

__all__ = ["settle"]

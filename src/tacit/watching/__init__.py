"""Strengths along training, and from further training."""

from tacit.watching.settling import settle
from tacit.watching.training_watch import Watch, WatchRow, watch

__all__ = ["Watch", "WatchRow", "settle", "watch"]

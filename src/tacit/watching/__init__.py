"""Strengths along training, and from further training."""

from tacit.watching.rows import WatchRow
from tacit.watching.settling import settle
from tacit.watching.training_watch import Watch, watch

__all__ = ["Watch", "WatchRow", "settle", "watch"]

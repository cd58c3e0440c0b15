"""How long a batch may take before its builder is doubted: learned from what batches took, and were expected to take.

The worst ratio of the two lately, and the longest time, say how far estimates can be trusted; the lesser of both bounds
what is plausible. A long batch that was expected to be long makes nobody wait longer for a short one.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Limit(NamedTuple):
    """So many times the expected seconds, and so many seconds more."""

    times: float
    more: float


_BEYOND: Final = 1.5
"""What takes so many times the plausible time is late."""
_UNKNOWN_S: Final = 10.0
"""Nothing is late before this, until some batches have shown what they cost."""
_LEARNED: Final = 8
_NOISE_S: Final = 0.1
"""A batch may take so much longer without a meaning; every limit has as much in it."""
_DECAY: Final = 0.995


class Lateness:
    """What batches took lately, against what was expected."""

    def __init__(self) -> None:
        """Start knowing nothing."""
        self._worst = 1.0
        self._slowest = 0.0
        self._num_seen = 0

    def saw(self, expected: float, taken: float) -> None:
        """Take in a finished batch."""
        self._num_seen += 1
        ratio = (taken - _NOISE_S) / max(expected, 1e-6)
        self._worst = max(ratio, 1.0 + (self._worst - 1.0) * _DECAY)
        self._slowest = max(taken, self._slowest * _DECAY)

    def is_over(self, limit: Limit, expected: float, spent: float) -> bool:
        """Tell whether a batch has taken longer than is plausible."""
        usual = min(self._worst * expected, self._slowest) if self._num_seen >= _LEARNED else _UNKNOWN_S / _BEYOND
        return spent > max(limit.times * expected, _BEYOND * usual) + limit.more

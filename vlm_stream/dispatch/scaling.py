"""How many builders there should be: more when the trainer waits, fewer when batches pile up or builders are idle.

Enters: how long each batch was waited for, how many builders were idle then and how many batches ready. Leaves: a
number of builders within limits. Like the schedule it has no clock and no threads.
"""

from __future__ import annotations

from typing import Final

_PERIOD_S: Final = 5.0
_MIN_BATCHES: Final = 4
_WAITING: Final = 0.05
"""A trainer that waits for a larger share of its time wants more builders."""
_PILE: Final = (4, 8)
"""So many batches ready for each builder, and so many more, are a pile: one builder fewer would do."""
_QUIET_PERIODS: Final = 6
"""Without any waiting and with builders to spare, before one of these is let go: starting it again takes seconds."""


class Scaler:
    """Watches one trainer."""

    def __init__(self, least: int, most: int) -> None:
        """Stay between `least` and `most` builders."""
        self._least, self._most = least, most
        self._begin: float | None = None
        self._num_batches = self._num_quiet = 0
        self._waited_s = 0.0
        self._num_idle = most

    def saw(self, now: float, waited_s: float, num_idle: int, num_builders: int, num_ready: int = 0) -> int:
        """Take in one batch; return how many builders there should be.

        Args:
            now: The time at which it was taken.
            waited_s: How long the trainer waited for it.
            num_idle: Builders that have nothing to do.
            num_builders: Builders that there are, those that are being started included.
            num_ready: Batches that wait to be taken.
        """
        if num_ready > _PILE[0] * num_builders + _PILE[1]:
            num_idle = max(num_idle, 1)
        num_builders = min(max(num_builders, self._least), self._most)
        if self._begin is None:  # what the first batch waited for is the start of the builders
            self._begin = now
            return num_builders
        self._num_batches += 1
        self._waited_s += waited_s
        self._num_idle = min(self._num_idle, num_idle)
        passed = now - self._begin
        if passed < _PERIOD_S or self._num_batches < _MIN_BATCHES:
            return num_builders
        share, idle = self._waited_s / passed, self._num_idle
        self._begin, self._num_batches, self._waited_s, self._num_idle = now, 0, 0.0, self._most
        if share > _WAITING and not idle:
            self._num_quiet = 0
            return min(num_builders + max(1, num_builders // 4), self._most)
        self._num_quiet = self._num_quiet + 1 if idle and share < _WAITING / 10 else 0
        if self._num_quiet < _QUIET_PERIODS:
            return num_builders
        self._num_quiet = 0
        return max(num_builders - max(1, idle // 2), self._least)

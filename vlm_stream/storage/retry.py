"""The policy for faults: what to try again, how long to wait, how many requests to keep in flight.

Values and arithmetic alone: the clock and the dice are handed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from vlm_stream.storage.options import RetryOptions

__all__ = ["AimdLimit", "Attempts", "Fault", "FaultKind", "TokenBucket"]

FaultKind: TypeAlias = Literal[
    "throttled",  # 429, 503: again, with fewer at a time
    "transient",  # timeouts, resets, other 5xx, broken bodies: again
    "missing",  # 404
    "refused",  # 401, 403, 400
    "changed",  # 412
    "past_end",  # 416
    "untrusted",  # the server's certificate
    "no_ranges",  # the server sends whole objects alone
    "unknown",  # anything else
]


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong with one attempt, in the policy's words."""

    kind: FaultKind
    text: str
    """What the store said, fit for a log."""


@dataclass(slots=True)
class Attempts:
    """How often one read was tried, and whether to try it again."""

    options: RetryOptions
    begun_s: float
    num_failed: int = 0
    """In a row, without a new byte."""

    def wait_before_next(self, fault: Fault, *, progressed: bool, now_s: float, uniform: float) -> float | None:
        """Return the seconds to wait before the next attempt, or None to give up.

        Args:
            fault: How the last attempt failed.
            progressed: Whether it brought new bytes: then the count of failures starts over.
            now_s: The clock, as `begun_s`.
            uniform: A draw from [0, 1): the jitter that keeps many clients from coming back together.
        """
        if fault.kind not in ("throttled", "transient"):
            return None
        self.num_failed = 1 if progressed else self.num_failed + 1
        # A store that throttles is alive: only the deadline ends the patience with it.
        if fault.kind == "transient" and self.num_failed > self.options.max_retries:
            return None
        ceiling_s = min(self.options.max_backoff_s, self.options.backoff_s * 2.0 ** (self.num_failed - 1))
        wait_s = uniform * ceiling_s
        return None if now_s + wait_s >= self.begun_s + self.options.deadline_s else wait_s

    def is_late(self, now_s: float) -> bool:
        """Return whether the deadline has passed."""
        return now_s >= self.begun_s + self.options.deadline_s


@dataclass(slots=True)
class AimdLimit:
    """Requests in flight: additive increase, multiplicative decrease."""

    ceiling: int
    limit: float = 0.0
    cooldown_s: float = 1.0
    """One storm is one signal: further throttles within this time do not cut again."""
    last_cut_s: float = float("-inf")

    def __post_init__(self) -> None:
        """Start at the ceiling."""
        self.limit = float(self.ceiling)

    def on_success(self) -> None:
        """Rise by one for every `limit` requests that went well."""
        self.limit = min(float(self.ceiling), self.limit + 1.0 / self.limit)

    def on_throttle(self, now_s: float) -> None:
        """Halve, never below one."""
        if now_s - self.last_cut_s >= self.cooldown_s:
            self.limit = max(1.0, self.limit / 2)
            self.last_cut_s = now_s


@dataclass(slots=True)
class TokenBucket:
    """A rate with one second of burst. Amounts larger than the burst are paid off by waiting afterwards."""

    rate: float
    level: float = 0.0
    """Tokens at `time_s`; negative is debt."""
    time_s: float = float("-inf")

    def take(self, amount: float, now_s: float) -> float:
        """Take tokens and return the seconds to wait before using them."""
        grown = self.level + (now_s - self.time_s) * self.rate
        self.level = min(self.rate, grown) - amount
        self.time_s = now_s
        return max(0.0, -self.level / self.rate)

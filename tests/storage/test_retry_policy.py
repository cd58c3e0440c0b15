from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.storage import RetryOptions
from vlm_stream.storage.retry import AimdLimit, Attempts, Fault, TokenBucket

BROKEN = Fault("transient", "broken")
BUSY = Fault("throttled", "busy")


def waits(attempts: Attempts, faults: list[Fault], *, uniform: float = 1.0) -> list[float | None]:
    """Return the waits after each fault, on a clock that passes them."""
    now, found = attempts.begun_s, []
    for fault in faults:
        wait = attempts.wait_before_next(fault, progressed=False, now_s=now, uniform=uniform)
        found.append(wait)
        now += wait or 0.0
    return found


def test_waits_double_up_to_a_limit():
    options = RetryOptions(max_retries=5, backoff_s=0.5, max_backoff_s=3)
    assert waits(Attempts(options, 100.0), [BROKEN] * 6) == [0.5, 1, 2, 3, 3, None]


def test_jitter_spreads_the_waits_from_zero_on():
    options = RetryOptions(backoff_s=1)
    assert waits(Attempts(options, 0.0), [BROKEN] * 3, uniform=0.0) == [0, 0, 0]
    assert waits(Attempts(options, 0.0), [BROKEN] * 3, uniform=0.25) == [0.25, 0.5, 1]


def test_new_bytes_renew_the_patience():
    attempts = Attempts(RetryOptions(max_retries=1, backoff_s=1), 0.0)
    for _ in range(10):
        assert attempts.wait_before_next(BROKEN, progressed=True, now_s=0.0, uniform=1.0) == 1
    assert attempts.wait_before_next(BROKEN, progressed=False, now_s=0.0, uniform=1.0) is None


def test_throttling_is_waited_out_until_the_deadline():
    options = RetryOptions(max_retries=1, backoff_s=1, max_backoff_s=1, deadline_s=10)
    assert waits(Attempts(options, 0.0), [BUSY] * 11) == [1.0] * 9 + [None, None]


@pytest.mark.parametrize("kind", ["missing", "refused", "changed", "past_end", "untrusted", "no_ranges", "unknown"])
def test_what_will_not_pass_is_not_tried_again(kind):
    assert waits(Attempts(RetryOptions(), 0.0), [Fault(kind, "no")]) == [None]


@given(st.lists(st.sampled_from([BROKEN, BUSY]), max_size=60), st.floats(0, 0.999))
def test_no_wait_ends_after_the_deadline(faults, uniform):
    attempts = Attempts(RetryOptions(max_retries=100, deadline_s=20), 5.0)
    found = waits(attempts, faults, uniform=uniform)
    assert sum(wait or 0.0 for wait in found) <= 20


def test_one_storm_cuts_once_and_success_raises_by_one_per_round():
    limit = AimdLimit(32)
    for _ in range(20):
        limit.on_throttle(10.0)
    assert limit.limit == 16
    for _ in range(16):
        limit.on_success()
    assert 16.9 < limit.limit <= 17
    limit.on_throttle(10.5)
    assert limit.limit > 16
    limit.on_throttle(11.0)
    assert limit.limit < 9


@given(st.lists(st.one_of(st.none(), st.floats(0, 1000)), max_size=300), st.integers(1, 64))
def test_the_limit_stays_between_one_and_its_ceiling(events, ceiling):
    limit = AimdLimit(ceiling)
    for now in events:
        if now is None:
            limit.on_success()
        else:
            limit.on_throttle(now)
        assert 1 <= limit.limit <= ceiling


def test_a_bucket_gives_one_second_of_burst_and_then_its_rate():
    bucket = TokenBucket(10)
    assert [bucket.take(5, 0.0) for _ in range(4)] == [0, 0, 0.5, 1.0]
    assert bucket.take(5, 100.0) == 0


@given(st.floats(1, 1000), st.lists(st.tuples(st.floats(0, 50), st.floats(0, 2)), max_size=50))
def test_no_more_than_burst_and_rate_passes(rate, takes):
    bucket, now, taken = TokenBucket(rate), 0.0, 0.0
    for amount, pause in takes:
        now += pause
        wait = bucket.take(amount, now)
        taken += amount
        assert taken <= rate + rate * (now + wait) + 1e-6 * taken

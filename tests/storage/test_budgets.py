from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.storage.reader import TokenBucket


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

"""The price of a billion tokens: core-seconds, bytes and requests of question 3, times stated prices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers.questions import Prices, Question, Results, Row, each

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.peers.job import Numbers
    from benchmarks.peers.suite import Suite

_TOKENS = 1e9


def measure(_suite: Suite) -> Results:
    """10. Nothing is measured again."""
    return {}


def _core_hours(run: Numbers) -> float:
    return run["cpu"] / run["tokens"] * _TOKENS / 3600  # type: ignore[no-any-return]


def _gigabytes(run: Numbers) -> float:
    return run["sent"] / run["all_tokens"] * _TOKENS / 1e9  # type: ignore[no-any-return]


def _thousand_requests(run: Numbers) -> float:
    return run["requests"] / run["all_tokens"] * _TOKENS / 1000  # type: ignore[no-any-return]


def _rows(_found: Results, results: Results, prices: Prices) -> Iterable[Row]:
    def dollars(run: Numbers) -> str:
        fetched = _gigabytes(run) * prices.gigabyte + _thousand_requests(run) * prices.thousand_requests
        return f"{_core_hours(run) * prices.core_hour + fetched:.2f}"

    for mixture, runs in results.get("s3", {}).items():
        yield Row(f"{mixture}: core-hours", each(runs, lambda run: f"{_core_hours(run):,.1f}"))
        yield Row(f"{mixture}: GB fetched", each(runs, lambda run: f"{_gigabytes(run):,.0f}"))
        yield Row(f"{mixture}: thousand requests", each(runs, lambda run: f"{_thousand_requests(run):,.0f}"))
        short = "dollars for 1e9 tokens, images from S3" if mixture == "images" else ""
        at = f"{prices.core_hour:g} for a core-hour, {prices.gigabyte:g} for a GB"
        at += f", {prices.thousand_requests:g} for 1,000 requests"
        yield Row(f"{mixture}: dollars, at {at}", each(runs, dollars), short)


COST = Question(
    "What do a billion tokens cost?",
    "Core-seconds, bytes and requests of the runs of question 3; the prices are assumptions, to be replaced by one's "
    "own (`--core-hour`, `--gb`, `--requests`). Bytes decide, and are the same for all (Lance: see question 3). Here "
    "each sample of a shuffled epoch is a request of its own, which costs more than the cores save; runs of neighbours "
    "(`run_length`) or a `cache_dir` make fewer of them.",
    measure,
    _rows,
)

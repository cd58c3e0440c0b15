"""The price of a billion tokens: core-seconds and bytes of question 3, times stated prices."""

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


def _rows(_found: Results, results: Results, prices: Prices) -> Iterable[Row]:
    def dollars(run: Numbers) -> str:
        return f"{_core_hours(run) * prices.core_hour + _gigabytes(run) * prices.gigabyte:.2f}"

    for mixture, runs in results.get("s3", {}).items():
        yield Row(f"{mixture}: core-hours", each(runs, lambda run: f"{_core_hours(run):,.1f}"))
        yield Row(f"{mixture}: GB fetched", each(runs, lambda run: f"{_gigabytes(run):,.0f}"))
        short = "dollars for 1e9 tokens, images from S3" if mixture == "images" else ""
        title = f"{mixture}: dollars, at {prices.core_hour:g} for a core-hour and {prices.gigabyte:g} for a GB"
        yield Row(title, each(runs, dollars), short)


COST = Question(
    "What do a billion tokens cost?",
    "Core-seconds and bytes of the runs of question 3; the two prices are assumptions, to be replaced by one's own "
    "(`--core-hour`, `--gb`). Bytes are about the same for all unless a loader leaves out what it does not need, so "
    "that what a core makes decides.",
    measure,
    _rows,
)

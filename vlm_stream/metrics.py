"""What a loader has done so far, as numbers for a log, a dashboard or a table.

Enters: deliveries, one by one. Leaves: a flat dict of numbers. Rates are over the whole life of the meter.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import ConfigError, require

if TYPE_CHECKING:
    from vlm_stream.build import Delivery
    from vlm_stream.storage import ReadTotals

_OF_BUILDERS: Final = ("built", "failed", "hedged", "waited_s", "bytes", "seconds", "queued")


class Meter:
    """Adds deliveries up."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._reads: dict[str, ReadTotals] = {}
        self._newest_step = 0

    def waited(self, seconds: float) -> None:
        """Count the time for which the consumer waited for a batch."""
        self._seconds["wait"] += seconds

    def add(self, delivery: Delivery) -> None:
        counts, seconds = self._counts, self._seconds  # not by `update`, which takes ten times as long
        counts["batches"] += 1
        counts["samples"] += delivery.num_samples
        counts["bad_samples"] += len(delivery.bad)
        counts["tokens"] += delivery.num_tokens
        counts["labels"] += delivery.num_labels
        # What nobody planned cannot be missing.
        planned = delivery.num_planned_labels
        counts["planned_labels"] += delivery.num_labels if planned is None else planned
        counts["slots"] += delivery.num_slots
        counts["rows"] += delivery.num_rows
        for stage, duration in delivery.seconds.items():
            seconds[stage] += duration
        self._reads[delivery.reader] = delivery.reads
        self._newest_step = delivery.name.step

    def numbers(self, *, pack_size: int | None = None) -> dict[str, float]:
        elapsed = max(time.monotonic() - self._begin, 1e-9)
        counts, batches = self._counts, max(self._counts["batches"], 1)
        names = ("bytes_wanted", "bytes_read", "requests", "retries", "samples", "cache_hits", "cache_downloads")
        wanted, read, requests, retries, num_read, hits, downloads = (
            sum(getattr(totals, name) for totals in self._reads.values()) for name in names
        )
        numbers: dict[str, float] = {
            "step": self._newest_step,
            "batches": counts["batches"],
            "samples": counts["samples"],
            "bad_samples": counts["bad_samples"],
            "tokens": counts["tokens"],
            "labels": counts["labels"],
            "planned_labels": counts["planned_labels"],
            "padding": 1 - counts["tokens"] / counts["slots"] if counts["slots"] else 0.0,
            "samples_per_s": counts["samples"] / elapsed,
            "tokens_per_s": counts["tokens"] / elapsed,
            "megabytes_per_s": wanted / elapsed / 1e6,
            "requests_per_sample": requests / max(num_read, 1),
            "bytes_read": read,
            "read_amplification": read / max(wanted, 1),
            "retries": retries,
            "cache_hits": hits,
            "cache_downloads": downloads,
            "waited_s": self._seconds["wait"],
        }
        if pack_size is not None:
            numbers["fill"] = counts["tokens"] / (pack_size * max(counts["rows"], 1))
        return numbers | {f"{stage}_s_per_batch": self._seconds[stage] / batches for stage in sorted(self._seconds)}


def serve_prometheus(numbers: Any, port: int, address: str = "127.0.0.1", builders: Any = list) -> Any:
    """Serve `numbers()` and the rows of `builders()` at `http://address:port/metrics`; needs the extra `metrics`.

    Returns:
        The server's handle.
    """
    prometheus = require("prometheus_client", "metrics", "A Prometheus endpoint")
    from prometheus_client.core import GaugeMetricFamily

    class _Collector:
        def collect(self) -> Any:
            for name, value in numbers().items():
                yield GaugeMetricFamily(f"vlm_stream_{name}", f"vlm_stream loader: {name}", value=value)
            rows = builders()
            for name in _OF_BUILDERS:
                about = f"vlm_stream builder: {name}"
                gauge = GaugeMetricFamily(f"vlm_stream_builder_{name}", about, labels=("builder", "node", "kind"))
                for row in rows:
                    gauge.add_metric([str(row["builder"]), row["node"], row["kind"]], row[name])
                yield gauge

    registry = prometheus.CollectorRegistry()
    registry.register(_Collector())
    try:
        return prometheus.start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served at {address}:{port} ({error.strerror}); choose another port, or 0 for any that "
            f"is free. Ranks of one node need one each"
        ) from error

"""What a dataset looks like: histograms of tokens, bytes and media, as values.

Enters: a dataset's URL; only manifest and indexes are read. Leaves: `DatasetStats`, which commands and pages show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vlm_stream.convert.in_place import open_dataset
from vlm_stream.format import TokenCounting, Totals
from vlm_stream.storage import StoreOptions
from vlm_stream.tokens import Geometry, MediaColumns, count_tokens

_NUM_BINS: Final = 16
_WIDE: Final = 30.0  # values that span more than this factor get bins that grow by a factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How one quantity is distributed."""

    name: str
    unit: str
    edges: tuple[float, ...]  # [bins + 1] Half-open bins, the last one closed
    counts: tuple[int, ...]  # [bins]
    num_values: int
    total: float
    mean: float
    low: float
    median: float
    p95: float
    high: float

    def label(self, number: int) -> str:
        """Return the range of one bin: whole numbers without a fraction, single values alone."""
        begin, end = self.edges[number : number + 2]
        if begin == int(begin) and end == begin + 1:
            return f"{int(begin):,}"
        digits = 0 if end - begin >= 2 else 2
        return f"{begin:,.{digits}f} - {end:,.{digits}f}"

    @property
    def is_log(self) -> bool:
        """Tell whether bins grow by a factor, as where values span a wide range."""
        return len(self.edges) > 3 and self.edges[-1] - self.edges[-2] > 2 * (self.edges[2] - self.edges[1])

    @property
    def facts(self) -> str:
        return (
            f"{self.num_values:,} values, mean {self.mean:,.1f}, median {self.median:,.1f}, p95 {self.p95:,.1f}, "
            f"from {self.low:,.6g} to {self.high:,.6g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryStats:
    """What came from one entry of the meta file, or from one file."""

    totals: Totals  # its bytes are those of samples alone
    length: int | None  # tokens with media, for the processor that was named

    def __add__(self, other: EntryStats) -> EntryStats:
        length = None if self.length is None or other.length is None else self.length + other.length
        return EntryStats(totals=self.totals + other.totals, length=length)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStats:
    """A dataset in numbers."""

    url: str
    digest: str
    num_shards: int
    totals: Totals
    tokens: TokenCounting
    dropped: dict[str, int]
    whole: dict[str, int]  # clips of which no table could be made
    entries: dict[str, EntryStats]
    histograms: tuple[Histogram, ...]


def histogram_of(name: str, unit: str, values: npt.NDArray[Any]) -> Histogram | None:
    """Return the distribution of `values`, None where there are none."""
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    counts, edges = np.histogram(values, bins=_edges(low, high, integral=values.dtype.kind in "iu"))
    return Histogram(
        name=name,
        unit=unit,
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
        num_values=len(values),
        total=float(values.sum()),
        mean=float(values.mean()),
        low=low,
        median=float(np.median(values)),
        p95=float(np.percentile(values, 95)),
        high=high,
    )


def _edges(low: float, high: float, *, integral: bool) -> npt.NDArray[np.float64]:
    """Return strictly growing edges from `low` to `high`: by steps, or by factors where values span a wide range."""
    if high <= low:
        return np.array([low, low + 1.0])
    if integral and high - low < _NUM_BINS:
        return np.arange(low, high + 2.0)
    if high / max(low, 1.0) > _WIDE:
        begin = max(low, 1.0 if integral else high / 1e4)
        edges = np.geomspace(begin, high, _NUM_BINS + 1)
        edges[0] = low
    else:
        edges = np.linspace(low, high, _NUM_BINS + 1)
    if integral:
        edges = np.unique(np.round(edges))
    edges[-1] = max(edges[-1], high)
    return edges


def dataset_stats(
    url: str,
    *,
    store: StoreOptions | None = None,
    count_tokens: Callable[[MediaColumns], npt.NDArray[np.int64]] | None = None,
) -> DatasetStats:
    """Read the indexes of a dataset and return its distributions.

    `count_tokens` gives the length of samples with their media; without it they are counted for the processor that the
    dataset was converted with, and where there was none only text is.
    """
    dataset = open_dataset(url, store, need="members")
    manifest = dataset.manifest
    if count_tokens is None and manifest.tokens.geometry:
        count_tokens = _counter(manifest.geometry)
    columns: dict[tuple[str, str], list[npt.NDArray[Any]]] = {}
    entries: dict[str, EntryStats] = {}
    for index in dataset.indexes():
        lengths = None if count_tokens is None else count_tokens(index.media)
        for quantity, values in _quantities(index.media, index.size, lengths).items():
            columns.setdefault(quantity, []).append(values)
        for name, totals in index.entries().items():
            length = None if lengths is None else int(lengths[index.is_of(name)].sum())
            found = EntryStats(totals=totals, length=length)
            entries[name] = entries[name] + found if name in entries else found
    histograms = (histogram_of(*quantity, np.concatenate(parts)) for quantity, parts in columns.items())
    return DatasetStats(
        url=dataset.root,
        digest=manifest.digest,
        num_shards=len(manifest.shards),
        totals=manifest.totals,
        tokens=manifest.tokens,
        dropped=manifest.dropped,
        whole=manifest.whole,
        entries=dict(sorted(entries.items())),
        histograms=tuple(histogram for histogram in histograms if histogram is not None),
    )


def _counter(geometry: Geometry) -> Callable[[MediaColumns], npt.NDArray[np.int64]]:
    return lambda media: count_tokens(media, geometry).tokens


def _quantities(
    media: MediaColumns, size: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64] | None
) -> dict[tuple[str, str], npt.NDArray[Any]]:
    """Return the values of some shards by (name, unit)."""
    found: dict[tuple[str, str], npt.NDArray[Any]] = {}
    if lengths is not None:
        found["sample length", "tokens"] = lengths
    found["text per sample", "tokens"] = media.text_tokens
    found["sample size", "bytes"] = size
    found["images per sample", "images"] = np.diff(media.image_splits)
    found["image width", "pixels"] = media.image_sizes[:, 1]
    found["image height", "pixels"] = media.image_sizes[:, 0]
    found["video length", "frames"] = media.video_sizes[:, 0]
    found["video duration", "seconds"] = media.video_seconds
    rates = media.audio_sizes[:, 1]
    found["audio duration", "seconds"] = media.audio_sizes[rates > 0, 0] / rates[rates > 0]
    return found

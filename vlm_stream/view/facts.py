"""What pages ask of samples, as columns of their shards: which match a query, and what all of them add up to.

Enters: indexes, and lengths by the plan's geometry. Leaves: `ShardFacts`, some bytes for each sample; totals of sources
and entries, and histograms. Where shards are still to be read, or are left out of a large dataset, totals are scaled to
all samples, and say so.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from vlm_stream.convert import histogram_of
from vlm_stream.format import Totals

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vlm_stream.convert import Histogram
    from vlm_stream.format import ShardIndex
    from vlm_stream.view.catalog import Catalog

KINDS: Final = {"image": 1, "video": 2, "audio": 4}
"""Bits of `ShardFacts.kinds`; 0 is text alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which samples are asked for; what is empty does not matter."""

    source: str = ""
    entry: str = ""
    kind: str = ""
    """`text` alone, or a medium that the sample has."""
    tokens_from: int | None = None
    tokens_to: int | None = None
    text: str = ""

    @property
    def is_empty(self) -> bool:
        """Tell whether every sample matches."""
        return self == Query()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardFacts:
    """What pages ask of the n samples of a shard."""

    tokens: npt.NDArray[np.int32]
    kinds: npt.NDArray[np.uint8]
    entry: npt.NDArray[np.uint16]
    entry_names: tuple[str, ...]
    decode: npt.NDArray[np.float32]
    """[n] Megapixels of images and of all frames of clips: what decoding goes through."""
    pixels: npt.NDArray[np.int64]
    """[images] Height times width."""
    pixel_rows: npt.NDArray[np.int32]
    """[images] Of which sample."""
    seconds: npt.NDArray[np.float32]
    """[clips and sounds]"""
    second_rows: npt.NDArray[np.int32]
    """[clips and sounds] Of which sample."""
    entries: dict[str, tuple[Totals, int]]
    """What each entry adds up to, and its tokens."""

    def match(self, query: Query) -> npt.NDArray[np.int64]:
        """Return the rows that match, as far as the index tells."""
        chosen = np.ones(len(self.tokens), dtype=bool)
        if query.entry:
            place = self.entry_names.index(query.entry) if query.entry in self.entry_names else -1
            chosen &= self.entry == place
        if query.kind == "text":
            chosen &= self.kinds == 0
        elif query.kind:
            chosen &= (self.kinds & KINDS[query.kind]) > 0
        if query.tokens_from is not None:
            chosen &= self.tokens >= query.tokens_from
        if query.tokens_to is not None:
            chosen &= self.tokens <= query.tokens_to
        return np.flatnonzero(chosen)


def facts_of(index: ShardIndex, rows: Sequence[int], tokens: npt.NDArray[np.int64]) -> ShardFacts:
    """Return the facts of the rows of an index that are shown."""
    shown = np.zeros(len(index), dtype=bool)
    shown[rows] = True
    media = index.columns.select(shown)
    (image_splits, images), (video_splits, videos), (audio_splits, audios) = media[2:]
    pixels = images["height"].astype(np.int64) * images["width"]
    frames = videos["frames"].astype(np.int64) * videos["height"] * videos["width"]
    rates = np.maximum(audios["rate"].astype(np.float64), 1.0)
    seconds = np.concatenate([videos["seconds"].astype(np.float32), (audios["samples"] / rates).astype(np.float32)])
    kinds = np.zeros(media.num_samples, dtype=np.uint8)
    for bit, splits in zip(KINDS.values(), (image_splits, video_splits, audio_splits), strict=True):
        kinds |= np.where(np.diff(splits.astype(np.int64)) > 0, bit, 0).astype(np.uint8)
    entry, totals = index.entry[shown].astype(np.uint16), index.entries()
    lengths = np.bincount(entry, weights=tokens, minlength=len(index.entry_names))
    named = {index.entry_names[number]: int(lengths[number]) for number in np.unique(entry).tolist()}
    return ShardFacts(
        tokens=np.minimum(tokens, 2**31 - 1).astype(np.int32),
        kinds=kinds,
        entry=entry,
        entry_names=index.entry_names,
        decode=((_added(pixels, image_splits) + _added(frames, video_splits)) / 1e6).astype(np.float32),
        pixels=pixels,
        pixel_rows=_owners(image_splits),
        seconds=seconds,
        second_rows=np.concatenate([_owners(video_splits), _owners(audio_splits)]),
        entries={name: (totals[name], length) for name, length in named.items()},
    )


def _owners(splits: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    counts: npt.NDArray[np.int64] = splits[1:].astype(np.int64) - splits[:-1].astype(np.int64)
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def _added(values: npt.NDArray[np.int64], splits: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    ends = np.concatenate([[0], np.cumsum(values)])
    sums: npt.NDArray[np.int64] = ends[splits[1:].astype(np.int64)] - ends[splits[:-1].astype(np.int64)]
    return sums


class Part(NamedTuple):
    """One source, or one entry of it."""

    source: int
    entry: str
    """Empty: all of the source."""
    samples: int
    url: str
    is_exact: bool
    """Whether all its shards were read."""
    sums: dict[str, float]
    """`tokens` with media, and the fields of a manifest's totals."""


class Overview:
    """Adds up the facts of a catalog; may be used by several threads."""

    def __init__(self, catalog: Catalog) -> None:
        """Take a catalog; nothing is read here."""
        self.catalog = catalog
        self._kept: dict[Query, tuple[int, tuple[Histogram, ...]]] = {}
        self._parts: tuple[int, list[Part]] = (-1, [])
        self._guard = threading.Lock()

    def parts(self) -> list[Part]:
        """Return the sources, each followed by its entries, largest first."""
        datasets, known = self.catalog.datasets, self.catalog.known_facts()
        if self._parts[0] == len(known):
            return self._parts[1]
        found: list[Part] = []
        for number, (source, dataset) in enumerate(zip(datasets.sources, datasets.opened, strict=True)):
            own = [facts for (each, _), facts in known.items() if each == number]
            samples, read = sum(dataset.samples_per_shard), sum(len(facts.tokens) for facts in own)
            empty = Part(number, "", samples, source.url, read == samples, {})
            sums = _sums(own, samples / max(read, 1))
            whole = sums.pop("")
            if samples == dataset.manifest.totals.samples:  # with the ends of tars, which belong to no sample
                whole["bytes"] = float(dataset.manifest.totals.bytes)
            found.append(empty._replace(sums=whole))
            entries = [
                empty._replace(entry=name, samples=round(own["samples"]), sums=own) for name, own in sums.items()
            ]
            found += sorted(entries, key=lambda each: -each.samples) if len(entries) > 1 else []
        self._parts = len(known), found
        return found

    def histograms(self, query: Query) -> tuple[Histogram, ...]:
        """Return the distributions of the samples that match, as far as indexes tell."""
        known = self.catalog.known_facts()
        with self._guard:
            count, kept = self._kept.get(query, (-1, ()))
        if count == len(known):
            return kept
        lengths, pixels, seconds = [], [], []
        for (source, _), facts in known.items():
            if query.source not in ("", self.catalog.source_names[source]):
                continue
            chosen = np.zeros(len(facts.tokens), dtype=bool)
            chosen[facts.match(query)] = True
            lengths.append(facts.tokens[chosen])
            pixels.append(facts.pixels[chosen[facts.pixel_rows]])
            seconds.append(facts.seconds[chosen[facts.second_rows]])
        found = (
            histogram_of("Length", "tokens", _joined(lengths)),
            histogram_of("Images as stored", "kilopixels", _joined(pixels) / 1e3),
            histogram_of("Clips and sound", "seconds", _joined(seconds)),
        )
        shown = tuple(each for each in found if each is not None)
        with self._guard:
            if len(self._kept) > 64:
                self._kept.clear()
            self._kept[query] = len(known), shown
        return shown


def _joined(arrays: list[Any]) -> Any:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def _sums(shards: Sequence[ShardFacts], scale: float) -> dict[str, dict[str, float]]:
    """Return what the entries of some shards add up to, and under "" all of them, times a factor."""
    names = ("tokens", *(field.name for field in fields(Totals)))
    sums: dict[str, dict[str, float]] = {"": dict.fromkeys(names, 0.0)}
    for facts in shards:
        for entry, (totals, tokens) in facts.entries.items():
            for into in ("", entry):
                own = sums.setdefault(into, dict.fromkeys(names, 0.0))
                for name in names:
                    own[name] += scale * (tokens if name == "tokens" else getattr(totals, name))
    return sums

"""What the samples of all sources add up to, by the shards whose facts were read so far.

Enters: a catalog. Leaves: totals of sources and entries, and histograms of what matches a query. Where shards are
still to be read, or are left out of a large dataset, totals are scaled to all samples, and say so.
"""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vlm_stream.convert import histogram_of
from vlm_stream.format import Totals
from vlm_stream.view.facts import Query

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.convert import Histogram
    from vlm_stream.view.catalog import Catalog
    from vlm_stream.view.facts import ShardFacts


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

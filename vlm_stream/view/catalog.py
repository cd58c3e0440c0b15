"""The samples of all sources by their indexes: what each costs, which match a query, and their bytes by ranges.

Enters: a plan, whose datasets are opened. Leaves: facts of shards, pages of refs, histograms, members. Indexes are read
shard by shard, when a page needs them and by one thread in the background; no tar is ever read whole.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from vlm_stream.encode import name_frames
from vlm_stream.errors import BadSampleError, InputError, VlmStreamError
from vlm_stream.format import is_text_member, to_conversation
from vlm_stream.plan import Ref
from vlm_stream.storage import Member, SpanReader
from vlm_stream.tokens import choose_keyframes
from vlm_stream.view.facts import Query, facts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vlm_stream.conversation import Conversation
    from vlm_stream.format import Drawn
    from vlm_stream.planning import Plan
    from vlm_stream.storage import Span
    from vlm_stream.view.facts import ShardFacts
    from vlm_stream.view.viewer import Pace

_TOGETHER: Final = 8
"""Indexes that the background thread reads while nobody else may."""
_TEXTS: Final = 64
"""Samples whose texts are read at a time."""
_MAX_LOOKED: Final = 4096
"""Samples whose texts are read for a page."""
_DISK_SECONDS: Final = 0.12
_STORE_SECONDS: Final = 0.8
_MAX_SCANNED: Final = 4_000_000
"""Samples that histograms are made of: of larger datasets some shards are left out, evenly."""
_MAX_KEPT: Final = 20_000_000
"""Samples whose facts are kept."""


class Name(NamedTuple):
    """What a sample is called, in links and ledgers."""

    source: str
    shard: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some samples that match a query, in the order of the shards."""

    refs: tuple[Ref, ...]
    before: int | None
    """Place in front of the first one, where others may match; None: there are none."""
    after: int | None
    """Place behind the last one, likewise."""
    looked_at: int
    """Samples whose text was read for it."""
    texts: Mapping[Ref, str]
    """Of those of them that match."""
    is_cut: bool
    """Whether time ran out before the page was full."""


class Catalog:
    """Looks samples up; may be used by several threads."""

    def __init__(self, plan: Plan, pace: Pace) -> None:
        """Take the opened datasets of a plan; nothing is read yet."""
        self.plan, self.pace = plan, pace
        self.datasets = plan.datasets
        self._shards: list[tuple[int, int]] = [
            (source, shard)
            for source, dataset in enumerate(self.datasets.opened)
            for shard in range(len(dataset.samples_per_shard))
        ]
        sizes = [self.datasets.opened[source].samples_per_shard[shard] for source, shard in self._shards]
        self._begins: list[int] = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).tolist()
        """[shards + 1] Place of each shard's first sample among all."""
        options = plan.build.options
        self._reader = SpanReader(options.read(), options.store)
        self._facts: OrderedDict[tuple[int, int], ShardFacts] = OrderedDict()
        self._guard = threading.Lock()
        self._read_guard = threading.Lock()
        self._scan: threading.Thread | None = None
        self.scan_problem = ""
        """Why some indexes could not be read."""
        self._numbers = {pair: number for number, pair in enumerate(self._shards)}
        step = max(-(-self.num_samples // _MAX_SCANNED), 1)
        self.scanned_shards = self._shards[::step]
        """Those that histograms are made of."""

    def close(self) -> None:
        """Wait for the background thread, and end the connections."""
        if self._scan is not None:
            self._scan.join(10)
        self._reader.close()

    # Names ------------------------------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        """Return how many samples there are."""
        return self._begins[-1]

    @cached_property
    def source_names(self) -> tuple[str, ...]:
        """Return what the sources are called."""
        return tuple(source.name for source in self.datasets.sources)

    def place_of(self, ref: Ref) -> int:
        """Return a sample's place among all."""
        return self._begins[self._numbers[ref.source, ref.shard]] + ref.row

    def ref_at(self, place: int) -> Ref:
        """Return the sample at a place."""
        number = bisect_right(self._begins, place) - 1
        return Ref(*self._shards[number], place - self._begins[number])

    def name_of(self, ref: Ref, drawn: Drawn) -> Name:
        """Return what a sample is called."""
        return Name(self.source_names[ref.source], drawn.span.path, drawn.key)

    def find(self, name: Name, row: int | None = None) -> Ref:
        """Return the sample of that name; `row` chooses among several with one key.

        Raises:
            InputError: There is none.
        """
        for source, own in enumerate(self.source_names):
            dataset = self.datasets.opened[source]
            shard = dataset.find_shard(name.shard) if own == name.source else None
            if shard is None:
                continue
            with self.datasets.lock:
                ((index, shown),) = dataset.look([shard])
            if row is not None and row < len(shown) and index.key(shown[row]) == name.key:
                return Ref(source, shard, row)
            named = set(index.find(name.key))
            rows = [place for place, each in enumerate(shown) if each in named]
            if rows:
                return Ref(source, shard, row if row in rows else rows[0])
        raise InputError(
            f"there is no sample '{name.key}' in the shard '{name.shard}' of the source '{name.source}'; sources here "
            f"are {', '.join(self.source_names)}, and keys are those in the tars"
        )

    def draw(self, refs: Sequence[Ref]) -> list[Drawn]:
        """Return what the index knows of samples."""
        return self.datasets.draw(list(refs))

    # Facts ------------------------------------------------------------------------------------------------------------

    def facts(self, source: int, shard: int) -> ShardFacts:
        """Return the facts of a shard, which are kept."""
        return self._read_facts(source, [shard])[0]

    def _read_facts(self, source: int, shards: Sequence[int]) -> list[ShardFacts]:
        with self._guard:
            kept = {shard: found for shard in shards if (found := self._facts.get((source, shard))) is not None}
        missing = [shard for shard in shards if shard not in kept]
        if missing:
            with self.datasets.lock:
                looked = self.datasets.opened[source].look(missing)
            columns, ends = self.plan.planner.read_columns(source, missing), np.cumsum([len(own) for _, own in looked])
            tokens = np.split(columns.pick(np.arange(len(columns))).tokens, ends[:-1])
            kept |= {shard: facts_of(*found, own) for shard, found, own in zip(missing, looked, tokens, strict=True)}
            with self._guard:
                self._facts |= {(source, shard): kept[shard] for shard in missing}
                while len(self._facts) > 1 and sum(len(each.tokens) for each in self._facts.values()) > _MAX_KEPT:
                    self._facts.popitem(last=False)
        return [kept[shard] for shard in shards]

    def start_scan(self) -> threading.Thread:
        """Begin to read the facts of all shards in the background, once; return the thread that does."""
        with self._guard:
            if self._scan is None:
                self._scan = threading.Thread(target=self._scan_all, name="vlm-stream-view-scan", daemon=True)
                self._scan.start()
            return self._scan

    def _scan_all(self) -> None:
        for source in range(len(self.datasets.opened)):
            shards = [shard for own, shard in self.scanned_shards if own == source]
            worked = time.monotonic()
            for begin in range(0, len(shards), _TOGETHER):
                if self.pace.is_closed:
                    return
                try:
                    self._read_facts(source, shards[begin : begin + _TOGETHER])
                except VlmStreamError as error:
                    self.scan_problem = str(error)
                except RuntimeError:  # the interpreter ends
                    return
                worked = self.pace.rest(worked)

    def known_facts(self) -> dict[tuple[int, int], ShardFacts]:
        """Return the facts of the shards that were read so far."""
        with self._guard:
            return dict(self._facts)

    # Queries ----------------------------------------------------------------------------------------------------------

    def count(self, query: Query) -> int | None:
        """Return how many samples match; None: not known yet, or only their texts tell."""
        if query.is_empty:
            return self.num_samples
        wanted = [pair for pair in self._shards if query.source in ("", self.source_names[pair[0]])]
        with self._guard:
            known = [self._facts.get(pair) for pair in wanted]
        if query.text or any(each is None for each in known):
            return None
        return sum(len(each.match(query)) for each in known if each is not None)

    def page(
        self,
        query: Query,
        at: int,
        size: int,
        *,
        backwards: bool = False,
        seconds: float | None = None,
    ) -> Page:
        """Return the next samples that match, from a place on, or the last ones before it.

        Args:
            query: Which.
            at: Place among all samples.
            size: How many.
            backwards: Return those before `at`, in order all the same.
            seconds: How long to look for more; None: shorter where all samples are on a disk.
        """
        if seconds is None:
            seconds = _STORE_SECONDS if any("://" in each.root for each in self.datasets.opened) else _DISK_SECONDS
        now = time.monotonic()
        deadline = now + seconds
        refs: list[Ref] = []
        texts: dict[Ref, str] = {}
        looked_at, last, is_cut = 0, at, False
        for chunk, reached in self._candidates(query, at, backwards):
            if query.text:
                looked_at += len(chunk)
                found = self._with_text(chunk, query.text)
                texts |= found
                chunk = list(found)
            refs += chunk
            last, before, now = reached, now, time.monotonic()
            is_late = now + (now - before) > deadline  # as the next takes as long
            is_cut = (is_late or looked_at >= _MAX_LOOKED) and reached != (0 if backwards else self.num_samples)
            if len(refs) >= size or is_cut:
                break
        refs = refs[:size]
        if len(refs) == size:
            is_cut = False
            last = self.place_of(refs[-1]) + (0 if backwards else 1)
        if backwards:
            refs.reverse()
        first = self.place_of(refs[0]) if refs else last
        end = at if backwards else last
        first = (last if is_cut else first) if backwards else at
        return Page(
            refs=tuple(refs),
            before=first if first > 0 else None,
            after=end if end < self.num_samples else None,
            looked_at=looked_at,
            texts=texts,
            is_cut=is_cut,
        )

    def _candidates(self, query: Query, at: int, backwards: bool) -> Iterator[tuple[list[Ref], int]]:
        """Yield samples that match by the index, some at a time, and the place that was reached."""
        at = min(max(at, 0), self.num_samples)
        numbers = range(len(self._shards))
        first = bisect_right(self._begins, max(at - 1, 0) if backwards else at) - 1
        order = reversed(numbers[: first + 1]) if backwards else iter(numbers[first:])
        for number in order:
            source, shard = self._shards[number]
            begin, end = self._begins[number : number + 2]
            if query.source and query.source != self.source_names[source]:
                continue
            low, high = (begin, min(at, end)) if backwards else (max(at, begin), end)
            if query.is_empty or query == Query(source=query.source):
                rows = np.arange(low - begin, high - begin)
            else:
                rows = self.facts(source, shard).match(query)
                rows = rows[(rows >= low - begin) & (rows < high - begin)]
            if backwards:
                rows = rows[::-1]
            for cut in range(0, len(rows), _TEXTS):
                part = rows[cut : cut + _TEXTS].tolist()
                yield [Ref(source, shard, row) for row in part], begin + part[-1] + (0 if backwards else 1)
            yield [], begin if backwards else end
        yield [], 0 if backwards else self.num_samples

    def _with_text(self, refs: Sequence[Ref], text: str) -> dict[Ref, str]:
        wanted = text.casefold()
        return {
            ref: found
            for ref, found in zip(refs, self.texts(refs, self.draw(refs)), strict=True)
            if isinstance(found, str) and wanted in found.casefold()
        }

    # Bytes ------------------------------------------------------------------------------------------------------------

    def read(self, spans: Sequence[Span]) -> list[Mapping[str, memoryview] | BadSampleError]:
        """Return the members of spans, or what is wrong with them."""
        with self._read_guard:  # the first call opens connections
            reading = self._reader.begin(spans)
        return reading.results()

    def read_member(self, drawn: Drawn, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return some bytes of one member; nothing else of the tar is read.

        Raises:
            BadSampleError: They cannot be read.
            InputError: There is no such member.
        """
        size = next((size for own, _, size in drawn.members if own == name), None)
        if size is None:
            raise InputError(f"the sample '{drawn.key}' has no member '{name}'; its page lists them")
        begin, end = min(begin, size), size if end is None else min(end, size)
        if begin >= end:
            return b""
        (found,) = self.read([_part_of(drawn, name, begin, end)])
        if isinstance(found, BadSampleError):
            raise found
        return bytes(found[name])

    def read_texts(self, drawn: Sequence[Drawn], more: str = "") -> list[dict[str, bytes] | BadSampleError]:
        """Return the members of samples that make their conversations; of their media only one that is named."""
        names = [
            [name for name, _, size in each.members if size and (is_text_member(name) or name == more)]
            for each in drawn
        ]
        spans = [_part_of(each, name) for each, own in zip(drawn, names, strict=True) for name in own]
        results = iter(self.read(spans) if spans else ())
        found: list[dict[str, bytes] | BadSampleError] = []
        for own in names:
            texts: dict[str, bytes] | BadSampleError = {}
            for name, result in [(name, next(results)) for name in own]:
                if isinstance(result, BadSampleError):
                    texts = result
                elif isinstance(texts, dict):
                    texts[name] = bytes(result[name])
            found.append(texts)
        return found

    def texts(self, refs: Sequence[Ref], drawn: Sequence[Drawn]) -> list[str | BadSampleError]:
        """Return what is said in samples."""
        found: list[str | BadSampleError] = []
        for ref, each, members in zip(refs, drawn, self.read_texts(drawn), strict=True):
            try:
                found.append(
                    members if isinstance(members, BadSampleError) else _text_of(self.conversation(ref, each, members))
                )
            except BadSampleError as error:
                found.append(error)
        return found

    def conversation(self, ref: Ref, drawn: Drawn, members: Mapping[str, Any]) -> Conversation:
        """Return the conversation of a sample, whose media items name members; samples of no known layout have none.

        Raises:
            BadSampleError: Its members make none.
        """
        fields = self.datasets.opened[ref.source].manifest.fields
        if fields.layout == "bytes":
            return []
        names = [name for name, *_ in drawn.members]
        texts = {name: bytes(content) for name, content in members.items() if is_text_member(name)}
        sizes = choose_keyframes(drawn.sizes, self.plan.build.frames)
        return name_frames(to_conversation(fields, names, texts), sizes)


def _part_of(drawn: Drawn, name: str, begin: int = 0, end: int | None = None) -> Span:
    """Return where some bytes of one member lie; checksums are of whole samples, so these cannot be checked."""
    _, offset, size = next(member for member in drawn.members if member[0] == name)
    part = Member(name, offset + begin, (size if end is None else end) - begin)
    return drawn.holder(name)._replace(offset=part.offset, size=part.size, crc32c=None, members=(part,))


def _text_of(conversation: Conversation) -> str:
    """Return what is said in a conversation, turn by turn."""
    said = (message["content"] for message in conversation)
    return "\n".join(
        each if isinstance(each, str) else " ".join(item["text"] for item in each if item.get("type") == "text")
        for each in said
    )

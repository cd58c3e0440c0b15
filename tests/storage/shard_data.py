"""Shards of random bytes with the spans that index them: what the other tests of this room read."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlm_stream.storage import Member, Span, crc32c_of, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vlm_stream.storage import SpanReader, SpanResult


@dataclass(frozen=True)
class Shards:
    """Spans in tar order, and the content that each of them must give back."""

    root: str
    spans: list[Span]
    contents: list[dict[str, bytes]]

    def order(self, seed: int = 0) -> list[tuple[int, Span]]:
        """Return all samples in a random order, tagged by position."""
        pairs = list(enumerate(self.spans))
        random.Random(seed).shuffle(pairs)
        return pairs

    def assert_equal(self, tag: int, result: object) -> None:
        """Fail unless the result is exactly the sample of that position."""
        assert not isinstance(result, Exception), result
        assert {name: bytes(view) for name, view in result.items()} == self.contents[tag]


def read(reader: SpanReader, pairs: Iterable[tuple[int, Span]]) -> list[tuple[int, SpanResult]]:
    """Read tagged spans as one batch; return the tags with what was read."""
    pairs = list(pairs)
    results = reader.begin([span for _, span in pairs]).results()
    return [(tag, result) for (tag, _), result in zip(pairs, results, strict=True)]


def write_shards(
    url: str, *, num_shards: int = 3, num_samples: int = 20, size: int = 3000, seed: int = 0, options=None
) -> Shards:
    """Write shards whose samples are two members between filler bytes that stand for tar headers."""
    rng = random.Random(seed)
    store = open_store(url, options)
    spans, contents = [], []
    for shard in range(num_shards):
        path = f"part/shard-{shard:06d}.tar"
        blob = bytearray()
        places = []
        for _ in range(num_samples):
            begin = len(blob)
            members, content = [], {}
            for name in ("json", "0.jpg"):
                blob += rng.randbytes(64)
                data = rng.randbytes(rng.randrange(size // 2, size))
                members.append(Member(name, len(blob), len(data)))
                content[name] = data
                blob += data
            places.append((begin, len(blob) - begin, tuple(members)))
            contents.append(content)
        blob += bytes(1024)
        store.put(path, bytes(blob))
        for begin, num_bytes, members in places:
            crc = crc32c_of(bytes(blob[begin : begin + num_bytes]))
            spans.append(Span(store.root, path, begin, num_bytes, crc, members, shard_size=len(blob)))
    return Shards(store.root, spans, contents)

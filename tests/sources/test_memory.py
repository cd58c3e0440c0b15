"""Memory grows by bytes per record, not by record."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from vlm_stream.sources import open_source

if TYPE_CHECKING:
    from pathlib import Path

NUM_RECORDS = 20_000
CHUNKS_BYTES = 24 << 20
"""Several copies of one chunk's positions, whatever the file's size."""


def peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        source = open_source(str(path))
        assert len(source) == NUM_RECORDS
        for index in range(0, NUM_RECORDS, NUM_RECORDS // 50):
            assert source.read(index).id == str(index)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.json.gz"])
def test_memory_does_not_grow_with_the_size_of_records(tmp_path: Path, name: str):
    peaks = {}
    for size_bytes in (100, 4000):
        turns = [{"role": "user", "content": "words, " * (size_bytes // 7)}]
        records = [json.dumps({"id": i, "messages": turns}) for i in range(NUM_RECORDS)]
        text = "\n".join(records) if name == "a.jsonl" else f"[{','.join(records)}]"
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode(), 1) if name.endswith(".gz") else text.encode())
        del records, text
        peaks[size_bytes] = peak_bytes(path)
    # The larger file has 78 MB more. Places of records cost 16 bytes each, twice while their parts are joined.
    assert peaks[4000] < CHUNKS_BYTES + 32 * NUM_RECORDS

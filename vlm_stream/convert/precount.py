"""Token counts written back into a data file, for datasets that are loaded whole: `_text_tokens` and `_media_tokens`.

Enters: a JSON array or JSON lines with its media, and a processor. Leaves: the same records in the same order with both
counts, which add up to the length of a sample's `input_ids`. A record that cannot be counted is written as it was, and
named. The target appears whole or not at all.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from vlm_stream.conversation import iter_media
from vlm_stream.convert.counting import open_counter
from vlm_stream.convert.media_bytes import MediaReader
from vlm_stream.convert.sample import build_sample
from vlm_stream.errors import ConfigError, SourceError, StorageError, blame_sample
from vlm_stream.processors import load_processor
from vlm_stream.sources import Catalog, DataFile, open_source
from vlm_stream.tokens import Geometry, count_tokens, make_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlm_stream.storage import StoreOptions

__all__ = ["PrecountReport", "precount"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecountReport:
    """What was counted."""

    out: str
    num_records: int
    text_tokens: int = 0
    media_tokens: int = 0
    bad: dict[str, str] = field(default_factory=dict)
    """Records that have no counts, and why."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)


def precount(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    processor: str,
    trust_remote_code: bool = False,
    store: StoreOptions | None = None,
    on_record: Callable[[int], None] | None = None,
    **form: Any,
) -> PrecountReport:
    """Write a data file with the token counts of its records.

    Args:
        path: JSON array or JSON lines, perhaps `.gz`.
        out: The new file, packed if its name ends in `.gz`; None replaces the file itself.
        processor: Name or path of the processor that counts.
        trust_remote_code: Let it bring its own code.
        store: How to reach media in object stores.
        on_record: Called with the number of records after each of them, for progress.
        form: `columns`, `tags`, `media_dir` and `media_first` of `open_source`.

    Raises:
        SourceError: The input is no single JSON file.
    """
    path, target = os.fspath(path), os.fspath(path if out is None else out)
    source = open_source(path, store=store, **form)
    catalog = source.members[0]
    if len(source.members) != 1 or not isinstance(catalog, Catalog) or not isinstance(catalog.data, DataFile):
        raise SourceError(
            f"{path} is not one JSON file, and counts are written into such; give its data files one by one."
        )
    if "://" in target or target.endswith(".zst"):
        raise ConfigError(
            f"counts cannot be written to {target}; give a local .json or .jsonl as the new file (.gz too)."
        )
    counter = _Counter(catalog, processor, trust_remote_code, store)
    lines = _lines(catalog.data, counter, on_record)
    try:
        _write_whole(Path(target), lines, catalog.data.is_array)
    except OSError as error:
        raise StorageError(
            f"{target} could not be written ({error.strerror or error}); nothing was changed. Give another --out."
        ) from error
    return PrecountReport(
        out=target, num_records=len(catalog), text_tokens=counter.text, media_tokens=counter.media, bad=counter.bad
    )


class _Counter:
    """Counts records, and keeps the sums."""

    def __init__(self, catalog: Catalog, name: str, trust_remote_code: bool, store: StoreOptions | None) -> None:
        self._catalog = catalog
        self._counter = open_counter(name, trust_remote_code=trust_remote_code)
        self._geometry = Geometry.from_processor(load_processor(name, trust_remote_code=trust_remote_code))
        self._reader = MediaReader(options=store)
        self.text = self.media = 0
        self.bad: dict[str, str] = {}

    def count(self, number: int) -> dict[str, int] | None:
        """Return both counts of a record, or note why there are none."""
        try:
            sample = build_sample(self._catalog.read(number), self._reader)
            counted = self._counter.count(sample.conversation, sample.sizes).text_tokens
        except Exception as error:  # a record can hold anything in any place
            blamed = blame_sample(error, "convert", "bad_record", "the record cannot be counted")
            self.bad[self._catalog.origin(number)] = f"{blamed.reason}: {blamed}"
            return None
        text = counted - sum(1 for _ in iter_media(sample.conversation))  # one stands for each medium
        total = int(count_tokens(make_columns([sample.sizes], [counted]), self._geometry).tokens[0])
        self.text += text
        self.media += total - text
        return {"_text_tokens": text, "_media_tokens": total - text}


def _lines(data: DataFile, counter: _Counter, on_record: Callable[[int], None] | None) -> Iterator[bytes]:
    for number in range(len(data)):
        counts = counter.count(number)
        if counts is None:
            yield data.raw(number).strip()
        else:
            yield json.dumps({**data.load(number), **counts}, ensure_ascii=False).encode()
        if on_record is not None:
            on_record(len(data))


def _write_whole(target: Path, lines: Iterator[bytes], is_array: bool) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as raw:
            # Without name and time, so that the same records give the same bytes.
            packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if target.name.endswith(".gz") else None
            file = cast("IO[bytes]", packed or raw)
            for number, line in enumerate(lines):
                file.write((b"[\n" if number == 0 else b",\n") + line if is_array else line + b"\n")
            if is_array:
                file.write(b"\n]\n")
            if packed is not None:
                packed.close()
            raw.flush()
            os.fsync(raw.fileno())
        Path(temporary).chmod(target.stat().st_mode & 0o777 if target.exists() else 0o644)
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)

"""Token counts written back into a data file, for datasets that are loaded whole: `_text_tokens` and `_media_tokens`.

Enters: a JSON array or JSON lines with its media, and a processor. Leaves: the same records in the same order with both
counts, which add up to the length of a sample's `input_ids`. A record that cannot be counted is written as it was, and
named. The target appears whole or not at all.
"""

import gzip
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, cast

from vlm_stream.conversation import iter_media
from vlm_stream.convert.counting import open_counter
from vlm_stream.convert.engines import LocalEngine
from vlm_stream.convert.media_bytes import MediaReader, MediaRules
from vlm_stream.convert.sample import build_sample
from vlm_stream.convert.web import PUBLIC
from vlm_stream.errors import ConfigError, SourceError, StorageError, blame_sample
from vlm_stream.sources import Catalog, DataFile, SourceGroup, open_source
from vlm_stream.storage import StoreOptions, local_path
from vlm_stream.tokens import count_tokens, make_columns

_CHUNK: Final = 64
_TEXT: Final = "_text_tokens"
_MEDIA: Final = "_media_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecountReport:
    """What was counted."""

    out: str
    num_records: int
    text_tokens: int = 0
    media_tokens: int = 0
    bad: dict[str, str] = field(default_factory=dict)  # records that have no counts, and why


def precount(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    processor: str,
    trust_remote_code: bool = False,
    store: StoreOptions | None = None,
    media_hosts: tuple[str, ...] = (PUBLIC,),
    workers: int = 1,
    on_form: Callable[[str], object] | None = None,
    on_record: Callable[[int], None] | None = None,
    **form: Any,
) -> PrecountReport:
    """Write a data file with the token counts of its records; without `out` the file itself is replaced.

    `form` are `columns`, `tags`, `media_dir` and `media_first` of `open_source`; `workers` is how many processes count,
    1 is this one; `on_form` is called with the line that says the recognised form, `on_record` with the number of
    records after each of them. A name that ends in `.gz` is packed. `media_hosts` are those of `ShardOptions`.
    """
    path, target = os.fspath(path), os.fspath(path if out is None else out)
    if out is not None and Path(target).exists() and Path(path).exists() and Path(path).samefile(target):
        raise ConfigError(
            f"{target} is the input itself, which would be replaced; say so with --in-place, or name another"
        )
    catalog, data = _open_file(path, open_source(path, store=store, **form))
    if not len(data):
        raise SourceError(f"{path} has no records, so there is nothing to count and nothing was written.")
    if on_form is not None and catalog.line:
        on_form(f"{catalog.name}: {catalog.line}")
    if "://" in target or target.endswith(".zst"):
        raise ConfigError(
            f"counts cannot be written to {target}; give a local .json or .jsonl as the new file (.gz too)."
        )
    counter = _Counter(catalog, processor, trust_remote_code, MediaReader(MediaRules(hosts=media_hosts), store))
    chunks = (range(begin, min(begin + _CHUNK, len(data))) for begin in range(0, len(data), _CHUNK))
    found = _in_order(LocalEngine(workers).run(counter, chunks))
    sums: Counter[str] = Counter()
    bad: dict[str, str] = {}

    def lines() -> Iterator[bytes]:
        for number, counts in enumerate(found):
            if isinstance(counts, str):
                bad[catalog.origin(number)] = counts
                yield data.raw(number).strip()
            else:
                sums.update(counts)
                yield json.dumps({**data.load(number), **counts}, ensure_ascii=False).encode()
            if on_record is not None:
                on_record(len(data))

    try:
        _write_whole(Path(target), lines(), data.is_array)
    except OSError as error:
        raise StorageError(
            f"{target} could not be written ({error.strerror or error}); nothing was changed. Give another --out."
        ) from error
    return PrecountReport(
        out=target, num_records=len(data), text_tokens=sums[_TEXT], media_tokens=sums[_MEDIA], bad=bad
    )


def _open_file(path: str, source: SourceGroup) -> tuple[Catalog, DataFile]:
    """Return the records of one JSON file and the file; refuse what names others, whose records have another order."""
    files = []
    for member in source.members:
        data = member.data if isinstance(member, Catalog) else None
        own = local_path(path) if path.startswith("file://") else path
        if isinstance(member, Catalog) and isinstance(data, DataFile) and data.path == own and member.order is None:
            return member, data
        files += [data.path] if isinstance(data, DataFile) else []
    named = f" ({', '.join(dict.fromkeys(files))})" if files else ""
    raise SourceError(
        f"{path} is not one JSON file, and counts are written into such, so nothing was written; give its data files"
        f"{named} one by one, with the columns, tags and media folder that a meta file says of each."
    )


@dataclass(frozen=True, slots=True)
class _Counter:
    """Counts runs of records; goes to every worker once."""

    catalog: Catalog
    processor: str
    trust_remote_code: bool
    reader: MediaReader

    def __call__(self, numbers: range) -> tuple[range, list[dict[str, int] | str]]:
        return numbers, [self._count(number) for number in numbers]

    def _count(self, number: int) -> dict[str, int] | str:
        counter = open_counter(self.processor, trust_remote_code=self.trust_remote_code)
        try:
            sample = build_sample(self.catalog.read(number), self.reader)
            counted = counter.count(sample.conversation, sample.sizes).text_tokens
        except Exception as error:  # a record can hold anything in any place
            blamed = blame_sample(error, "convert", "bad_record", "the record cannot be counted")
            return f"{blamed.reason}: {blamed}"
        text = counted - sum(1 for _ in iter_media(sample.conversation))  # one stands for each medium
        total = int(count_tokens(make_columns([sample.sizes], [counted]), counter.geometry).tokens[0])
        return {_TEXT: text, _MEDIA: total - text}


def _in_order(found: Iterator[tuple[range, list[dict[str, int] | str]]]) -> Iterator[dict[str, int] | str]:
    """Yield what was counted in the order of the records; what comes too early waits, which are a few numbers."""
    waiting: dict[int, list[dict[str, int] | str]] = {}
    due = 0
    for numbers, counts in found:
        waiting[numbers.start] = counts
        while due in waiting:
            ready = waiting.pop(due)
            due += len(ready)
            yield from ready


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

"""The rows of Parquet and Arrow files by number, as dicts.

Enters: paths or URLs of files with one schema. Leaves: rows, read block by block (a row group of Parquet, a batch of
Arrow). At most `_CACHE_BYTES` of blocks are kept, and never the whole. Remote Parquet is read by byte ranges, remote
Arrow is made local first. What a row means is decided elsewhere.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any, Final

import crc32c
import numpy as np
import numpy.typing as npt

from vlm_stream.errors import NO_DESCRIPTORS, SourceError, StorageError, VlmStreamError, say_no_descriptors
from vlm_stream.sources.json_file import UnreadableError
from vlm_stream.sources.local_file import LocalFile, keep_open
from vlm_stream.sources.record import is_url
from vlm_stream.storage import StoreOptions, local_path, open_store, split_url

PARQUET: Final = (".parquet", ".pq")
ARROW: Final = (".arrow", ".ipc", ".feather")
_CACHE_BYTES: Final = 256 << 20  # of decoded blocks; the one that is being read stays, whatever its size
_NUM_THREADS: Final = 16


def is_table(path: str) -> bool:
    """Tell by its name whether a file holds rows of columns."""
    return path.lower().endswith((*PARQUET, *ARROW))


class TableFiles:
    """Rows of one or more files after each other. Picklable; files are opened where they are read."""

    def __init__(self, paths: Sequence[str], *, store: StoreOptions | None = None) -> None:
        """Read the places of all blocks: footers of Parquet, messages of Arrow."""
        self.paths = tuple(paths)
        self.columns: tuple[str, ...] | None = None
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            self._files = tuple(pool.map(lambda path: _open(path, store), self.paths))
        self._blocks = [(file, block) for file, part in enumerate(self._files) for block in range(len(part.block_rows))]
        rows = [part.block_rows for part in self._files]
        self._ends = np.cumsum(np.concatenate(rows) if rows else np.zeros(0, np.int64), dtype=np.int64)
        self._forget()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def block_ends(self) -> npt.NDArray[np.int64] | None:
        """Return where each row group ends, because its rows are read together; None for Arrow, which is mapped."""
        return self._ends if any(isinstance(file, _ParquetFile) for file in self._files) else None

    def digest(self) -> str:
        """Return what changes with the files, as far as their footers tell; their bytes may be far away and many."""
        return " ".join(
            f"{PurePosixPath(path).name} {file.digest()}" for path, file in zip(self.paths, self._files, strict=True)
        )

    def reading(self, columns: Iterable[str]) -> TableFiles:
        """Return these rows with no other columns than these."""
        other = copy.copy(self)
        other.columns = tuple(columns)
        other._forget()
        return other

    def where(self, number: int) -> str:
        which, row = self._place(number)
        file, block = self._blocks[which]
        return f"{self.paths[file]}: {self._files[file].block_name} {block}, row {row}"

    def load(self, number: int) -> dict[str, Any]:
        """Return one row; raise `UnreadableError` when its block is damaged."""
        which, row = self._place(number)
        if which not in self._cache:
            file, block = self._blocks[which]
            self._keep(which, self._files[file].read(block, self.columns))
        self._cache.move_to_end(which)
        found = self._cache[which]
        if isinstance(found, str):
            raise UnreadableError("damaged_table", found)
        values: dict[str, Any] = found.slice(row, 1).to_pylist()[0]
        return values

    def _place(self, number: int) -> tuple[int, int]:
        which = int(np.searchsorted(self._ends, number, side="right"))
        return which, number - (int(self._ends[which - 1]) if which else 0)

    def _keep(self, which: int, block: Any) -> None:
        self._cache[which] = block
        self._kept_bytes += _size(block)
        while self._kept_bytes > _CACHE_BYTES and len(self._cache) > 1:
            self._kept_bytes -= _size(self._cache.popitem(last=False)[1])

    def _forget(self) -> None:
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._kept_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        """Rows that were read stay in this process."""
        return {**self.__dict__, "_cache": OrderedDict(), "_kept_bytes": 0}


def _size(block: Any) -> int:
    return 0 if isinstance(block, str) else int(block.nbytes)


def _open(path: str, store: StoreOptions | None) -> _ParquetFile | _ArrowFile:
    if path.lower().endswith(ARROW):
        return _ArrowFile(LocalFile(path, store=store))
    return _ParquetFile(path, store)


class _ParquetFile:
    """Row groups of one file."""

    block_name = "row group"

    def __init__(self, path: str, store: StoreOptions | None) -> None:
        import pyarrow as pa

        self.path = path
        self._store = store
        footer = pa.BufferOutputStream()
        try:
            metadata = self._opened().metadata
            metadata.write_metadata_file(footer)
        except VlmStreamError as error:
            raise SourceError(f"{path}: cannot be fetched ({error}), so none of its rows can be read.") from error
        except (OSError, ValueError) as error:  # Arrow's errors are kinds of these
            raise _refusal(path, "Parquet", error) from error
        self.block_rows = np.array([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)], np.int64)
        self._footer = f"{metadata.num_rows} {crc32c.crc32c(footer.getvalue())}"

    def _opened(self) -> Any:
        """Open the file for one read: a dataset may have more files than a process may open."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if is_url(self.path) and not self.path.startswith("file://"):
            return pq.ParquetFile(pa.PythonFile(_RangeFile(self.path, self._store), mode="r"), pre_buffer=True)
        return pq.ParquetFile(local_path(self.path), memory_map=False)

    def digest(self) -> str:
        return self._footer

    def read(self, block: int, columns: Sequence[str] | None) -> Any:
        """Return a row group as a table, or the sentence that says why not."""
        try:
            file = self._opened()
            known = set(file.schema_arrow.names)
            return file.read_row_group(block, None if columns is None else [name for name in columns if name in known])
        except VlmStreamError:
            raise
        except (OSError, ValueError) as error:
            return _say_damaged(f"row group {block}", error)


class _ArrowFile:
    """Record batches of one file: of the file format, or of the stream format that HF datasets keep on disk."""

    block_name = "batch"

    def __init__(self, file: LocalFile) -> None:
        self.file = file
        self._batches: Any = None
        try:
            batches = self._opened()
            self.block_rows = np.array(
                [batches.get_batch(i).num_rows for i in range(batches.num_record_batches)], np.int64
            )
        except (OSError, ValueError) as error:
            raise _refusal(file.path, "Arrow", error) from error

    def _opened(self) -> Any:
        """Return a reader of either format; batches lie in the file, mapped, unless they are compressed."""
        import pyarrow as pa

        if (batches := self._batches) is None:
            mapped = pa.memory_map(str(self.file.plain_path()))
            is_file = mapped.read(6) == b"ARROW1"
            batches = self._batches = pa.ipc.open_file(mapped) if is_file else _ArrowStream(mapped)
            keep_open(self)
        return batches

    def digest(self) -> str:
        return f"{self.file.size_bytes} {self.block_rows.tolist()}"

    def read(self, block: int, columns: Sequence[str] | None) -> Any:
        """Return a batch, or the sentence that says why not."""
        try:
            batch = self._opened().get_batch(block)
        except (OSError, ValueError) as error:
            return _say_damaged(f"batch {block}", error)
        return batch if columns is None else batch.select([name for name in columns if name in batch.schema.names])

    def close(self) -> None:
        self._batches = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None}


class _ArrowStream:
    """The batches of a stream at any place, by where their messages begin; with dictionaries, as a list."""

    def __init__(self, mapped: Any) -> None:
        import pyarrow as pa

        mapped.seek(0)
        self._mapped, self._places, has_dictionaries = mapped, [], False
        messages = pa.ipc.MessageReader.open_stream(mapped)
        while True:
            place = mapped.tell()
            try:
                kind = messages.read_next_message().type
            except StopIteration:
                break
            has_dictionaries = has_dictionaries or kind == "dictionary"
            self._places += [place] * (kind == "record batch")
        mapped.seek(0)
        stream = pa.ipc.open_stream(mapped)
        self._schema = stream.schema
        self._decoded = list(stream) if has_dictionaries else None
        self.num_record_batches = len(self._places)

    def get_batch(self, number: int) -> Any:
        """Return one batch; what is compressed is decoded for this."""
        import pyarrow as pa

        if self._decoded is not None:
            return self._decoded[number]
        self._mapped.seek(self._places[number])
        return pa.ipc.read_record_batch(pa.ipc.read_message(self._mapped), self._schema)


def _say_damaged(block: str, error: Exception) -> str:
    if getattr(error, "errno", None) in NO_DESCRIPTORS:
        raise StorageError(say_no_descriptors(f"{block} of a table could not be read")) from error
    return f"{block} is damaged ({error})"


def _refusal(path: str, kind: str, error: Exception) -> SourceError:
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return SourceError(
        f"{path}: cannot be opened as {kind} ({reason}), so none of its rows can be read. Check the path; if it is "
        "cut off, fetch it again."
    )


class _RangeFile(io.RawIOBase):
    """A remote object as a file that is read at any place."""

    def __init__(self, url: str, options: StoreOptions | None) -> None:
        root, self._name = split_url(url)
        self._remote = open_store(root, options)
        self._size = self._remote.head(self._name).size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size is None or size < 0 else min(self._at + size, self._size)
        data = bytes(self._remote.fetch(self._name, self._at, end - self._at).data) if end > self._at else b""
        self._at += len(data)
        return data

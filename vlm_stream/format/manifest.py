"""The manifest: which shards a dataset has, what they add up to, and how their tokens were counted.

Enters and leaves: frozen values and their JSON form, `dataset.json`. It is written last, so a dataset that has one is
whole. It knows no tar and no index, only their digests. Shards are kept column by column: there may be a hundred
thousand, and an entry is made when it is asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, reduce
from operator import add, attrgetter, eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

from vlm_stream.errors import DatasetError, NotFoundError, shorten
from vlm_stream.format.checks import check_columns, check_counts, check_texts
from vlm_stream.format.fields import FieldMap
from vlm_stream.storage import scheme_of
from vlm_stream.tokens import Geometry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vlm_stream.storage import Store

MANIFEST: Final = "dataset.json"
FORMAT_VERSION: Final = 7


def index_name(shard: str) -> str:
    """Return the name of a tar's index, which lies beside it.

    >>> index_name("a/shard-000007.tar")
    'a/shard-000007.index.parquet'
    """
    return f"{shard.removesuffix('.tar')}.index.parquet"


def clips_name(shard: str) -> str:
    """Return the name of the file with the tables of a tar's clips, which lies beside its index.

    >>> clips_name("a/shard-000007.tar")
    'a/shard-000007.clips.bin'
    """
    return f"{shard.removesuffix('.tar')}.clips.bin"


def texts_name(shard: str, key: str) -> str:
    """Return the name of the file with the tokens of a tar's texts, made for what the key of kept text names.

    >>> texts_name("a/shard-000007.tar", "d6f1-4.57.0-1")
    'a/shard-000007.tokens.f54fdf682adf63ed.bin'
    """
    return f"{shard.removesuffix('.tar')}.tokens.{hashlib.sha256(key.encode()).hexdigest()[:16]}.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What one shard, or all of them, adds up to."""

    samples: int = 0
    bytes: int = 0
    """Size of the tar."""
    text_tokens: int = 0
    label_tokens: int = 0
    """Of the samples for which they are known."""
    text_only: int = 0
    """Samples without any medium."""
    images: int = 0
    image_pixels: int = 0
    videos: int = 0
    video_frames: int = 0
    video_seconds: float = 0.0
    audios: int = 0
    audio_seconds: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        """Add field by field."""
        return Totals(**{name: getattr(self, name) + getattr(other, name) for name in _TOTALS})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard, as the manifest lists it."""

    name: str
    """Relative to the dataset's root, or to `Manifest.tars`."""
    totals: Totals
    entries: dict[str, int]
    """Samples by the meta file's entry that they came from; they add up to those of `totals`."""
    crc32c: int
    """Of the tar."""
    index_sha256: str
    etag: str | None = None
    """What the store called this very object, where the store is remote."""


_OWN: Final = ("name", "crc32c", "index_sha256", "etag")
_TOTALS: Final = tuple(total.name for total in fields(Totals))


class ShardList(Sequence[ShardEntry]):
    """Entries of shards, in order."""

    __slots__ = ("_columns", "entries")

    def __init__(self, columns: dict[str, list[Any]], entries: dict[str, list[int]]) -> None:
        """Take a list of values for every field of a shard and of its totals, and samples by the meta file's entries.

        Raises:
            KeyError, TypeError, ValueError: They are not these fields, not lists of one length, or no such numbers; or
                entries do not add up.
        """
        if odd := set(columns) ^ {*_OWN, *_TOTALS}:
            raise KeyError(", ".join(sorted(odd)))
        lists = [*columns.values(), *entries.values()]
        if not all(isinstance(column, list) for column in lists) or len(set(map(len, lists))) > 1:
            raise TypeError("the columns of the shards are not lists of one length")
        check_columns(columns, entries)
        sums = map(sum, zip(*entries.values(), strict=True))
        if bool(entries) != any(columns["samples"]) or not all(map(eq, sums, columns["samples"])):
            raise TypeError("the entries of the shards do not add up to their samples")
        self._columns = {name: columns[name] for name in (*_OWN, *_TOTALS)}
        self.entries: Final = entries
        """[shards] Samples of each entry of the meta file, by its name."""

    @classmethod
    def of(cls, entries: Iterable[ShardEntry]) -> ShardList:
        """Take entries apart."""
        each = list(entries)
        own = {name: list(map(attrgetter(name), each)) for name in _OWN}
        totals = {name: list(map(attrgetter(f"totals.{name}"), each)) for name in _TOTALS}
        names = sorted({name for shard in each for name in shard.entries})
        return cls(own | totals, {name: [shard.entries.get(name, 0) for shard in each] for name in names})

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self._columns["name"])

    @overload
    def __getitem__(self, place: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[ShardEntry, ...]: ...
    def __getitem__(self, place: int | slice) -> ShardEntry | tuple[ShardEntry, ...]:
        """Return one entry, or some of them."""
        if isinstance(place, slice):
            return tuple(self[number] for number in range(len(self))[place])
        totals = Totals(**{name: self._columns[name][place] for name in _TOTALS})
        entries = {name: counts[place] for name, counts in self.entries.items() if counts[place]}
        return ShardEntry(totals=totals, entries=entries, **{name: self._columns[name][place] for name in _OWN})

    def __eq__(self, other: object) -> bool:
        """Tell whether all entries are equal."""
        return isinstance(other, ShardList) and (self._columns, self.entries) == (other._columns, other.entries)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return the entries."""
        return f"ShardList.of({list(self)!r})"

    def column(self, name: str) -> list[Any]:
        """Return one field of all entries or of their totals."""
        return self._columns[name]

    def totals(self) -> Totals:
        """Add field by field, from the first to the last (`sum` rounds floats otherwise in newer Pythons)."""
        zeros = asdict(Totals())
        return Totals(**{name: reduce(add, self.column(name), zeros[name]) for name in _TOTALS})

    def without_etags(self) -> ShardList:
        """Return the same shards as they are elsewhere."""
        return ShardList(self._columns | {"etag": [None] * len(self)}, self.entries)

    def to_json(self) -> str:
        """Return the columns, a line for each; a column that says the same of all shards is stored as that value."""
        lines = [
            f"  {_dump(name)}: {_dump(column[0] if name != 'name' and len(set(column)) == 1 else column)}"
            for name, column in self._columns.items()
        ]
        entries = {name: counts[0] if len(set(counts)) == 1 else counts for name, counts in self.entries.items()}
        lines.append(f'  "entries": {_dump(entries)}')
        return "{\n" + ",\n".join(lines) + "\n }"

    @classmethod
    def from_json(cls, written: dict[str, Any]) -> ShardList:
        """Take the columns that `to_json` wrote, as JSON values.

        Raises:
            KeyError, TypeError, ValueError: They are no columns of one length, or none of shards.
        """
        num_shards = len(written["name"])
        entries = {
            name: [counts] * num_shards if isinstance(counts, int) else counts
            for name, counts in written.pop("entries").items()
        }
        single = {"name": (), "etag": (str, type(None)), "index_sha256": (str,)}
        return cls(
            {
                name: [column] * num_shards if type(column) in single.get(name, (int, float)) else column
                for name, column in written.items()
            },
            entries,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounting:
    """How `text_tokens` came about, and `label_tokens`, which only a processor counts."""

    kind: str = "estimated"
    """`exact`: a processor's template, rendered and tokenised; `estimated`: a third of the characters."""
    processor: str = ""
    """The name or path that was given, and its class."""
    processor_class: str = ""
    template_sha256: str = ""
    """Of the chat template's text."""
    library: str = ""
    """Version of transformers, which decides how templates and timestamps become text."""
    geometry: dict[str, Any] = field(default_factory=dict)
    """`Geometry.to_json()` of that processor: plans can be made without it."""


@dataclass(frozen=True, kw_only=True)  # no slots: the digest is kept once it was asked for
class Manifest:
    """A dataset: its shards in order."""

    shards: ShardList
    tokens: TokenCounting = field(default_factory=TokenCounting)
    fields: FieldMap = field(default_factory=FieldMap)
    """How a sample's members become a conversation; the default is our own shards."""
    tars: str = ""
    """URL of the folder of the tars, where it is not the dataset's own."""
    home: str = ""
    """URL that the etags belong to; a copy elsewhere has others."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Records that are not in the shards, counted by stage and reason; the ledger names each."""
    whole: dict[str, int] = field(default_factory=dict)
    """Clips of which no table could be made, counted by reason."""
    job: str = ""
    """Fingerprint of the conversion's input and options."""

    @property
    def geometry(self) -> Geometry:
        """Return the geometry of the processor that the dataset was counted for; a guess where there was none."""
        try:
            return Geometry.from_json(self.tokens.geometry) if self.tokens.geometry else Geometry.unknown()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DatasetError(
                f"the geometry in the manifest is damaged ({shorten(repr(error), 200)}), so media cannot be counted; "
                f"write it again with: vlm-stream recount --processor ..."
            ) from error

    @property
    def totals(self) -> Totals:
        """Return the sum over the shards."""
        return self.shards.totals()

    @cached_property
    def digest(self) -> str:
        """Return what identifies the dataset: it changes when any tar or index does, and with nothing else."""
        columns = map(self.shards.column, ("name", "samples", "bytes", "crc32c", "index_sha256"))
        shards = list(zip(*columns, strict=True))
        text = json.dumps([shards, self.fields.to_json()], separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Return the text of `dataset.json`: a line for each value, and for each column of the shards."""
        begin, rest = self._parts()
        return f'{begin} "checksum": "{self.checksum()}",\n{rest}'

    def checksum(self) -> str:
        """Return the SHA-256 of the text without the line that holds it."""
        return hashlib.sha256("".join(self._parts()).encode("utf-8", "surrogatepass")).hexdigest()

    def _parts(self) -> tuple[str, str]:
        """Return the text before and behind its checksum."""
        values = {
            "digest": self.digest,
            "totals": asdict(self.totals),
            "tokens": asdict(self.tokens),
            "fields": self.fields.to_json(),
            "tars": self.tars,
            "home": self.home,
            "dropped": self.dropped,
            "whole": self.whole,
            "job": self.job,
        }
        lines = [f" {_dump(name)}: {_dump(value)}" for name, value in values.items()]
        begin = f'{{\n "format": "vlm_stream",\n "version": {FORMAT_VERSION},\n'
        return begin, ",\n".join([*lines, f' "shards": {self.shards.to_json()}']) + "\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = MANIFEST) -> Manifest:
        """Read what `to_json` wrote.

        Raises:
            DatasetError: It is not a manifest, contradicts itself, or has a version that is not known here.
        """
        data = _parse(text, where)
        try:
            checksum, digest, totals = (data.pop(name) for name in ("checksum", "digest", "totals"))
            data["shards"] = ShardList.from_json(data["shards"])
            data["tokens"] = TokenCounting(**data["tokens"])
            data["fields"] = FieldMap(**data["fields"])
            manifest = cls(**data)
            _check_values(manifest)
            is_whole = manifest.digest == digest and asdict(manifest.totals) == totals
            is_whole = is_whole and checksum == manifest.checksum()
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise DatasetError(
                f"{where} lacks or misnames a field ({shorten(str(error), 200)}): write the dataset again."
            ) from error
        if not is_whole:
            raise DatasetError(
                f"{where} does not have the checksum or the digest that it states: it was edited or damaged, so "
                f"nothing of it can be trusted. Write it again with: vlm-stream index"
            )
        return manifest


def _check_values(manifest: Manifest) -> None:
    """Raise where a value that is not of the shards has another type than it is written with."""
    tokens, written = asdict(manifest.tokens), manifest.fields.to_json()
    pairs = [*written.pop("columns").items(), *written.pop("tags").items()]
    if not isinstance(tokens.pop("geometry"), dict) or type(written.pop("media_first", False)) is not bool:
        raise TypeError("geometry or media_first")
    check_texts([manifest.tars, manifest.home, manifest.job, *tokens.values(), *written.values(), *sum(pairs, ())])
    check_counts("dropped", manifest.dropped.values())


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _parse(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where} is not JSON ({error}): it was damaged; write the dataset again.") from error
    if not isinstance(data, dict) or data.get("format") != "vlm_stream":
        raise DatasetError(f"{where} is not a manifest of this package. For tars made elsewhere run: vlm-stream index")
    version = data.pop("version", None)
    if version != FORMAT_VERSION:
        raise DatasetError(
            f"{where} has format version {version}, this release reads version {FORMAT_VERSION} alone: it cannot be "
            f"read. The tars are as they were; write indexes and manifest again with: vlm-stream index --overwrite "
            f"--processor ... (the folder), or install the release that wrote it."
        )
    del data["format"]
    return data


def load_manifest(store: Store) -> Manifest:
    """Read a dataset's manifest.

    Raises:
        DatasetError: There is none, or it cannot be used.
    """
    is_local = scheme_of(store.root) == "file"
    if is_local and Path(store.root).is_file():
        raise DatasetError(f"{store.root} is a file; name the dataset's folder, which holds {MANIFEST}.")
    try:
        text = store.get(MANIFEST)
    except NotFoundError as error:
        if is_local and not Path(store.root).exists():
            raise DatasetError(
                f"there is no folder {store.root}, so there is no dataset to read. Check the path, and that the disk "
                f"is mounted here."
            ) from error
        raise DatasetError(
            f"{store.root} has no {MANIFEST}: its conversion is not finished, or it is no dataset. "
            f"Finish it by the same make-shards again; for tars made elsewhere run: vlm-stream index"
        ) from error
    manifest = Manifest.from_json(text, where=f"{store.root}/{MANIFEST}")
    if manifest.home != store.root and any(manifest.shards.column("etag")):
        manifest = replace(manifest, shards=manifest.shards.without_etags())
    return manifest


def save_manifest(store: Store, manifest: Manifest) -> None:
    """Write a dataset's manifest: from now on it is whole."""
    store.put(MANIFEST, manifest.to_json().encode())

"""The manifest: which shards a dataset has, what they add up to, and how their tokens were counted.

Enters and leaves: frozen values and their JSON form, `dataset.json`. It is written last, so a dataset that has one is
whole. It knows no tar and no index, only their digests.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any, Final

import crc32c

from vlm_stream.errors import DatasetError, NotFoundError
from vlm_stream.shards.fields import FieldMap
from vlm_stream.shards.layout import MANIFEST
from vlm_stream.shards.shard_list import ShardList
from vlm_stream.tokens import Geometry

if TYPE_CHECKING:
    from vlm_stream.shards.shard_list import Totals
    from vlm_stream.storage import Store

__all__ = ["FORMAT_VERSION", "Manifest", "TokenCounting", "load_manifest", "save_manifest"]

FORMAT_VERSION: Final = 4
_OLD_VERSIONS: Final = range(1, FORMAT_VERSION)
_HEAD: Final = '{{\n "crc32c": {},\n'
"""How the file begins: with the checksum of all that follows."""
_COLUMNS_BEGIN: Final = ',\n "shards": {\n'
_COLUMNS_END: Final = "\n }\n}\n"
"""What stands around the columns of the shards, which have a line each."""
_SINGLE_VALUES: Final = {"name": (), "etag": (str, type(None)), "index_sha256": (str,)}
"""Kinds of values that may stand for a whole column; of all other columns: numbers."""


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
    job: str = ""
    """Fingerprint of the conversion's input and options."""
    joint_index_crc32c: int | None = None
    """Of the object with all indexes in one, where there is one."""

    @property
    def geometry(self) -> Geometry:
        """Return the geometry of the processor that the dataset was counted for; a guess where there was none."""
        return Geometry.from_json(self.tokens.geometry) if self.tokens.geometry else Geometry.unknown()

    @property
    def totals(self) -> Totals:
        """Return the sum over the shards."""
        return self.shards.totals()

    @cached_property
    def digest(self) -> str:
        """Return what identifies the dataset: it changes when any tar or index does, and with nothing else."""
        samples, num_bytes, sums = map(self.shards.column, ("samples", "bytes", "crc32c"))
        names, indexes = (map(encode_basestring_ascii, self.shards.column(name)) for name in ("name", "index_sha256"))
        # As `json.dumps` writes a list of lists, which would have to be made first.
        parts = ",".join(map("[{},{},{},{},{}]".format, names, samples, num_bytes, sums, indexes))
        fields = json.dumps(asdict(self.fields), separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(f"[[{parts}],{fields}]".encode()).hexdigest()

    def to_json(self) -> str:
        """Return the text of `dataset.json`: a line for each value, and for each column of the shards.

        Of a column that says the same of all shards, that is all that is written.
        """
        values = {
            "format": "vlm_stream",
            "version": FORMAT_VERSION,
            "digest": self.digest,
            "totals": asdict(self.totals),
            "tokens": asdict(self.tokens),
            "fields": asdict(self.fields),
            "tars": self.tars,
            "home": self.home,
            "dropped": self.dropped,
            "job": self.job,
            "joint_index_crc32c": self.joint_index_crc32c,
        }
        lines = [f" {_dump(name)}: {_dump(value)}" for name, value in values.items()]
        columns = [
            f"  {_dump(name)}: {_dump(column[0] if name != 'name' and len(set(column)) == 1 else column)}"
            for name, column in self.shards.columns().items()
        ]
        text = ",\n".join(lines) + _COLUMNS_BEGIN + ",\n".join(columns) + _COLUMNS_END
        return _HEAD.format(crc32c.crc32c(text.encode())) + text

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = MANIFEST) -> Manifest:
        """Read what `to_json` wrote; refuse what a newer release wrote.

        Raises:
            DatasetError: It is not a manifest, contradicts itself, or has a version that is not known here.
        """
        written = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        later = _columns_for_later(written) if _is_as_written(written) else None
        data = _parse(later[0] if later else text, where)
        digest = data.pop("digest", None)
        try:
            data["shards"] = ShardList(later[1] if later else _columns(data["shards"]))
            data["tokens"] = TokenCounting(**data["tokens"])
            data["fields"] = FieldMap(**data["fields"])
            manifest = cls(**data)
            if later:
                vars(manifest)["digest"] = digest  # to find it out takes as long as to read the file
            is_whole = manifest.digest == digest
        except (KeyError, TypeError) as error:
            raise DatasetError(f"{where} lacks or misnames a field ({error}): write the dataset again.") from error
        if not is_whole:
            raise DatasetError(
                f"{where} does not have the digest that it states: it was edited or damaged, so its shards cannot be "
                f"trusted. Write it again with: vlm-stream index"
            )
        return manifest


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _is_as_written(data: bytes) -> bool:
    """Tell whether a text is one that `to_json` wrote, to the byte."""
    begin = data.find(b",\n") + 2
    return data[:begin] == _HEAD.format(crc32c.crc32c(memoryview(data)[begin:])).encode()


def _columns_for_later(data: bytes) -> tuple[bytes, dict[str, Any]] | None:
    """Take the columns of the shards out of what `to_json` wrote: a run looks at half of them.

    Returns:
        The JSON without them, and for each column what reads it; None where it is the form of another release.
    """
    head, _, rest = data.partition(_COLUMNS_BEGIN.encode())
    try:
        lines = dict(line.split(b": ", 1) for line in rest.removesuffix(_COLUMNS_END.encode()).split(b",\n"))
        shards = json.loads(lines.pop(b'  "name"'))
        columns = {name.strip(b' "').decode(): partial(_read_column, line, len(shards)) for name, line in lines.items()}
    except (KeyError, ValueError):
        return None
    return head + b"\n}", columns | {"name": shards}


def _read_column(line: bytes, num_shards: int) -> list[Any]:
    value = json.loads(line)
    return value if isinstance(value, list) else [value] * num_shards


def _parse(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{where} is not JSON ({error}): it was damaged; write the dataset again.") from error
    if not isinstance(data, dict) or data.get("format") != "vlm_stream":
        raise DatasetError(f"{where} is not a manifest of this package. For tars made elsewhere run: vlm-stream index")
    version = data.pop("version", None)
    if version in _OLD_VERSIONS:
        raise DatasetError(
            f"{where} has format version {version}, and this release reads version {FORMAT_VERSION}, whose indexes "
            f"count labels: it cannot be read. The tars are as they were; write indexes and manifest anew with: "
            f"vlm-stream index --overwrite --processor ... (the folder), or convert again."
        )
    if version != FORMAT_VERSION:
        raise DatasetError(
            f"{where} has format version {version}, this release reads version {FORMAT_VERSION}: "
            f"it cannot be read safely. Install the release that wrote it, or a newer one."
        )
    for name in ("format", "totals", "crc32c"):
        data.pop(name, None)
    return data


def _columns(written: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of the shards, where one value may stand for all of them; what is neither is refused later."""
    num_shards = len(written["name"])
    return {
        name: [column] * num_shards if type(column) in _SINGLE_VALUES.get(name, (int, float)) else column
        for name, column in written.items()
    }


def load_manifest(store: Store) -> Manifest:
    """Read a dataset's manifest.

    Raises:
        DatasetError: There is none, or it cannot be used.
    """
    try:
        text = store.get(MANIFEST)
    except NotFoundError as error:
        raise DatasetError(
            f"{store.root} has no {MANIFEST}: its conversion is not finished, or it is no dataset. "
            f"Finish it with: vlm-stream make-shards --resume; for tars made elsewhere run: vlm-stream index"
        ) from error
    manifest = Manifest.from_json(text, where=f"{store.root}/{MANIFEST}")
    if manifest.home != store.root and any(manifest.shards.column("etag")):
        manifest = replace(manifest, shards=manifest.shards.without_etags())
    return manifest


def save_manifest(store: Store, manifest: Manifest) -> None:
    """Write a dataset's manifest: from now on it is whole."""
    store.put(MANIFEST, manifest.to_json().encode())

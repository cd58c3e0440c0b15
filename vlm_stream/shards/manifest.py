"""The manifest: which shards a dataset has, what they add up to, and how their tokens were counted.

Enters and leaves: frozen values and their JSON form, `dataset.json`. It is written last, so a dataset that has one is
whole. It knows no tar and no index, only their digests.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from operator import add, attrgetter
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import DatasetError, NotFoundError
from vlm_stream.shards.fields import FieldMap
from vlm_stream.shards.layout import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vlm_stream.storage import Store

__all__ = ["FORMAT_VERSION", "Manifest", "ShardEntry", "TokenCounting", "Totals", "load_manifest", "save_manifest"]

FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What one shard, or all of them, adds up to."""

    samples: int = 0
    bytes: int = 0
    """Size of the tar."""
    text_tokens: int = 0
    text_only: int = 0
    """Samples without any medium."""
    images: int = 0
    image_pixels: int = 0
    videos: int = 0
    video_frames: int = 0
    video_seconds: float = 0.0
    audios: int = 0
    audio_seconds: float = 0.0

    @classmethod
    def sum(cls, parts: Iterable[Totals]) -> Totals:
        """Add field by field, from the first to the last (`sum` rounds floats otherwise in newer Pythons)."""
        columns = {f.name: attrgetter(f.name) for f in fields(cls)}
        each = list(parts)
        return cls(**{name: reduce(add, map(value, each), getattr(cls(), name)) for name, value in columns.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard, as the manifest lists it."""

    name: str
    """Relative to the dataset's root, or to `Manifest.tars`."""
    totals: Totals
    crc32c: int
    """Of the tar."""
    index_sha256: str
    etag: str | None = None
    """What the store called this very object, where the store is remote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounting:
    """How `text_tokens` came about."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A dataset: its shards in order."""

    shards: tuple[ShardEntry, ...]
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
    joint_index_sha256: str = ""
    """Of the object with all indexes in one, where there is one."""
    version: int = FORMAT_VERSION

    @property
    def totals(self) -> Totals:
        """Return the sum over the shards."""
        return Totals.sum(shard.totals for shard in self.shards)

    @property
    def digest(self) -> str:
        """Return what identifies the dataset: it changes when any tar or index does, and with nothing else."""
        parts = [[s.name, s.totals.samples, s.totals.bytes, s.crc32c, s.index_sha256] for s in self.shards]
        text = json.dumps([parts, asdict(self.fields)], separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Return the text of `dataset.json`."""
        data = {"format": "vlm_stream", "digest": self.digest, "totals": asdict(self.totals), **asdict(self)}
        return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = MANIFEST) -> Manifest:
        """Read what `to_json` wrote; refuse what a newer release wrote.

        Raises:
            DatasetError: It is not a manifest, contradicts itself, or has a version that is not known here.
        """
        data = _parse(text, where)
        digest = data.pop("digest", None)
        data.pop("totals", None)
        data.pop("format")
        try:
            data["shards"] = tuple(_shard_from(shard) for shard in data["shards"])
            data["tokens"] = TokenCounting(**data["tokens"])
            data["fields"] = FieldMap(**data["fields"])
            manifest = cls(**data)
        except (KeyError, TypeError) as error:
            raise DatasetError(f"{where} lacks or misnames a field ({error}): write the dataset again.") from error
        if manifest.digest != digest:
            raise DatasetError(
                f"{where} does not have the digest that it states: it was edited or damaged, so its shards cannot be "
                f"trusted. Write it again with: vlm-stream index"
            )
        return manifest


def _parse(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{where} is not JSON ({error}): it was damaged; write the dataset again.") from error
    if not isinstance(data, dict) or data.get("format") != "vlm_stream":
        raise DatasetError(f"{where} is not a manifest of this package. For tars made elsewhere run: vlm-stream index")
    version = data.get("version")
    if version != FORMAT_VERSION:
        raise DatasetError(
            f"{where} has format version {version}, this release reads version {FORMAT_VERSION}: "
            f"it cannot be read safely. Install the release that wrote it, or a newer one."
        )
    return data


def _shard_from(data: dict[str, Any]) -> ShardEntry:
    return ShardEntry(**(data | {"totals": Totals(**data["totals"])}))


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
    if manifest.home != store.root and any(shard.etag for shard in manifest.shards):
        shards = tuple(replace(shard, etag=None) for shard in manifest.shards)
        manifest = replace(manifest, shards=shards)
    return manifest


def save_manifest(store: Store, manifest: Manifest) -> None:
    """Write a dataset's manifest: from now on it is whole."""
    store.put(MANIFEST, manifest.to_json().encode())

"""A path or URL -> a source of records: a meta file with its entries, or one bare data file.

    {"coco": {"file_name": "coco.jsonl", "media_dir": "images", "sample_ratio": 0.5},
     "chat": {"file_name": "/data/chat.json.gz", "columns": {"messages": "conversations"}, "tags": {...}}}

`file_name` and `media_dir` are relative to the meta file unless they are absolute or URLs. The result is a
`SourceGroup` of the entries in sorted order, or of the one file. Every data file is scanned here, once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import SourceError, nearest_name
from vlm_stream.sources.catalog import Catalog, sample_order
from vlm_stream.sources.data_file import FileCache, first_bytes, holds_lines
from vlm_stream.sources.factories import PREFIX, open_factory
from vlm_stream.sources.form import OnMismatch, ShareGptForm, check_policy
from vlm_stream.sources.local_file import plain_name
from vlm_stream.sources.record import SourceGroup, absolute, join_media_path, parent_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from vlm_stream.storage import StoreOptions

__all__ = ["MetaEntry", "open_entry", "open_source", "read_entries"]

_META_BYTES = 64 << 20
"""A meta file lists datasets; something larger that starts with a brace is not one."""
_KEYS = ("columns", "file_name", "media_dir", "sample_ratio", "tags")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaEntry:
    """One dataset of a meta file, with its paths resolved."""

    name: str
    path: str
    """The data file: a path or URL."""
    form: ShareGptForm
    sample_ratio: float = 1.0


def open_source(
    path: str,
    *,
    names: Iterable[str] | None = None,
    on_mismatch: OnMismatch = "drop",
    columns: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    media_dir: str | None = None,
    spill_dir: str | None = None,
    store: StoreOptions | None = None,
) -> SourceGroup:
    """Return the records of a meta file, or of a bare JSON array or JSONL file (`.gz`, `.zst` and URLs too).

    Args:
        path: The file. A meta file is a JSON object whose values are objects. `factory:NAME[=PATH]` is an HF dataset.
        names: Which entries of a meta file; all if None.
        on_mismatch: What happens to a record that does not map whole: `drop`, `keep` what maps, `raise`.
        columns: For a bare file: names of its columns. A meta file says this itself.
        tags: For a bare file: names of its role keys and roles.
        media_dir: For a bare file: what its relative media paths are joined to; as written if None.
        spill_dir: Where compressed and remote files are unpacked; the folder for temporary files if None.
        store: How to reach the stores of URLs.
    """
    check_policy(on_mismatch)
    path = str(path)
    if path.startswith(PREFIX):
        given = {"columns": columns, "tags": tags, "media_dir": media_dir}
        return _factory_group(path, names, {key: value for key, value in given.items() if value}, on_mismatch)
    bare = ShareGptForm.from_dicts(columns, tags, absolute(media_dir) if media_dir else None)
    files = FileCache(spill_dir, store)
    entries = read_entries(path, files, names=names, bare=bare)
    catalogs = [open_entry(entry, files, on_mismatch) for entry in entries]
    return SourceGroup(catalogs, name=_stem(path))


def _factory_group(
    spec: str, names: Iterable[str] | None, form: dict[str, object], on_mismatch: OnMismatch
) -> SourceGroup:
    """Return an HF dataset; only the one without a schema of its own takes a form and a policy."""
    if not spec.startswith(f"{PREFIX}sharegpt"):
        if names is not None or form:
            raise SourceError(f"{spec}: the factory knows its columns; leave names, columns, tags and media_dir out.")
        return SourceGroup([open_factory(spec)], name=spec.removeprefix(PREFIX))
    if names is not None or "media_dir" in form:
        raise SourceError(f"{spec}: the dataset has one part and its own media; leave names and media_dir out.")
    return SourceGroup([open_factory(spec, **form, on_mismatch=on_mismatch)], name=spec.removeprefix(PREFIX))


def open_entry(entry: MetaEntry, files: FileCache, on_mismatch: OnMismatch = "drop") -> Catalog:
    """Return the records of one entry, in the order that its ratio gives."""
    data = files.scanned(entry.path)
    try:
        order = sample_order(len(data), entry.sample_ratio)
    except SourceError as error:
        raise SourceError(f"dataset '{entry.name}': {error}") from None
    return Catalog(data, name=entry.name, form=entry.form, on_mismatch=on_mismatch, order=order)


def read_entries(
    path: str, files: FileCache, *, names: Iterable[str] | None = None, bare: ShareGptForm | None = None
) -> list[MetaEntry]:
    """Return the entries of a meta file; a bare data file is one entry named after the file."""
    bare = bare or ShareGptForm()
    file = files.local(path)
    _, head = first_bytes(file)
    if not head.lstrip().startswith(b"{") or holds_lines(file, head):
        if names is not None:
            raise SourceError(f"{path}: a data file has no names to choose from; leave the names filter out.")
        return [MetaEntry(name=_stem(path), path=path, form=bare)]
    if bare != ShareGptForm():
        raise SourceError(f"{path}: a meta file says columns, tags and media_dir for each entry; put them there.")
    if file.size_bytes > _META_BYTES:
        raise SourceError(
            f"{path}: Expected a JSON array of records or a meta file, found one JSON object of {file.size_bytes:,} "
            "bytes, which is neither. Write the records as an array or one per line (.jsonl)."
        )
    text = file.read_at(0, file.size_bytes).decode("utf-8-sig", errors="replace")
    return _parse_meta(text, path, names)


def _stem(path: str) -> str:
    return PurePosixPath(plain_name(path)).stem or path


def _parse_meta(text: str, meta_path: str, names: Iterable[str] | None) -> list[MetaEntry]:
    """Return the chosen entries in sorted order; anything that nothing would read raises `SourceError`."""
    try:
        meta = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{meta_path}: not a meta file, broken JSON ({error}); mend it.") from None
    if not all(isinstance(value, dict) for value in meta.values()):
        raise SourceError(
            f"{meta_path}: Expected a JSON array of records or a meta file, found one object with the keys "
            f"{', '.join(sorted(meta)[:8])}. Write the records as an array or one per line (.jsonl)."
        )
    return [_entry(name, meta[name], meta_path) for name in _select(meta.keys(), names, meta_path)]


def _select(known: Collection[str], names: Iterable[str] | None, meta_path: str) -> list[str]:
    """Return the chosen names, sorted."""
    if not known:
        raise SourceError(f"{meta_path}: the meta file names no datasets, so there is nothing to read; add an entry.")
    if names is None:
        return sorted(known)
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise SourceError(
            f"{meta_path}: the names filter is empty, so nothing would be read; {nearest_name('', known)}"
        )
    for name in names:
        if name not in known:
            raise SourceError(f"dataset '{name}' not found in meta file {meta_path}; {nearest_name(name, known)}")
    return sorted(set(names))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key '{twice}' occurs twice in one object, and only one of them would count")
    return found


def _entry(name: str, config: dict[str, Any], meta_path: str) -> MetaEntry:
    place = f"{meta_path}: dataset '{name}'"
    for key in config:
        if key not in _KEYS:
            raise SourceError(f"{place} has the key '{key}', which nothing reads; {nearest_name(key, _KEYS)}")
    for key, kind in (("file_name", str), ("media_dir", str), ("columns", dict), ("tags", dict)):
        if config.get(key) is not None and not isinstance(config[key], kind):
            wanted = "a string" if kind is str else "an object"
            raise SourceError(f"{place}: '{key}' is {config[key]!r}, which cannot be used; write {wanted}.")
    if not config.get("file_name"):
        raise SourceError(f"{place} is missing 'file_name', so it has no data; name its .json or .jsonl file.")
    folder = parent_of(meta_path)
    media_dir = config.get("media_dir")
    ratio = config.get("sample_ratio")
    try:
        form = ShareGptForm.from_dicts(
            config.get("columns"),
            config.get("tags"),
            absolute(join_media_path(folder, media_dir)) if media_dir else None,
        )
    except SourceError as error:
        raise SourceError(f"{place}: {error}") from None
    return MetaEntry(
        name=name,
        path=join_media_path(folder, config["file_name"]),
        form=form,
        sample_ratio=1.0 if ratio is None else ratio,
    )

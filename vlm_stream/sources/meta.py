"""A meta file -> its entries, checked: which data files, in which form, how much of each.

    {"coco": {"file_name": "coco.jsonl", "media_dir": "images", "sample_ratio": 0.5},
     "chat": {"file_name": "/data/chat.json.gz", "columns": {"messages": "conversations"}, "tags": {...}}}

`file_name` and `media_dir` are relative to the meta file unless they are absolute or URLs. No data file is opened here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import SourceError, nearest_name
from vlm_stream.sources.form import ShareGptForm
from vlm_stream.sources.media_path import absolute, join_media_path, parent_of

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MetaEntry", "parse_meta", "select_names"]

_KEYS = ("columns", "file_name", "media_dir", "sample_ratio", "tags")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaEntry:
    """One dataset of a meta file, with its paths resolved."""

    name: str
    path: str
    """The data file: a path or URL."""
    form: ShareGptForm
    sample_ratio: float = 1.0


def parse_meta(text: str, meta_path: str, names: Iterable[str] | None = None) -> list[MetaEntry]:
    """Return the chosen entries in sorted order; anything that nothing would read raises `SourceError`."""
    try:
        meta = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{meta_path}: not a meta file, broken JSON ({error}); mend it.") from None
    chosen = select_names(meta, names, meta_path)
    return [_entry(name, meta[name], meta_path) for name in chosen]


def select_names(known: Iterable[str], names: Iterable[str] | None, meta_path: str) -> list[str]:
    """Return the chosen names, sorted."""
    known = set(known)
    if not known:
        raise SourceError(f"{meta_path}: the meta file names no datasets, so there is nothing to read; add an entry.")
    if names is None:
        return sorted(known)
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise SourceError(f"{meta_path}: the names filter is empty, so nothing would be read; {_allowed('', known)}")
    for name in names:
        if name not in known:
            raise SourceError(f"dataset '{name}' not found in meta file {meta_path}; {_allowed(name, known)}")
    return sorted(set(names))


def _allowed(name: str, known: Iterable[str]) -> str:
    return nearest_name(name, known)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key '{twice}' occurs twice in one object, and only one of them would count")
    return found


def _entry(name: str, config: Any, meta_path: str) -> MetaEntry:
    place = f"{meta_path}: dataset '{name}'"
    if not isinstance(config, dict):
        raise SourceError(f'{place} is {config!r}, not an object; write {{"file_name": ...}}.')
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

"""A path or URL -> a source of records: a meta file with its entries, a data file, a folder or a pattern of them.

    {"coco": {"file_name": "coco.jsonl", "media_dir": "images", "sample_ratio": 0.5},
     "chat": {"file_name": "/data/chat.json.gz", "columns": {"messages": "conversations"}, "tags": {...}},
     "web":  {"file_name": "web/data/train-*.parquet"}}

`file_name` and `media_dir` are relative to the meta file unless they are absolute or URLs. InternVL's meta files
(`annotation`, `root`, `repeat_time`) are read as well. The result is a `SourceGroup` of the entries in sorted order.
Every data file is opened here, once.
"""

import fnmatch
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from vlm_stream.errors import ConfigError, SourceError, StorageError, nearest_name
from vlm_stream.sources.catalog import Catalog, FileCache, MetaEntry, sample_order
from vlm_stream.sources.factories import PREFIX, open_factory
from vlm_stream.sources.forms import ShareGptForm
from vlm_stream.sources.json_file import first_bytes, holds_lines
from vlm_stream.sources.local_file import plain_name
from vlm_stream.sources.record import SourceGroup, absolute, is_url, join_media_path, parent_of
from vlm_stream.sources.sharegpt import OnMismatch, check_policy
from vlm_stream.sources.table_file import is_table
from vlm_stream.storage import StoreOptions, expand_braces, local_path, open_store

_META_BYTES: Final = 64 << 20  # a meta file lists datasets; something larger that starts with a brace is not one
_INTERNVL: Final = {"annotation": "file_name", "root": "media_dir", "repeat_time": "sample_ratio"}
_INTERNVL_ONLY: Final = ("data_augment", "length", "max_dynamic_patch", "min_dynamic_patch", "conv_style")
"""Keys of InternVL's entries that are about its model or its own loader."""
_KINDS: Final = {
    "columns": dict,
    "file_name": str,
    "media_dir": str,
    "media_first": bool,
    "sample_ratio": object,
    "tags": dict,
}
_TARS: Final = (".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz")
_SHARD_NAME: Final = re.compile(r"(.+?)-\d{5}-of-\d{5}(-[0-9a-f]+)?$")
_SPLIT: Final = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])")


def open_source(
    path: str,
    *,
    names: Iterable[str] | None = None,
    on_mismatch: OnMismatch = "drop",
    columns: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    media_dir: str | None = None,
    media_first: bool | None = None,
    store: StoreOptions | None = None,
) -> SourceGroup:
    """Return the records of a meta file or of data files: JSON, JSONL (`.gz`, `.zst`), Parquet, Arrow; also by URL.

    The form of the records is recognised, see `forms`; `lines` of the result says it.

    Args:
        path: The file, a folder of tables, or a pattern (`data/train-*.parquet`, `x-{0..7}.jsonl`, `a.jsonl::b.jsonl`).
            A meta file is a JSON object whose values are objects. `factory:NAME[=PATH]` is an HF dataset.
        names: Which entries of a meta file, or which splits and parts of a folder; all if None.
        on_mismatch: What happens to a record that does not map whole: `drop`, `keep` what maps, `raise`.
        columns: For data files: names of columns, where recognition should not decide. A meta file says this itself.
        tags: For data files: names of role keys and roles, likewise.
        media_dir: For data files: what relative media paths are joined to; as written if None.
        media_first: For data files: whether media that no placeholder shows go before the first user text.
        store: How to reach the stores of URLs.
    """
    check_policy(on_mismatch)
    path = str(path)
    if path.startswith(PREFIX):
        given = {"columns": columns, "tags": tags, "media_dir": media_dir}
        return _factory_group(path, names, {key: value for key, value in given.items() if value}, on_mismatch)
    ShareGptForm.from_dicts(columns, tags)  # refuses unknown keys before anything is opened
    files = FileCache(store)
    said = {
        "columns": columns or {},
        "tags": tags or {},
        "media_dir": absolute(media_dir) if media_dir else None,
        "media_first": media_first,
    }
    catalogs = [open_entry(entry, files, on_mismatch) for entry in read_entries(path, files, names=names, said=said)]
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
    data = files.open(entry.paths)
    try:
        order = sample_order(len(data), entry.sample_ratio)
    except SourceError as error:
        raise SourceError(f"dataset '{entry.name}': {error}") from None
    try:
        return Catalog(data, entry, order, on_mismatch)
    except SourceError as error:
        raise SourceError(f"{entry.paths[0]}: {error}") from None


def read_entries(
    path: str, files: FileCache, *, names: Iterable[str] | None = None, said: Mapping[str, Any] | None = None
) -> list[MetaEntry]:
    """Return the entries of a meta file, or of data files; `said` are fields of the entries of data files."""
    said = said or {}
    found = _find_files(path, files)
    if found is not None:
        chosen = _select(found.keys(), names, path) if names is not None else _one_split(found, path)
        return [MetaEntry(name=name, paths=found[name], **said) for name in chosen]
    file = files.local(path)
    _, head = first_bytes(file)
    if not head.lstrip().startswith(b"{") or holds_lines(file, head):
        if names is not None:
            raise SourceError(f"{path}: a data file has no names to choose from; leave the names filter out.")
        return [MetaEntry(name=_stem(path), paths=(path,), **said)]
    if file.size_bytes > _META_BYTES:
        raise SourceError(
            f"{path}: Expected a JSON array of records or a meta file, found one JSON object of {file.size_bytes:,} "
            "bytes, which is neither. Write the records as an array or one per line (.jsonl)."
        )
    text = file.read_at(0, file.size_bytes).decode("utf-8-sig", errors="replace")
    entries = _parse_meta(text, path, files, names)
    if any(value not in (None, {}) for value in said.values()):
        raise SourceError(f"{path}: a meta file says columns, tags and media_dir for each entry; put them there.")
    return entries


def _stem(path: str) -> str:
    return PurePosixPath(plain_name(path)).stem or path


# --- folders and patterns ---


def _find_files(path: str, files: FileCache) -> dict[str, tuple[str, ...]] | None:
    """Return the files that a table, a folder or a pattern names, by the name of their entry; None: it is one file."""
    parts = _expand(path)
    if parts == [path]:
        return _find_part(path, files)
    found: dict[str, list[str]] = {}
    for part in parts:
        for name, paths in (_find_part(part, files) or {_stem(part): (part,)}).items():
            if paths == (part,) and is_table(part):  # as patterns call it
                name = _part_name(part.rpartition("/")[2]) or _stem(parent_of(part)) or name
            found.setdefault(name, []).extend(paths)
    return _named_once(path, found)


def _expand(path: str) -> list[str]:
    """Return what `{00..03}` and `::` of a name stand for, as for tars; a file of that very name is itself."""
    if not any(sign in path for sign in ("{", "::")) or path.startswith("data:"):
        return [path]
    if not _is_remote(path) and Path(local_path(path)).exists():
        return [path]
    try:
        return [each for part in path.split("::") for each in expand_braces(part)]
    except ConfigError as error:
        raise SourceError(f"{error} Nothing was read.") from error


def _named_once(path: str, found: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return files by the name of their entry, where only those of a table may be several."""
    twice = next((name for name in found if len(found[name]) > 1 and not all(map(is_table, found[name]))), None)
    if twice is not None:
        raise SourceError(f"{path}: {' and '.join(found[twice])} have the same name; convert them one by one.")
    return {name: tuple(paths) for name, paths in found.items()}


def _find_part(path: str, files: FileCache) -> dict[str, tuple[str, ...]] | None:
    if path.lower().endswith(_TARS):
        raise SourceError(
            f"{path}: a tar needs no conversion, so nothing was read. Give it to StreamLoader and to commands as it "
            f"is, or index it beforehand with: vlm-stream index '{path}' (compressed ones have to be unpacked)."
        )
    if path.startswith(("http:", "https:")) and "?" in path:
        raise SourceError(f"{path}: a web address with a query cannot be read. Leave it out, or fetch the file first.")
    has_pattern = any(mark in path for mark in "*?[") and not Path(path).exists()
    is_folder = _is_remote_folder(path, files) if _is_remote(path) else Path(local_path(path)).is_dir()
    if not has_pattern and not is_folder:
        return {_stem(path): (path,)} if is_table(path) else None
    folder = path.rstrip("/")
    while has_pattern and any(mark in folder for mark in "*?["):
        folder = parent_of(folder)
    found = _list(folder or ".", files)
    if has_pattern:
        found = [name for name in found if fnmatch.fnmatchcase(f"{folder}/{name}" if folder else name, path)]
    found = [name for name in found if not name.endswith(".index.parquet")]  # what we know of a tar
    tables = [name for name in found if is_table(name) and not PurePosixPath(name).name.startswith(("cache-", "."))]
    others = [] if is_folder else [name for name in found if name not in tables]
    if not tables and not others:
        what = "matches no file" if has_pattern else "is a folder without .parquet or .arrow files"
        way = "Give a file, a pattern or the right folder."
        if any(name.endswith(".tar") for name in found):
            way = f"Its tars need no conversion: vlm-stream index '{path}', or give it to StreamLoader as it is."
        raise SourceError(f"{path}: {what}, so there is nothing to read. {way}")
    groups: dict[str, list[str]] = {}
    for name in sorted(tables):
        groups.setdefault(_part_name(name) or _stem(folder), []).append(_joined(folder, name))
    for name in sorted(others):
        groups.setdefault(_stem(name), []).append(_joined(folder, name))
    return _named_once(path, groups)


def _is_remote_folder(path: str, files: FileCache) -> bool:
    """Tell whether a URL names a folder: by its slash, or because tables lie below a name without an extension."""
    if path.endswith("/") or "." in path.rpartition("/")[2] or path.startswith(("http:", "https:", "data:")):
        return path.endswith("/")
    try:
        return any(map(is_table, _list(path, files)))
    except SourceError:  # it cannot be listed, or is not there: reading it as a file says so
        return False


def _is_remote(path: str) -> bool:
    return is_url(path) and not path.startswith("file://")


def _list(folder: str, files: FileCache) -> list[str]:
    try:
        return [info.path for info in open_store(folder, files.store).list()]
    except (ConfigError, StorageError) as error:
        raise SourceError(f"{folder}: cannot be listed ({error}). Check it, or name the files.") from error


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _part_name(path: str) -> str:
    """Return which part of a dataset a file belongs to, by the layouts of the hub and of `save_to_disk`.

    >>> _part_name("data/train-00000-of-00008.parquet"), _part_name("ai2d/test-00000-of-00001.parquet")
    ('train', 'ai2d/test')
    >>> _part_name("train/data-00000-of-00002.arrow"), _part_name("0000.parquet")
    ('train', '')
    """
    place = PurePosixPath(path)
    numbered = _SHARD_NAME.match(place.stem)
    stem = numbered.group(1) if numbered else (match.group() if (match := _SPLIT.match(place.stem)) else "")
    return "/".join(part for part in (*place.parts[:-1], stem) if part and part != "data")


def _one_split(found: Collection[str], path: str) -> list[str]:
    """Return all parts, sorted, unless they are of several splits: then somebody has to choose."""
    splits = {match.group() for name in found if (match := _SPLIT.match(name.rpartition("/")[2]))}
    if len(splits) > 1:
        train = [name for name in found if name.rpartition("/")[2].startswith("train")] or sorted(found)[:1]
        raise SourceError(
            f"{path}: there are the splits {', '.join(sorted(found))}, and training data would be mixed with others. "
            f"Choose with --names {','.join(sorted(train))}."
        )
    return sorted(found)


# --- meta files ---


def _parse_meta(text: str, meta_path: str, files: FileCache, names: Iterable[str] | None) -> list[MetaEntry]:
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
    return [_entry(name, meta[name], meta_path, files) for name in _select(meta.keys(), names, meta_path)]


def _select(known: Collection[str], names: Iterable[str] | None, meta_path: str) -> list[str]:
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


def _entry(name: str, config: dict[str, Any], meta_path: str, files: FileCache) -> MetaEntry:
    place = f"{meta_path}: dataset '{name}'"
    if "annotation" in config and "file_name" not in config:
        config = {_INTERNVL.get(key, key): value for key, value in config.items() if key not in _INTERNVL_ONLY}
    for key, value in config.items():
        if key not in _KINDS:
            raise SourceError(f"{place} has the key '{key}', which nothing reads; {nearest_name(key, _KINDS)}")
        if value is not None and not isinstance(value, _KINDS[key]):
            wanted = {str: "a string", dict: "an object", bool: "true or false"}[_KINDS[key]]
            raise SourceError(f"{place}: '{key}' is {value!r}, which cannot be used; write {wanted}.")
    if not config.get("file_name"):
        raise SourceError(
            f"{place} is missing 'file_name', so it has no data; name its .json, .jsonl or .parquet file."
        )
    columns, tags = config.get("columns") or {}, config.get("tags") or {}
    try:
        ShareGptForm.from_dicts(columns, tags)
    except SourceError as error:
        raise SourceError(f"{place}: {error}") from None
    folder = parent_of(meta_path)
    path = join_media_path(folder, config["file_name"])
    if len(_expand(path)) > 1:
        path = "::".join(join_media_path(folder, part) for part in config["file_name"].split("::"))
    found = _find_files(path, files) or {name: (path,)}
    if len(found) > 1:
        raise SourceError(
            f"{place}: '{config['file_name']}' holds {', '.join(sorted(found))}, and an entry is one dataset; write an "
            "entry with a pattern for each of them."
        )
    media_dir, ratio = config.get("media_dir"), config.get("sample_ratio")
    return MetaEntry(
        name=name,
        paths=next(iter(found.values())),
        columns=columns,
        tags=tags,
        media_dir=absolute(join_media_path(folder, media_dir)) if media_dir else None,
        media_first=config.get("media_first"),
        sample_ratio=1.0 if ratio is None else ratio,
    )

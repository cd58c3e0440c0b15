"""URLs of tars as people write them -> the folder that holds them all, and their names in it.

Enters: patterns. Leaves: one root and relative names, in the order given. Only folders and globs are looked up.
"""

from __future__ import annotations

import posixpath
import re
from fnmatch import fnmatchcase
from glob import glob, has_magic
from typing import TYPE_CHECKING, Final

from vlm_stream.errors import ConfigError
from vlm_stream.storage.store import join_url, local_path, open_store, scheme_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.storage.options import StoreOptions

_TAR: Final = ".tar"
_COMPRESSED: Final = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
_JOIN: Final = "::"
_RANGE: Final = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?\d+)?")
_MOST_DIGITS: Final = 18
_LETTERS: Final = re.compile(r"[A-Za-z]\.\.[A-Za-z](?:\.\.-?\d+)?")
_NUM_LETTERS: Final = 52
"""The most that a range of letters stands for."""
_MOST_NAMES: Final = 1 << 22
_MOST_CHARACTERS: Final = 1 << 28


def names_tars(url: str) -> bool:
    """Tell whether a URL names tars by its form: `x.tar`, `{00..03}`, `*`, several joined by `::`.

    >>> names_tars("s3://bucket/{00..03}.tar"), names_tars("a.tar::b.tar"), names_tars("s3://bucket/data")
    (True, True, False)
    """
    ends = url.endswith((_TAR, *_COMPRESSED))
    return ends or _JOIN in url or "{" in url or has_magic(url) or url.startswith("pipe:")


def expand_urls(patterns: Sequence[str], options: StoreOptions | None = None) -> tuple[str, list[str]]:
    """Return the common folder of all tars and each tar's path in it.

    Args:
        patterns: `s3://b/{000..127}.tar`, `data/*.tar`, `a.tar::b.tar`, a folder, or plain names.
        options: How to reach object stores.

    Raises:
        ConfigError: A pattern names no tar, a compressed one, or one tar twice.
    """
    urls = [url for pattern in patterns for part in pattern.split(_JOIN) for url in _expand(part, options)]
    if not urls:
        raise ConfigError("no tar was named, so there is nothing to index. Give paths, URLs or patterns.")
    if len(set(urls)) < len(urls):
        twice = next(url for url in urls if urls.count(url) > 1)
        raise ConfigError(f"{twice} is named twice, so its samples would be counted twice. Name each tar once.")
    for url in urls:
        if not url.endswith(_TAR):
            raise ConfigError(
                f"{url} does not end in .tar; compressed tars cannot be read at an offset. Unpack it first."
            )
    root = _common_folder(urls)
    return root, [url[len(root) :].lstrip("/") for url in urls]


def _expand(pattern: str, options: StoreOptions | None) -> list[str]:
    if pattern.startswith("pipe:"):
        raise ConfigError(
            f"'{pattern}' is a command, which gives a stream, and samples are read at their offsets, so it cannot be "
            f"used. Name what it reads: s3://, gs://, az:// or https:// URLs are read directly."
        )
    found = []
    for url in expand_braces(pattern):
        is_local = scheme_of(url) == "file"
        place = local_path(url) if is_local else url.rstrip("/")
        if has_magic(place):
            found.append(sorted(glob(place)) if is_local else _match(place, options))  # noqa: PTH207 (it is absolute)
        elif place.endswith((_TAR, *_COMPRESSED)):
            found.append([place])
        else:
            found.append(_list_tars(place, options))
        if not found[-1]:
            raise ConfigError(f"{url} holds no .tar file, so there is nothing to index there.")
    return [url for urls_of_one in found for url in urls_of_one]


def expand_braces(pattern: str) -> list[str]:
    """Return what a pattern with braces stands for; how much that is is counted first.

    >>> expand_braces("{00..02}.tar")
    ['00.tar', '01.tar', '02.tar']

    Raises:
        ConfigError: A brace lacks its pair, or the pattern stands for more than any dataset has.
    """
    from braceexpand import braceexpand

    try:
        num_names = _count(pattern)
        if num_names <= min(_MOST_NAMES, _MOST_CHARACTERS // max(len(pattern), 1)):
            return list(braceexpand(pattern))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{pattern!r:.200} has a brace without its pair: write ranges as {{000..127}}.") from error
    raise ConfigError(f"{pattern!r:.200} stands for more names than any dataset has. Write a smaller range.")


def _count(pattern: str) -> int:
    """Return how many texts a pattern stands for, or more: steps of ranges are not looked at."""
    total, depth, begin, at = 1, 0, 0, 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "{":
            begin = begin if depth else at + 1
            depth += 1
        elif pattern[at] == "}":
            depth -= 1
            if depth == 0:
                total *= _count_choices(pattern[begin:at])
        at += 1
    return total


def _count_choices(inner: str) -> int:
    if ends := _RANGE.fullmatch(inner):
        if max(map(len, ends.groups())) > _MOST_DIGITS:
            return _MOST_NAMES + 1
        first, last = map(int, ends.groups())
        return abs(last - first) + 1
    if _LETTERS.fullmatch(inner):
        return _NUM_LETTERS
    total, depth, begin = 0, 0, 0
    for at, sign in enumerate(inner):
        depth += (sign == "{") - (sign == "}")
        if sign == "," and depth == 0:
            total += _count(inner[begin:at])
            begin = at + 1
    return total + _count(inner[begin:])


def _list_tars(folder: str, options: StoreOptions | None, prefix: str = "") -> list[str]:
    store = open_store(folder, options)
    return [join_url(store.root, info.path) for info in store.list(prefix) if info.path.endswith(_TAR)]


def _match(pattern: str, options: StoreOptions | None) -> list[str]:
    """Return the objects that a pattern of an object store matches; `*` stays inside one folder."""
    head = pattern[: min(pattern.index(sign) for sign in "*?[" if sign in pattern)]
    folder, _, prefix = head.rpartition("/")
    depth = pattern.count("/")
    found = _list_tars(folder, options, prefix)
    return [url for url in found if url.count("/") == depth and fnmatchcase(url, pattern)]


def _common_folder(urls: Sequence[str]) -> str:
    schemes = {url.partition("://")[0] if "://" in url else "" for url in urls}
    hosts = {url.split("://", 1)[1].split("/", 1)[0] if "://" in url else "" for url in urls}
    if len(schemes) > 1 or len(hosts) > 1:
        raise ConfigError(
            "the tars lie in several stores, and a dataset has one folder above all of its tars. "
            "Index each store by itself and mix the datasets."
        )
    scheme = schemes.pop()
    prefix = f"{scheme}://" if scheme else ""
    folders = [posixpath.dirname(url[len(prefix) :]) for url in urls]
    return prefix + posixpath.commonpath(folders)

"""The samples of a tar, the layout that the first of them show, and members that several of them share.

Enters: members of a tar in one pass. Leaves: runs of members with the same key, as WebDataset has them; a `FieldMap`;
the places and bytes of members that samples of our own tars name as `shared`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from vlm_stream.convert.tar import Group, TarGap, TarMember, iter_pieces, split_member_name
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.format import FieldMap, complete_fields, guess_fields, is_text_member
from vlm_stream.storage import Member, ObjectReader, Store

_NUM_FIRST: Final = 50
_FIRST_BYTES: Final = 64 << 20
"""The samples that tell the layout together: so many, or those with so many bytes."""
_NUM_GUESSED: Final = 100
"""Later samples that are tried one by one where those show none."""
_LEFT_OUT: Final = "The bytes from {begin} to {end} are left out, and so is a sample that has lost a member there."


def find_layout(store: Store, names: Sequence[str], fields: FieldMap | None = None) -> FieldMap:
    """Return the layout that the first samples show; where they show none, a later one.

    Of `fields` that the user names, records of layout sharegpt are still recognised as far as nothing is said of them.
    """
    if fields is not None and fields.layout != "sharegpt":
        return fields
    faults: list[str] = []
    samples = _first_samples(store, names, faults)
    first = list(map(_shown, _few(samples)))
    if fields is not None:
        return complete_fields(fields, first)
    if not first:
        fault = f" ({faults[0]})" if faults else ""
        raise ConfigError(f"the tars at {store.root} hold no samples{fault}, so there is nothing to index.")
    try:
        return guess_fields(first)
    except ConfigError:
        for group in itertools.islice(samples, _NUM_GUESSED):
            with contextlib.suppress(ConfigError):
                return guess_fields([_shown(group)])
        raise


def _few(samples: Iterator[Group]) -> Iterator[Group]:
    """Yield the first samples: some, or as many as have so many bytes."""
    num_bytes = 0
    for group in itertools.islice(samples, _NUM_FIRST):
        yield group
        num_bytes += sum(len(member.content) for _, member in group)
        if num_bytes >= _FIRST_BYTES:
            return


def _shown(group: Group) -> tuple[list[str], dict[str, bytes]]:
    """Return the names of a sample's members, and the contents of those with text."""
    return [name for name, _ in group], {name: m.content for name, m in group if is_text_member(name)}


def _first_samples(store: Store, names: Sequence[str], faults: list[str]) -> Iterator[Group]:
    for name in names:
        with ObjectReader(store, name, store.head(name).size) as reader:
            for _, group in iter_samples(iter_pieces(reader.read), partial(_keep_fault, faults, name)):
                yield group


def _keep_fault(faults: list[str], name: str, _key: str, _offset: int, error: BadSampleError) -> None:
    faults.append(f"{name}: {error}")


def iter_samples(
    pieces: Iterable[TarMember | TarGap], note: Callable[[str, int, BadSampleError], None]
) -> Iterator[tuple[str, Group]]:
    """Yield key and `(extension, member)`s: neighbours with the same key are one sample.

    Gaps are noted, and so are samples beside them that are not whole: they have the key of the damaged member, or lack
    a kind of member that the last whole sample has.
    """
    key = ""
    group: Group = []
    gap: TarGap | None = None  # the last one, while it touches the group
    kinds: set[str] = set()

    def is_whole() -> bool:
        nonlocal kinds
        found = {extension.rpartition(".")[2] for extension, _ in group}
        if gap is not None and (split_member_name(gap.name)[0] == key or found < kinds):
            detail = f"a member of it was lost, because {gap.fault}"
            note(key, group[0][1].begin, BadSampleError("read", "damaged_tar", detail))
            return False
        kinds = found
        return True

    for piece in pieces:
        if isinstance(piece, TarGap):
            fault = f"{piece.fault} {_LEFT_OUT.format(begin=piece.begin, end=piece.end)}"
            note("", piece.begin, BadSampleError("read", "damaged_tar", fault))
            gap = piece
            continue
        new_key, extension = split_member_name(piece.name)
        if not extension or piece.name.rpartition("/")[2].startswith("."):
            continue  # READMEs and the dot files of archivers (`._x.jpg`) are no samples
        if new_key != key and group:
            if is_whole():
                yield key, group
            touches = gap is not None and gap.end > group[-1][1].end
            gap = gap if touches else None
            group = []
        key = new_key
        group.append((extension, piece))
    if group and is_whole():
        yield key, group


class SharedMembers:
    """The members of one tar, as far as it was read."""

    def __init__(self, store: Store, tar: str) -> None:
        """Begin before the first member."""
        self._store, self._tar = store, tar
        self._places: dict[str, tuple[int, int]] = {}
        self._last: tuple[int, bytes] = (-1, b"")

    def add(self, key: str, group: Group) -> None:
        """Note where the members of a sample lie."""
        for name, member in group:
            self._places[f"{key}.{name}"] = member.offset, len(member.content)

    def named_in(self, texts: Mapping[str, bytes]) -> tuple[Member, ...]:
        """Return the members that a sample shares, under its own names for them."""
        text = texts.get("json", b"")
        if b'"shared":' not in text:
            return ()
        data = json.loads(text)
        named = data.get("shared", {}) if isinstance(data, dict) else {}
        found = []
        for name, place in named.items() if isinstance(named, dict) else ():
            if place not in self._places:
                detail = f"'{place}', which holds its '{name}', does not lie before it in the tar."
                raise BadSampleError("convert", "missing_member", detail)
            found.append(Member(name, *self._places[place]))
        return tuple(found)

    def read(self, member: Member) -> bytes:
        """Return the bytes of an earlier member; neighbours often share one, so the last one is kept."""
        if self._last[0] != member.offset:
            self._last = member.offset, bytes(self._store.fetch(self._tar, member.offset, member.size).data)
        return self._last[1]

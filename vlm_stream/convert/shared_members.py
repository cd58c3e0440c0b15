"""Members that several samples of a tar show, when a tar of ours is indexed again.

Enters: the members of each sample as the tar goes by, and the JSON of one that names members of others (`shared`).
Leaves: their places in the tar, and their bytes, read once more.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vlm_stream.errors import BadSampleError
from vlm_stream.storage import Member

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vlm_stream.convert.tar import TarMember
    from vlm_stream.storage import Store


class SharedMembers:
    """The members of one tar, as far as it was read."""

    def __init__(self, store: Store, tar: str) -> None:
        """Begin before the first member."""
        self._store, self._tar = store, tar
        self._places: dict[str, tuple[int, int]] = {}
        self._last: tuple[int, bytes] = (-1, b"")

    def add(self, key: str, group: Iterable[tuple[str, TarMember]]) -> None:
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
        """Return the bytes of a member that has gone by; neighbours often share one, so the last one is kept."""
        if self._last[0] != member.offset:
            self._last = member.offset, bytes(self._store.fetch(self._tar, member.offset, member.size).data)
        return self._last[1]

"""The media of one example: its columns, taken in order by the placeholders of its turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlm_stream.conversation import MEDIA_TYPES, Item
from vlm_stream.sources.media_path import join_media_path
from vlm_stream.sources.mismatch import Mismatch, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vlm_stream.sources.form import ShareGptForm

__all__ = ["ExampleMedia"]


class ExampleMedia:
    """The media of one example, taken in order by the placeholders of its turns."""

    def __init__(self, example: Mapping[str, Any], form: ShareGptForm, mismatches: list[Mismatch]) -> None:
        self.media_dir = form.media_dir
        self.mismatches = mismatches
        self.names = {"image": form.images, "video": form.videos, "audio": form.audios}
        self.entries = {medium: self._column(example.get(name), name) for medium, name in self.names.items()}
        self.num_shown = dict.fromkeys(MEDIA_TYPES, 0)

    def _column(self, value: object, name: str) -> list[Any]:
        if value is None or value == "":
            return []
        if isinstance(value, (list, tuple)):
            return list(value)
        if isinstance(value, (str, dict)):
            return [value]
        self.mismatches.append(Mismatch("media_not_a_list", f"column '{name}' is {show(value)}, not a list of media"))
        return []

    def take(self, medium: str, turn: str) -> Item | None:
        """Return the next medium of its column, or note that there is none."""
        number = self.num_shown[medium]
        self.num_shown[medium] = number + 1
        entries = self.entries[medium]
        if number >= len(entries):
            self.mismatches.append(
                Mismatch(
                    "surplus_placeholder",
                    f"{turn} shows <{medium}> number {number + 1}, but '{self.names[medium]}' has {len(entries)}",
                )
            )
            return None
        return self.item(medium, entries[number], f"'{self.names[medium]}' number {number + 1}")

    def item(self, medium: str, entry: object, place: str) -> Item | None:
        """Return the media item of one entry, or note why there is none."""
        item = _media_item(medium, entry, place, self.media_dir)
        if isinstance(item, Mismatch):
            self.mismatches.append(item)
            return None
        return item

    def note_surplus(self) -> None:
        """Note the media that no placeholder took."""
        for medium, entries in self.entries.items():
            shown = self.num_shown[medium]
            if shown < len(entries):
                self.mismatches.append(
                    Mismatch(
                        "surplus_media",
                        f"'{self.names[medium]}' has {len(entries)}, but the user turns show <{medium}> {shown} times",
                    )
                )


def _media_item(medium: str, entry: object, place: str, media_dir: str | None) -> Item | Mismatch:
    extras: dict[str, Any] = {}
    where = entry
    if isinstance(entry, dict):
        if entry.get("bytes") is None and "path" not in entry:
            return Mismatch("media_without_path", f"{place} has no 'path' (keys: {', '.join(sorted(entry)) or 'none'})")
        where = entry["path"] if entry.get("bytes") is None else entry["bytes"]
        extras = {key: value for key, value in entry.items() if key not in ("path", "bytes")}
        if clash := {"type", medium} & extras.keys():
            return Mismatch(
                "reserved_media_key", f"{place} has the key '{min(clash)}', which the media item itself needs"
            )
    if isinstance(where, list) and medium == "video":
        if not where or not all(isinstance(frame, str) and frame for frame in where):
            return Mismatch(
                "bad_frame_list", f"{place} is a list of frames that is empty or has an entry without a path"
            )
        return {"type": medium, medium: [join_media_path(media_dir, frame) for frame in where], **extras}
    if isinstance(where, bytes) and where:
        return {"type": medium, medium: where, **extras}
    if not isinstance(where, str) or not where:
        return Mismatch("media_not_a_path", f"{place} is {show(where)}, not a path")
    return {"type": medium, medium: join_media_path(media_dir, where), **extras}

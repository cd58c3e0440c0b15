"""The media of one example: taken in order, each an item of a conversation; what does not map is noted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vlm_stream.conversation import MEDIA_TYPES, SPAN_KEYS, Conversation, Item
from vlm_stream.sources.forms import ShareGptForm, held_media, show
from vlm_stream.sources.record import join_media_path


class Mismatch(NamedTuple):
    """One thing in an example that has no place in a conversation."""

    reason: str  # short stable code to count by
    fact: str  # what was found, as the beginning of a sentence


class ExampleMedia:
    """The media of one example, taken in order by the placeholders of its turns; and what does not map."""

    def __init__(self, example: Mapping[str, Any], form: ShareGptForm, turns: list[Any]) -> None:
        self.form = form
        self.example = example
        self.mismatches: list[Mismatch] = []
        self.names = {"image": form.images, "video": form.videos, "audio": form.audios}
        self.entries = {medium: self._column(example.get(name), name) for medium, name in self.names.items()}
        self.num_shown = dict.fromkeys(MEDIA_TYPES, 0)
        has_only_videos = bool(self.entries["video"]) and not self.entries["image"]
        self.image_is_video = has_only_videos and "<video>" not in str(turns).lower()

    def note(self, reason: str, fact: str) -> None:
        self.mismatches.append(Mismatch(reason, fact))

    def _column(self, value: object, name: str) -> list[Any]:
        if value is None or value == "":
            return []
        if isinstance(value, (list, tuple)):
            return list(value)
        if isinstance(value, (str, bytes, dict)):
            return [value] if not isinstance(value, dict) or any(value.values()) else []
        self.note("media_not_a_list", f"column '{name}' is {show(value)}, not a list of media")
        return []

    def note_unread(self, text: str, turn: str) -> tuple[str, ...]:
        """Return the kinds of media there are; note where a text shows others that stand in a column nobody reads."""
        for medium in MEDIA_TYPES:
            if self.entries[medium] or f"<{medium}>" not in text.lower():
                continue
            name = held_media(self.example, f"{medium}s")
            if name is not None and name not in self.names.values():
                self.note(
                    "unread_media",
                    f"{turn} shows <{medium}>, but '{self.names[medium]}' has none and nothing reads '{name}' (add "
                    f"--columns {medium}s={name})",
                )
        return tuple(medium for medium in MEDIA_TYPES if self.entries[medium])

    def take(self, medium: str, turn: str, number: int | None = None) -> Item | None:
        """Return the next medium of its column, or the one of that number; or note that there is none."""
        number = self.num_shown[medium] if number is None else number
        self.num_shown[medium] += 1
        entries = self.entries[medium]
        if not 0 <= number < len(entries):
            self.note(
                "surplus_placeholder",
                f"{turn} shows <{medium}> number {number + 1}, but '{self.names[medium]}' has {len(entries)}",
            )
            return None
        item = self.item(medium, entries[number], f"'{self.names[medium]}' number {number + 1}")
        if item is None or medium == "image" or any(item.get(key) is not None for key in SPAN_KEYS):
            return item
        return {**item, **self._span(number)}

    def _span(self, number: int) -> Item:
        """Return what columns say of the part that is shown of a video or sound: for all of them, or one by one."""
        found = {}
        for key, name in zip(SPAN_KEYS, (self.form.start, self.form.end), strict=True):
            value = self.example.get(name)
            if isinstance(value, (list, tuple)):
                if number >= len(value):
                    self.note("bad_span", f"'{name}' has {len(value)} numbers, and none for medium number {number + 1}")
                    continue
                value = value[number]
            if value is not None:
                found[key] = value
        return found

    def item(self, medium: str, entry: object, place: str) -> Item | None:
        """Return the media item of one entry, or note why there is none."""
        item = _media_item(medium, entry, place, self.form.media_dir)
        if isinstance(item, Mismatch):
            self.mismatches.append(item)
            return None
        return item

    def place_rest(self, conversation: Conversation) -> None:
        """Put media of a kind that nothing shows before the first user text, if the form says so; or note them."""
        for medium in reversed(MEDIA_TYPES):
            entries, shown = self.entries[medium], self.num_shown[medium]
            if not entries:
                self._note_overlooked(medium, conversation)
            if shown >= len(entries):
                continue
            first = next((message for message in conversation if message["role"] == "user"), None)
            if self.form.media_first and not shown and first is not None:
                items = [self.take(medium, "") for _ in entries]
                texts = [item for item in first["content"] if item != {"type": "text", "text": ""}]
                first["content"] = [*(item for item in items if item is not None), *texts] or first["content"]
            else:
                self.note(
                    "surplus_media",
                    f"'{self.names[medium]}' has {len(entries)}, but the user turns show <{medium}> {shown} times",
                )

    def _note_overlooked(self, medium: str, conversation: Conversation) -> None:
        """Note media under a usual name in a record that lacks the column that is read."""
        name = None if self.names[medium] in self.example else held_media(self.example, f"{medium}s")
        items = (item for message in conversation for item in message["content"])
        is_told = any(mismatch.reason == "unread_media" for mismatch in self.mismatches)
        if name is None or name in self.names.values() or is_told or any(item["type"] == medium for item in items):
            return
        self.note("unread_media", f"'{name}' has {medium}s, and nothing reads them (add --columns {medium}s={name})")


def note_empty_media(example: Any, form: ShareGptForm, conversation: Conversation) -> list[str]:
    """Note where a text shows a medium whose column is null or empty in this record: a download that failed looks so.

    The record is no worse than one that speaks of `<image>`, so it stays, with that text.
    """
    notes = []
    columns = {"image": form.images, "video": form.videos, "audio": form.audios}
    for medium, name in columns.items() if isinstance(example, dict) else ():
        is_empty = name in example and (example[name] is None or example[name] == "")
        items = (item for message in conversation if message["role"] == "user" for item in message["content"])
        if is_empty and any(f"<{medium}>" in item.get("text", "").lower() for item in items):
            empty = Mismatch("placeholder_as_text", f"<{medium}> stays text, because '{name}' is {show(example[name])}")
            notes.append(": ".join(empty))
    return notes


def _media_item(medium: str, entry: object, place: str, media_dir: str | None) -> Item | Mismatch:
    extras: dict[str, Any] = {}
    where = entry
    if isinstance(entry, dict):
        key = next((key for key in ("bytes", "path", medium) if entry.get(key) is not None), "path")
        if key not in entry:
            return Mismatch("media_without_path", f"{place} has no 'path' (keys: {', '.join(sorted(entry)) or 'none'})")
        where = entry[key]
        extras = {name: value for name, value in entry.items() if name not in ("path", "bytes", key)}
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

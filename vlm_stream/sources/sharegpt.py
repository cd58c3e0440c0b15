"""One sharegpt example becomes one conversation; what does not map is named, never lost in silence.

Enters: a JSON object with messages and media columns, and how its columns and roles are called. Leaves: a conversation
and the list of mismatches. No files are opened here and no medium is looked at: paths stay words.

The rules, where the format leaves a choice:

* `<image>`, `<video>`, `<audio>` (any case, no blanks inside) in user turns take the next medium of their column,
  counted over the whole example. In other turns they are plain text and take nothing.
* System turns are kept. Turns of one role after each other stay separate turns. Empty user turns keep one empty text.
* Tool results map to the role `tool` once `tool_tag` says how they are called, calls of functions to `assistant` once
  `function_tag` does; without those tags they are unmapped roles.
* One medium outside a list (a string, a dict) counts as a list of one; null and "" as an empty list.
* Content may also be a list of typed parts; a media part without a value takes the next medium of its column.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.conversation import MEDIA_TYPES, Conversation, Item
from vlm_stream.sources.form import MISMATCHES_KEY, Mismatch, OnMismatch, ShareGptForm, apply_policy, check_policy, show
from vlm_stream.sources.record import join_media_path

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["PASSENGER_KEYS", "ExampleMedia", "convert_example", "convert_sharegpt_to_conversation", "map_sharegpt"]

PASSENGER_KEYS: Final = ("mm_inputs_meta", "_text_tokens")
"""Fields that travel with a conversation, unread."""

_PLACEHOLDER = re.compile(r"<(image|video|audio)>", re.IGNORECASE)


def convert_sharegpt_to_conversation(
    example: Mapping[str, Any],
    columns: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    media_dir: str | None = None,
    on_mismatch: OnMismatch = "drop",
) -> dict[str, Any]:
    """Return `{"conversation": [...]}` with `mm_inputs_meta` and `_text_tokens` if the example has them.

    Args:
        example: One sharegpt object.
        columns: Names of the columns `messages`, `images`, `videos`, `audios`, where they differ.
        tags: Names of the role and content keys and of the roles, where they differ.
        media_dir: What relative media paths are joined to.
        on_mismatch: `drop` raises `BadSampleError`, which the caller records; `keep` keeps what maps and lists the rest
            under `_mismatches`; `raise` raises `SourceError`, which ends the job.
    """
    check_policy(on_mismatch)
    return convert_example(example, ShareGptForm.from_dicts(columns, tags, media_dir), on_mismatch)


def convert_example(
    example: Mapping[str, Any], form: ShareGptForm, on_mismatch: OnMismatch, where: str = ""
) -> dict[str, Any]:
    """Do what `convert_sharegpt_to_conversation` does, with a form that is checked; errors name `where` it lies."""
    conversation, mismatches = map_sharegpt(example, form)
    kept = apply_policy(conversation, mismatches, on_mismatch, where)
    result: dict[str, Any] = {"conversation": conversation}
    result.update((key, example[key]) for key in PASSENGER_KEYS if key in example)
    if kept:
        result[MISMATCHES_KEY] = kept
    return result


def map_sharegpt(example: Mapping[str, Any], form: ShareGptForm) -> tuple[Conversation, list[Mismatch]]:
    """Return what maps, and what does not."""
    mismatches: list[Mismatch] = []
    if not isinstance(example, dict):
        return [], [Mismatch("not_an_object", f"the record is {show(example)}, not a JSON object")]
    messages = example.get(form.messages)
    if messages is None:
        return [], [_missing_messages(example, form.messages)]
    if not isinstance(messages, list):
        return [], [Mismatch("messages_not_a_list", f"'{form.messages}' is {show(messages)}, not a list of turns")]
    media = ExampleMedia(example, form, mismatches)
    roles = form.roles
    conversation: Conversation = []
    for number, message in enumerate(messages, 1):
        turn = f"turn {number}"
        if not isinstance(message, dict):
            mismatches.append(Mismatch("turn_not_an_object", f"{turn} is {show(message)}, not an object"))
            continue
        role = _role(message.get(form.role_tag, ""), roles)
        if role is None:
            mismatches.append(_unmapped(turn, message, form, roles))
            continue
        content = message.get(form.content_tag)
        if content is None:
            mismatches.append(Mismatch("null_content", f"{turn} ({role}) has no '{form.content_tag}'"))
            continue
        items = _items(content, f"{turn} ({role})", role == "user", media)
        if items:
            conversation.append({"role": role, "content": items})
    media.note_surplus()
    if not conversation and not mismatches:
        mismatches.append(Mismatch("empty_conversation", f"'{form.messages}' has no turns"))
    return conversation, mismatches


def _role(value: object, roles: dict[str, str]) -> str | None:
    return roles.get(value) if isinstance(value, str) else None


def _missing_messages(example: Mapping[str, Any], column: str) -> Mismatch:
    state = "is null" if column in example else "is missing"
    return Mismatch(
        "no_messages", f"column '{column}' {state} (columns here: {', '.join(sorted(map(str, example))) or 'none'})"
    )


def _unmapped(turn: str, message: dict[str, Any], form: ShareGptForm, roles: dict[str, str]) -> Mismatch:
    if form.role_tag not in message:
        return Mismatch("no_role", f"{turn} has no '{form.role_tag}' (keys: {', '.join(sorted(message)) or 'none'})")
    known = ", ".join(sorted(roles))
    return Mismatch("unmapped_role", f"{turn} has the role {show(message[form.role_tag])}; mapped are {known}")


def _items(content: object, turn: str, is_user: bool, media: ExampleMedia) -> list[Item]:
    """Return the items of one turn; an empty list when nothing of the turn can be used."""
    if isinstance(content, str):
        if not is_user:
            return [{"type": "text", "text": content}]
        return _split_placeholders(content, turn, media) or [{"type": "text", "text": ""}]
    if isinstance(content, list):
        return _typed_parts(content, turn, media) or [{"type": "text", "text": ""}]
    media.mismatches.append(Mismatch("content_not_text", f"{turn} has {show(content)} for content, not text"))
    return []


def _split_placeholders(text: str, turn: str, media: ExampleMedia) -> list[Item]:
    items: list[Item] = []
    for position, piece in enumerate(_PLACEHOLDER.split(text)):  # text, medium, text, medium, ..., text
        if position % 2:
            item = media.take(piece.lower(), turn)
            if item is not None:
                items.append(item)
        elif stripped := piece.strip():
            items.append({"type": "text", "text": stripped})
    return items


def _typed_parts(parts: list[Any], turn: str, media: ExampleMedia) -> list[Item]:
    items: list[Item] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            items.append({"type": "text", "text": part["text"]})
        elif kind in MEDIA_TYPES:
            value = part.get(kind)
            extras = {k: v for k, v in part.items() if k not in ("type", kind) and v is not None}
            item = media.take(kind, turn) if value is None else media.item(kind, value, turn)
            if item is not None:
                items.append({**item, **extras})
        else:
            media.mismatches.append(Mismatch("unknown_part", f"{turn} has the content part {show(part)}"))
    return items


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

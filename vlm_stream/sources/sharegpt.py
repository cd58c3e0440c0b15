"""One example becomes one conversation; what does not map is named, never lost in silence.

Enters: a JSON object or table row, and its form. Leaves: a conversation and the list of mismatches, of which a policy
makes an error or a note: `drop`, `keep` or `raise`. No files are opened here and no medium is looked at: paths stay
words.

The rules, where the formats leave a choice:

* `<image>`, `<video>`, `<audio>` (any case, no blanks inside) in user turns take the next medium of their column,
  counted over the whole example. Where the example has no such medium they are text, and so they are in other turns.
* System turns are kept. Turns of one role after each other stay separate turns. Empty user turns keep one empty text.
* Tool results map to the role `tool` once `tool_tag` says how they are called, calls of functions to `assistant` once
  `function_tag` does; without those tags they are unmapped roles.
* `"weight": 0` and `"train": false` of a turn travel along: it is not learned.
* One medium outside a list (a string, a dict) counts as a list of one; null and "" as an empty list.
* Content may also be a list of typed parts; a media part without a value takes the next medium of its column, or the
  one that its `index` names.
* A plain text is an answer to an empty user turn, because many chat templates insist on one.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, get_args

from vlm_stream.conversation import MEDIA_TYPES, Conversation, Item, Message
from vlm_stream.errors import BadSampleError, ConfigError, SourceError, nearest_name
from vlm_stream.sources.forms import ShareGptForm, as_turns, held_media, show
from vlm_stream.sources.record import join_media_path

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MISMATCHES_KEY",
    "PASSENGER_KEYS",
    "Mismatch",
    "OnMismatch",
    "apply_policy",
    "check_policy",
    "convert_example",
    "convert_sharegpt_to_conversation",
    "map_sharegpt",
]

OnMismatch: TypeAlias = Literal["drop", "keep", "raise"]

MISMATCHES_KEY: Final = "_mismatches"
"""Where `keep` notes what it left out: a list of `reason: sentence`."""
PASSENGER_KEYS: Final = ("mm_inputs_meta", "_text_tokens", "_media_tokens")
"""Fields that travel with a conversation, unread."""
_PART_TYPES: Final = {
    **{kind: (kind, kind) for kind in MEDIA_TYPES},
    **{f"{kind}_url": (kind, f"{kind}_url") for kind in MEDIA_TYPES},
    "input_image": ("image", "image_url"),
    "input_audio": ("audio", "input_audio"),
}
"""Type of a content part -> the medium, and the key that holds it."""


class Mismatch(NamedTuple):
    """One thing in an example that has no place in a conversation."""

    reason: str
    """Short stable code to count by."""
    fact: str
    """What was found, as the beginning of a sentence."""


def check_policy(on_mismatch: str) -> None:
    """Refuse a policy that does not exist."""
    if on_mismatch not in get_args(OnMismatch):
        raise ConfigError(
            f"on_mismatch is {on_mismatch!r}, which says nothing about bad samples; "
            f"{nearest_name(on_mismatch, get_args(OnMismatch))}"
        )


def apply_policy(
    conversation: Conversation, mismatches: list[Mismatch], on_mismatch: OnMismatch, where: str = ""
) -> list[str]:
    """Raise as the policy says, or return the notes of what is left out; nothing to keep is bad under every policy."""
    if not mismatches:
        return []
    if on_mismatch == "keep" and conversation:
        return [f"{reason}: {fact}" for reason, fact in mismatches]
    place = f"{where}: " if where else ""
    facts = "; ".join(fact for _, fact in mismatches)
    if on_mismatch == "raise":
        raise SourceError(
            f"{place}{facts}. The job ends here, as on_mismatch='raise' asks; mend the sample or use "
            "on_mismatch='drop'."
        )
    way_out = "mend it, or use on_mismatch='keep' for what does map" if conversation else "mend it"
    raise BadSampleError("convert", mismatches[0].reason, f"{place}{facts}. The sample is left out; {way_out}.")


def convert_sharegpt_to_conversation(
    example: Mapping[str, Any],
    columns: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    media_dir: str | None = None,
    on_mismatch: OnMismatch = "drop",
) -> dict[str, Any]:
    """Return `{"conversation": [...]}` with `mm_inputs_meta` and the token counts if the example has them.

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
    if not isinstance(example, dict):
        return [], [Mismatch("not_an_object", f"the record is {show(example)}, not a JSON object")]
    turns = _turns(example, form)
    if isinstance(turns, Mismatch):
        return [], [turns]
    media = ExampleMedia(example, form)
    conversation: Conversation = []
    for number, turn in enumerate(turns, 1):
        message = _message(turn, number, form, media)
        if isinstance(message, Mismatch):
            media.mismatches.append(message)
        else:
            conversation.append(message)
    media.place_rest(conversation)
    if not conversation and not media.mismatches:
        media.mismatches.append(Mismatch("empty_conversation", f"'{form.columns[0]}' has no turns"))
    return conversation, media.mismatches


def _turns(example: Mapping[str, Any], form: ShareGptForm) -> list[Any] | Mismatch:
    """Return the turns of an example of any form, with the form's own keys and roles."""

    def turn(role: str, content: object) -> dict[str, object]:
        return {form.role_tag: role, form.content_tag: content}

    for column in form.columns:
        if example.get(column) is None and column not in (form.input, form.system):
            state = "is null" if column in example else "is missing"
            found = ", ".join(sorted(map(str, example))) or "none"
            return Mismatch("no_messages", f"column '{column}' {state} (columns here: {found})")
    head = [turn(form.system_tag, example[form.system])] if form.system and example.get(form.system) else []
    if form.prompt is not None and form.completion is not None:
        prompt, completion = example[form.prompt], example[form.completion]
        extra = example.get(form.input) if form.input else None
        if isinstance(prompt, str) and extra:
            prompt = f"{prompt}\n{extra}"
        asked = prompt if isinstance(prompt, list) else [turn(form.user_tag, prompt)]
        told = completion if isinstance(completion, list) else [turn(form.assistant_tag, completion)]
        return [*head, *asked, *told]
    if form.text is not None:
        return [turn(form.user_tag, ""), turn(form.assistant_tag, example[form.text])]
    column = form.texts or form.messages
    turns = as_turns(example[column])
    if turns is None:
        return Mismatch("messages_not_a_list", f"'{column}' is {show(example[column])}, not a list of turns")
    if form.texts is None:
        return [*head, *turns]
    for pair in turns:
        if not isinstance(pair, dict):
            return Mismatch("turn_not_an_object", f"'{column}' has {show(pair)}, not an object")
        head += [turn(form.user_tag, pair.get("user")), turn(form.assistant_tag, pair.get("assistant"))]
    return head


def _message(turn: object, number: int, form: ShareGptForm, media: ExampleMedia) -> Message | Mismatch:
    """Return one turn, or why nothing of it can be used."""
    place = f"turn {number}"
    if not isinstance(turn, dict):
        return Mismatch("turn_not_an_object", f"{place} is {show(turn)}, not an object")
    if form.role_tag not in turn:
        keys = ", ".join(sorted(turn)) or "none"
        return Mismatch("no_role", f"{place} has no '{form.role_tag}' (keys: {keys})")
    value = turn[form.role_tag]
    role = form.roles.get(value) if isinstance(value, str) else None
    if role is None:
        known = ", ".join(sorted(form.roles))
        return Mismatch("unmapped_role", f"{place} has the role {show(value)}; mapped are {known}")
    content = turn.get(form.content_tag)
    place = f"{place} ({role})"
    if content is None:
        return Mismatch("null_content", f"{place} has no '{form.content_tag}'")
    if isinstance(content, str):
        takes_media = role == "user" or form.text is not None
        items = _split_placeholders(content, place, media) if takes_media else [{"type": "text", "text": content}]
    elif isinstance(content, list):
        items = _typed_parts(content, place, media)
    else:
        return Mismatch("content_not_text", f"{place} has {show(content)} for content, not text")
    return {"role": role, "content": items or [{"type": "text", "text": ""}], **_learned(turn, place, media)}


def _learned(turn: Mapping[str, Any], place: str, media: ExampleMedia) -> dict[str, Any]:
    """Return what a turn says of whether it is learned."""
    said: dict[str, Any] = {}
    for key, allowed in (("weight", (0, 1)), ("train", (True, False))):
        value = turn.get(key)
        if value is None:
            continue
        if isinstance(value, (int, float)) and value in allowed:
            said[key] = value
        else:
            media.note(f"bad_{key}", f"{place} has {show(value)} for '{key}', which is {allowed[0]} or {allowed[1]}")
    return said


@cache
def _placeholders(media: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(f"<({'|'.join(media)})>", re.IGNORECASE)


def _split_placeholders(text: str, turn: str, media: ExampleMedia) -> list[Item]:
    kinds = media.note_unread(text, turn)
    items: list[Item] = []
    for position, piece in enumerate(_placeholders(kinds).split(text) if kinds else [text]):  # text, medium, text, ...
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
        kind = _part_type(part)
        if kind.endswith("text") and isinstance(part.get("text"), str):
            items.append({"type": "text", "text": part["text"]})
        elif kind in _PART_TYPES:
            medium, key = _PART_TYPES[kind]
            extras = {k: v for k, v in part.items() if k not in ("type", "text", "index", key) and v is not None}
            value = part.get(key)
            if isinstance(value, dict) and "url" in value:
                extras |= {k: v for k, v in value.items() if k != "url" and v is not None}
                value = value["url"]
            elif kind == "input_audio" and isinstance(value, dict):
                value = f"data:audio/{value.get('format') or 'wav'};base64,{value.get('data')}"
            index = part.get("index") if isinstance(part.get("index"), int) else None
            item = media.take(medium, turn, index) if value is None else media.item(medium, value, turn)
            if item is not None:
                items.append({**item, **extras})
        else:
            media.note("unknown_part", f"{turn} has the content part {show(part)}")
    return items


def _part_type(part: Any) -> str:
    """Return the type of a content part; one without a type is of the kind of the one thing that it holds."""
    if not isinstance(part, dict):
        return ""
    kind = part.get("type")
    if kind is None:
        held = [key for key in ("text", *_PART_TYPES) if part.get(key) is not None]
        kind = held[0] if len(held) == 1 else ""
    return kind if isinstance(kind, str) and kind in ("text", "input_text", "output_text", *_PART_TYPES) else ""


class ExampleMedia:
    """The media of one example, taken in order by the placeholders of its turns; and what does not map."""

    def __init__(self, example: Mapping[str, Any], form: ShareGptForm) -> None:
        self.form = form
        self.example = example
        self.mismatches: list[Mismatch] = []
        self.names = {"image": form.images, "video": form.videos, "audio": form.audios}
        self.entries = {medium: self._column(example.get(name), name) for medium, name in self.names.items()}
        self.num_shown = dict.fromkeys(MEDIA_TYPES, 0)

    def note(self, reason: str, fact: str) -> None:
        """Note what does not map."""
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
        return self.item(medium, entries[number], f"'{self.names[medium]}' number {number + 1}")

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

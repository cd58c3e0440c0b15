"""One example becomes one conversation; what does not map is named, never lost in silence.

Enters: a JSON object or table row, and its form. Leaves: a conversation and the list of mismatches, of which a policy
makes an error or a note: `drop`, `keep` or `raise`. No files are opened here and no medium is looked at: paths stay
words.

The rules, where the formats leave a choice:

* `<image>`, `<video>`, `<audio>` (any case, no blanks inside) in user turns take the next medium of their column,
  counted over the whole example. Where the example has no such medium they are text, and so they are in other turns.
* `<img>path</img>` and `<audio>path</audio>` in user turns are media where no column has such; `<image>` is a video
  where the example has videos, no images, and no `<video>` (LLaVA-Video).
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
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, Literal, TypeAlias, get_args

from vlm_stream.conversation import Conversation, Item, Message
from vlm_stream.errors import BadSampleError, ConfigError, SourceError, nearest_name
from vlm_stream.sources.example_media import ExampleMedia, Mismatch
from vlm_stream.sources.forms import ShareGptForm, show
from vlm_stream.sources.known_forms import INLINE, INLINE_KINDS, PART_TYPES, as_turns

OnMismatch: TypeAlias = Literal["drop", "keep", "raise"]

MISMATCHES_KEY: Final = "_mismatches"  # where `keep` notes what it left out: a list of `reason: sentence`
PASSENGER_KEYS: Final = ("mm_inputs_meta", "_text_tokens", "_media_tokens")
"""Fields that travel with a conversation, unread."""


def check_policy(on_mismatch: str) -> None:
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
    way_out = "mend it, or keep what does map with --on-mismatch keep" if conversation else "mend it"
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
    """Return the conversation of a record, and what of it does not fit."""
    if not isinstance(example, dict):
        return [], [Mismatch("not_an_object", f"the record is {show(example)}, not a JSON object")]
    turns = _turns(example, form)
    if isinstance(turns, Mismatch):
        return [], [turns]
    media = ExampleMedia(example, form, turns)
    if example.get("tools") and "tools" not in form.columns:
        media.note(
            "unread_tools", "'tools' has functions, and nothing shows them to the model (--columns system=tools)"
        )
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
        if example.get(column) is None and column not in (form.input, form.history, form.system):
            state = "is null" if column in example else "is missing"
            found = ", ".join(sorted(map(str, example))) or "none"
            return Mismatch("no_messages", f"column '{column}' {state} (columns here: {found})")
    head = [turn(form.system_tag, example[form.system])] if form.system and example.get(form.system) else []
    if form.prompt is not None and form.completion is not None:
        prompt, completion = example[form.prompt], example[form.completion]
        extra = example.get(form.input) if form.input else None
        for pair in (example.get(form.history) or ()) if form.history else ():
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                return Mismatch("bad_history", f"'{form.history}' has {show(pair)}, not a question and its answer")
            head += [turn(form.user_tag, pair[0]), turn(form.assistant_tag, pair[1])]
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
        head += [turn(tag, pair.get(tag)) for tag in (form.user_tag, form.assistant_tag)]
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
    if turn.get("tool_calls"):
        media.note(
            "unread_tools", f"{place} has 'tool_calls', which nothing reads; write them into '{form.content_tag}'"
        )
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
    items: list[Item | None] = []
    tag = ""
    for position, piece in enumerate(INLINE.split(text)):  # text, tag, path, text, ...
        if position % 3 == 1:
            tag = piece.lower()
        elif position % 3 == 2 and INLINE_KINDS[tag] not in kinds:
            items.append(media.item(INLINE_KINDS[tag], piece.strip(), turn))
        else:
            if position % 3:
                piece = f"<{tag}>{piece}</{tag}>"
            items += _split_shown(piece, kinds, turn, media)
    return [item for item in items if item is not None]


def _split_shown(text: str, kinds: tuple[str, ...], turn: str, media: ExampleMedia) -> Iterator[Item | None]:
    """Yield the text between placeholders, and what they show."""
    shown = {"image" if kind == "video" and media.image_is_video else kind: kind for kind in kinds}
    for position, piece in enumerate(_placeholders(tuple(shown)).split(text) if shown else [text]):
        if position % 2:  # text, medium, text, ...
            yield media.take(shown[piece.lower()], turn)
        elif stripped := piece.strip():
            yield {"type": "text", "text": stripped}


def _typed_parts(parts: list[Any], turn: str, media: ExampleMedia) -> list[Item]:
    items: list[Item] = []
    for part in parts:
        kind = _part_type(part)
        if kind.endswith("text") and isinstance(part.get("text"), str):
            items.append({"type": "text", "text": part["text"]})
        elif kind in PART_TYPES:
            medium, key = PART_TYPES[kind]
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
        held = [key for key in ("text", *PART_TYPES) if part.get(key) is not None]
        kind = held[0] if len(held) == 1 else ""
    return kind if isinstance(kind, str) and kind in ("text", "input_text", "output_text", *PART_TYPES) else ""

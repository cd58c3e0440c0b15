"""The forms that datasets have: how to tell each from its columns, how its turns are called; what is said if none fits.

Enters: the first records. Leaves: their turns; or a sentence with their keys and the flags that would read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vlm_stream.conversation import MEDIA_TYPES

MEDIA_NAMES: Final = {
    "images": ("images", "image", "image_path", "image_paths", "img", "image_url"),
    "videos": ("videos", "video", "video_path", "video_paths"),
    "audios": ("audios", "audio", "audio_path", "audio_paths", "sound"),
}
"""How datasets call their media, by our name of the column."""
ROLE_NAMES: Final = {
    "user_tag": ("user", "human", "prompter"),
    "assistant_tag": ("assistant", "gpt", "model", "bot", "chatgpt", "ai"),
    "system_tag": ("system",),
    "tool_tag": ("tool", "observation", "function_response"),
}
"""Other words for the roles, in lower case."""
_NO_TEXT: Final = ("id", "source", *sum(MEDIA_NAMES.values(), ()))
_ASKS: Final = ("q", "question", "prompt", "query", "instruction", "problem", "input", *ROLE_NAMES["user_tag"])
_ANSWERS: Final = ("a", "answer", "completion", "output", "reply", "response", "solution", *ROLE_NAMES["assistant_tag"])
"""Words in names of columns, in lower case."""
INLINE: Final = re.compile(r"<(img|audio)>([^<>\n]+)</\1>", re.IGNORECASE)
"""Media that the text itself names, as in the data of the first Qwen-VL and Qwen-Audio."""
INLINE_KINDS: Final = {"img": "image", "audio": "audio"}
PART_TYPES: Final = {
    **{kind: (kind, kind) for kind in MEDIA_TYPES},
    **{f"{kind}_url": (kind, f"{kind}_url") for kind in MEDIA_TYPES},
    "input_image": ("image", "image_url"),
    "input_audio": ("audio", "input_audio"),
}
"""Type of a content part -> the medium, and the key that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownForm:
    """A form that a file may have: how to tell it, and what `columns` and `tags` would say of it."""

    title: str
    columns: dict[str, str]
    """With the columns that make the form: a record fits that has them."""
    tags: dict[str, str] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    """One of them must be seen: a column, or `<type>` of a content part (`<type=>`: with a value of its own)."""
    media_first: bool = False


_FROM: Final = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "tool_tag": "observation", "function_tag": "function_call",
}  # fmt: skip
_ROLE: Final = {"role_tag": "role", "content_tag": "content", "tool_tag": "tool"}
_OPENAI: Final = ("<image_url>", "<input_audio>", "<input_image>", "<input_text>", "<video_url>", "<audio_url>")


def _chat(title: str, column: str, tags: dict[str, str], *marks: str, media_first: bool = False) -> KnownForm:
    return KnownForm(title=title, columns={"messages": column}, tags=tags, marks=marks, media_first=media_first)


def _pair(prompt: str, completion: str, title: str = "prompt and completion") -> KnownForm:
    return KnownForm(title=title, columns={"prompt": prompt, "completion": completion}, media_first=True)


def _pairs(column: str) -> KnownForm:
    return KnownForm(title="pairs of turns", columns={"texts": column}, tags={"user_tag": "human"}, media_first=True)


FORMS: Final = (
    _chat("InternVL conversations", "conversations", _FROM, "width_list", "height_list", "width", media_first=True),
    _chat("LLaVA conversations", "conversations", _FROM, "image", "video"),
    _chat("ShareGPT conversations", "conversations", _FROM),
    _chat("ShareGPT conversations", "messages", _FROM),
    _chat("ShareGPT conversations", "conversation", _FROM),
    _chat("OpenAI messages", "messages", _ROLE, *_OPENAI),
    _chat("Qwen messages", "messages", _ROLE, "<image=>", "<video=>", "<audio=>"),
    _chat("chat messages", "messages", _ROLE),
    _chat("chat messages", "conversations", _ROLE),
    _chat("chat messages", "conversation", _ROLE),
    KnownForm(title="Cauldron texts", columns={"texts": "texts"}, media_first=True),
    _pairs("conversation"),
    _pairs("conversations"),
    _pair("prompt", "completion"),
    _pair("prompt", "response"),
    _pair("query", "response"),
    _pair("problem", "solution"),
    _pair("instruction", "output", "instruction and output"),
    _pair("instruction", "response", "instruction and response"),
    _pair("question", "answer", "question and answer"),
    KnownForm(title="plain text", columns={"text": "text"}, media_first=True),
    KnownForm(title="captions", columns={"text": "caption"}, marks=sum(MEDIA_NAMES.values(), ()), media_first=True),
)
"""The first that fits, of those with the same columns and tags. Plain text fits only where nothing else does: datasets
keep a rendered copy in such a column."""


def as_turns(value: object) -> list[Any] | None:
    """Return a list of objects that stands there as a list, as its JSON text, or as one list for each key."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, dict) and value and all(isinstance(part, list) for part in value.values()):
        if len({len(part) for part in value.values()}) == 1:
            return [dict(zip(value, entry, strict=True)) for entry in zip(*value.values(), strict=True)]
        return None
    return value if isinstance(value, list) else None


def turns_of(row: Mapping[str, Any], column: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a column of turns."""
    for turn in as_turns(row.get(column)) or ():
        if isinstance(turn, dict):
            yield turn


def keys_of(row: Mapping[str, Any]) -> str:
    """Return the keys of a record for a sentence."""
    return ", ".join(sorted(map(str, row))) or "none"


def flags_for(columns: Mapping[str, str], tags: Mapping[str, str]) -> str:
    """Return the flags of `vlm-stream make-shards` that say so."""
    text = "--columns " + ",".join(f"{key}={value}" for key, value in columns.items())
    return text + (" --tags " + ",".join(f"{key}={value}" for key, value in tags.items()) if tags else "")


def none_fits(rows: Sequence[dict[str, Any]]) -> str:
    """Return the sentence for a file of no known form, with flags made of its first records."""
    has_turns = [name for name in rows[0] if any(turns_of(rows[0], name)) and name not in _NO_TEXT]
    flags = next((found for name in has_turns if (found := _turn_flags(rows, name))), "")
    flags = flags or _column_flags(rows[0])
    way = "No column holds turns or text: look at the file"
    if flags:
        way = f"Say what they hold, for example with {flags}"
    elif asks := [key for key in rows[0] if _is_word(key, _ASKS)]:
        way = f"'{asks[0]}' asks, and no column has its answer as a text: write the one to be learned into one"
    return (
        f"the first record has the keys {keys_of(rows[0])}, which is no known form, so nothing can be learned. {way}."
    )


def _turn_flags(rows: Sequence[dict[str, Any]], column: str) -> str:
    """Return the flags that read a column of turns, or of pairs; empty: it holds neither."""
    turns = [turn for row in rows for turn in turns_of(row, column)]
    texts = [key for key, value in turns[0].items() if isinstance(value, str)]
    if len(texts) < 2:
        return ""
    by_length = sorted(texts, key=lambda key: sum(len(turn[key]) for turn in turns if isinstance(turn.get(key), str)))
    role, content = by_length[0], by_length[-1]
    are_pairs = any(_is_word(key, (*_ASKS, *_ANSWERS)) for key in (role, content))
    words = _words(turn.get(role) for turn in turns)
    if words and not are_pairs:
        is_known = any(word.lower() in sum(ROLE_NAMES.values(), ()) for word in words)
        if not is_known and len(set(words)) == len(words):
            return ""  # too few to tell roles from answers of one word
        roles = dict(zip(("user_tag", "assistant_tag"), dict.fromkeys(words), strict=False))
        return flags_for({"messages": column}, {"role_tag": role, "content_tag": content, **roles})
    if len(texts) > 2:
        return ""
    asked, told = sorted(texts, key=lambda key: _is_word(key, _ANSWERS))
    return flags_for({"texts": column}, {"user_tag": asked, "assistant_tag": told})


def _words(values: Iterable[Any]) -> list[str]:
    """Return the values if each is a single word, as roles are."""
    found = list(values)
    return found if all(isinstance(value, str) and len(value.split()) == 1 for value in found) else []


def _column_flags(row: Mapping[str, Any]) -> str:
    """Return the flags that read columns of text; empty: none would be learned, or only what is asked."""
    texts = [key for key, value in row.items() if isinstance(value, str) and key not in _NO_TEXT]
    asks = [key for key in texts if _is_word(key, _ASKS)]
    answers = [key for key in texts if _is_word(key, _ANSWERS) and key not in asks]
    if asks:
        return flags_for({"prompt": asks[0], "completion": answers[0]}, {}) if answers else ""
    if len(texts) > 1:
        return flags_for({"prompt": texts[0], "completion": texts[1]}, {})
    return flags_for({"text": texts[0]}, {}) if texts else ""


def _is_word(key: str, words: Sequence[str]) -> bool:
    return key.lower().rstrip("s") in words or key.lower().rpartition("_")[2] in words

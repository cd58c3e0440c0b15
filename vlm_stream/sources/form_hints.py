"""What is said of a file of no known form: its keys, and the flags that would read it.

Enters: the first records. Leaves: a sentence. Nothing is recognised here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from vlm_stream.sources.known_forms import MEDIA_NAMES, ROLE_NAMES

_NO_TEXT: Final = ("id", "source", *sum(MEDIA_NAMES.values(), ()))
_ASKS: Final = ("q", "question", "prompt", "query", "instruction", "problem", "input", *ROLE_NAMES["user_tag"])
_ANSWERS: Final = ("a", "answer", "completion", "output", "reply", "response", "solution", *ROLE_NAMES["assistant_tag"])
"""Words in names of columns, in lower case."""


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

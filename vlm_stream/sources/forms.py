"""How datasets call their columns and roles: the form of a record, the known forms, and which of them a file has.

Enters: the first records of a file, and what the user says of it. Leaves: a `ShareGptForm`, which says everything that
maps a record, and one line for people. Nothing is opened here, and no record is mapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

from vlm_stream.conversation import MEDIA_TYPES
from vlm_stream.errors import SourceError, nearest_name
from vlm_stream.sources.known_forms import (
    FORMS,
    INLINE,
    INLINE_KINDS,
    MEDIA_NAMES,
    PART_TYPES,
    ROLE_NAMES,
    KnownForm,
    flags_for,
    keys_of,
    none_fits,
    turns_of,
)

_MAIN: Final[tuple[str, ...]] = ("messages", "prompt", "texts", "text")
"""The columns of which one holds the words: turns, a question, pairs of turns, or a text."""
_COLUMN_KEYS: Final = (*_MAIN, "completion", "input", "history", "system", *MEDIA_NAMES, "start", "end")
_TAG_KEYS: Final = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag", "tool_tag", "function_tag")


def show(value: object) -> str:
    """Return a short form of a value for a sentence."""
    try:
        text = "null" if value is None else repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} nested too deeply to be shown"
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGptForm:
    """How a dataset calls its columns and roles, and where its media lie."""

    messages: str = "messages"
    """Column of the turns; not read where one of the next six is given."""
    prompt: str | None = None
    """Column of a question, or of the turns before the answer."""
    completion: str | None = None
    """Column of its answer."""
    input: str | None = None
    """Column of a text that goes after the prompt."""
    history: str | None = None
    """Column of pairs `[question, answer]` that go before the prompt."""
    texts: str | None = None
    """Column of pairs `{"user": ..., "assistant": ...}`; their keys are `user_tag` and `assistant_tag`."""
    text: str | None = None
    """Column of plain text, which is learned."""
    system: str | None = None
    """Column of a system prompt."""
    images: str = "images"
    videos: str = "videos"
    audios: str = "audios"
    start: str = "start"
    """Column of the second where a record's videos and sounds begin: a number for all, or a list of them."""
    end: str = "end"
    """Column of the second where they end."""
    role_tag: str = "role"
    """Key of a message's role."""
    content_tag: str = "content"
    """Key of a message's text."""
    user_tag: str = "user"
    """Role value of user turns; `assistant_tag` and `system_tag` alike."""
    assistant_tag: str = "assistant"
    system_tag: str = "system"
    tool_tag: str | None = None
    """Role value of tool results ("tool", "observation"); None: such turns are unmapped."""
    function_tag: str | None = None
    """Role value of function calls, which are assistant turns; None: such turns are unmapped."""
    media_first: bool = False
    """Media of a kind that no placeholder shows stand before the first user text; False: the record is bad."""
    media_dir: str | None = None
    """Folder or URL that relative media paths are joined to."""
    roles: dict[str, str] = field(init=False, repr=False, compare=False)
    """Role value -> role, from the tags."""

    def __post_init__(self) -> None:
        """Derive the roles; where two tags are equal, the earlier of user, assistant, system wins."""
        if (self.prompt is None) != (self.completion is None):
            raise SourceError("'prompt' and 'completion' belong together; name both columns.")
        named = (
            (self.function_tag, "assistant"),
            (self.tool_tag, "tool"),
            (self.system_tag, "system"),
            (self.assistant_tag, "assistant"),
            (self.user_tag, "user"),
        )
        object.__setattr__(self, "roles", {"developer": "system"} | {tag: role for tag, role in named if tag})

    @classmethod
    def from_dicts(
        cls,
        columns: Mapping[str, str] | None,
        tags: Mapping[str, str] | None,
        media_dir: str | None = None,
        media_first: bool = False,
    ) -> ShareGptForm:
        """Read the two mappings of a meta file; an unknown key raises `SourceError` with the nearest known one."""
        for what, given, allowed in (("columns", columns, _COLUMN_KEYS), ("tags", tags, _TAG_KEYS)):
            for key, value in (given or {}).items():
                if key not in allowed:
                    raise SourceError(
                        f"'{key}' is no key of '{what}', so nothing would read it; {nearest_name(key, allowed)}"
                    )
                if not isinstance(value, str):
                    raise SourceError(f"'{key}' in '{what}' is {show(value)}, so it names no field; write a string.")
        return cls(**{**(columns or {}), **(tags or {})}, media_dir=media_dir or None, media_first=media_first)

    def to_dicts(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the two mappings of which `from_dicts` makes this form: what differs from the usual names."""
        said = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        said = {name: value for name, value in said.items() if value != getattr(_USUAL, name)}
        columns, tags = ({key: said[key] for key in keys if key in said} for keys in (_COLUMN_KEYS, _TAG_KEYS))
        return columns, tags

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that are read, without media."""
        if self.prompt is not None or self.texts is not None or self.text is not None:
            named = (self.prompt, self.completion, self.input, self.history, self.texts, self.text, self.system)
            return tuple(name for name in named if name is not None)
        return (self.messages, *((self.system,) if self.system else ()))


_USUAL: Final = ShareGptForm()


class Recognised(NamedTuple):
    """What was found."""

    form: ShareGptForm
    line: str  # for people: `LLaVA conversations, images in 'image'`


def recognise(
    records: Sequence[Any],
    columns: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    *,
    media_dir: str | None = None,
    media_first: bool | None = None,
) -> Recognised | None:
    """Return the form of a file from its first records; what the user says of columns and tags wins.

    None when the records say nothing: there are none, or not one of them is an object with turns.
    """
    ShareGptForm.from_dicts(columns, tags)  # refuses unknown keys
    columns, tags = dict(columns or {}), dict(tags or {})
    rows = [record for record in records if isinstance(record, dict)]
    given: dict[str, str] = {key: columns[key] for key in (*_MAIN, "completion") if key in columns}
    fitting = _fitting(rows, given, tags)
    chosen = _choose(fitting, rows)
    if chosen is None:
        if not rows or given or any(key in row for row in rows for key in ("messages", "conversations")):
            return None  # nothing to tell by; or turns without content, each of which is named when it is read
        raise SourceError(none_fits(rows))
    known = {**_media_columns(rows, columns), **_more_columns(rows, chosen), **chosen.columns, **columns}
    roles = {**chosen.tags, **_role_tags(rows, {**chosen.tags, **tags}, known), **tags}
    first = chosen.media_first if media_first is None else media_first
    form = ShareGptForm.from_dicts(known, roles, media_dir, first)
    return Recognised(form, _describe(chosen, form, rows))


def _fitting(rows: Sequence[dict[str, Any]], given: dict[str, str], tags: dict[str, str]) -> list[KnownForm]:
    """Return the forms that rows have, with what the user says in its place; of the same columns and keys the first."""
    seen = frozenset(_marks(rows))
    fitting: dict[tuple[object, ...], KnownForm] = {}
    for known in FORMS:
        if given and given.keys() != known.columns.keys():
            continue
        form = replace(known, columns=given or known.columns, tags={**known.tags, **tags})
        keys = ("role_tag", "content_tag") if "messages" in form.columns else ()
        shape = (*form.columns.items(), *(form.tags[key] for key in keys))
        is_marked = not form.marks or not seen.isdisjoint(form.marks)
        if shape not in fitting and is_marked and any(_fits(row, form) for row in rows):
            fitting[shape] = form
    return list(fitting.values())


def _choose(fitting: list[KnownForm], rows: Sequence[dict[str, Any]]) -> KnownForm | None:
    if len(fitting) > 1:
        fitting = [form for form in fitting if "text" not in form.columns] or fitting
    if len(fitting) > 1:
        flags = " or ".join(
            flags_for(form.columns, form.tags if "messages" in form.columns else {}) for form in fitting
        )
        raise SourceError(
            f"the first records fit {len(fitting)} forms ({', '.join(form.title for form in fitting)}), so it is not "
            f"known which columns to learn; the first one has the keys {keys_of(rows[0])}. Choose with {flags}."
        )
    return fitting[0] if fitting else None


def _fits(row: dict[str, Any], form: KnownForm) -> bool:
    if "messages" in form.columns:
        turn = next(turns_of(row, form.columns["messages"]), {})
        return form.tags["role_tag"] in turn and form.tags["content_tag"] in turn
    if "texts" in form.columns:
        keys = {form.tags.get("user_tag", _USUAL.user_tag), form.tags.get("assistant_tag", _USUAL.assistant_tag)}
        return keys <= next(turns_of(row, form.columns["texts"]), {}).keys()
    values = [row.get(form.columns[key]) for key in form.columns]
    return all(isinstance(value, (str, list) if len(values) > 1 else str) for value in values)


def _marks(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the columns that hold something, and the types of content parts."""
    for row in rows:
        yield from (key for key, value in row.items() if value not in (None, "", []))
        for turn in (*turns_of(row, "conversations"), *turns_of(row, "messages")):
            tags = {tag.lower() for text in turn.values() if isinstance(text, str) for tag, _ in INLINE.findall(text)}
            yield from (f"<{INLINE_KINDS[tag]}s>" for tag in tags)
            for part in turn["content"] if isinstance(turn.get("content"), list) else ():
                if isinstance(part, dict) and isinstance(kind := part.get("type"), str):
                    yield f"<{kind}>"
                    if part.get(kind) is not None:
                        yield f"<{kind}=>"


def held_media(row: Mapping[str, Any], column: str) -> str | None:
    """Return the name under which a record has media of a column (`images`), among the usual names."""
    return next((name for name in MEDIA_NAMES[column] if _is_medium(row.get(name))), None)


def _is_medium(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_medium, value))
    if isinstance(value, dict):
        return any(value.get(key) for key in ("path", "bytes", *MEDIA_TYPES))
    return isinstance(value, (str, bytes)) and bool(value)


def _media_columns(rows: Sequence[dict[str, Any]], given: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for column, names in MEDIA_NAMES.items():
        held = [name for name in names if any(_is_medium(row.get(name)) for row in rows)]
        held = [name for name in held if name != "image_url"] or held  # it often tells where the image came from
        if len(held) > 1 and column not in given:
            flags = " or ".join(f"--columns {column}={name}" for name in held)
            raise SourceError(
                f"{column} are in {' and '.join(map(repr, held))}, and one column is read; the first record has the "
                f"keys {keys_of(rows[0])}. Choose with {flags}."
            )
        if held:
            found[column] = held[0]
    return found


def _more_columns(rows: Sequence[dict[str, Any]], chosen: KnownForm) -> dict[str, str]:
    """Return columns that some forms have besides: the input of an instruction, earlier pairs, a system prompt."""
    found = {}
    if chosen.columns.get("prompt") == "instruction" and any(isinstance(row.get("input"), str) for row in rows):
        found["input"] = "input"
    if "prompt" in chosen.columns and any(isinstance(row.get("history"), list) for row in rows):
        found["history"] = "history"
    if "text" not in chosen.columns and any(isinstance(row.get("system"), str) for row in rows):
        found["system"] = "system"
    return found


def _role_tags(rows: Sequence[dict[str, Any]], tags: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the roles as the turns call them, where they use another usual word."""
    names = [columns[key] for key in ("messages", "prompt", "completion") if key in columns]
    turns = [turn for row in rows for name in names for turn in turns_of(row, name)]
    seen = Counter(role for turn in turns if isinstance(role := turn.get(tags.get("role_tag", "role")), str))
    defaults = {item.name: item.default for item in fields(ShareGptForm)}
    found = {}
    for tag, words in ROLE_NAMES.items():
        used = [role for role, _ in seen.most_common() if role.lower() in words]
        if used and tags.get(tag, defaults[tag]) not in used:
            found[tag] = used[0]
    return found


def _describe(chosen: KnownForm, form: ShareGptForm, rows: Sequence[dict[str, Any]]) -> str:
    parts = [chosen.title]
    if form.prompt is not None:
        parts += [f"prompt in '{form.prompt}'", f"completion in '{form.completion}'"]
    elif form.text is not None:
        parts = [f"{chosen.title} in '{form.text}'"]
    elif form.texts is None and form.messages not in ("messages", "conversations"):
        parts = [f"{chosen.title} in '{form.messages}'"]
    seen = set(_marks(rows))
    for medium in MEDIA_TYPES:
        column = f"{medium}s"
        name = getattr(form, column)
        if any(_is_medium(row.get(name)) for row in rows):
            parts.append(f"{column} in '{name}'")
        elif f"<{column}>" in seen:
            parts.append(f"{column} in the text")
        elif any(f"<{kind}>" in seen for kind, (shown, _) in PART_TYPES.items() if shown == medium):
            parts.append(f"{column} in content parts")
    return ", ".join(parts)

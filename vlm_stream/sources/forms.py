"""How datasets call their columns and roles: the form of a record, the known forms, and which of them a file has.

Enters: the first records of a file, and what the user says of it. Leaves: a `ShareGptForm`, which says everything that
maps a record, and one line for people. Nothing is opened here, and no record is mapped.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vlm_stream.errors import SourceError, nearest_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["FORMS", "KnownForm", "Recognised", "ShareGptForm", "as_turns", "held_media", "recognise", "show"]

_MAIN: Final[tuple[str, ...]] = ("messages", "prompt", "texts", "text")
"""The columns of which one holds the words: turns, a question, pairs of turns, or a text."""
MEDIA_NAMES: Final = {
    "images": ("images", "image", "image_path", "image_paths", "img"),
    "videos": ("videos", "video", "video_path", "video_paths"),
    "audios": ("audios", "audio", "audio_path", "audio_paths", "sound"),
}
"""How datasets call their media, by our name of the column."""
_COLUMN_KEYS: Final = (*_MAIN, "completion", "input", "system", *MEDIA_NAMES)
_TAG_KEYS: Final = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag", "tool_tag", "function_tag")
_ROLE_NAMES: Final = {
    "user_tag": ("user", "human", "prompter"),
    "assistant_tag": ("assistant", "gpt", "model", "bot", "chatgpt", "ai"),
    "system_tag": ("system",),
    "tool_tag": ("tool", "observation", "function_response"),
}
"""Other words for the roles, in lower case."""


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
    """Column of the turns; not read where one of the next five is given."""
    prompt: str | None = None
    """Column of a question, or of the turns before the answer."""
    completion: str | None = None
    """Column of its answer."""
    input: str | None = None
    """Column of a text that goes after the prompt."""
    texts: str | None = None
    """Column of pairs `{"user": ..., "assistant": ...}`."""
    text: str | None = None
    """Column of plain text, which is learned."""
    system: str | None = None
    """Column of a system prompt."""
    images: str = "images"
    videos: str = "videos"
    audios: str = "audios"
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
        object.__setattr__(self, "roles", {tag: role for tag, role in named if tag is not None})

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

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that are read, without media."""
        if self.prompt is not None or self.texts is not None or self.text is not None:
            named = (self.prompt, self.completion, self.input, self.texts, self.text, self.system)
            return tuple(name for name in named if name is not None)
        return (self.messages, *((self.system,) if self.system else ()))


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
    _pair("prompt", "completion"),
    _pair("prompt", "response"),
    _pair("query", "response"),
    _pair("problem", "solution"),
    _pair("instruction", "output", "instruction and output"),
    _pair("instruction", "response", "instruction and response"),
    _pair("question", "answer", "question and answer"),
    KnownForm(title="plain text", columns={"text": "text"}, media_first=True),
)
"""The first that fits, of those with the same columns and tags. Plain text fits only where nothing else does: datasets
keep a rendered copy in such a column."""


class Recognised(NamedTuple):
    """What was found."""

    form: ShareGptForm
    line: str
    """For people: `LLaVA conversations, images in 'image'`."""


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

    Raises:
        SourceError: No form fits, or two do; with the flags that help.
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
        raise SourceError(_none_fits(rows[0]))
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
        shape = (*form.columns.items(), *(form.tags[key] for key in ("role_tag", "content_tag") if known.tags))
        is_marked = not form.marks or not seen.isdisjoint(form.marks)
        if shape not in fitting and is_marked and any(_fits(row, form) for row in rows):
            fitting[shape] = form
    return list(fitting.values())


def _choose(fitting: list[KnownForm], rows: Sequence[dict[str, Any]]) -> KnownForm | None:
    if len(fitting) > 1:
        fitting = [form for form in fitting if "text" not in form.columns]
    if len(fitting) > 1:
        flags = " or ".join(_flags(form.columns, form.tags if "messages" in form.columns else {}) for form in fitting)
        raise SourceError(
            f"the first records fit {len(fitting)} forms ({', '.join(form.title for form in fitting)}), so it is not "
            f"known which columns to learn; the first one has the keys {_keys(rows[0])}. Choose with {flags}."
        )
    return fitting[0] if fitting else None


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


def _fits(row: dict[str, Any], form: KnownForm) -> bool:
    if "messages" in form.columns:
        turn = next(_turns(row, form.columns["messages"]), {})
        return form.tags["role_tag"] in turn and form.tags["content_tag"] in turn
    if "texts" in form.columns:
        return {"user", "assistant"} <= next(_turns(row, form.columns["texts"]), {}).keys()
    values = [row.get(form.columns[key]) for key in form.columns]
    return all(isinstance(value, (str, list) if len(values) > 1 else str) for value in values)


def _turns(row: dict[str, Any], column: str) -> Iterator[dict[str, Any]]:
    for turn in as_turns(row.get(column)) or ():
        if isinstance(turn, dict):
            yield turn


def _marks(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the columns that hold something, and the types of content parts."""
    for row in rows:
        yield from (key for key, value in row.items() if value not in (None, "", []))
        for turn in _turns(row, "messages"):
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
        return bool(value.get("path") or value.get("bytes"))
    return isinstance(value, (str, bytes)) and bool(value)


def _media_columns(rows: Sequence[dict[str, Any]], given: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for column, names in MEDIA_NAMES.items():
        held = [name for name in names if any(_is_medium(row.get(name)) for row in rows)]
        if len(held) > 1 and column not in given:
            flags = " or ".join(f"--columns {column}={name}" for name in held)
            raise SourceError(
                f"{column} are in {' and '.join(map(repr, held))}, and one column is read; the first record has the "
                f"keys {_keys(rows[0])}. Choose with {flags}."
            )
        if held:
            found[column] = held[0]
    return found


def _more_columns(rows: Sequence[dict[str, Any]], chosen: KnownForm) -> dict[str, str]:
    """Return columns that some forms have besides: the input of an instruction, a system prompt."""
    found = {}
    if chosen.columns.get("prompt") == "instruction" and any(isinstance(row.get("input"), str) for row in rows):
        found["input"] = "input"
    if "text" not in chosen.columns and any(isinstance(row.get("system"), str) for row in rows):
        found["system"] = "system"
    return found


def _role_tags(rows: Sequence[dict[str, Any]], tags: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the roles as the turns call them, where they use another usual word."""
    names = [columns[key] for key in ("messages", "prompt", "completion") if key in columns]
    turns = [turn for row in rows for name in names for turn in _turns(row, name)]
    seen = Counter(role for turn in turns if isinstance(role := turn.get(tags.get("role_tag", "role")), str))
    defaults = {item.name: item.default for item in fields(ShareGptForm)}
    found = {}
    for tag, words in _ROLE_NAMES.items():
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
    for column, kinds in (("images", ("image", "image_url", "input_image")), ("videos", ("video", "video_url")),
                          ("audios", ("audio", "audio_url", "input_audio"))):  # fmt: skip
        name = getattr(form, column)
        if any(_is_medium(row.get(name)) for row in rows):
            parts.append(f"{column} in '{name}'")
        elif any(f"<{kind}>" in seen for kind in kinds):
            parts.append(f"{column} in content parts")
    return ", ".join(parts)


def _keys(row: dict[str, Any]) -> str:
    return ", ".join(sorted(map(str, row))) or "none"


def _flags(columns: Mapping[str, str], tags: Mapping[str, str]) -> str:
    """Return the flags of `vlm-stream make-shards` that say so."""
    text = "--columns " + ",".join(f"{key}={value}" for key, value in columns.items())
    return text + (" --tags " + ",".join(f"{key}={value}" for key, value in tags.items()) if tags else "")


def _none_fits(row: dict[str, Any]) -> str:
    """Return the sentence for a file of no known form, with flags made of its first record."""
    flags = ""
    for name in row:
        turn = next(_turns(row, name), {})
        texts = sorted((key for key, value in turn.items() if isinstance(value, str)), key=lambda key: len(turn[key]))
        if len(texts) > 1:
            role, content = texts[0], texts[-1]
            names = list(dict.fromkeys(str(turn.get(role)) for turn in _turns(row, name)))
            roles = dict(zip(("user_tag", "assistant_tag"), names, strict=False))
            flags = _flags({"messages": name}, {"role_tag": role, "content_tag": content, **roles})
            break
    if not flags:
        texts = [key for key, value in row.items() if isinstance(value, str) and key not in ("id", "source")]
        if len(texts) > 1:
            flags = _flags({"prompt": texts[0], "completion": texts[1]}, {})
        elif texts:
            flags = _flags({"text": texts[0]}, {})
    way = (
        f"Say what they hold, for example with {flags}" if flags else "No column holds turns or text: look at the file"
    )
    return f"the first record has the keys {_keys(row)}, which is no known form, so nothing can be learned. {way}."

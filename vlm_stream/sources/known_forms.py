"""The forms that datasets have: how to tell each from its columns, and how its turns are called."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

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
INLINE: Final = re.compile(r"<(img|audio)>([^<>\n]+)</\1>", re.IGNORECASE)
"""Media that the text itself names, as in the data of the first Qwen-VL and Qwen-Audio."""
INLINE_KINDS: Final = {"img": "image", "audio": "audio"}


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

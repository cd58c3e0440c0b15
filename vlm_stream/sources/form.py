"""How a dataset calls its columns and roles: the `columns` and `tags` of a meta file, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vlm_stream.errors import SourceError, nearest_name
from vlm_stream.sources.mismatch import show

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ShareGptForm"]

_COLUMN_KEYS: Final = ("messages", "images", "videos", "audios")
_TAG_KEYS: Final = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag", "tool_tag", "function_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGptForm:
    """How a dataset calls its columns and roles, and where its media lie."""

    messages: str = "messages"
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
    media_dir: str | None = None
    """Folder or URL that relative media paths are joined to."""
    roles: dict[str, str] = field(init=False, repr=False, compare=False)
    """Role value -> role, from the tags."""

    def __post_init__(self) -> None:
        """Derive the roles; where two tags are equal, the earlier of user, assistant, system wins."""
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
        cls, columns: Mapping[str, str] | None, tags: Mapping[str, str] | None, media_dir: str | None = None
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
        return cls(**dict(columns or {}), **dict(tags or {}), media_dir=media_dir or None)

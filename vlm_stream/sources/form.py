"""How a dataset calls its columns and roles, and what happens to what does not map: `drop`, `keep` or `raise`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, get_args

from vlm_stream.errors import BadSampleError, ConfigError, SourceError, nearest_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vlm_stream.conversation import Conversation

__all__ = ["MISMATCHES_KEY", "Mismatch", "OnMismatch", "ShareGptForm", "apply_policy", "check_policy", "show"]

OnMismatch: TypeAlias = Literal["drop", "keep", "raise"]

MISMATCHES_KEY: Final = "_mismatches"
"""Where `keep` notes what it left out: a list of `reason: sentence`."""
_COLUMN_KEYS: Final = ("messages", "images", "videos", "audios")
_TAG_KEYS: Final = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag", "tool_tag", "function_tag")


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

"""Members of one sample: where their bytes lie, what is said in them, which of them is shown first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vlm_stream.format import medium_of
from vlm_stream.storage import Member

if TYPE_CHECKING:
    from vlm_stream.conversation import Conversation
    from vlm_stream.format import Drawn
    from vlm_stream.storage import Span

_TYPES: Final = {
    **dict.fromkeys(("jpg", "jpeg"), "image/jpeg"),
    **{name: f"image/{name}" for name in ("png", "webp", "gif", "bmp", "avif")},
    **dict.fromkeys(("mp4", "m4v", "mov"), "video/mp4"),
    **{name: f"video/{name}" for name in ("webm",)},
    **{name: f"audio/{name}" for name in ("wav", "flac", "ogg")},
    "mp3": "audio/mpeg",
    "m4a": "audio/mp4",
    "opus": "audio/ogg",
}
"""What browsers show; every other member is handed out as a file, under no type that anything executes."""


def type_of(member: str) -> str | None:
    """Return the type under which a browser shows a member; None: it shows no such thing."""
    return _TYPES.get(member.rpartition(".")[2].lower())


def part_of(drawn: Drawn, name: str, begin: int = 0, end: int | None = None) -> Span:
    """Return where some bytes of one member lie; checksums are of whole samples, so these cannot be checked."""
    _, offset, size = next(member for member in drawn.members if member[0] == name)
    part = Member(name, offset + begin, (size if end is None else end) - begin)
    return drawn.holder(name)._replace(offset=part.offset, size=part.size, crc32c=None, members=(part,))


def text_of(conversation: Conversation) -> str:
    """Return what is said in a conversation, turn by turn."""
    lines = []
    for message in conversation:
        content = message["content"]
        items = [{"type": "text", "text": content}] if isinstance(content, str) else content
        lines.append(" ".join(item["text"] for item in items if item.get("type") == "text"))
    return "\n".join(lines)


def first_medium(drawn: Drawn) -> str | None:
    """Return the name of the first member that is a picture or a clip; else that of a sound; None: there is none."""
    media = [(medium_of(name), name) for name, *_ in drawn.members]
    for kinds in (("image", "video"), ("audio",)):
        for medium, name in media:
            if medium in kinds:
                return name
    return None

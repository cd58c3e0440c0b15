"""Fields: how the files of one sample become a conversation, for our shards and for tars made elsewhere.

Enters: a `FieldMap` from the manifest and the sample's small files (JSON, text) with the names of all of them. Leaves:
a conversation whose media items name members, or `BadSampleError`. No tar and no store is known here.

Layouts:

* `native`: `json` holds `{"conversation": [...]}`, media items name members.
* `sharegpt`: `json` holds a record of any form that `sources` reads. A medium that is named like a member is that
  member; otherwise the n-th image is the n-th image member, and so on. Where the JSON names no medium of a kind, the
  members of that kind are its media.
* `caption`: `txt` (or a field of `json`) describes the sample's media: a prompt with all of them, and the caption.
* `energon`: a sample type of Megatron-Energon and its field map (`energon.py`).
* `bytes`: no conversation is made; samples are handed out as they lie.

Names of members are compared without regard to case, as WebDataset does.
"""

from __future__ import annotations

import json
import posixpath
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import crc32c

from vlm_stream.conversation import MEDIA_TYPES, check_conversation, iter_media
from vlm_stream.errors import BadSampleError, ConfigError, blame_sample, nearest_name, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.conversation import Conversation, Item

LAYOUTS: Final = ("native", "sharegpt", "caption", "energon", "bytes")
MEDIA_EXTENSIONS: Final = {
    "image": frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "jp2", "avif")),
    "video": frozenset(("mp4", "webm", "mkv", "mov", "avi", "m4v", "mpg", "mpeg")),
    "audio": frozenset(("wav", "flac", "ogg", "mp3", "m4a", "opus")),
}
_TOKENS: Final = b',"tokens":'
_BINARY_EXTENSIONS: Final = frozenset(
    (
        "npy",
        "npz",
        "pt",
        "pth",
        "pyd",
        "pkl",
        "pickle",
        "bin",
        "safetensors",
        "ten",
        "tb",
        "mp",
        "msg",
        "h5",
        "gz",
        "zip",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldMap:
    """How a sample's members become a conversation."""

    layout: str = "native"
    """One of `LAYOUTS`."""
    columns: dict[str, str] = field(default_factory=dict)
    """sharegpt: names of the messages and media fields inside `json`, where they differ from the usual ones. energon:
    the field map."""
    tags: dict[str, str] = field(default_factory=dict)
    """sharegpt: names of the role and content keys and of the roles. energon: `sample_type`, and `subflavors` as
    JSON."""
    prompt: str = "Describe this image."
    """What the user asks, where the sample does not say it."""
    caption: str = "txt"
    """caption: the member with the text, or `json:FIELD`."""
    media_first: bool = False
    """sharegpt: media of a kind that nothing shows stand before the first user text; False: the sample is bad."""

    @property
    def text_member(self) -> str:
        """Return the name of the one member that the text comes from; empty where there may be several."""
        if self.layout in ("energon", "bytes"):
            return ""
        return self.caption.partition(":")[0].lower() if self.layout == "caption" else "json"

    @property
    def subflavors(self) -> dict[str, Any]:
        """Return what an Energon dataset says of all its samples."""
        found: dict[str, Any] = json.loads(self.tags.get("subflavors", "{}"))
        return found

    def __post_init__(self) -> None:
        """Refuse a layout that does not exist."""
        if self.layout not in LAYOUTS:
            raise ConfigError(f"'{self.layout}' is no layout of samples; {nearest_name(self.layout, LAYOUTS)}")

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data; `media_first` stands there only where it is set."""
        return {name: value for name, value in asdict(self).items() if value is not False}


def medium_of(name: str) -> str | None:
    """Return `image`, `video` or `audio` by the last extension of a member's name, or None."""
    extension = name.rpartition(".")[2].lower()
    return next((medium for medium in MEDIA_TYPES if extension in MEDIA_EXTENSIONS[medium]), None)


def is_text_member(name: str) -> bool:
    """Tell whether a member may be needed to make the conversation: it is neither a medium nor known to be binary."""
    return medium_of(name) is None and name.rpartition(".")[2].lower() not in _BINARY_EXTENSIONS


def to_conversation(fields: FieldMap, names: Sequence[str], texts: Mapping[str, bytes]) -> Conversation:
    """Return one sample's conversation, as `read_sample` does."""
    return read_sample(fields, names, texts)[0]


def read_sample(fields: FieldMap, names: Sequence[str], texts: Mapping[str, bytes]) -> tuple[Conversation, Any]:
    """Return one sample's conversation, whose media items name members, and the tokens that its JSON keeps of it.

    Args:
        fields: The dataset's field map.
        names: Names of all members of the sample, without the key, in tar order.
        texts: Contents of its text members, by name.

    Raises:
        BadSampleError: The sample does not have what its layout promises.
    """
    try:
        return _read_sample(fields, names, texts)
    except Exception as error:  # JSON can hold anything in any place
        raise blame_sample(error, "convert", "bad_form", "the sample cannot be made a conversation") from error


def own_names(fields: FieldMap, texts: Mapping[str, bytes]) -> tuple[str | None, str | None]:
    """Return the id that a sample's JSON states, and the meta file's entry that it names where the shard is our own."""
    text = next((text for name, text in texts.items() if name.lower() == "json"), None)
    try:
        data = None if text is None else parse_json(text)
    except BadSampleError:
        data = None
    if not isinstance(data, dict):
        return None, None
    own_id, entry = data.get("id"), data.get("source") if fields.layout == "native" else None
    has_id = isinstance(own_id, str | int) and not isinstance(own_id, bool)
    return _as_name(str(own_id)) if has_id else None, _as_name(entry) if isinstance(entry, str) else None


def _as_name(text: str) -> str | None:
    """Return a name that an index can hold, or None: half of a surrogate pair is no text."""
    try:
        return text if text.encode() else None
    except UnicodeEncodeError:
        return None


def _read_sample(fields: FieldMap, names: Sequence[str], texts: Mapping[str, bytes]) -> tuple[Conversation, Any]:
    texts = {name.lower(): text for name, text in texts.items()}
    tokens = None
    if fields.layout == "bytes":
        raise ConfigError(
            f"the samples were indexed as bytes, because their members ({', '.join(names)}) have no known layout, so "
            f"they have no conversation; use their members, or index them with --layout caption or sharegpt"
        )
    if fields.layout == "energon":
        from vlm_stream.format.energon import read_energon_sample

        conversation = read_energon_sample(fields.tags["sample_type"], fields.columns, fields.prompt, names, texts)
    elif fields.layout == "caption":
        conversation = _from_caption(fields, names, texts)
    else:
        if "json" not in texts:
            raise BadSampleError("convert", "no_json", f"the sample has no .json member (it has: {', '.join(names)}).")
        data = parse_json(texts["json"])
        if not isinstance(data, dict):
            raise BadSampleError("convert", "bad_json", "the sample's .json is not a JSON object.")
        conversation = _from_native(data) if fields.layout == "native" else _from_sharegpt(fields, data, names)
        tokens = _kept_tokens(data, texts["json"]) if fields.layout == "native" else None
    check_conversation(conversation)
    _place_media(conversation, names)
    return conversation, tokens


def keep_tokens(text: bytes, tokens: Mapping[str, Any]) -> bytes:
    """Return the JSON object of a sample with the tokens of its text, and a checksum of what they were made of."""
    value = json.dumps({"of": crc32c.crc32c(text[:-1]), **tokens}, separators=(",", ":"))
    return text[:-1] + _TOKENS + value.encode() + b"}"


def are_tokens_short(text: bytes, tokens: Mapping[str, Any]) -> bool:
    """Tell whether tokens would take no more bytes than the rest of a sample's JSON object, where they are kept."""
    bare = text[: text.rfind(_TOKENS)] + b"}" if _TOKENS in text else text
    return len(keep_tokens(bare, tokens)) <= 2 * len(bare)


def _kept_tokens(data: dict[str, Any], text: bytes) -> Any:
    """Return the tokens that a sample's JSON keeps; None where the rest of it is not what they were made of."""
    return _if_made_of(data.get("tokens"), text[: text.rfind(_TOKENS)])


def read_tokens(text: bytes) -> Any:
    """Return the tokens that a native sample's JSON keeps, and read nothing else of it; None where it has none.

    They say of which bytes they were made, so these are known to be a conversation without being read.
    """
    begin = text.rfind(_TOKENS)
    try:
        return _if_made_of(json.loads(text[begin + len(_TOKENS) : -1]), text[:begin]) if begin > 0 else None
    except (RecursionError, ValueError):
        return None


def _if_made_of(tokens: Any, rest: bytes) -> Any:
    return tokens if isinstance(tokens, dict) and tokens.get("of") == crc32c.crc32c(rest) else None


def parse_json(data: bytes) -> Any:
    """Return what a JSON member holds; raise `BadSampleError` where it is none."""
    try:
        return json.loads(data)
    except RecursionError:
        raise BadSampleError("convert", "bad_json", "the sample's .json is nested too deeply to be read.") from None
    except ValueError as error:
        raise blame_sample(error, "convert", "bad_json", "the sample's .json is not JSON") from None


def _from_native(data: dict[str, Any]) -> Conversation:
    conversation = data.get("conversation")
    if not isinstance(conversation, list) or not conversation:
        raise BadSampleError("convert", "no_messages", "the sample's .json has no list of turns in 'conversation'.")
    return conversation


def _from_sharegpt(fields: FieldMap, data: dict[str, Any], names: Sequence[str]) -> Conversation:
    from vlm_stream.sources import ShareGptForm, map_sharegpt

    form = ShareGptForm.from_dicts(fields.columns, fields.tags, media_first=fields.media_first)
    conversation, mismatches = map_sharegpt(data, form)
    shown = {item["type"] for item in iter_media(conversation)}
    given: dict[str, list[str]] = {}
    for medium, column in (("image", form.images), ("video", form.videos), ("audio", form.audios)):
        members = [name for name in names if medium_of(name) == medium]
        if members and medium not in shown and not data.get(column):  # the tar holds them, and its JSON names none
            given[column] = members
    if given:
        conversation, mismatches = map_sharegpt({**data, **given}, form)
    if mismatches:
        reason = mismatches[0].reason
        way = "index the tars with --layout sharegpt and --columns or --tags that read it"
        if reason == "surplus_media":
            way = "index the tars with --layout sharegpt --media-first to have them before the first user text"
        members = [f"'{column}' stands for its members {', '.join(members)}" for column, members in given.items()]
        facts = "; ".join([*(fact for _, fact in mismatches), *members])
        raise BadSampleError("convert", reason, f"{facts}. The sample is left out; mend it, or {way}.")
    return conversation


def _from_caption(fields: FieldMap, names: Sequence[str], texts: Mapping[str, bytes]) -> Conversation:
    member, column = fields.text_member, fields.caption.partition(":")[2]
    if member not in texts:
        raise BadSampleError("convert", "no_caption", f"the sample has no .{member} (it has: {', '.join(names)}).")
    caption: Any = texts[member].decode("utf-8", "replace")
    if column:
        data = parse_json(texts[member])
        caption = data.get(column) if isinstance(data, dict) else None
        if not isinstance(caption, str):
            raise BadSampleError("convert", "no_caption", f"the sample's .{member} has no text in '{column}'.")
    media: list[Item] = [{"type": medium, medium: name} for name in names if (medium := medium_of(name))]
    if not media:
        raise BadSampleError("convert", "no_media", f"the sample has a caption and no medium ({', '.join(names)}).")
    return [
        {"role": "user", "content": [*media, {"type": "text", "text": fields.prompt}]},
        {"role": "assistant", "content": [{"type": "text", "text": caption.strip()}]},
    ]


def _place_media(conversation: Conversation, names: Sequence[str]) -> None:
    """Let every media item name a member: by its own name, else by its number among the media of its kind."""
    present = {name.lower(): name for name in names}
    by_medium = {medium: [name for name in names if medium_of(name) == medium] for medium in MEDIA_TYPES}
    number = dict.fromkeys(MEDIA_TYPES, 0)
    for item in iter_media(conversation):
        medium = item["type"]
        where = item.get(medium)
        if isinstance(where, list):
            _check_frames(medium, where, present)
            item[medium] = [present[name.lower()] for name in where]
            continue
        candidates = by_medium[medium]
        position = number[medium]
        number[medium] += 1
        names_of_item = (where, posixpath.basename(where)) if isinstance(where, str) else ()
        if named := next((name for name in names_of_item if name.lower() in present), None):
            item[medium] = present[named.lower()]
            continue
        if position >= len(candidates):
            shown = shorten(repr(where), 100)
            raise BadSampleError(
                "convert",
                "missing_member",
                f"{medium} number {position + 1} ({shown}) is not in the tar, which has {len(candidates)} of them.",
            )
        item[medium] = candidates[position]


def _check_frames(medium: str, frames: list[Any], present: Mapping[str, str]) -> None:
    if medium != "video":
        raise BadSampleError("convert", "media_not_a_name", f"one {medium} item names a list; give each its own item.")
    if not frames or not all(isinstance(name, str) for name in frames):
        raise BadSampleError("convert", "bad_frame_list", "a list of frames is empty or has an entry that is no name.")
    missing = next((name for name in frames if name.lower() not in present), None)
    if missing is not None:
        raise BadSampleError("convert", "missing_member", f"the frame {missing[:200]!r} is not in the tar.")

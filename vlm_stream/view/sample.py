"""One sample as people and models see it: turns with media in place, the rendered prompt, counts against the index.

Enters: a ref. Leaves: a `Sample`, plain values; `media_picture` and `media_frames` draw its media. A sample that a run
would call bad is shown all the same, with the reason.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.conversation import named_span
from vlm_stream.encode import IGNORE, Encoder, media_token_ids, picker, tokenizer_of
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.format import is_text_member
from vlm_stream.keys import EXIF_ROTATE
from vlm_stream.media import decode_frame_list, decode_video
from vlm_stream.tokens import MediaSizes, Resized, count_tokens, frame_indices, make_columns
from vlm_stream.view.pictures import as_seen, decode_frames, shown_frames

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from threading import Lock

    from vlm_stream.conversation import Conversation, Item
    from vlm_stream.format import Drawn
    from vlm_stream.plan import Ref
    from vlm_stream.tokens import AudioSize, Geometry, ImageSize, VideoSize
    from vlm_stream.view.catalog import Catalog, Name

_MAX_ENCODED_BYTES: Final = 64 << 20
_MAX_ENCODED_MEGAPIXELS: Final = 600.0
_MAX_TEXT: Final = 200_000
"""Characters of a text member that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """A medium at its place in the conversation."""

    number: int
    """Among all media of the sample, from 0."""
    kind: str
    members: tuple[str, ...]
    """One file, or the frames of a clip."""
    says: str
    """Its sizes, in words."""
    tokens: int | None
    resized: Resized | None
    frames: tuple[tuple[int, float | None], ...] = ()
    """Frames that are shown: number in the clip, and time in seconds."""
    num_frames: int = 0
    """Frames that the model gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message."""

    role: str
    parts: tuple[str | Medium, ...]
    is_trained: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of one kind."""

    kind: str
    """`label`, `media` or `text`."""
    text: str
    tokens: tuple[tuple[int, str], ...]
    """Id and text of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the model reads."""

    runs: tuple[Run, ...]
    num_tokens: int
    num_labels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample."""

    ref: Ref
    name: Name
    entry: str
    id: str | None
    turns: tuple[Turn, ...]
    prompt: Prompt | None
    why_no_prompt: str
    problem: str
    """Why a run would leave it out; empty: it would not."""
    tokens: int
    """By the index and the geometry."""
    text_tokens: int
    labels: int
    """By the index; -1: not counted."""
    members: tuple[tuple[str, int, int], ...]
    """Name, offset in the tar, and bytes."""
    texts: tuple[tuple[str, str], ...]
    """Text members as they lie, and their contents."""
    offset: int
    size: int
    place: int
    """Among all samples."""

    @property
    def media(self) -> list[Medium]:
        """Return its media, in order."""
        return [part for turn in self.turns for part in turn.parts if isinstance(part, Medium)]


class SampleReader:
    """Reads samples of a catalog; encodes them where there is a processor."""

    def __init__(self, catalog: Catalog, processor: Any, lock: Lock) -> None:
        """Prepare the encoder as a run would, without its limit of length; `lock` is held while it encodes."""
        self.catalog = catalog
        self.geometry: Geometry = catalog.plan.geometry
        self.frames = catalog.plan.build.frames
        self._lock = lock
        self._encoder: Encoder | None = None
        self._why_no_prompt = "name the processor (--processor) to see what the model reads"
        family = catalog.plan.build.family
        if processor is not None and family is not None:
            if family.only_function:
                self._why_no_prompt = f"the family '{family.name}' encodes whole batches by a function of its own"
                return
            config = replace(catalog.plan.build.options.encode(self.frames), max_length=None, allow_unlabelled=True)
            self._encoder = Encoder(processor, replace(config, pixels="full"), family.steps_for(processor))

    def read(self, ref: Ref) -> Sample:
        """Read one sample; what is wrong with it is part of the answer."""
        catalog = self.catalog
        (drawn,) = catalog.draw([ref])
        members, problem = self._members(ref, drawn)
        conversation: Conversation = []
        if members:
            try:
                conversation = catalog.conversation(ref, drawn, members)
            except BadSampleError as error:
                problem = problem or _say(error)
        prompt, why = None, self._why_no_prompt if not problem else "it cannot be read"
        if conversation and self._encoder is not None and not problem:
            prompt, why, problem = self._encode(conversation, members, drawn, self._is_whole(drawn, ref))
        columns = catalog.plan.planner.read_columns(ref.source, [ref.shard]).pick(np.array([ref.row]))
        with catalog.datasets.lock:
            media = catalog.datasets.opened[ref.source].media([ref.shard])
        return Sample(
            ref=ref,
            name=catalog.name_of(ref, drawn),
            entry=drawn.entry,
            id=drawn.id,
            turns=tuple(self._turns(conversation, drawn)),
            prompt=prompt,
            why_no_prompt=why,
            problem=problem,
            tokens=int(columns.tokens[0]),
            text_tokens=int(media.text_tokens[ref.row]),
            labels=int(media.label_tokens[ref.row]),
            members=tuple((name, offset, size) for name, offset, size in drawn.members),
            texts=tuple((name, _pretty(bytes(data))) for name, data in members.items() if is_text_member(name)),
            offset=drawn.span.offset,
            size=drawn.span.size,
            place=catalog.place_of(ref),
        )

    def _is_whole(self, drawn: Drawn, ref: Ref) -> bool:
        """Tell whether all of a sample is read, media too, and not its text alone."""
        facts = self.catalog.facts(ref.source, ref.shard)
        is_small = drawn.num_bytes <= _MAX_ENCODED_BYTES and facts.decode[ref.row] <= _MAX_ENCODED_MEGAPIXELS
        return bool(is_small)

    def _members(self, ref: Ref, drawn: Drawn) -> tuple[Mapping[str, Any], str]:
        """Return the members of a sample, and why a run would not have them: then, and of large ones, texts alone."""
        problem = ""
        if self._is_whole(drawn, ref):
            members: dict[str, Any] = {}
            for found in self.catalog.read([drawn.span, *drawn.shared]):
                if isinstance(found, BadSampleError):
                    problem = problem or _say(found)
                else:
                    members |= found
            if not problem:
                return members, ""
        (texts,) = self.catalog.read_texts([drawn])
        return ({}, problem or _say(texts)) if isinstance(texts, BadSampleError) else (texts, problem)

    def _encode(
        self, conversation: Conversation, members: Mapping[str, Any], drawn: Drawn, is_whole: bool
    ) -> tuple[Prompt | None, str, str]:
        """Return the prompt, why there is none, and why a run would leave the sample out."""
        encoder = self._encoder
        assert encoder is not None  # noqa: S101
        try:
            with self._lock:
                if is_whole:
                    encoded = encoder.encode(conversation, members)
                else:
                    encoded = encoder.encode_from_sizes(conversation, drawn.sizes)
        except BadSampleError as error:
            return None, "it cannot be encoded", _say(error)
        except ConfigError as error:
            return None, f"it is too large to be encoded for a page, and without its pixels: {error}", ""
        ids, labels = encoded["input_ids"].tolist(), encoded["labels"].tolist()
        num_labels = sum(label != IGNORE for label in labels)
        problem = "" if num_labels else "encode: no_labels: no token of the sample is to be learned"
        return (
            Prompt(runs=tuple(prompt_runs(encoder.processor, ids, labels)), num_tokens=len(ids), num_labels=num_labels),
            "",
            problem,
        )

    def _turns(self, conversation: Conversation, drawn: Drawn) -> Iterator[Turn]:
        sizes: dict[str, Iterator[Any]] = {
            "image": iter(drawn.sizes.images),
            "video": iter(drawn.sizes.videos),
            "audio": iter(drawn.sizes.audios),
        }
        numbers = itertools.count()
        for message in conversation:
            content = message["content"]
            parts: list[str | Medium] = []
            for item in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                kind = item.get("type")
                if kind in sizes:
                    parts.append(self._medium(item, next(sizes[kind], None), next(numbers), drawn))
                else:
                    parts.append(str(item.get("text", "")) if kind == "text" else json.dumps(item, default=str))
            is_trained = message.get("role") == "assistant" and bool(message.get("train", True))
            yield Turn(
                role=str(message.get("role", "?")),
                parts=tuple(parts),
                is_trained=is_trained and message.get("weight", 1) != 0,
            )

    def _medium(self, item: Item, size: Any, number: int, drawn: Drawn) -> Medium:
        kind, where = item["type"], item.get(item["type"])
        names = tuple(map(str, where)) if isinstance(where, list | tuple) else (str(where),)
        if size is None:
            says = "its size is not in the index"
            return Medium(number=number, kind=kind, members=names, says=says, tokens=None, resized=None)
        tokens = self._count(kind, size, len(drawn.sizes.images))
        if kind == "image":
            resized = self.geometry.resize(size.height, size.width)
            says = f"{size.width} x {size.height}"
            return Medium(number=number, kind=kind, members=names, says=says, tokens=tokens, resized=resized)
        if kind == "audio":
            says = f"{size.samples / max(size.rate, 1):.2f} s at {size.rate:,} Hz{_part(item)}"
            return Medium(number=number, kind=kind, members=names, says=says, tokens=tokens, resized=None)
        indices = self._indices(item, size, names)
        fps = size.fps or float(item.get("fps") or 0)
        return Medium(
            number=number,
            kind=kind,
            members=names,
            says=f"{size.width} x {size.height}, {size.frames:,} frames, {size.seconds:.2f} s{_part(item)}",
            tokens=tokens,
            resized=self.geometry.resize(size.height, size.width, max(len(indices), 1)),
            frames=tuple((index, index / fps if fps else None) for index in shown_frames(indices)),
            num_frames=len(indices),
        )

    def _indices(self, item: Item, size: VideoSize, names: tuple[str, ...]) -> list[int]:
        named = item.get("frame_indices")
        if named is None and isinstance(item["video"], list | tuple):
            named = range(len(names))
        try:
            found: list[int] = frame_indices(size.frames, size.fps, self.frames, named).tolist()
        except (BadSampleError, TypeError, ValueError):
            return []
        return found

    def _count(self, kind: str, size: ImageSize | VideoSize | AudioSize, num_images: int) -> int:
        """Return the tokens of one medium; an image may cost less beside others."""
        many = num_images if kind == "image" else 1
        sizes: dict[str, Any] = {f"{kind}s": (size,) * many}
        columns = make_columns([MediaSizes(**sizes)], [many])
        return int(count_tokens(columns, self.geometry).tokens[0]) // many

    # Drawing ----------------------------------------------------------------------------------------------------------

    def picture(self, ref: Ref, number: int) -> bytes:
        """Return an image of the sample as the vision tower gets it, as JPEG."""
        drawn, item, medium = self._item(ref, number)
        data = self.catalog.read_member(drawn, medium.members[0])
        return as_seen(data, medium.resized, exif_rotate=bool(item.get(EXIF_ROTATE)))

    def strip(self, ref: Ref, number: int) -> list[bytes]:
        """Return pictures of the picked frames of a clip, those of `Medium.frames`."""
        drawn, item, medium = self._item(ref, number)
        data = [self.catalog.read_member(drawn, name) for name in medium.members]
        if isinstance(item["video"], list | tuple):
            fps = float(item.get("fps") or self.frames.fps or 1.0)
            return decode_frames(lambda pick: decode_frame_list(data, pick, fps), picker(self.frames, item))
        return decode_frames(partial(decode_video, data[0], seconds=named_span(item)), picker(self.frames, item))

    def _item(self, ref: Ref, number: int) -> tuple[Drawn, Item, Medium]:
        from vlm_stream.conversation import iter_media

        catalog = self.catalog
        (drawn,) = catalog.draw([ref])
        (members,) = catalog.read_texts([drawn])
        if isinstance(members, BadSampleError):
            raise members
        conversation = catalog.conversation(ref, drawn, members)
        items = list(iter_media(conversation))
        media = [part for turn in self._turns(conversation, drawn) for part in turn.parts if isinstance(part, Medium)]
        if not 0 <= number < len(items):
            raise ConfigError(f"the sample has {len(items)} media and none with the number {number}")
        return drawn, items[number], media[number]


def prompt_runs(processor: Any, ids: Sequence[int], labels: Sequence[int]) -> Iterator[Run]:
    """Yield neighbouring tokens of one kind: learned, of media, or other text."""
    tokenizer = tokenizer_of(processor)
    media = media_token_ids(processor)

    def kind(place: int) -> str:
        if labels[place] != IGNORE:
            return "label"
        return "media" if ids[place] in media else "text"

    written: dict[int, str] = {}
    for name, group in itertools.groupby(range(len(ids)), key=kind):
        places = list(group)
        for place in places:
            if ids[place] not in written:
                written[ids[place]] = tokenizer.decode([ids[place]])
        tokens = tuple((ids[place], written[ids[place]]) for place in places)
        text = "".join(text for _, text in tokens) if name == "media" else tokenizer.decode([i for i, _ in tokens])
        yield Run(name, text, tokens)


def _part(item: Item) -> str:
    """Return which part of its file an item shows."""
    return f" from {seconds.start:g} s of its file on" if (seconds := named_span(item)) else ""


def _say(error: BadSampleError) -> str:
    return f"{error.stage}: {error.reason}: {error}"


def _pretty(data: bytes) -> str:
    """Return a text member as people read it, cut where it is long."""
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    cut = f"\n… and {len(text) - _MAX_TEXT:,} more characters" if len(text) > _MAX_TEXT else ""
    return text[:_MAX_TEXT] + cut


def snippet(text: str, length: int = 160) -> str:
    """Return the beginning of what is said."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 1]}…"

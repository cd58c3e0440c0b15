"""Exact text counts: a conversation and the sizes of its media enter, the tokens of everything but embeddings leave.

    text_tokens = tokens of the rendered chat + what the processor writes around media, one token for every medium

The conversation is rendered and tokenised once, as the processor's own `apply_chat_template` would do it: special
tokens are added unless the template has written the first of them. No pixel is needed.
"""

import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from vlm_stream.conversation import MEDIA_TYPES, Conversation, iter_media, map_media
from vlm_stream.errors import BadSampleError
from vlm_stream.tokens.chat import Processor, render_template, tokenizer_of
from vlm_stream.tokens.families import read_family
from vlm_stream.tokens.geometry import Geometry, count_tokens
from vlm_stream.tokens.measure import ask
from vlm_stream.tokens.media import (
    MediaColumns,
    MediaSizes,
    VideoSize,
    make_columns,
    unpack_steps,
)
from vlm_stream.tokens.media_text import AUDIO_TEXTS, IMAGE_TEXTS, VIDEO_TEXTS, WHOLE_TEXTS, Scene

CHARACTERS_PER_TOKEN = 3
_NO_MEDIA = MediaSizes()
_MOST_KNOWN: Final = 1 << 16
"""Samples whose changes are kept."""


class TextCounter:
    """Counts the text of many samples for one processor.

    Example:
        >>> from vlm_stream.testing import build_processor
        >>> counter = TextCounter(build_processor("qwen2_5_vl"))
        >>> counter.count([{"role": "user", "content": "Hello world"}])
        18
    """

    def __init__(self, processor: Processor, geometry: Geometry | None = None) -> None:
        """Learn the media tokens of a processor or a bare tokenizer; `geometry` is for another sampling of frames."""
        self.processor = processor
        self.geometry = Geometry.from_processor(processor) if geometry is None else geometry
        self._asker = ask(processor)[0] if self.geometry.is_measured else None
        self._tokenizer = tokenizer_of(processor)
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        family = read_family(processor)
        self._writers: dict[str, Any] = {
            "image": IMAGE_TEXTS.get(family),
            "video": VIDEO_TEXTS.get(family),
            "audio": AUDIO_TEXTS.get(family),
        }
        self._write_whole = WHOLE_TEXTS.get(family)
        tokens = {kind: getattr(processor, f"{kind}_token", None) for kind in MEDIA_TYPES}
        self._pattern = re.compile(
            "|".join(f"(?P<{kind}>{re.escape(str(token))})" for kind, token in tokens.items() if token) or r"(?!)"
        )

    def count(self, conversation: Conversation, sizes: MediaSizes = _NO_MEDIA) -> int:
        """Count one sample whose text holds no control strings: those are the encoder's to disguise."""
        bare = map_media(conversation, lambda item: {"type": item["type"]})  # a template needs only the kind of media
        ids, surplus = self.encode(render_template(self.processor, bare), sizes)
        return len(ids) - surplus

    def encode(self, text: str, sizes: MediaSizes) -> tuple[list[int], int]:
        """Return the ids of a rendered chat, and how many more they are than the text tokens.

        By rule there is one embedding token for each medium. A processor that is asked gives all of them: the surplus
        is then what `count_tokens` will count for the media.
        """
        if self._asker is not None:
            media = count_tokens(make_columns([sizes], [0]), self.geometry)
            return self._asker.encode(text, sizes, self.geometry.frames), int(media.tokens[0])
        text = self._write_media(text, sizes)
        begin, backend = self._tokenizer.bos_token, self._backend
        adds_special = not begin or not text.startswith(begin)
        if hasattr(backend, "encode_batch_fast") and backend.truncation is None and backend.padding is None:
            # Without the offsets and lists that nobody asks for here.
            return list(backend.encode_batch_fast([text], add_special_tokens=adds_special)[0].ids), 0
        return list(self._tokenizer(text, add_special_tokens=adds_special)["input_ids"]), 0

    def _write_media(self, text: str, sizes: MediaSizes) -> str:
        """Return a rendered chat with what the processor writes for media, one embedding token for each of them."""
        queues: dict[str, Sequence[Any]] = {"image": sizes.images, "video": sizes.videos, "audio": sizes.audios}
        found = dict.fromkeys(queues, 0)
        scene = Scene(self.geometry, sizes)

        def write(match: re.Match[str]) -> str:
            kind = str(match.lastgroup)
            found[kind] += 1
            if found[kind] > len(queues[kind]):
                return match.group()
            writer = self._writers[kind]
            return writer(self.processor, queues[kind][found[kind] - 1], scene) if writer else match.group()

        text = self._pattern.sub(write, text)
        for kind, queue in queues.items():
            if found[kind] != len(queue):
                raise BadSampleError(
                    "convert",
                    "media_mismatch",
                    f"The chat template shows {found[kind]} {kind}s where the sample has {len(queue)}, so its tokens "
                    f"cannot be counted. Look for a {kind} outside of user turns.",
                )
        return str(text) if self._write_whole is None else self._write_whole(self.processor, str(text))


class FrameText:
    """By how many tokens the text around videos changes when other frames are shown than those counted."""

    def __init__(self, processor: Processor, counted: Geometry, shown: Geometry) -> None:
        """Count for one processor; `counted` is what the index was counted by, `shown` what this run reads."""
        self._before, self._after = TextCounter(processor, counted), TextCounter(processor, shown)
        self._is_plain = read_family(processor) not in VIDEO_TEXTS and not shown.is_measured
        self._known: dict[Any, int] = {}
        self._rendered: dict[int, str] = {}
        self._lock = threading.Lock()
        """A tokenizer is used by one thread at a time."""

    def change(self, media: MediaColumns) -> npt.NDArray[np.int64]:
        """Return [n] how many tokens more the texts of samples have."""
        found = np.zeros(len(media), np.int64)
        if self._is_plain or media.video_keyframes is None:
            return found
        ends = np.concatenate([[0], np.cumsum(media.video_picked == 0)])[media.video_splits]
        with self._lock:
            for row in np.flatnonzero(np.diff(ends)).tolist():
                begin, end = media.video_splits[row : row + 2].tolist()
                found[row] = self._change(media, range(begin, end))
        return found

    def _change(self, media: MediaColumns, videos: range) -> int:
        columns = (media.video_fps, media.video_seconds, media.video_picked)
        facts = [(*media.video_sizes[at].tolist(), *(column.item(at) for column in columns)) for at in videos]
        packed = [cast("Any", media.video_keyframes)[at] for at in videos]
        key = (tuple(facts), tuple(each.tobytes() for each in packed))
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            clips = tuple(
                VideoSize(
                    frames=frames,
                    height=height,
                    width=width,
                    fps=fps,
                    seconds=seconds,
                    picked=tuple(range(picked)),
                    keyframes=tuple(unpack_steps(each, frames)),
                )
                for (frames, height, width, fps, seconds, picked), each in zip(facts, packed, strict=True)
            )
            sizes, text = MediaSizes(videos=clips), self._render(len(clips))
            after, before = (counter.encode(text, sizes) for counter in (self._after, self._before))
            self._known[key] = len(after[0]) - after[1] - len(before[0]) + before[1]
        return self._known[key]

    def _render(self, num_videos: int) -> str:
        if num_videos not in self._rendered:
            content = [*({"type": "video"} for _ in range(num_videos)), {"type": "text", "text": "x"}]
            chat = [{"role": "user", "content": content}]
            self._rendered[num_videos] = render_template(self._after.processor, chat)
        return self._rendered[num_videos]


def guess_text_tokens(conversation: Conversation) -> int:
    """Return a third of the characters, plus one for every medium.

    The one keeps the arithmetic of `count_tokens`: media are counted by geometry and their placeholders taken away.
    """
    characters = sum(len(text) for text in _iter_texts(conversation))
    return characters // CHARACTERS_PER_TOKEN + sum(1 for _ in iter_media(conversation))


def _iter_texts(conversation: Conversation) -> Iterable[str]:
    for message in conversation:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (item["text"] for item in content if item.get("type") == "text")

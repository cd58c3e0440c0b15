"""Asks a processor itself: sizes enter, blank media of these sizes are processed, and numbers of tokens leave.

Blank media are tensors without memory (torch's meta device) where a processor gives the same ids for them as for
pixels; then asking takes as long for large images as for small ones. torch is not imported here: a processor that works
on tensors has imported it.
"""

import copy
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from vlm_stream.tokens.chat import PARTS, audio_rate, call_arguments, render_template, special_tokens, tokenizer_of
from vlm_stream.tokens.media import FrameRule, MediaSizes, make_video_metadata, sample_clip
from vlm_stream.tokens.rules.audio import resample_length

R = TypeVar("R")

_PROBES: Final[dict[str, tuple[tuple[int, ...], ...]]] = {
    "image": ((300, 500, 1), (700, 200, 1), (56, 84, 1)),
    "video": ((4, 112, 168), (8, 224, 112)),
    "audio": ((16000,), (40000,)),
}
"""Sizes by which it is found out how a processor takes a medium."""
_CLIP_FPS: Final = 2.0
_PROBE_TEXT: Final = (
    "The quick brown foxes' 1,024 jumps — 3.14e-9 m/s; naïve façade, Straße, \u4f60\u597d\u4e16\u754c, "
    "\u043f\u0440\u0438\u0432\u0435\u0442, \u0645\u0631\u062d\u0628\u0627, \U0001f600\n\n"
    "    def f(x):\n\treturn {'k': x[0] != None}  # <b>&amp;</b> \\frac{a}{b}\n"
)
"""Text on which tokenizers with the same vocabulary and other rules differ."""


class Count(NamedTuple):
    """An answer."""

    tokens: int  # -1: the processor refuses the size
    patches: int
    piece: int  # patches that attend to each other


def template_digest(processor: Any) -> str:
    """Return what identifies how text becomes ids: the chat template, the vocabulary, and how a probe is cut by it.

    Not the tokenizer's file: releases of the tokenizers library write the same tokenizer differently.
    """
    tokenizer = tokenizer_of(processor)
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[::-1])
    probe = tokenizer(_PROBE_TEXT, add_special_tokens=False)["input_ids"]
    return hashlib.sha256(json.dumps([template, vocabulary, list(probe)]).encode()).hexdigest()


class Asker:
    """Asks one processor; a copy of it, because tokenizers must not be used by two threads at a time."""

    def __init__(self, processor: Any) -> None:
        with suppress(Exception):  # remote code may not bear copying
            processor = copy.deepcopy(processor)
        self.processor = processor
        self.name = type(processor).__name__
        self._tokenizer = tokenizer_of(processor)
        self._patch = _patch_size(processor)
        self._is_weightless = dict.fromkeys(_PROBES, False)

    def prove(self, medium: str) -> None:
        """Find out whether blanks without memory give the same ids as pixels; raise what the processor raises."""
        expected = [self.count(medium, size) for size in _PROBES[medium]]
        if medium == "audio" or "torch" not in sys.modules:
            return
        self._is_weightless[medium] = True
        try:
            is_same = [self._count(medium, size) for size in _PROBES[medium]] == expected
        except Exception:  # most often: "Cannot copy out of meta tensor; no data!"
            is_same = False
        self._is_weightless[medium] = is_same

    def depends_on_siblings(self) -> bool:
        """Tell whether an image counts otherwise beside another one."""
        with suppress(Exception):  # some take one image only
            return any(
                self.count("image", (*size[:2], 2)).tokens != self.count("image", size).tokens
                for size in _PROBES["image"]
            )
        return False

    def count(self, medium: str, size: Sequence[int]) -> Count:
        """Count one medium in a chat that holds nothing else; an image as often as its size says."""
        return self._with_pixels_at_need(lambda: self._count(medium, size))

    def encode(self, text: str, sizes: MediaSizes, rule: FrameRule) -> list[int]:
        return self._with_pixels_at_need(lambda: self._encode(text, sizes, rule))

    def _with_pixels_at_need(self, ask: Callable[[], R]) -> R:
        try:
            return ask()
        except Exception:
            kept = self._is_weightless
            if not any(kept.values()):
                raise
        self._is_weightless = dict.fromkeys(kept, False)
        try:
            return ask()
        finally:
            self._is_weightless = kept

    def _count(self, medium: str, size: Sequence[int]) -> Count:
        number = size[2] if medium == "image" else 1
        media: dict[str, list[Any]] = {medium: [self._blank(medium, size)] * number}
        if medium == "video":
            clip = make_video_metadata(size[0], _CLIP_FPS, size[0] / _CLIP_FPS, range(size[0]))
            media["metadata"] = [clip]
        items: list[dict[str, Any]] = [{"type": medium}] * number
        text = render_template(self.processor, [{"role": "user", "content": [*items, {"type": "text", "text": "x"}]}])
        batch = self._call(text, media)
        plain = len(self._tokenizer(text, **special_tokens(self.processor, text))["input_ids"])
        patches, piece = self._count_patches(batch)
        return Count((len(_first_row(batch)) - plain) // number + 1, patches // number, piece)

    def _encode(self, text: str, sizes: MediaSizes, rule: FrameRule) -> list[int]:
        media: dict[str, list[Any]] = {"image": [self._blank("image", (i.height, i.width)) for i in sizes.images]}
        clips = [sample_clip(size, rule) for size in sizes.videos]
        shapes = [(len(c["frames_indices"]), s.height, s.width) for c, s in zip(clips, sizes.videos, strict=True)]
        media |= {"video": [self._blank("video", shape) for shape in shapes], "metadata": clips}
        rate = audio_rate(self.processor)
        lengths = (resample_length(np.asarray(each.samples), np.asarray(each.rate), rate) for each in sizes.audios)
        media["audio"] = [self._blank("audio", (int(length),)) for length in lengths]
        return _first_row(self._call(text, media))

    def _blank(self, medium: str, size: Sequence[int]) -> Any:
        if medium == "audio":
            return np.zeros(size[0], np.float32)
        if self._is_weightless[medium]:
            torch: Any = sys.modules["torch"]  # the processor has imported it
            shape = (3, *size[:2]) if medium == "image" else (size[0], 3, *size[1:])
            return torch.empty(shape, dtype=torch.uint8, device="meta")
        if medium == "video":
            return np.zeros((*size, 3), np.uint8)
        from PIL import Image

        return Image.new("RGB", (size[1], size[0]))

    def _call(self, text: str, media: dict[str, list[Any]]) -> Any:
        """Call the processor as the encoder does."""
        images, videos, sounds = (media.get(medium, []) for medium in _PROBES)
        options = call_arguments(
            self.processor, text, images=[images], videos=[videos], metadata=media.get("metadata"), audios=sounds
        )
        try:
            return self.processor(text=[text], return_tensors="pt", **options)
        except Exception:
            if not images:
                raise
        return self.processor(text=[text], return_tensors="pt", **{**options, "images": images})  # a flat list

    def _count_patches(self, batch: Any) -> tuple[int, int]:
        """Return all patches, and those of one piece, by the shapes of pixels: rows of patches, or whole pictures."""
        patches, piece = 0, 0
        for key, value in dict(batch).items():
            shape = tuple(getattr(value, "shape", ()))
            if not key.startswith("pixel_values") or len(shape) < 2:
                continue
            area = self._patch**2
            is_picture = len(shape) >= 4 and min(shape[-2:]) > self._patch
            piece = shape[-2] * shape[-1] // area if is_picture else int(np.prod(shape)) // (3 * area)
            patches += max(1, int(np.prod(shape)) // (3 * area))
        return patches, max(piece, 1)


def describe(processor: Any) -> list[Any]:
    """Return everything that decides answers, as JSON data that is the same in every process."""
    library = getattr(sys.modules.get("transformers"), "__version__", "")
    names = [name for each in PARTS.values() for name in each]
    parts = {name: part for name in names if (part := getattr(processor, name, None)) is not None}
    own = {key: _plain(value) for key, value in vars(processor).items() if key not in (*parts, "tokenizer")}
    described = {name: [type(part).__name__, _plain(_values(part))] for name, part in parts.items()}
    return [type(processor).__name__, library, template_digest(processor), own, described]


def _values(part: Any) -> dict[str, Any]:
    """Return the settings of a part, also those that are its class's."""
    with suppress(Exception):  # some look for files meanwhile
        return dict(part.to_dict())
    return dict(vars(part))


def _plain(value: Any) -> Any:
    """Return the part of a value that JSON can hold, without what loading and saving add."""
    if isinstance(value, dict):
        kept = {str(k): _plain(v) for k, v in value.items() if k not in ("processor_class", "name_or_path")}
        return {k: v for k, v in kept.items() if v is not None and not k.startswith("_")}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, bool | int | float | str | None):
        return value
    return _plain(dict(value)) if hasattr(value, "keys") else type(value).__name__


def _patch_size(processor: Any) -> int:
    size = getattr(getattr(processor, "image_processor", None), "patch_size", None)
    return size if isinstance(size, int) and 0 < size <= 32 else 14


def _first_row(batch: Any) -> list[int]:
    row = batch["input_ids"][0]
    return list(row.tolist() if hasattr(row, "tolist") else row)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]

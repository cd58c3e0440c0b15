"""One sample: a conversation and its media bytes become ids, labels and the family's media tensors.

Enters: a conversation whose media items name members, and the members. Leaves: a dict of tensors, not padded and not
shifted, ready for padding or packing. Ids and pixels are what the processor itself gives when it is called with the
same text and media. Steps: decode, render once, call the processor once, place labels, check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vlm_stream.conversation import Conversation
from vlm_stream.encode.call_processor import call_processor
from vlm_stream.encode.chat_format import ChatFormat, Rendered, chat_format, render_chat
from vlm_stream.encode.control_tokens import TypedMarkers, check_media_tokens, disguise, media_token_ids, splice_plain
from vlm_stream.encode.kept_text import KeptText, KeptTextReader, kind_of_text
from vlm_stream.encode.label_search import build_labels_from_template
from vlm_stream.encode.labels import has_labels, label_answers, wants_training
from vlm_stream.encode.load_media import (
    LoadedMedia,
    has_media,
    inject_fake_image,
    load_media,
    make_fake_image,
    mask_vision_tokens,
    processor_reads,
)
from vlm_stream.encode.sizes_only import fill_blank, make_grid_processor, stand_in_media
from vlm_stream.errors import BadSampleError, ConfigError, VlmStreamError, blame_sample
from vlm_stream.keys import FAKE_IMAGE_SIZE, TOKEN_KEYS
from vlm_stream.media import DEFAULT_LIMITS, ImageConfig, MediaLimits, VideoBackend
from vlm_stream.tokens import FrameRule, ImageSize, MediaSizes, Processor

if TYPE_CHECKING:
    import torch

    from vlm_stream.pixels import CompactPath


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeConfig:
    """How one sample becomes tensors."""

    max_length: int | None = None
    """Longest sequence in tokens; None: any length."""
    overlong: Literal["bad", "truncate"] = "bad"
    """A longer sequence is a bad sample, or is cut at `max_length`. A cut through media is a bad sample either way."""
    inject_fake_image: bool = False
    """Give text-only samples a small white image that attention does not see, so that every rank runs its vision
    tower in every step."""
    image: ImageConfig = field(default_factory=ImageConfig)
    """How images are decoded."""
    limits: MediaLimits = DEFAULT_LIMITS
    """Larger media are bad samples."""
    video_backend: VideoBackend = "auto"
    """av (auto is the same), decord or torchcodec."""
    frames: FrameRule | None = None
    """Which frames of a video are read; None: as the processor's own config says. Planning must count with the same."""
    allow_unlabelled: bool = False
    """Return samples in which nothing is to be learned, instead of calling them bad."""
    pixels: Literal["full", "compact"] = "full"
    """`compact`: bytes that `finish_pixels` makes the processor's pixels of, on the trainer's device. Families without
    a compact path give full pixels and say so."""

    def __post_init__(self) -> None:
        if self.overlong not in ("bad", "truncate"):
            raise ConfigError(f"overlong={self.overlong!r} means nothing here; use 'bad' or 'truncate'.")
        if self.pixels not in ("full", "compact"):
            raise ConfigError(f"pixels={self.pixels!r} means nothing here; use 'full' or 'compact'.")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length={self.max_length} leaves nothing to encode; use a number above 0, or None.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What a family does otherwise than transformers' chat processors; a step that is not given is theirs."""

    shape: Callable[[Conversation], Conversation] | None = None
    """What of a conversation is shown, for families that take one question and one answer."""
    render: Callable[[Conversation], str] | None = None
    """The text that `call` gets, for processors without a chat template."""
    call: Callable[..., dict[str, Any]] = call_processor
    """`(processor, texts, loaded, options)` -> the processor's batch; rows are padded if `options` say so."""
    placeholder: Callable[[str, int], str] | None = None
    """`(medium, number from 1)` -> what stands for a medium in the text, for chat templates that take strings."""
    hook: Callable[[dict[str, Any], Any], dict[str, Any]] | None = None
    """`(batch, processor)` -> the batch `[1, S]` of a user's hook, which sees it before there are labels."""
    label: Callable[[torch.Tensor, Conversation, Any], torch.Tensor] | None = None
    """`(ids, conversation, processor)` -> labels `[S]`."""
    writes_labels: bool = False
    """Whether `call` returns `labels` itself."""
    edit: Callable[[dict[str, Any], Any], dict[str, Any]] | None = None
    """`(sample, processor)` -> the labelled sample with tokens or media in the form of the family."""

    @property
    def changes_text(self) -> bool:
        """Whether ids are other than those of the rendered chat that is given to the processor as it is."""
        own = (self.shape, self.render, self.placeholder, self.hook, self.edit)
        return self.call is not call_processor or any(step is not None for step in own)


class Encoder:
    """Encodes samples for one processor."""

    def __init__(self, processor: Processor, config: EncodeConfig | None = None, steps: Steps | None = None) -> None:
        self.processor = processor
        self.config = config or EncodeConfig()
        self.steps = steps or Steps()
        self.chat: ChatFormat = chat_format(processor)
        self.reads = processor_reads(processor, self.config)
        self._path: CompactPath | None = None
        if self.config.pixels == "compact":
            from vlm_stream.pixels import find_compact_path

            self._path = find_compact_path(processor)

    def encode(
        self, conversation: Conversation, media: Mapping[str, Any], kept: KeptText | None = None
    ) -> dict[str, Any]:
        """Return the sample's tensors.

        Args:
            conversation: Turns whose media items name keys of `media` (or hold bytes). It is not changed.
            media: Member name -> bytes.
            kept: What conversion made of its text, for this processor; the result is the same without it.

        Returns:
            `input_ids`, `attention_mask`, `labels` [S] int64 (labels not shifted, -100 where nothing is learned), the
            family's other per-token tensors [S], and its media tensors as the processor gives them.
        """
        conversation = self.shape(conversation)
        is_faked = self._wants_fake(conversation)
        if is_faked:
            conversation = inject_fake_image(conversation)
            kept = None if kept is None else kept.with_fake()
        loaded = load_media(conversation, media, self.config, self.reads)
        return self._encode(self.processor, conversation, loaded, is_faked, kept if self._keeps_text else None)

    @property
    def trusts_texts(self) -> bool:
        """Whether kept text of samples without media was seen to give what the processor gives."""
        return self._keeps_text and self._kept_texts.is_trusted(kind_of_text(is_faked=self.config.inject_fake_image))

    def encode_text(self, kept: KeptText | None) -> dict[str, Any] | None:
        """Return what `encode` would for a sample without media whose kept text is trusted; None: it must do it."""
        is_faked = self.config.inject_fake_image
        if kept is not None and is_faked:
            kept = kept.with_fake()
        if kept is None:
            return None
        loaded = LoadedMedia(images=[make_fake_image()] if is_faked else [])
        sample = self._kept_texts.read(kind_of_text(is_faked=is_faked), kept, loaded)
        return None if sample is None else self._check(sample, is_faked)

    def encode_from_sizes(self, conversation: Conversation, sizes: MediaSizes) -> dict[str, Any]:
        """Return what `encode` would, without pixels and without having the media.

        `sizes` are those of what the family shows, in its order; media items may name anything.
        """
        conversation = self.shape(conversation)
        is_faked = self._wants_fake(conversation)
        if is_faked:
            height, width = FAKE_IMAGE_SIZE
            conversation = inject_fake_image(conversation)
            sizes = replace(sizes, images=(ImageSize(height=height, width=width),))
        loaded = stand_in_media(conversation, sizes, self.reads)
        return self._encode(self.grid_processor, conversation, loaded, is_faked)

    def encode_blank(self, conversation: Conversation, sizes: MediaSizes) -> dict[str, Any]:
        """Return what `encode` would, for blank media of these sizes: the ids are the same for any family."""
        filled = self.shape(fill_blank(conversation, sizes, self.reads))
        return self._encode(self.processor, filled, load_media(filled, {}, self.config, self.reads), is_faked=False)

    @cached_property
    def grid_processor(self) -> Any:
        """The processor with grids from sizes, no pixels; `ConfigError` for families where that is not known."""
        return make_grid_processor(self.processor, self.config)

    @cached_property
    def _keeps_text(self) -> bool:
        """Whether text that was tokenised by the processor and labelled by its template is what `encode` makes."""
        steps = self.steps
        # A class of somebody else may do more in its call than its parts do.
        is_known = type(self.processor).__module__.startswith("transformers.")
        return is_known and not steps.changes_text and steps.label is None and not steps.writes_labels

    @cached_property
    def _kept_texts(self) -> KeptTextReader:
        return KeptTextReader(self.processor, self._make_pixels)

    def _wants_fake(self, conversation: Conversation) -> bool:
        return self.config.inject_fake_image and not has_media(conversation)

    def _encode(
        self,
        processor: Processor,
        conversation: Conversation,
        loaded: LoadedMedia,
        is_faked: bool,
        kept: KeptText | None = None,
    ) -> dict[str, Any]:
        """Encode a sample, from kept text where that was seen to give the same."""
        kind = "" if kept is None else self._kept_texts.kind_of(loaded, is_faked=is_faked)
        try:
            sample = None
            if kept is not None and self._kept_texts.is_trusted(kind):
                sample = self._kept_texts.read(kind, kept, loaded)
            if sample is None:
                sample = self._label(processor, conversation, loaded)
                if kept is not None and kind and not self._kept_texts.is_trusted(kind):
                    self._kept_texts.learn(kind, sample, kept, loaded)
            return self._check(sample, is_faked)
        except VlmStreamError:
            raise
        except Exception as error:  # processors and templates raise anything on content they do not accept
            fact = f"{type(self.processor).__name__} refused the sample"
            raise blame_sample(error, "encode", "processor_error", fact) from error

    def _label(self, processor: Processor, conversation: Conversation, loaded: LoadedMedia) -> dict[str, Any]:
        """Render, call the processor, place labels."""
        rendered, markers = self.render(conversation)
        if processor is self.processor:
            batch = self.call([rendered.text], [loaded], {})
        else:
            batch = self.steps.call(processor, [rendered.text], [loaded], {})
        is_hooked = False
        if self.steps.hook is not None:
            before = batch["input_ids"]
            batch = self.steps.hook(batch, self.processor)
            is_hooked = batch["input_ids"].tolist() != before.tolist()
        # By way of numpy, whose indexing of short rows is cheaper than torch's.
        sample = {k: _as_tensor(v.numpy()[0]) if k in TOKEN_KEYS else v for k, v in batch.items()}
        if markers is not None:
            sample |= self.splice(sample, rendered, markers)
        ids = sample["input_ids"]
        if is_hooked:
            sample["labels"] = build_labels_from_template(ids[None], [conversation], self.processor)[0]
        elif not (self.steps.writes_labels and "labels" in sample):
            sample["labels"] = self.label(conversation, rendered, ids)
        return sample

    def _check(self, sample: dict[str, Any], is_faked: bool) -> dict[str, Any]:
        """Give a labelled sample the form of the family, and raise where it cannot be used."""
        if self.steps.edit is not None:
            sample = self.steps.edit(sample, self.processor)
        if self.config.max_length is not None:
            sample = fit_length(self.processor, sample, self.config.max_length, self.config.overlong)
        check_media_tokens(self.processor, sample["input_ids"], sample)
        if not self.config.allow_unlabelled and not has_labels(sample["labels"].numpy()):
            raise BadSampleError("encode", "no_labels", "No token of the sample is to be learned: no answer is left.")
        if is_faked:
            sample["attention_mask"] = mask_vision_tokens(self.processor, sample["input_ids"], sample["attention_mask"])
        return sample

    def call(self, texts: Sequence[str], loaded: Sequence[LoadedMedia], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the processor's batch, its pixels compact if they are to be."""
        if self._path is None:
            return self.steps.call(self.processor, texts, loaded, options)
        batch = self.steps.call(self._path.processor, texts, loaded, options)
        return batch | self._path.tag(batch)

    def _make_pixels(self, images: list[Any]) -> dict[str, Any]:
        """Return what the processor's image part makes of one sample's images, compact if they are to be."""
        processor: Any = self.processor if self._path is None else self._path.processor
        declared = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", None) or {}
        options = {**declared.get("images_kwargs", {}), "return_tensors": "pt"}
        batch = dict(processor.image_processor([images], **options))
        return batch if self._path is None else batch | self._path.tag(batch)

    def shape(self, conversation: Conversation) -> Conversation:
        """Return what of a conversation the family shows."""
        return conversation if self.steps.shape is None else self.steps.shape(conversation)

    def render(self, conversation: Conversation) -> tuple[Rendered, TypedMarkers | None]:
        """Return what the chat template writes, typed control strings replaced."""
        if self.steps.render is not None:
            return Rendered(self.steps.render(conversation)), None
        conversation, markers = disguise(conversation, self.chat)
        conversation = shape_content(conversation, self.chat, self.steps.placeholder)
        return render_chat(self.processor, self.chat, conversation), markers

    def label(self, conversation: Conversation, rendered: Rendered, ids: torch.Tensor) -> torch.Tensor:
        """Return labels for ids [S] without padding."""
        if self.steps.label is not None:
            return self.steps.label(ids, conversation, self.processor)
        if rendered.spans is None and not self.chat.header:
            return build_labels_from_template(ids[None], [conversation], self.processor)[0]
        train = wants_training(conversation)
        return _as_tensor(label_answers(self.processor, self.chat, rendered, ids.numpy(), train))

    def splice(
        self, row: Mapping[str, torch.Tensor], rendered: Rendered, markers: TypedMarkers
    ) -> dict[str, torch.Tensor]:
        """Return the per-token tensors of a row with typed control strings written as plain text."""
        ids, origin = splice_plain(self.processor, rendered.text, row["input_ids"].numpy(), markers)
        is_new = origin < 0
        spliced = {"input_ids": _as_tensor(ids)}
        for key in TOKEN_KEYS:
            if key in row and key != "input_ids":
                value = row[key].numpy()[np.maximum(origin, 0)]
                value[is_new] = 1 if key == "attention_mask" else 0
                spliced[key] = _as_tensor(value)
        return spliced


def fit_length(processor: Processor, sample: dict[str, Any], max_length: int, overlong: str) -> dict[str, Any]:
    """Return the sample when it fits, or its beginning when it may be cut."""
    ids: torch.Tensor = sample["input_ids"]
    length = len(ids)
    if length <= max_length:
        return sample
    if overlong == "bad":
        raise BadSampleError("encode", "overlong", f"The sequence has {length} tokens, more than {max_length}.")
    import torch

    media = torch.tensor(sorted(media_token_ids(processor)), dtype=ids.dtype)
    if bool(torch.isin(ids[max_length:], media).any()):
        raise BadSampleError(
            "encode",
            "truncated_media",
            f"Cutting {length} tokens at {max_length} would take media tokens away; their pixels would match nothing.",
        )
    return {key: value[:max_length] if key in TOKEN_KEYS else value for key, value in sample.items()}


def shape_content(
    conversation: Conversation, chat: ChatFormat, placeholder: Callable[[str, int], str] | None = None
) -> Conversation:
    """Return the conversation with contents in a form that the template shows; the same object if it already is."""
    if chat.content_form == "list":
        return [
            {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else m
            for m in conversation
        ]
    if chat.content_form == "string":
        seen: Counter[str] = Counter()
        return [
            {**m, "content": _join_content(m["content"], placeholder, seen)}
            if isinstance(m.get("content"), list)
            else m
            for m in conversation
        ]
    return conversation


def _join_content(
    content: list[dict[str, Any]], placeholder: Callable[[str, int], str] | None, seen: Counter[str]
) -> str:
    pieces = []
    for item in content:
        kind = item.get("type", "text")
        if kind == "text":
            pieces.append(item["text"])
        elif placeholder is not None:
            seen[kind] += 1
            pieces.append(placeholder(kind, seen[kind]))
        else:
            raise BadSampleError(
                "encode", "no_media_in_template", "The chat template takes plain text, the turn has media."
            )
    return "".join(pieces)


def _as_tensor(array: Any) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)

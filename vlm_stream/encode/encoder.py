"""One sample: a conversation and its media bytes become ids, labels and the family's media tensors.

Enters: a conversation whose media items name members, and the members. Leaves: a dict of tensors, not padded and not
shifted, ready for padding or packing. Ids and pixels are what the processor itself gives when it is called with the
same text and media. Steps: decode, render once, call the processor once, place labels, check.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.encode.blind_processor import blind_processor, stand_in_media
from vlm_stream.encode.call_processor import call_processor
from vlm_stream.encode.chat_format import ChatFormat, Rendered, chat_format, render_chat
from vlm_stream.encode.compact import find_compact_path
from vlm_stream.encode.config import EncodeConfig
from vlm_stream.encode.fake_image import has_media, inject_fake_image, mask_vision_tokens
from vlm_stream.encode.fit_length import fit_length
from vlm_stream.encode.labels import SEQUENCE_KEYS, has_labels, label_answers, wants_training
from vlm_stream.encode.load_media import LoadedMedia, load_media, processor_reads
from vlm_stream.encode.marker_scan import build_labels_from_template
from vlm_stream.encode.media_tokens import check_media_tokens
from vlm_stream.encode.typed_markers import TypedMarkers, disguise, splice_plain
from vlm_stream.errors import BadSampleError, VlmStreamError, blame_sample
from vlm_stream.tokens import FAKE_IMAGE_SIZE, ImageSize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    import torch

    from vlm_stream.conversation import Conversation
    from vlm_stream.tokens import MediaSizes

__all__ = ["Encoder"]


class Encoder:
    """Encodes samples for one processor."""

    def __init__(self, processor: Any, config: EncodeConfig | None = None) -> None:
        """Learn the processor's chat template and frame rule once."""
        self.processor = processor
        self.config = config or EncodeConfig()
        self.chat: ChatFormat = chat_format(processor)
        self.reads = processor_reads(processor, self.config)
        self._path = find_compact_path(processor) if self.config.pixels == "compact" else None

    def encode(self, conversation: Conversation, media: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sample's tensors.

        Args:
            conversation: Turns whose media items name keys of `media` (or hold bytes). It is not changed.
            media: Member name -> bytes.

        Returns:
            `input_ids`, `attention_mask`, `labels` [S] int64 (labels not shifted, -100 where nothing is learned), the
            family's other per-token tensors [S], and its media tensors as the processor gives them.

        Raises:
            BadSampleError: Stage "decode" for media, stage "encode" for everything after.
        """
        is_faked = self._wants_fake(conversation)
        if is_faked:
            conversation = inject_fake_image(conversation)
        loaded = load_media(conversation, media, self.config, self.reads)
        return self._encode(self.processor, conversation, loaded, is_faked)

    def encode_from_sizes(self, conversation: Conversation, sizes: MediaSizes) -> dict[str, Any]:
        """Return what `encode` would, without pixels and without having the media.

        Args:
            conversation: Turns with media items, whatever these name. It is not changed.
            sizes: Sizes of the media, in the order of the conversation.

        Raises:
            BadSampleError: As `encode` does; damage inside of media is not seen.
            ConfigError: The family's text does not follow from sizes (see `blind`).
        """
        is_faked = self._wants_fake(conversation)
        if is_faked:
            height, width = FAKE_IMAGE_SIZE
            conversation = inject_fake_image(conversation)
            sizes = replace(sizes, images=(ImageSize(height=height, width=width),))
        loaded = stand_in_media(conversation, sizes, self.reads)
        return self._encode(self.blind, conversation, loaded, is_faked)

    @cached_property
    def blind(self) -> Any:
        """The processor, without eyes; raises `ConfigError` for families that `encode_from_sizes` does not know."""
        return blind_processor(self.processor, self.config)

    def _wants_fake(self, conversation: Conversation) -> bool:
        return self.config.inject_fake_image and not has_media(conversation)

    def _encode(
        self, processor: Any, conversation: Conversation, loaded: LoadedMedia, is_faked: bool
    ) -> dict[str, Any]:
        try:
            return self._finish(processor, conversation, loaded, is_faked)
        except VlmStreamError:
            raise
        except Exception as error:  # processors and templates raise anything on content they do not accept
            fact = f"{type(self.processor).__name__} refused the sample"
            raise blame_sample(error, "encode", "processor_error", fact) from error

    def _finish(
        self, processor: Any, conversation: Conversation, loaded: LoadedMedia, is_faked: bool
    ) -> dict[str, Any]:
        rendered, markers = self.render(conversation)
        if processor is self.processor:
            batch = self.call([rendered.text], [loaded], self.config.processor_kwargs)
        else:
            batch = call_processor(processor, [rendered.text], [loaded], self.config.processor_kwargs)
        # By way of numpy, which for a few hundred ids takes half the time of torch's own indexing.
        sample = {k: _as_tensor(v.numpy()[0]) if k in SEQUENCE_KEYS else v for k, v in batch.items()}
        if markers is not None:
            sample |= self.splice(sample, rendered, markers)
        labels = self._labels(conversation, rendered, sample["input_ids"])
        sample["labels"] = _as_tensor(labels)
        if self.config.max_length is not None:
            sample = fit_length(self.processor, sample, self.config.max_length, self.config.overlong)
        check_media_tokens(self.processor, sample["input_ids"], sample)
        if not self.config.allow_unlabelled and not has_labels(labels[: self.config.max_length]):
            raise BadSampleError("encode", "no_labels", "No token of the sample is to be learned: no answer is left.")
        if is_faked:
            sample["attention_mask"] = mask_vision_tokens(self.processor, sample["input_ids"], sample["attention_mask"])
        return sample

    def call(self, texts: Sequence[str], loaded: Sequence[LoadedMedia], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the processor's batch, its pixels compact if they are to be."""
        if self._path is None:
            return call_processor(self.processor, texts, loaded, options)
        batch = call_processor(self._path.processor, texts, loaded, options)
        return batch | self._path.tag(batch)

    def render(self, conversation: Conversation) -> tuple[Rendered, TypedMarkers | None]:
        """Return what the chat template writes, typed control strings replaced."""
        conversation = shape_content(conversation, self.chat)
        conversation, markers = disguise(conversation, self.chat)
        return render_chat(self.processor, self.chat, conversation, **self.config.template_kwargs), markers

    def label(self, conversation: Conversation, rendered: Rendered, ids: torch.Tensor) -> torch.Tensor:
        """Return labels for ids [S] without padding."""
        return _as_tensor(self._labels(conversation, rendered, ids))

    def _labels(self, conversation: Conversation, rendered: Rendered, ids: torch.Tensor) -> npt.NDArray[np.int64]:
        if rendered.spans is None and not self.chat.header:
            return build_labels_from_template(ids[None], [conversation], self.processor)[0].numpy()
        return label_answers(self.processor, self.chat, rendered, ids.numpy(), wants_training(conversation))

    def splice(
        self, row: Mapping[str, torch.Tensor], rendered: Rendered, markers: TypedMarkers
    ) -> dict[str, torch.Tensor]:
        """Return the per-token tensors of a row with typed control strings written as plain text."""
        ids, origin = splice_plain(self.processor, rendered.text, row["input_ids"].numpy(), markers)
        is_new = origin < 0
        spliced = {"input_ids": _as_tensor(ids)}
        for key in SEQUENCE_KEYS:
            if key in row and key != "input_ids":
                value = row[key].numpy()[np.maximum(origin, 0)]
                value[is_new] = 1 if key == "attention_mask" else 0
                spliced[key] = _as_tensor(value)
        return spliced


def shape_content(conversation: Conversation, chat: ChatFormat) -> Conversation:
    """Return the conversation with contents in a form that the template shows; the same object if it already is."""
    if chat.content_form == "list":
        return [
            {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else m
            for m in conversation
        ]
    if chat.content_form == "string":
        return [
            {**m, "content": _join_text(m["content"])} if isinstance(m.get("content"), list) else m
            for m in conversation
        ]
    return conversation


def _join_text(content: list[dict[str, Any]]) -> str:
    if any(item.get("type") != "text" for item in content):
        raise BadSampleError(
            "encode", "no_media_in_template", "The chat template takes plain text, the turn has media."
        )
    return "".join(item["text"] for item in content)


def _as_tensor(array: Any) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)

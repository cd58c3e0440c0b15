"""The table of families: what a model family wants in a batch that others do not, and its collate function.

Enters: examples `{"conversation": [...]}` for the functions, which have the names that NeMo Automodel gives them;
encoded samples for `pad_collate_fn` and `collate_encoded`. Leaves: a batch. Its labels are shifted already: column t is
to predict label t.

Both ways end alike: per-token tensors are cut or padded, shifted, pixels get the family's type, `finish` adds its keys.
A new family is a row of the table, with a function of its own if its processor is called in an unusual way.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from vlm_stream.collate.conversations import conversations_of, drop_overlong, mask_fake_images, process_batch
from vlm_stream.collate.family_steps import (
    TASK_PROMPT,
    add_decoder_inputs,
    add_input_mode,
    add_kimi_grids,
    add_num_patches,
    encode_kimi_row,
    encode_omni_rows,
    name_omni_tensors,
    process_omni,
    process_pages,
    process_phi4,
    takes_medias,
)
from vlm_stream.collate.media import cast_pixels, count_conversation_media, count_grids, merge_media
from vlm_stream.collate.rows import fit_to, pad_id_of, pad_rows, shift, split_rows
from vlm_stream.collate.token_edits import cut_kimi_row, gemma4_inject_thinking_prefix, relabel
from vlm_stream.keys import TOKEN_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vlm_stream.collate.conversations import Example, PixelForm
    from vlm_stream.keys import Sample

logger = logging.getLogger(__name__)

Batch: TypeAlias = dict[str, Any]
CollateFn: TypeAlias = "Callable[..., Batch]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one model family wants."""

    process: Callable[..., Batch] = process_batch
    """`(examples, processor, **options)` -> the processor's padded batch with labels, not shifted."""
    encode_row: Callable[[Example, Any], dict[str, Any]] | None = None
    """`(example, processor)` -> one encoded row, where `Encoder.encode` does not fit the processor."""
    pixel_dtype: torch.dtype | None = None
    """Type of pixels in a batch; None: as the processor gives them."""
    counts_media: bool = True
    """Whether batches of conversations count the media of each row, and hide fake images."""
    finish: Callable[[Batch, Any], Batch] | None = None
    """`(batch, processor)` -> the shifted batch with the family's own keys."""

    def collate(
        self,
        examples: Sequence[Example],
        processor: Any,
        max_length: int | None = None,
        edit: Callable[[Batch], Batch] | None = None,
        **options: Any,
    ) -> Batch:
        """Collate conversations; `edit` changes the batch before it is cut, `options` go to `process`."""
        batch = self.process(examples, processor, **options)
        if edit is not None:
            batch = edit(batch)
        if max_length is not None:
            batch = fit_to(batch, max_length, processor)
        batch = cast_pixels(batch, self.pixel_dtype)
        if self.counts_media:
            batch = mask_fake_images(batch, examples, processor)
            batch |= count_conversation_media(conversations_of(examples))
        return self._finish(shift(batch), processor)

    def collate_rows(self, rows: Sequence[Sample], processor: Any, max_length: int | None = None) -> Batch:
        """Collate encoded samples; fake images were masked when the samples were encoded."""
        tokens: Batch = dict(pad_rows(rows, pad_id=pad_id_of(processor)))
        if max_length is not None:
            tokens = fit_to(tokens, max_length, processor)
        batch = shift(tokens) | merge_media(rows, pixel_dtype=self.pixel_dtype) | count_grids(rows)
        return self._finish(batch, processor)

    def _finish(self, batch: Batch, processor: Any) -> Batch:
        return batch if self.finish is None else self.finish(batch, processor)


def _encode_alone(process: Callable[..., Batch]) -> Callable[[Example, Any], dict[str, Any]]:
    """Return an `encode_row` that takes the row out of a batch of one."""

    def encode_row(example: Example, processor: Any) -> dict[str, Any]:
        batch = process([example], processor)
        media = {key: value for key, value in batch.items() if key not in TOKEN_KEYS}
        return {**split_rows(batch)[0], **media}

    return encode_row


_process_flat = partial(process_batch, options={"add_special_tokens": False}, flat_images=True)
_process_right = partial(process_batch, options={"padding_side": "right"})

_PLAIN: Final = Family()
_ENCODED: Final = Family(pixel_dtype=torch.bfloat16)
_DEFAULT: Final = Family(pixel_dtype=torch.bfloat16, finish=add_num_patches)
_QWEN3_OMNI: Final = Family(process=process_omni)
_KIMI_VL: Final = Family(process=_process_flat, encode_row=_encode_alone(_process_flat))
_KIMI_K25: Final = Family(process=_process_right, finish=add_kimi_grids)
_KIMI_K25_REMOTE: Final = Family(encode_row=encode_kimi_row, finish=add_kimi_grids)
_NEMOTRON_OMNI: Final = Family(pixel_dtype=torch.bfloat16, finish=name_omni_tensors)
_NEMOTRON_PARSE: Final = Family(
    process=process_pages,
    encode_row=_encode_alone(process_pages),
    pixel_dtype=torch.bfloat16,
    counts_media=False,
    finish=add_decoder_inputs,
)
_PHI4: Final = Family(
    process=process_phi4, encode_row=_encode_alone(process_phi4), counts_media=False, finish=add_input_mode
)


def default_collate_fn(
    examples: Sequence[Example],
    processor: Any,
    max_length: int | None = None,
    _post_tokenize_hook: Callable[[Batch, Any], Batch] | None = None,
    *,
    drop_overlong: bool = False,
    pixels: PixelForm = "full",
) -> Batch:
    """Collate conversations for any processor whose chat template and call follow transformers' conventions.

    Args:
        examples: `{"conversation": [...]}`; media as paths, bytes or decoded objects. They are not changed.
        processor: The model's processor.
        max_length: Every batch gets this many tokens before the shift; longer rows are cut, never through media.
        _post_tokenize_hook: `(batch, processor) -> batch`, called right after tokenising.
        drop_overlong: Leave out rows that are estimated to be longer than `max_length`, instead of cutting them.
        pixels: `compact` leaves pixels as bytes for `finish_pixels`, where the family has such a path.

    Returns:
        The processor's batch with shifted labels, pixels in bfloat16, media counts per row.
    """
    if drop_overlong:
        examples = _drop(examples, processor, max_length)
    hook = _post_tokenize_hook
    edit = None if hook is None else lambda batch: relabel(hook, batch, examples, processor)
    return _DEFAULT.collate(examples, processor, max_length, edit, pixels=pixels)


def _drop(examples: Sequence[Example], processor: Any, max_length: int | None) -> Sequence[Example]:
    return examples if max_length is None else drop_overlong(examples, processor, max_length)


def gemma4_prefix_collate_fn(examples: Sequence[Example], processor: Any, max_length: int | None = None) -> Batch:
    """Collate conversations for Gemma-4 with the thinking prefix before every answer."""
    return _DEFAULT.collate(
        examples, processor, max_length, lambda batch: gemma4_inject_thinking_prefix(batch, processor)
    )


def qwen2_5_collate_fn(examples: Sequence[Example], processor: Any, pixels: PixelForm = "full") -> Batch:
    """Collate conversations for Qwen2.5-VL; pixels keep their type, `compact` ones are bytes for `finish_pixels`."""
    return _PLAIN.collate(examples, processor, pixels=pixels)


def llava_onevision_collate_fn(examples: Sequence[Example], processor: Any) -> Batch:
    """Collate conversations for LLaVA-OneVision; labels shifted, pixels as the processor gives them."""
    return _PLAIN.collate(examples, processor)


def qwen3_omni_collate_fn(
    examples: Sequence[Example],
    processor: Any,
    use_audio_in_video: bool = False,
    pixels: PixelForm = "full",
) -> Batch:
    """Collate conversations for Qwen3-Omni: images, videos and sound.

    Args:
        examples: `{"conversation": [...]}`.
        processor: The model's processor; batches are padded on the right.
        use_audio_in_video: Interleave the sound track of each video with its frames; needs `qwen_omni_utils`.
        pixels: `compact` leaves pixels as bytes for `finish_pixels`; media are then read by our own reader.
    """
    return _QWEN3_OMNI.collate(examples, processor, use_audio_in_video=use_audio_in_video, pixels=pixels)


def kimi_vl_collate_fn(examples: Sequence[Example], processor: Any, max_length: int | None = None) -> Batch:
    """Collate conversations for Kimi-VL, whose remote code takes all images of a batch as one flat list.

    Args:
        examples: `{"conversation": [...]}`, with images only.
        processor: The model's processor.
        max_length: Rows that are estimated to be longer are dropped, the others padded to this many tokens.
    """
    return _KIMI_VL.collate(_drop(examples, processor, max_length), processor, max_length)


def kimi_k25_vl_collate_fn(
    examples: Sequence[Example], processor: Any, max_length: int | None = None, drop_overlong: bool = False
) -> Batch:
    """Collate conversations for Kimi-K2.5; image placeholders leave as many as the vision tower gives tokens.

    Args:
        examples: `{"conversation": [...]}`.
        processor: The model's processor, remote or from transformers.
        max_length: Length of every batch before the shift; longer rows are cut (media that the cut would tear are
            taken out, and reported), or dropped.
        drop_overlong: Drop rows that are too long instead of cutting them.

    Returns:
        `input_ids`, `attention_mask`, `labels` (shifted), `pixel_values`, `grid_thws` [N, 3], `image_grid_hws` [N, 2],
        `n_images_per_sample` [B] with zeros; the class inside transformers adds its own keys, videos among them.

    Raises:
        ValueError: Every row is too long, or placeholders and images differ in number.
    """
    if drop_overlong:
        examples = _drop(examples, processor, max_length)
    if not takes_medias(processor):
        return _KIMI_K25.collate(examples, processor, max_length)
    rows = []
    for row in (encode_kimi_row(example, processor) for example in examples):
        length = len(row["input_ids"])
        if max_length is None or length <= max_length:
            rows.append(row)
        elif drop_overlong:
            logger.warning("Dropped a row of %d tokens, more than %d.", length, max_length)
        else:
            rows.append(cut_kimi_row(row, max_length, processor))
    if not rows:
        raise ValueError(f"All samples in batch exceed max_length={max_length}.")
    return _KIMI_K25_REMOTE.collate_rows(rows, processor, max_length)


def nemotron_omni_collate_fn(
    examples: Sequence[Example], processor: Any, max_length: int | None = None, max_video_frames: int = 8
) -> Batch:
    """Collate conversations for Nemotron-Omni: images, one video and sound per sample.

    Args:
        examples: `{"conversation": [...]}`; sound as an array, (array, rate), bytes or a path.
        processor: The model's processor.
        max_length: Length of every batch before the shift; longer rows are cut, never through media.
        max_video_frames: Most frames of a video; the number is always even.

    Raises:
        NotImplementedError: A sample has more than one video.
    """
    return _NEMOTRON_OMNI.collate_rows(encode_omni_rows(examples, processor, max_video_frames), processor, max_length)


def nemotron_parse_collate_fn(examples: Sequence[Example], processor: Any, task_prompt: str = TASK_PROMPT) -> Batch:
    """Collate pages and their transcriptions for Nemotron-Parse, an encoder-decoder.

    Args:
        examples: `{"conversation": [...]}`: the image of the last user turn that has one before the answer, and the
            first answer with text, which is learned up to and with the end token.
        processor: The model's processor, called with images and text.
        task_prompt: What the decoder is asked.

    Returns:
        The processor's batch with shifted labels, pixels in bfloat16, `decoder_input_ids`, `decoder_attention_mask` and
        `n_images_per_sample` if any row has an image.

    Raises:
        ValueError: The tokenizer has no start token or no padding token for the decoder.
    """
    return _NEMOTRON_PARSE.collate(examples, processor, task_prompt=task_prompt)


def phi4_mm_collate_fn(examples: Sequence[Example], processor: Any) -> Batch:
    """Collate conversations with sound for Phi-4-multimodal.

    Args:
        examples: `{"conversation": [...], "audio": ...}`; sound as an array, (array, rate), or a dict with `array` and
            `sampling_rate`.
        processor: The model's processor.

    Returns:
        The processor's batch, at most 1024 tokens before the shift, `input_mode` (0 text, 1 image, 2 sound, 3 both)
        and shifted labels. Image tensors are left out of batches without images.
    """
    return _PHI4.collate(examples, processor)


def pad_collate_fn(examples: Sequence[Sample], processor: Any, max_length: int | None = None) -> Batch:
    """Collate encoded samples, of any family, as NeMo Automodel does.

    Args:
        examples: Dicts of tensors; per-token tensors [S] (or [1, S]), media as the processor gave them.
        processor: For its padding token and media tokens.
        max_length: Every batch gets this many tokens before the shift; longer rows are cut, never through media.

    Returns:
        Per-token tensors [B, S - 1] with shifted labels, every media key of the samples (`second_per_grid_ts` too),
        `n_images_per_sample` and `n_videos_per_sample` where grids exist; pixels in bfloat16.

    Raises:
        BadSampleError: The cut would take media tokens away.
    """
    return _ENCODED.collate_rows(examples, processor, max_length)


_TABLE: Final[tuple[tuple[tuple[str, ...], Family, CollateFn | None], ...]] = (
    (("Qwen2_5_VLProcessor",), _PLAIN, qwen2_5_collate_fn),
    (("Qwen3OmniMoeProcessor",), _QWEN3_OMNI, qwen3_omni_collate_fn),
    (("LlavaOneVisionProcessor", "LlavaOnevisionProcessor"), _PLAIN, llava_onevision_collate_fn),
    (("KimiVLProcessor",), _KIMI_VL, kimi_vl_collate_fn),
    (("KimiK25Processor",), _KIMI_K25_REMOTE, kimi_k25_vl_collate_fn),
    (("Kimi_K25Processor",), _KIMI_K25, kimi_k25_vl_collate_fn),
    (("NemotronParseProcessor",), _NEMOTRON_PARSE, nemotron_parse_collate_fn),
    (
        ("NemotronH_Nano_Omni_Reasoning_V3Processor", "NemotronH_Omni_Reasoning_V3Processor"),
        _NEMOTRON_OMNI,
        nemotron_omni_collate_fn,
    ),
    (("Phi4MMProcessor", "Phi4MultimodalProcessor"), _PHI4, None),
    (("default",), _DEFAULT, default_collate_fn),
)
"""Processor classes (the published remote code's and transformers' own), their family, its registered function.

Phi-4's function is not registered, as in NeMo Automodel: it is chosen explicitly.
"""

COLLATE_FNS: Final[dict[str, CollateFn]] = {name: fn for names, _, fn in _TABLE if fn for name in names}
"""Class name of a processor -> its collate function."""

_FAMILIES: Final = {name: family for names, family, _ in _TABLE for name in names}


def family_of(processor: Any) -> Family:
    """Return the family of a processor's class; that of `default` for classes that the table does not name."""
    return _FAMILIES.get(type(processor).__name__, _DEFAULT)


def collate_encoded(rows: Sequence[Sample], processor: Any, max_length: int | None = None) -> Batch:
    """Collate encoded samples in the form of their processor's family.

    The batch is that of the family's own collate function, padded on the right. Rows are what `Encoder.encode` gives,
    or `family_of(processor).encode_row` where the family has one.
    """
    return family_of(processor).collate_rows(rows, processor, max_length)


def get_collate(processor: Any) -> CollateFn:
    """Return the function of the processor's class; the default one (and a warning) for classes nobody registered."""
    name = type(processor).__name__
    if name not in COLLATE_FNS:
        logger.warning("No collate function is registered for %s; the default one is used.", name)
    return COLLATE_FNS.get(name, default_collate_fn)


def register_collate(class_name: str) -> Callable[[CollateFn], CollateFn]:
    """Register a collate function for a processor class, in place of any other.

    Example:
        >>> @register_collate("MyProcessor")
        ... def my_collate_fn(examples, processor):
        ...     return {}
    """

    def register(function: CollateFn) -> CollateFn:
        COLLATE_FNS[class_name] = function
        return function

    return register

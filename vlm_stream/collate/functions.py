"""The collate functions of NeMo Automodel, under its names: conversations in, a batch with shifted labels out.

`pad_collate_fn` takes encoded samples. What a family wants is in `families.py`; here are the arguments of functions.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.collate.conversations import conversation_of, drop_overlong, encode_rows
from vlm_stream.collate.families import DEFAULT, ENCODED, PLAIN, family_of, find_family, function_of
from vlm_stream.collate.family_steps import TASK_PROMPT, page_steps, relabel
from vlm_stream.collate.kimi import cut_kimi_row, takes_medias
from vlm_stream.collate.rows import cut_to
from vlm_stream.conversation import iter_media
from vlm_stream.encode import EncodeConfig, Encoder, frame_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vlm_stream.collate.conversations import Example, PixelForm
    from vlm_stream.collate.families import Batch
    from vlm_stream.conversation import Conversation
    from vlm_stream.keys import Sample

logger = logging.getLogger(__name__)

_PHI4_MAX_LENGTH: Final = 1024


@function_of("default")
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
    edit = None if hook is None else lambda batch: relabel(hook, batch, _conversations(examples, processor), processor)
    return DEFAULT.collate(examples, processor, max_length, edit, pixels=pixels)


def _conversations(examples: Sequence[Example], processor: Any) -> list[Conversation]:
    return [conversation_of(example, processor) for example in examples]


def _drop(examples: Sequence[Example], processor: Any, max_length: int | None) -> Sequence[Example]:
    return examples if max_length is None else drop_overlong(examples, processor, max_length)


@function_of("gemma4_prefix")
def gemma4_prefix_collate_fn(examples: Sequence[Example], processor: Any, max_length: int | None = None) -> Batch:
    """Collate conversations for Gemma-4 with the thinking prefix before every answer."""
    return find_family("gemma4_prefix").collate(examples, processor, max_length)


@function_of("qwen2_5_vl")
def qwen2_5_collate_fn(examples: Sequence[Example], processor: Any, pixels: PixelForm = "full") -> Batch:
    """Collate conversations for Qwen2.5-VL; pixels keep their type, `compact` ones are bytes for `finish_pixels`."""
    return PLAIN.collate(examples, processor, pixels=pixels)


@function_of("llava_onevision")
def llava_onevision_collate_fn(examples: Sequence[Example], processor: Any) -> Batch:
    """Collate conversations for LLaVA-OneVision; labels shifted, pixels as the processor gives them."""
    return PLAIN.collate(examples, processor)


@function_of("qwen3_omni_moe")
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
    return find_family("qwen3_omni_moe").collate(
        examples, processor, use_audio_in_video=use_audio_in_video, pixels=pixels
    )


@function_of("kimi_vl")
def kimi_vl_collate_fn(examples: Sequence[Example], processor: Any, max_length: int | None = None) -> Batch:
    """Collate conversations for Kimi-VL, whose remote code takes all images of a batch as one flat list.

    Args:
        examples: `{"conversation": [...]}`, with images only.
        processor: The model's processor.
        max_length: Rows that are estimated to be longer are dropped, the others padded to this many tokens.
    """
    return find_family("kimi_vl").collate(_drop(examples, processor, max_length), processor, max_length)


@function_of("kimi_k25", "kimi_k25_remote")
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
        return find_family("kimi_k25").collate(examples, processor, max_length)
    family = find_family("kimi_k25_remote")
    encoder = Encoder(processor, EncodeConfig(allow_unlabelled=True), family.steps)
    rows = []
    for row in encode_rows(examples, encoder):
        length = len(row["input_ids"])
        if max_length is None or length <= max_length:
            rows.append(row)
        elif drop_overlong:
            logger.warning("Dropped a row of %d tokens, more than %d.", length, max_length)
        else:
            rows.append(cut_kimi_row(row, max_length, processor))
    if not rows:
        raise ValueError(f"All samples in batch exceed max_length={max_length}.")
    return family.collate_rows(rows, processor, max_length)


@function_of("nemotron_h_omni", "nemotron_omni_remote")
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
    for conversation in _conversations(examples, processor):
        if sum(item["type"] == "video" for item in iter_media(conversation)) > 1:
            raise NotImplementedError("Nemotron-Omni takes one video per sample.")
    rule = frame_rule(processor, None)
    least = min(rule.min_frames, max_video_frames)
    rule = replace(rule, max_frames=max_video_frames, temporal_patch_size=2, min_frames=least)
    family = family_of(processor)
    encoder = Encoder(processor, EncodeConfig(frames=rule, allow_unlabelled=True), family.steps)
    return family.collate_rows(encode_rows(examples, encoder), processor, max_length)


@function_of("nemotron_parse")
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
    family = find_family("nemotron_parse")
    return replace(family, steps=page_steps(task_prompt)).collate(examples, processor)


@function_of("phi4_mm", "phi4_multimodal")
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
    family = replace(find_family("phi4_multimodal"), finish=None)
    return family.collate(examples, processor, edit=lambda batch: cut_to(batch, _PHI4_MAX_LENGTH, processor))


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
    return ENCODED.collate_rows(examples, processor, max_length)

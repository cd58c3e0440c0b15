"""The collate functions of NeMo Automodel, under its names: conversations in, a batch with shifted labels out.

`examples` are `{"conversation": [...]}`, media as paths, bytes or decoded objects, and are not changed; `processor` is
that of the model; `max_length` is the length of every batch before the shift: longer rows are cut, never through media.
`pixels="compact"` leaves pixels as bytes for `finish_pixels`, where the family has such a path. `pad_collate_fn` takes
encoded samples. What a family wants is in `families.py`; here are the arguments of functions.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from vlm_stream.collate.conversations import Example, PixelForm, conversation_of, drop_overlong, encode_rows
from vlm_stream.collate.families import DEFAULT, ENCODED, PLAIN, Batch, family_of, find_family, function_of
from vlm_stream.collate.family_steps import TASK_PROMPT, page_steps, relabel
from vlm_stream.collate.kimi import cut_kimi_row, takes_medias
from vlm_stream.collate.rows import cut_to
from vlm_stream.conversation import Conversation, iter_media
from vlm_stream.encode import EncodeConfig, Encoder, frame_rule
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

    `_post_tokenize_hook` is called with batch and processor right after tokenising, and returns the batch.
    `drop_overlong` leaves out rows that are estimated to be longer than `max_length`, instead of cutting them.

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
    """Collate conversations for Qwen2.5-VL; pixels keep their type."""
    return PLAIN.collate(examples, processor, pixels=pixels)


@function_of("llava_onevision")
def llava_onevision_collate_fn(examples: Sequence[Example], processor: Any) -> Batch:
    """Collate conversations for LLaVA-OneVision; pixels keep their type."""
    return PLAIN.collate(examples, processor)


@function_of("qwen3_omni_moe")
def qwen3_omni_collate_fn(
    examples: Sequence[Example], processor: Any, use_audio_in_video: bool = False, pixels: PixelForm = "full"
) -> Batch:
    """Collate conversations for Qwen3-Omni: images, videos and sound; padded on the right.

    `use_audio_in_video` interleaves the sound track of each video with its frames, and needs `qwen_omni_utils`.
    Compact pixels are read by our own reader.
    """
    return find_family("qwen3_omni_moe").collate(
        examples, processor, use_audio_in_video=use_audio_in_video, pixels=pixels
    )


@function_of("kimi_vl")
def kimi_vl_collate_fn(examples: Sequence[Example], processor: Any, max_length: int | None = None) -> Batch:
    """Collate conversations with images for Kimi-VL, whose remote code takes all images of a batch as one flat list.

    Rows that are estimated to be longer than `max_length` are dropped, the others padded to it.
    """
    return find_family("kimi_vl").collate(_drop(examples, processor, max_length), processor, max_length)


@function_of("kimi_k25", "kimi_k25_remote")
def kimi_k25_vl_collate_fn(
    examples: Sequence[Example], processor: Any, max_length: int | None = None, drop_overlong: bool = False
) -> Batch:
    """Collate conversations for Kimi-K2.5, by its remote class or transformers' own.

    Image placeholders leave as many as the vision tower gives tokens. Rows longer than `max_length` are cut (media that
    the cut would tear are taken out, and reported), or dropped with `drop_overlong`.

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

    Sound comes as an array, (array, rate), bytes or a path. A video has at most `max_video_frames`, and an even number.

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
    """Collate pages and their transcriptions for Nemotron-Parse, an encoder-decoder that is asked `task_prompt`.

    Of a conversation it takes the image of the last user turn that has one before the answer, and the first answer with
    text, which is learned up to and with the end token.

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

    The `audio` of an example is an array, (array, rate), or a dict with `array` and `sampling_rate`.

    Returns:
        The processor's batch, at most 1024 tokens before the shift, `input_mode` (0 text, 1 image, 2 sound, 3 both)
        and shifted labels. Image tensors are left out of batches without images.
    """
    family = replace(find_family("phi4_multimodal"), finish=None)
    return family.collate(examples, processor, edit=lambda batch: cut_to(batch, _PHI4_MAX_LENGTH, processor))


def pad_collate_fn(examples: Sequence[Sample], processor: Any, max_length: int | None = None) -> Batch:
    """Collate encoded samples, of any family, as NeMo Automodel does.

    Per-token tensors of the samples are [S] (or [1, S]), media as the processor gave them.

    Returns:
        Per-token tensors [B, S - 1] with shifted labels, every media key of the samples (`second_per_grid_ts` too),
        `n_images_per_sample` and `n_videos_per_sample` where grids exist; pixels in bfloat16.

    Raises:
        BadSampleError: The cut would take media tokens away.
    """
    return ENCODED.collate_rows(examples, processor, max_length)

"""What single families do otherwise: how their processors are called, and what their models want in a batch.

Enters: conversations, decoded media, rows or batches of one family. Leaves: the same, in the form that `families.py`
goes on with. Nothing is shifted here.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch

from vlm_stream.collate.conversations import Example, PixelForm, conversation_of, process_batch
from vlm_stream.collate.rows import pad_id_of, pad_rows, padding_side, split_rows
from vlm_stream.conversation import Conversation, iter_media
from vlm_stream.encode import (
    LoadedMedia,
    Steps,
    build_labels,
    build_labels_from_template,
    call_processor,
    message_text,
    tokenizer_of,
)
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.keys import IGNORE, TOKEN_KEYS
from vlm_stream.tokens import audio_rate

_GEMMA4_MODEL_TURN: Final = "<|turn>model\n"
GEMMA4_THINKING_PREFIX: Final = "<|channel>thought\n<channel|>"


def relabel(
    hook: Callable[[dict[str, Any], Any], dict[str, Any]],
    batch: dict[str, Any],
    conversations: Sequence[Conversation],
    processor: Any,
) -> dict[str, Any]:
    """Let a hook change a tokenised batch, which it sees without labels; they are made again if it changed the ids."""
    labels = batch.pop("labels")
    before = batch["input_ids"]
    batch = hook(dict(batch), processor)
    if not torch.equal(batch["input_ids"], before):
        labels = build_labels_from_template(batch["input_ids"], conversations, processor)
        labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORE)
    return batch | {"labels": labels}


def add_num_patches(batch: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Add the image tokens per row, which models with 5-D pixels (tiles) are cut by."""
    token_id = getattr(processor, "image_token_id", None)
    pixels = batch.get("pixel_values")
    if token_id is None or not isinstance(pixels, torch.Tensor) or pixels.ndim != 5:
        return batch
    return batch | {"num_patches": (batch["input_ids"] == token_id).sum(dim=1)}


# Qwen3-Omni ----------------------------------------------------------------------------------------------------------


def process_omni(
    examples: Sequence[Example], processor: Any, use_audio_in_video: bool = False, pixels: PixelForm = "full"
) -> dict[str, Any]:
    """Read media with `qwen_omni_utils` where it is installed, as NeMo Automodel does, else with our own reader."""
    conversations = [conversation_of(example, processor) for example in examples]
    has_utils = find_spec("qwen_omni_utils") is not None
    if use_audio_in_video and not has_utils:
        raise ConfigError(
            "use_audio_in_video needs the sound tracks of the videos, which the package 'qwen_omni_utils' reads and "
            "which is not installed. Install it with: pip install qwen-omni-utils, or leave use_audio_in_video off."
        )
    if use_audio_in_video and pixels == "compact":
        raise ConfigError(
            "use_audio_in_video goes through 'qwen_omni_utils', which gives full pixels, so compact ones cannot be had "
            "with it; leave one of the two off."
        )
    # Files and URLs are the only form that qwen_omni_utils samples videos of.
    are_paths = all(isinstance(item[item["type"]], str) for chat in conversations for item in iter_media(chat))
    if has_utils and are_paths and pixels == "full":
        return _process_with_utils(conversations, processor, use_audio_in_video)
    return process_batch(examples, processor, {"padding_side": "right"}, pixels=pixels)


def _process_with_utils(
    conversations: Sequence[Conversation], processor: Any, use_audio_in_video: bool
) -> dict[str, Any]:
    process_mm_info = import_module("qwen_omni_utils").process_mm_info
    texts = [processor.apply_chat_template(c, add_generation_prompt=False, tokenize=False) for c in conversations]
    infos = [process_mm_info(conversation, use_audio_in_video=use_audio_in_video) for conversation in conversations]
    audios, images, videos = ([part for part in parts if part] for parts in zip(*infos, strict=True))
    media = {"audio": [wave for waves in audios for wave in waves], "images": images, "videos": videos}
    batch: dict[str, Any] = dict(
        processor(
            text=texts,
            **{name: items for name, items in media.items() if items},
            padding=True,
            padding_side="right",
            use_audio_in_video=use_audio_in_video,
            return_tensors="pt",
        )
    )
    labels = build_labels_from_template(batch["input_ids"], conversations, processor)
    return batch | {"labels": labels.masked_fill(batch["attention_mask"] == 0, IGNORE)}


# Nemotron-Omni -------------------------------------------------------------------------------------------------------

_REMOTE_OMNI_NAMES: Final = {"input_features": "sound_features", "input_features_mask": "sound_attention_mask"}


def name_omni_tensors(sample: dict[str, Any], processor: Any) -> dict[str, Any]:  # noqa: ARG001 - a family's edit
    """Rename sound and add `image_flags` for the published remote class; transformers' class keeps its names."""
    renamed = {_REMOTE_OMNI_NAMES.get(key, key): value for key, value in sample.items()}
    if "pixel_values" in renamed:
        renamed["image_flags"] = torch.ones((len(renamed["pixel_values"]), 1), dtype=torch.int64)
    return renamed


# One question, one answer: Nemotron-Parse, PaliGemma ------------------------------------------------------------------

TASK_PROMPT: Final = "</s><s><predict_bbox><predict_classes><output_markdown>"
_BEFORE_ANSWER: Final = "\x1f"


def page_steps(task_prompt: str = TASK_PROMPT) -> Steps:
    """Return the steps of Nemotron-Parse: a page, the fixed prompt and the transcription; there is no chat template."""
    return Steps(shape=partial(_page, task_prompt), render=_join_turns, call=_call_pages, label=_label_answer)


def _page(task_prompt: str, conversation: Conversation) -> Conversation:
    """Return one page with the prompt, and its answer.

    The page is the image of the last user turn that has one before the first answer with text.
    """
    image, answer = None, ""
    for message in conversation:
        content = message.get("content")
        if message["role"] == "user" and isinstance(content, list):
            image = next((item for item in content if item.get("type") == "image"), image)
        elif message["role"] == "assistant" and not answer:
            answer = message_text(message)
        if image is not None and answer:
            break
    prompt = [*([image] if image is not None else []), {"type": "text", "text": task_prompt}]
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]


def _join_turns(conversation: Conversation) -> str:
    return "".join(message_text(message) for message in conversation)


def _call_pages(
    processor: Any, texts: Sequence[str], loaded: Sequence[LoadedMedia], options: Mapping[str, Any]
) -> dict[str, Any]:
    decoder_padding(processor)
    images = [next(iter(media.images), None) for media in loaded]
    return dict(processor(images=images, text=list(texts), **{"padding": True, "return_tensors": "pt", **options}))


def _label_answer(ids: torch.Tensor, conversation: Conversation, processor: Any) -> torch.Tensor:
    # The prompt is searched first, so that an answer is never found inside it.
    return build_labels(ids[None], [conversation], processor)[0]


def add_decoder_inputs(batch: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Add what the decoder of an encoder-decoder reads; the prompt itself begins with its start token."""
    ids = batch["input_ids"].clone()
    return batch | {
        "decoder_input_ids": ids,
        "decoder_attention_mask": (ids != decoder_padding(processor)).long(),
    }


def decoder_padding(processor: Any) -> int:
    """Return the padding token, after making sure that the decoder has a start token too."""
    tokenizer = processor.tokenizer
    names = ("decoder_start_token_id", "bos_token_id", "eos_token_id")
    has_start = any(getattr(tokenizer, name, None) is not None for name in names)
    pad = getattr(tokenizer, "pad_token_id", None)
    if not has_start or pad is None:
        raise ConfigError(
            "The decoder needs a start token and a padding token, and the tokenizer names "
            f"{'no padding token' if has_start else 'no start token'}. Set it on the tokenizer."
        )
    return int(pad)


def prefix_steps() -> Steps:
    """Return the steps of PaliGemma without a chat template: images and a prefix, and the suffix that is learned."""
    return Steps(shape=_prefix_and_suffix, render=_mark_suffix, call=_call_with_suffix, writes_labels=True)


def _prefix_and_suffix(conversation: Conversation) -> Conversation:
    """Return the first question with its images, and the answer to it."""
    turns = [message for message in conversation if message["role"] in ("user", "assistant")]
    if [message["role"] for message in turns] != ["user", "assistant"]:
        raise BadSampleError(
            "encode",
            "not_one_answer",
            f"PaliGemma without a chat template takes one question and one answer, and the sample has the turns "
            f"{', '.join(message['role'] for message in conversation)}. Cut it, or give the processor a chat template.",
        )
    return turns


def _mark_suffix(conversation: Conversation) -> str:
    question, answer = conversation
    num_images = sum(item["type"] == "image" for item in iter_media([question]))
    return f"{'<image>' * num_images}{message_text(question)}{_BEFORE_ANSWER}{message_text(answer)}"


def _call_with_suffix(
    processor: Any, texts: Sequence[str], loaded: Sequence[LoadedMedia], options: Mapping[str, Any]
) -> dict[str, Any]:
    prefixes, suffixes = zip(*(text.rsplit(_BEFORE_ANSWER, 1) for text in texts), strict=True)
    return call_processor(processor, prefixes, loaded, {**options, "suffix": list(suffixes)})


# Phi-4-multimodal ----------------------------------------------------------------------------------------------------

_PHI4_IMAGES: Final = ("input_image_embeds", "image_pixel_values")
_PHI4_AUDIOS: Final = ("input_audio_embeds", "audio_input_features")
_PHI4_IMAGE_KEYS: Final = (*_PHI4_IMAGES, "image_sizes", "image_attention_mask")


def call_phi4(
    processor: Any, texts: Sequence[str], loaded: Sequence[LoadedMedia], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Call the published remote code, which takes flat lists and rates, or transformers' class; names stay theirs."""
    if "audios" in inspect.signature(type(processor).__call__).parameters:
        media: dict[str, Any] = {
            "images": [image for one in loaded for image in one.images],
            "audios": [(audio, audio_rate(processor)) for one in loaded for audio in one.audios],
        }
        given = {name: items for name, items in media.items() if items}
        batch = dict(processor(text=list(texts), return_tensors="pt", **given, **options))
    else:
        batch = call_processor(processor, texts, loaded, options)
    if not any(one.images for one in loaded):
        batch = {key: value for key, value in batch.items() if key not in _PHI4_IMAGE_KEYS}
    return batch


def number_phi4_media(medium: str, number: int) -> str:
    """Return what stands for a medium where Phi-4's template takes strings."""
    return f"<|{medium}_{number}|>"


def add_input_mode(batch: dict[str, Any], processor: Any) -> dict[str, Any]:  # noqa: ARG001 - a family's finish
    """Say which adapters the model switches on: 0 none, 1 image, 2 sound, 3 both; the processor may have said it."""
    if len(batch.get("input_mode", ())) == 1:
        return batch
    has_image, has_audio = (_has_any(batch, keys) for keys in (_PHI4_IMAGES, _PHI4_AUDIOS))
    return batch | {"input_mode": torch.tensor([1 * has_image + 2 * has_audio])}


def _has_any(batch: Mapping[str, Any], keys: Sequence[str]) -> bool:
    return any(batch.get(key) is not None and len(batch[key]) > 0 for key in keys)


# Gemma 4 -------------------------------------------------------------------------------------------------------------


def gemma4_inject_thinking_prefix(batch: dict[str, Any], processor: Any) -> dict[str, Any]:
    r"""Return the batch `[B, S]`, or one sample `[S]`, with an empty thought before every answer.

    The large instruction-tuned models open every answer with it; without it the first loss is that of a missing habit.
    The prefix goes after every `<|turn>model\n`, visible to the model and IGNORE in the labels. Where the template
    wrote it already, it is only masked.
    """
    tokenizer = tokenizer_of(processor)
    turn, prefix = (
        torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        for text in (_GEMMA4_MODEL_TURN, GEMMA4_THINKING_PREFIX)
    )
    if not len(turn) or not len(prefix):
        return batch
    if batch["input_ids"].ndim == 1:
        return batch | _inject({key: batch[key] for key in TOKEN_KEYS if key in batch}, turn, prefix)
    rows = [_inject(row, turn, prefix) for row in split_rows(batch)]
    return batch | pad_rows(rows, pad_id=pad_id_of(processor), side=padding_side(processor))


def _inject(row: Mapping[str, torch.Tensor], turn: torch.Tensor, prefix: torch.Tensor) -> dict[str, torch.Tensor]:
    """Insert the prefix after every turn marker of one row without padding."""
    ids = row["input_ids"]
    if len(ids) < len(turn):
        return dict(row)
    places = (ids.unfold(0, len(turn), 1) == turn).all(dim=1).nonzero().flatten() + len(turn)
    fills = {"attention_mask": 1, "labels": IGNORE}
    pieces: dict[str, list[torch.Tensor]] = {key: [] for key in row}
    begin = 0
    for place in places.tolist():
        end = place + len(prefix)
        is_written = torch.equal(ids[place:end], prefix)
        for key, value in row.items():
            pieces[key].append(value[begin:place])
            written = prefix if key == "input_ids" else torch.full_like(prefix, fills.get(key, 0))
            pieces[key].append(value[place:end] if is_written and key != "labels" else written)
        begin = end if is_written else place
    return {key: torch.cat([*pieces[key], value[begin:]]) for key, value in row.items()}

"""Processors that read images and videos: one function per family, each gets `Parts` and leaves a real processor."""

from __future__ import annotations

from typing import Any, Final

from vlm_stream.testing.chat_templates import ChatStyle
from vlm_stream.testing.parts import Parts, require_package, transformers_class
from vlm_stream.testing.tokenizer import train_tokenizer

_HALF: Final = [0.5, 0.5, 0.5]
_QWEN_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_QWEN_IMAGE: Final = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_VIDEO: Final = "<|vision_start|><|video_pad|><|vision_end|>"
_DEFAULT_SYSTEM: Final = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


def chatml(*, image: str, video: str = "", audio: str = "", default_system: str = "") -> ChatStyle:
    """Return the style of the families that speak ChatML."""
    return ChatStyle(
        turn_begin="<|im_start|>{{ role }}\n",
        turn_end="<|im_end|>",
        after_turn="\n",
        generation_prompt="<|im_start|>assistant\n",
        default_system=default_system,
        image=image,
        video=video,
        audio=audio,
    )


def _qwen_tokenizer() -> Any:
    return train_tokenizer(_QWEN_TOKENS, eos="<|im_end|>", pad="<|endoftext|>")


def build_qwen2_vl(parts: Parts, class_name: str = "Qwen2VLProcessor") -> Any:
    """Build Qwen2-VL's processor (and Qwen2.5-VL's, which has the same parts)."""
    return transformers_class(class_name)(
        image_processor=parts.make_image("Qwen2VLImageProcessor"),
        video_processor=parts.make_video("Qwen2VLVideoProcessor"),
        tokenizer=_qwen_tokenizer(),
        chat_template=parts.write_template(
            chatml(image=_QWEN_IMAGE, video=_QWEN_VIDEO, default_system=_DEFAULT_SYSTEM)
        ),
    )


def build_qwen2_5_vl(parts: Parts) -> Any:
    """Build Qwen2.5-VL's processor."""
    return build_qwen2_vl(parts, "Qwen2_5_VLProcessor")


def build_qwen3_vl(parts: Parts) -> Any:
    """Build Qwen3-VL's processor."""
    image = parts.make_image(
        "Qwen2VLImageProcessor",
        patch_size=16,
        image_mean=_HALF,
        image_std=_HALF,
        size={"shortest_edge": 65536, "longest_edge": 16777216},
    )
    return transformers_class("Qwen3VLProcessor")(
        image_processor=image,
        video_processor=parts.make_video("Qwen3VLVideoProcessor"),
        tokenizer=_qwen_tokenizer(),
        chat_template=parts.write_template(chatml(image=_QWEN_IMAGE, video=_QWEN_VIDEO)),
    )


def build_kimi_k25(parts: Parts) -> Any:
    """Build Kimi-K2.5's processor."""
    tokens = (
        "[BOS]",
        "[EOS]",
        "[PAD]",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_system|>",
        "<|im_middle|>",
        "<|im_end|>",
        "<|media_begin|>",
        "<|media_content|>",
        "<|media_end|>",
        "<|media_pad|>",
        "<|kimi_k25_video_placeholder|>",
    )
    style = ChatStyle(
        turn_begin="<|im_{{ message['role'] }}|>{{ role }}<|im_middle|>",
        turn_end="<|im_end|>",
        generation_prompt="<|im_assistant|>assistant<|im_middle|>",
        image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n",
        video="<|kimi_k25_video_placeholder|>\n",
    )
    return transformers_class("Kimi_K25Processor")(
        image_processor=parts.make_image("Kimi_K25ImageProcessor"),
        video_processor=parts.make_video("Kimi_K25VideoProcessor"),
        tokenizer=train_tokenizer(tokens, eos="[EOS]", pad="[PAD]", bos="[BOS]"),
        chat_template=parts.write_template(style),
    )


def build_gemma3(parts: Parts) -> Any:
    """Build Gemma-3's processor (images only)."""
    named = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokens = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", *named.values())
    style = ChatStyle(
        begin="{{ bos_token }}",
        turn_begin="<start_of_turn>{{ role }}\n",
        turn_end="<end_of_turn>",
        after_turn="\n",
        generation_prompt="<start_of_turn>model\n",
        image="<start_of_image>",
        assistant_name="model",
    )
    return transformers_class("Gemma3Processor")(
        image_processor=parts.make_image("Gemma3ImageProcessor"),
        tokenizer=train_tokenizer(tokens, eos="<eos>", pad="<pad>", bos="<bos>", named_tokens=named, add_bos=True),
        chat_template=parts.write_template(style),
    )


def build_internvl(parts: Parts) -> Any:
    """Build InternVL's processor: images in tiles, videos frame by frame."""
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *named.values())
    tile = {"height": 448, "width": 448}
    return transformers_class("InternVLProcessor")(
        image_processor=parts.make_image(
            "GotOcr2ImageProcessor", size=tile, crop_to_patches=True, min_patches=1, max_patches=12
        ),
        video_processor=parts.make_video("InternVLVideoProcessor", size=tile),
        tokenizer=train_tokenizer(tokens, eos="<|im_end|>", pad="<|endoftext|>", named_tokens=named),
        chat_template=parts.write_template(chatml(image="<IMG_CONTEXT>\n", video="<video>\n")),
    )


def build_llava_onevision(parts: Parts) -> Any:
    """Build LLaVA-OneVision's processor."""
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
    return transformers_class("LlavaOnevisionProcessor")(
        image_processor=parts.make_image("LlavaOnevisionImageProcessor"),
        video_processor=parts.make_video("LlavaOnevisionVideoProcessor"),
        tokenizer=train_tokenizer(tokens, eos="<|im_end|>", pad="<|endoftext|>"),
        num_image_tokens=729,
        vision_feature_select_strategy="full",
        chat_template=parts.write_template(chatml(image="<image>\n", video="<video>\n")),
    )


def build_smolvlm(parts: Parts) -> Any:
    """Build SmolVLM's processor (its class writes durations in words and needs num2words for it)."""
    require_package("num2words", "video", "The SmolVLM processor")
    places = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    tokens = (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<image>",
        "<video>",
        "<fake_token_around_image>",
        "<global-img>",
        "<end_of_utterance>",
        *places,
    )
    style = ChatStyle(
        begin="<|im_start|>",
        turn_begin="{{ role | capitalize }}:{% if message['content'] is string or not message['content'] "
        "or message['content'][0]['type'] != 'image' %} {% endif %}",
        turn_end="<end_of_utterance>",
        after_turn="\n",
        generation_prompt="Assistant:",
        image="<image>",
        video="<video>",
    )
    sampling = {"video_size": {"longest_edge": 512}, "max_frames": 64, "fps": 1}
    return transformers_class("SmolVLMProcessor")(
        image_processor=parts.make_image("SmolVLMImageProcessor"),
        video_processor=parts.make_video(
            "SmolVLMVideoProcessor", video_sampling=sampling, do_sample_frames=True, num_frames=64, fps=1
        ),
        tokenizer=train_tokenizer(tokens, eos="<end_of_utterance>", pad="<|im_end|>"),
        image_seq_len=64,
        chat_template=parts.write_template(style),
    )


def build_step3p7(parts: Parts) -> Any:
    """Build Step-3.7's processor (images only)."""
    tokens = (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<im_patch>",
        "<im_start>",
        "<im_end>",
        "<patch_start>",
        "<patch_end>",
        "<patch_newline>",
    )
    return transformers_class("Step3p7Processor")(
        image_processor=parts.make_image("Step3p7ImageProcessor"),
        tokenizer=train_tokenizer(tokens, eos="<|im_end|>", pad="<|endoftext|>"),
        chat_template=parts.write_template(chatml(image="<im_patch>")),
    )


def build_glm46v(parts: Parts) -> Any:
    """Build GLM-4.6V's processor."""
    tokens = (
        "<|endoftext|>",
        "[gMASK]",
        "<sop>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
        "<|video|>",
    )
    style = ChatStyle(
        begin="[gMASK]<sop>",
        turn_begin="<|{{ role }}|>\n",
        turn_end="",
        generation_prompt="<|assistant|>\n",
        image="<|begin_of_image|><|image|><|end_of_image|>",
        video="<|begin_of_video|><|video|><|end_of_video|>",
    )
    return transformers_class("Glm46VProcessor")(
        image_processor=parts.make_image("Glm46VImageProcessor"),
        video_processor=parts.make_video("Glm46VVideoProcessor"),
        tokenizer=train_tokenizer(tokens, eos="<|user|>", pad="<|endoftext|>"),
        chat_template=parts.write_template(style),
    )

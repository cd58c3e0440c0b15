"""Processors that read audio too: one function per family, each gets `Parts` and leaves a real processor."""

from __future__ import annotations

from typing import Any, Final

from vlm_stream.testing.chat_templates import ChatStyle
from vlm_stream.testing.parts import Parts, require_package, transformers_class
from vlm_stream.testing.tokenizer import train_tokenizer
from vlm_stream.testing.vision_processors import chatml

_HALF: Final = [0.5, 0.5, 0.5]
_CLIP_MEAN: Final = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD: Final = [0.26862954, 0.26130258, 0.27577711]


def build_qwen3_omni_moe(parts: Parts) -> Any:
    """Build Qwen3-Omni's processor."""
    named = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "audio_token": "<|audio_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *named.values())
    style = chatml(
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
        audio="<|audio_start|><|audio_pad|><|audio_end|>",
    )
    return transformers_class("Qwen3OmniMoeProcessor")(
        image_processor=parts.make_image("Qwen2VLImageProcessor", patch_size=16, image_mean=_HALF, image_std=_HALF),
        video_processor=parts.make_video("Qwen2VLVideoProcessor", patch_size=16),
        feature_extractor=parts.make_audio(
            "WhisperFeatureExtractor", feature_size=128, sampling_rate=16000, n_fft=400, hop_length=160
        ),
        tokenizer=train_tokenizer(tokens, eos="<|im_end|>", pad="<|endoftext|>", named_tokens=named),
        chat_template=parts.write_template(style),
    )


def build_phi4_multimodal(parts: Parts) -> Any:
    """Build Phi-4-multimodal's processor (images and audio)."""
    named = {"image_token": "<|image|>", "audio_token": "<|audio|>"}
    tokens = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", *named.values())
    style = ChatStyle(
        turn_begin="<|{{ role }}|>",
        turn_end="<|end|>",
        generation_prompt="<|assistant|>",
        image="<|image|>",
        audio="<|audio|>",
    )
    return transformers_class("Phi4MultimodalProcessor")(
        image_processor=parts.make_image("Phi4MultimodalImageProcessor"),
        audio_processor=parts.make_audio("Phi4MultimodalFeatureExtractor"),
        tokenizer=train_tokenizer(tokens, eos="<|endoftext|>", pad="<|endoftext|>", named_tokens=named),
        chat_template=parts.write_template(style),
    )


def build_gemma4(parts: Parts, prefix: str = "Gemma4") -> Any:
    """Build Gemma-4's processor (and the unified one's, which has the same parts under another prefix)."""
    named = {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    }
    tokens = ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|video|>", *named.values())
    style = ChatStyle(
        begin="{{ bos_token }}",
        turn_begin="<|turn>{{ role }}\n",
        turn_end="<turn|>",
        after_turn="\n",
        generation_prompt="<|turn>model\n",
        image="<|image|>",
        video="<|video|>",
        audio="<|audio|>",
        assistant_name="model",
    )
    return transformers_class(f"{prefix}Processor")(
        feature_extractor=parts.make_audio(f"{prefix}AudioFeatureExtractor"),
        image_processor=parts.make_image(f"{prefix}ImageProcessor"),
        video_processor=parts.make_video(f"{prefix}VideoProcessor"),
        tokenizer=train_tokenizer(tokens, eos="<eos>", pad="<pad>", bos="<bos>", named_tokens=named, add_bos=True),
        chat_template=parts.write_template(style),
    )


def build_gemma4_unified(parts: Parts) -> Any:
    """Build the processor of the unified Gemma-4."""
    return build_gemma4(parts, "Gemma4Unified")


def build_nemotron_h_omni(parts: Parts) -> Any:
    """Build Nemotron-H-Omni's processor (its audio class needs librosa)."""
    require_package("librosa", "audio", "The Nemotron-H-Omni processor")
    tokens = (
        "<unk>",
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<image>",
        "<video>",
        "<img>",
        "</img>",
        "<so_embedding>",
        "<so_start>",
        "<so_end>",
    )
    return transformers_class("NemotronH_Omni_Reasoning_V3Processor")(
        image_processor=parts.make_image("NemotronH_Omni_Reasoning_V3ImageProcessor"),
        video_processor=parts.make_video(
            "NemotronH_Omni_Reasoning_V3VideoProcessor", norm_mean=_CLIP_MEAN, norm_std=_CLIP_STD
        ),
        feature_extractor=parts.make_audio("ParakeetFeatureExtractor", feature_size=128),
        tokenizer=train_tokenizer(tokens, eos="<|im_end|>", pad="</s>", bos="<s>"),
        chat_template=parts.write_template(chatml(image="<image>", video="<video>", audio="<so_embedding>")),
    )

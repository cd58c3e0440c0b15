"""What each family's processor is made of: class names of transformers, special tokens in their order, a chat style."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from vlm_stream.testing.tokenizer import ChatStyle

__all__ = ["FAMILY_PARTS", "MORE_PARTS", "Family"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The parts of one family's processor."""

    processor: str
    """Class of the processor."""
    image: str
    """Class of the image processor."""
    style: ChatStyle | None
    """None: the family has no chat template."""
    tokens: str
    """Special tokens, between blanks, in the order of their ids; those of `named` come after them."""
    eos: str
    pad: str
    bos: str | None = None
    add_bos: bool = False
    """Whether encoding puts `bos` in front by itself."""
    named: dict[str, str] = field(default_factory=dict)
    """Tokens that the processor reads from its tokenizer, by attribute."""
    video: str | None = None
    audio: str | None = None
    image_options: dict[str, Any] = field(default_factory=dict)
    image_attributes: dict[str, Any] = field(default_factory=dict)
    """What the processor reads from its image processor, and the class does not have."""
    video_options: dict[str, Any] = field(default_factory=dict)
    audio_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the processor."""
    audio_argument: str = "feature_extractor"
    """What the processor calls its audio part."""
    needs: tuple[str, str] | None = None
    """A package that its classes import, and our extra that brings it."""


def _chatml(*, image: str, video: str = "", audio: str = "", default_system: str = "") -> ChatStyle:
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


_HALF: Final = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_CHATML_TOKENS: Final = "<|endoftext|> <|im_start|> <|im_end|>"
_VISION: Final = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
_GEMMA: Final[dict[str, Any]] = {"eos": "<eos>", "pad": "<pad>", "bos": "<bos>", "add_bos": True}
_MISTRAL: Final[dict[str, Any]] = {"eos": "</s>", "pad": "<pad>", "bos": "<s>"}
_TILE: Final = {"height": 448, "width": 448}

_QWEN2_VL: Final = Family(
    processor="Qwen2VLProcessor",
    image="Qwen2VLImageProcessor",
    video="Qwen2VLVideoProcessor",
    tokens=f"{_CHATML_TOKENS} <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>",
    eos="<|im_end|>",
    pad="<|endoftext|>",
    style=_chatml(**_VISION, default_system="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"),
)
_QWEN3_VL: Final = replace(
    _QWEN2_VL,
    processor="Qwen3VLProcessor",
    video="Qwen3VLVideoProcessor",
    image_options={"patch_size": 16, **_HALF, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
    style=_chatml(**_VISION),
)
_QWEN3_OMNI: Final = Family(
    processor="Qwen3OmniMoeProcessor",
    image="Qwen2VLImageProcessor",
    image_options={"patch_size": 16, **_HALF},
    video="Qwen2VLVideoProcessor",
    video_options={"patch_size": 16},
    audio="WhisperFeatureExtractor",
    audio_options={"feature_size": 128, "sampling_rate": 16000, "n_fft": 400, "hop_length": 160},
    tokens=_CHATML_TOKENS,
    named={
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "audio_token": "<|audio_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    },
    eos="<|im_end|>",
    pad="<|endoftext|>",
    style=_chatml(**_VISION, audio="<|audio_start|><|audio_pad|><|audio_end|>"),
)
_KIMI_K25: Final = Family(
    processor="Kimi_K25Processor",
    image="Kimi_K25ImageProcessor",
    video="Kimi_K25VideoProcessor",
    tokens="[BOS] [EOS] [PAD] <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> <|media_begin|> "
    "<|media_content|> <|media_end|> <|media_pad|> <|kimi_k25_video_placeholder|>",
    eos="[EOS]",
    pad="[PAD]",
    bos="[BOS]",
    style=ChatStyle(
        turn_begin="<|im_{{ message['role'] }}|>{{ role }}<|im_middle|>",
        turn_end="<|im_end|>",
        generation_prompt="<|im_assistant|>assistant<|im_middle|>",
        image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n",
        video="<|kimi_k25_video_placeholder|>\n",
    ),
)
_GEMMA3_STYLE: Final = ChatStyle(
    begin="{{ bos_token }}",
    turn_begin="<start_of_turn>{{ role }}\n",
    turn_end="<end_of_turn>",
    after_turn="\n",
    generation_prompt="<start_of_turn>model\n",
    image="<start_of_image>",
    assistant_name="model",
)
_GEMMA3: Final = Family(
    processor="Gemma3Processor",
    image="Gemma3ImageProcessor",
    tokens="<pad> <eos> <bos> <start_of_turn> <end_of_turn>",
    named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    **_GEMMA,
    style=_GEMMA3_STYLE,
)
_GEMMA4: Final = Family(
    processor="Gemma4Processor",
    image="Gemma4ImageProcessor",
    video="Gemma4VideoProcessor",
    audio="Gemma4AudioFeatureExtractor",
    tokens="<pad> <eos> <bos> <|turn> <turn|> <|video|>",
    named={
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    },
    **_GEMMA,
    style=ChatStyle(
        begin="{{ bos_token }}",
        turn_begin="<|turn>{{ role }}\n",
        turn_end="<turn|>",
        after_turn="\n",
        generation_prompt="<|turn>model\n",
        image="<|image|>",
        video="<|video|>",
        audio="<|audio|>",
        assistant_name="model",
    ),
)
_GEMMA4_UNIFIED: Final = replace(
    _GEMMA4,
    processor="Gemma4UnifiedProcessor",
    image="Gemma4UnifiedImageProcessor",
    video="Gemma4UnifiedVideoProcessor",
    audio="Gemma4UnifiedAudioFeatureExtractor",
)
_INTERNVL: Final = Family(
    processor="InternVLProcessor",
    image="GotOcr2ImageProcessor",
    image_options={"size": _TILE, "crop_to_patches": True, "min_patches": 1, "max_patches": 12},
    video="InternVLVideoProcessor",
    video_options={"size": _TILE},
    tokens=_CHATML_TOKENS,
    named={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    eos="<|im_end|>",
    pad="<|endoftext|>",
    style=_chatml(image="<IMG_CONTEXT>\n", video="<video>\n"),
)
_LLAVA_ONEVISION: Final = Family(
    processor="LlavaOnevisionProcessor",
    image="LlavaOnevisionImageProcessor",
    video="LlavaOnevisionVideoProcessor",
    options={"num_image_tokens": 729, "vision_feature_select_strategy": "full"},
    tokens=f"{_CHATML_TOKENS} <image> <video>",
    eos="<|im_end|>",
    pad="<|endoftext|>",
    style=_chatml(image="<image>\n", video="<video>\n"),
)
_SMOLVLM: Final = Family(
    processor="SmolVLMProcessor",
    image="SmolVLMImageProcessor",
    video="SmolVLMVideoProcessor",
    video_options={
        "video_sampling": {"video_size": {"longest_edge": 512}, "max_frames": 64, "fps": 1},
        "do_sample_frames": True,
        "num_frames": 64,
        "fps": 1,
    },
    options={"image_seq_len": 64},
    needs=("num2words", "video"),  # writes durations in words
    tokens=f"{_CHATML_TOKENS} <image> <video> <fake_token_around_image> <global-img> <end_of_utterance> "
    + " ".join(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    eos="<end_of_utterance>",
    pad="<|im_end|>",
    style=ChatStyle(
        begin="<|im_start|>",
        turn_begin="{{ role | capitalize }}:{% if message['content'] is string or not message['content'] "
        "or message['content'][0]['type'] != 'image' %} {% endif %}",
        turn_end="<end_of_utterance>",
        after_turn="\n",
        generation_prompt="Assistant:",
        image="<image>",
        video="<video>",
    ),
)
_STEP3P7: Final = Family(
    processor="Step3p7Processor",
    image="Step3p7ImageProcessor",
    tokens=f"{_CHATML_TOKENS} <im_patch> <im_start> <im_end> <patch_start> <patch_end> <patch_newline>",
    eos="<|im_end|>",
    pad="<|endoftext|>",
    style=_chatml(image="<im_patch>"),
)
_GLM46V: Final = Family(
    processor="Glm46VProcessor",
    image="Glm46VImageProcessor",
    video="Glm46VVideoProcessor",
    tokens="<|endoftext|> [gMASK] <sop> <|user|> <|assistant|> <|system|> <|begin_of_image|> <|end_of_image|> "
    "<|image|> <|begin_of_video|> <|end_of_video|> <|video|>",
    eos="<|user|>",
    pad="<|endoftext|>",
    style=ChatStyle(
        begin="[gMASK]<sop>",
        turn_begin="<|{{ role }}|>\n",
        turn_end="",
        generation_prompt="<|assistant|>\n",
        image="<|begin_of_image|><|image|><|end_of_image|>",
        video="<|begin_of_video|><|video|><|end_of_video|>",
    ),
)
_PHI4: Final = Family(
    processor="Phi4MultimodalProcessor",
    image="Phi4MultimodalImageProcessor",
    audio="Phi4MultimodalFeatureExtractor",
    audio_argument="audio_processor",
    tokens="<|endoftext|> <|user|> <|assistant|> <|system|> <|end|>",
    named={"image_token": "<|image|>", "audio_token": "<|audio|>"},
    eos="<|endoftext|>",
    pad="<|endoftext|>",
    style=ChatStyle(
        turn_begin="<|{{ role }}|>",
        turn_end="<|end|>",
        generation_prompt="<|assistant|>",
        image="<|image|>",
        audio="<|audio|>",
    ),
)
_NEMOTRON: Final = Family(
    processor="NemotronH_Omni_Reasoning_V3Processor",
    image="NemotronH_Omni_Reasoning_V3ImageProcessor",
    video="NemotronH_Omni_Reasoning_V3VideoProcessor",
    video_options={
        "norm_mean": [0.48145466, 0.4578275, 0.40821073],
        "norm_std": [0.26862954, 0.26130258, 0.27577711],
    },
    audio="ParakeetFeatureExtractor",
    audio_options={"feature_size": 128},
    needs=("librosa", "audio"),
    tokens="<unk> <s> </s> <|im_start|> <|im_end|> <image> <video> <img> </img> <so_embedding> <so_start> <so_end>",
    eos="<|im_end|>",
    pad="</s>",
    bos="<s>",
    style=_chatml(image="<image>", video="<video>", audio="<so_embedding>"),
)
_QWEN2_5_OMNI: Final = replace(
    _QWEN3_OMNI,
    processor="Qwen2_5OmniProcessor",
    image_options={},
    video_options={},
    named={**_QWEN3_OMNI.named, "audio_token": "<|AUDIO|>", "image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>"},
    style=_chatml(
        image="<|vision_start|><|IMAGE|><|vision_end|>",
        video="<|vision_start|><|VIDEO|><|vision_end|>",
        audio="<|audio_start|><|AUDIO|><|audio_end|>",
    ),
)
_GEMMA3N: Final = replace(
    _GEMMA3,
    processor="Gemma3nProcessor",
    image="SiglipImageProcessor",
    image_options={"size": {"height": 768, "width": 768}},
    audio="Gemma3nAudioFeatureExtractor",
    named=_GEMMA3.named
    | {"boa_token": "<start_of_audio>", "eoa_token": "<end_of_audio>", "audio_token": "<audio_soft_token>"},
    style=replace(_GEMMA3_STYLE, image="<image_soft_token>", audio="<audio_soft_token>"),
)
_PALIGEMMA: Final = Family(
    processor="PaliGemmaProcessor",
    image="SiglipImageProcessor",
    image_options={"size": {"height": 224, "width": 224}},
    image_attributes={"image_seq_length": 256},
    tokens="<pad> <eos> <bos>",
    named={"image_token": "<image>"},
    **_GEMMA | {"add_bos": False},
    style=None,
)
_LLAVA_NEXT: Final = Family(
    processor="LlavaNextProcessor",
    image="LlavaNextImageProcessor",
    options={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    tokens="<unk> <s> </s> <pad> <image>",
    **_MISTRAL,
    style=ChatStyle(
        begin="<s>",
        turn_begin="{% if role == 'user' %}[INST] {% else %} {% endif %}",
        turn_end="{% if message['role'] == 'user' %} [/INST]{% else %}</s>{% endif %}",
        image="<image>\n",
    ),
)
_PIXTRAL: Final = Family(
    processor="PixtralProcessor",
    image="PixtralImageProcessor",
    image_options={"patch_size": 14, "size": {"longest_edge": 1540}},
    options={"patch_size": 14, "spatial_merge_size": 2},
    tokens="<unk> <s> </s> <pad> [INST] [/INST] [IMG] [IMG_BREAK] [IMG_END]",
    **_MISTRAL,
    style=ChatStyle(
        begin="<s>",
        turn_begin="{% if role == 'user' %}[INST]{% endif %}",
        turn_end="{% if message['role'] == 'user' %}[/INST]{% else %}</s>{% endif %}",
        image="[IMG]",
    ),
)
_LLAMA4: Final = Family(
    processor="Llama4Processor",
    image="Llama4ImageProcessor",
    tokens="<|begin_of_text|> <|eot|> <|finetune_right_pad|> <|header_start|> <|header_end|> <|image|> <|image_start|> "
    "<|image_end|> <|patch|> <|tile_x_separator|> <|tile_y_separator|>",
    eos="<|eot|>",
    pad="<|finetune_right_pad|>",
    bos="<|begin_of_text|>",
    style=ChatStyle(
        begin="<|begin_of_text|>",
        turn_begin="<|header_start|>{{ role }}<|header_end|>\n\n",
        turn_end="<|eot|>",
        generation_prompt="<|header_start|>assistant<|header_end|>\n\n",
        image="<|image|>",
    ),
)

FAMILY_PARTS: Final = {
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4_UNIFIED,
    "glm46v": _GLM46V,
    "internvl": _INTERNVL,
    "kimi_k25": _KIMI_K25,
    "llava_onevision": _LLAVA_ONEVISION,
    "nemotron_h_omni": _NEMOTRON,
    "phi4_multimodal": _PHI4,
    "qwen2_5_vl": replace(_QWEN2_VL, processor="Qwen2_5_VLProcessor"),
    "qwen2_vl": _QWEN2_VL,
    "qwen3_omni_moe": _QWEN3_OMNI,
    "qwen3_vl": _QWEN3_VL,
    "smolvlm": _SMOLVLM,
    "step3p7": _STEP3P7,
}
"""Families by the names that transformers gives its folders: those whose tokens are counted by an exact rule."""

MORE_PARTS: Final = {
    "gemma3n": _GEMMA3N,
    "idefics3": replace(
        _SMOLVLM,
        processor="Idefics3Processor",
        image="Idefics3ImageProcessor",
        video=None,
        needs=None,
        options={"image_seq_len": 169},
    ),
    "llama4": _LLAMA4,
    "llava_next": _LLAVA_NEXT,
    "paligemma": _PALIGEMMA,
    "pixtral": _PIXTRAL,
    "qwen2_5_omni": _QWEN2_5_OMNI,
}
"""Others that stream too."""

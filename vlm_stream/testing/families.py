"""What each family's processor is made of: class names of transformers, special tokens in their order, a chat style."""

from dataclasses import dataclass, field, replace
from typing import Any, Final

from vlm_stream.testing.tokenizer import ChatStyle


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
    eos: str = "<|im_end|>"
    pad: str = "<|endoftext|>"
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


def _named_parts(name: str, *parts: str) -> dict[str, Any]:
    """Return the classes of a family that names them alike: `NameProcessor`, `NameImageProcessor`, ..."""
    endings = {"image": "ImageProcessor", "video": "VideoProcessor", "audio": "AudioFeatureExtractor"}
    return {"processor": f"{name}Processor", **{part: name + endings[part] for part in parts}}


def _roles(turn_begin: str, turn_end: str, *, assistant: str = "assistant", **more: str) -> ChatStyle:
    """Return a style whose turns all begin alike, and so does the answer that is asked for."""
    prompt = turn_begin.replace("{{ role }}", assistant).replace("{{ message['role'] }}", "assistant")
    turns = {"turn_begin": turn_begin, "turn_end": turn_end, "generation_prompt": prompt}
    return ChatStyle(**turns, assistant_name=assistant, **more)


def _chatml(**more: str) -> ChatStyle:
    return _roles("<|im_start|>{{ role }}\n", "<|im_end|>", after_turn="\n", **more)


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
    **_named_parts("Qwen2VL", "image", "video"),
    tokens=f"{_CHATML_TOKENS} <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>",
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
    style=_chatml(**_VISION, audio="<|audio_start|><|audio_pad|><|audio_end|>"),
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
_KIMI_K25: Final = Family(
    **_named_parts("Kimi_K25", "image", "video"),
    tokens="[BOS] [EOS] [PAD] <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> <|media_begin|> "
    "<|media_content|> <|media_end|> <|media_pad|> <|kimi_k25_video_placeholder|>",
    eos="[EOS]",
    pad="[PAD]",
    bos="[BOS]",
    style=_roles(
        "<|im_{{ message['role'] }}|>{{ role }}<|im_middle|>",
        "<|im_end|>",
        image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n",
        video="<|kimi_k25_video_placeholder|>\n",
    ),
)
_GEMMA3_STYLE: Final = _roles(
    "<start_of_turn>{{ role }}\n",
    "<end_of_turn>",
    assistant="model",
    begin="{{ bos_token }}",
    after_turn="\n",
    image="<start_of_image>",
)
_GEMMA3: Final = Family(
    **_named_parts("Gemma3", "image"),
    tokens="<pad> <eos> <bos> <start_of_turn> <end_of_turn>",
    named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    **_GEMMA,
    style=_GEMMA3_STYLE,
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
_GEMMA4: Final = Family(
    **_named_parts("Gemma4", "image", "video", "audio"),
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
    style=_roles(
        "<|turn>{{ role }}\n",
        "<turn|>",
        assistant="model",
        begin="{{ bos_token }}",
        after_turn="\n",
        image="<|image|>",
        video="<|video|>",
        audio="<|audio|>",
    ),
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
    style=_chatml(image="<IMG_CONTEXT>\n", video="<video>\n"),
)
_LLAVA_ONEVISION: Final = Family(
    **_named_parts("LlavaOnevision", "image", "video"),
    options={"num_image_tokens": 729, "vision_feature_select_strategy": "full"},
    tokens=f"{_CHATML_TOKENS} <image> <video>",
    style=_chatml(image="<image>\n", video="<video>\n"),
)
_LLAVA_NEXT: Final = Family(
    **_named_parts("LlavaNext", "image"),
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
    **_named_parts("Pixtral", "image"),
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
_SMOLVLM: Final = Family(
    **_named_parts("SmolVLM", "image", "video"),
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
    **_named_parts("Step3p7", "image"),
    tokens=f"{_CHATML_TOKENS} <im_patch> <im_start> <im_end> <patch_start> <patch_end> <patch_newline>",
    style=_chatml(image="<im_patch>"),
)
_GLM46V: Final = Family(
    **_named_parts("Glm46V", "image", "video"),
    tokens="<|endoftext|> [gMASK] <sop> <|user|> <|assistant|> <|system|> <|begin_of_image|> <|end_of_image|> "
    "<|image|> <|begin_of_video|> <|end_of_video|> <|video|>",
    eos="<|user|>",
    style=_roles(
        "<|{{ role }}|>\n",
        "",
        begin="[gMASK]<sop>",
        image="<|begin_of_image|><|image|><|end_of_image|>",
        video="<|begin_of_video|><|video|><|end_of_video|>",
    ),
)
_PHI4: Final = Family(
    **_named_parts("Phi4Multimodal", "image"),
    audio="Phi4MultimodalFeatureExtractor",
    audio_argument="audio_processor",
    tokens="<|endoftext|> <|user|> <|assistant|> <|system|> <|end|>",
    named={"image_token": "<|image|>", "audio_token": "<|audio|>"},
    eos="<|endoftext|>",
    style=_roles("<|{{ role }}|>", "<|end|>", image="<|image|>", audio="<|audio|>"),
)
_NEMOTRON: Final = Family(
    **_named_parts("NemotronH_Omni_Reasoning_V3", "image", "video"),
    video_options={
        "norm_mean": [0.48145466, 0.4578275, 0.40821073],
        "norm_std": [0.26862954, 0.26130258, 0.27577711],
    },
    audio="ParakeetFeatureExtractor",
    audio_options={"feature_size": 128},
    needs=("librosa", "audio"),
    tokens="<unk> <s> </s> <|im_start|> <|im_end|> <image> <video> <img> </img> <so_embedding> <so_start> <so_end>",
    pad="</s>",
    bos="<s>",
    style=_chatml(image="<image>", video="<video>", audio="<so_embedding>"),
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
_LLAMA4: Final = Family(
    **_named_parts("Llama4", "image"),
    tokens="<|begin_of_text|> <|eot|> <|finetune_right_pad|> <|header_start|> <|header_end|> <|image|> <|image_start|> "
    "<|image_end|> <|patch|> <|tile_x_separator|> <|tile_y_separator|>",
    eos="<|eot|>",
    pad="<|finetune_right_pad|>",
    bos="<|begin_of_text|>",
    style=_roles(
        "<|header_start|>{{ role }}<|header_end|>\n\n", "<|eot|>", begin="<|begin_of_text|>", image="<|image|>"
    ),
)

FAMILY_PARTS: Final = {
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_unified": replace(_GEMMA4, **_named_parts("Gemma4Unified", "image", "video", "audio")),
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
}
"""Families by the names that transformers gives its folders: those whose tokens are counted by an exact rule."""

MORE_PARTS: Final = {
    "gemma3n": _GEMMA3N,
    "idefics3": replace(
        _SMOLVLM, **_named_parts("Idefics3", "image"), video=None, needs=None, options={"image_seq_len": 169}
    ),
    "llama4": _LLAMA4,
    "llava_next": _LLAVA_NEXT,
    "paligemma": _PALIGEMMA,
    "pixtral": _PIXTRAL,
    "qwen2_5_omni": _QWEN2_5_OMNI,
    "step3p7": _STEP3P7,
}
"""Others that stream too."""

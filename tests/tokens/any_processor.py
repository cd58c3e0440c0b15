"""Any processor class of the installed transformers, built without a download from the defaults of its parts."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

from vlm_stream.testing import FAMILIES, build_processor
from vlm_stream.testing.families import FAMILY_PARTS
from vlm_stream.testing.tokenizer import train_tokenizer

_PARTS = {
    "image_processor": IMAGE_PROCESSOR_MAPPING_NAMES,
    "video_processor": VIDEO_PROCESSOR_MAPPING_NAMES,
    "feature_extractor": FEATURE_EXTRACTOR_MAPPING_NAMES,
    "audio_processor": FEATURE_EXTRACTOR_MAPPING_NAMES,
}
_SPECIAL = re.compile(r"""["'](<\|?[^\s"'{}<>|]+\|?>|\[[A-Z_]+\]|\]<\][a-z ]+\[>\[|\|[A-Z_]+\|)["']""")
_NAMED = re.compile(r"""tokenizer\.(\w+_token)\b|getattr\(\s*(?:self\.)?tokenizer,\s*"(\w+_token)\"""")
_COMMON_NAMES = ("bos", "eos", "pad", "unk", "mask", "cls", "sep", "add_bos", "add_eos")
_REQUIRED = {
    "image_seq_len": 64,
    "num_additional_image_tokens": 1,
    "num_image_tokens": 64,
    "num_query_tokens": 32,
    "patch_size": 14,
    "pooling_ratio": 2,
    "vision_feature_select_strategy": "default",
}
"""What classes need and have no default for."""
_AROUND = {"HunYuanVLProcessor": "{image_start_token}{image_token}{image_end_token}", "Gemma3Processor": "{boi_token}"}
"""What templates write for an image, where it is not the image token alone."""
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}IMAGE{% elif item['type'] == 'video' %}VIDEO"
    "{% elif item['type'] == 'audio' %}AUDIO{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def list_processors() -> dict[str, str]:
    """Return the processor classes of all models that read media and write text, each with one model type."""
    names = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")
    types = [kind for name in names for kind in getattr(modeling_auto, name, {})]
    found: dict[str, str] = {}
    for kind in sorted(types, key=lambda kind: kind not in IMAGE_PROCESSOR_MAPPING_NAMES):
        if kind in PROCESSOR_MAPPING_NAMES:
            found.setdefault(PROCESSOR_MAPPING_NAMES[kind], kind)
    return dict(sorted(found.items()))


def build_any(name: str, kind: str) -> Any:
    """Build a processor; raises whatever its parts raise."""
    own = next((family for family in FAMILIES if FAMILY_PARTS[family].processor == name), None)
    if own is not None:
        return build_processor(own)
    cls = getattr(transformers, name)
    parts = {"tokenizer": _make_tokenizer(cls)}
    for part in cls.get_attributes():
        if part != "tokenizer":
            if part not in _PARTS:
                raise LookupError(f"needs a {part}")
            entry: Any = _PARTS[part][kind]
            entry = (entry.get("torchvision") or entry["pil"]) if isinstance(entry, dict) else entry
            parts[part] = getattr(transformers, entry)()
    taken = inspect.signature(cls.__init__).parameters
    required = {
        n: v for n, v in _REQUIRED.items() if n in taken and taken[n].default in (None, inspect.Parameter.empty)
    }
    processor = cls(**parts, **required)
    template = _TEMPLATE
    for medium in ("image", "video", "audio"):
        token = next(
            (t for owner in (processor, parts["tokenizer"]) if (t := getattr(owner, f"{medium}_token", None))), ""
        )
        if medium == "image" and name in _AROUND:
            owners = {**vars(parts["tokenizer"]), **parts["tokenizer"].special_tokens_map, **vars(processor)}
            token = _AROUND[name].format_map(owners)
        template = template.replace(medium.upper(), str(token))
    processor.chat_template = template
    return processor


def _make_tokenizer(cls: type) -> Any:
    """Train a tokenizer with all control strings that the class's source names, and the attributes that it reads."""
    source = inspect.getsource(sys.modules[cls.__module__])
    named = {a or b: f"<|{a or b}|>" for a, b in _NAMED.findall(source)}
    named = {n: token for n, token in named.items() if n.removesuffix("_token") not in _COMMON_NAMES}
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", *_SPECIAL.findall(source), *named.values())
    return train_tokenizer(
        tuple(dict.fromkeys(special)), eos="<|im_end|>", pad="<|endoftext|>", bos="<s>", named_tokens=named
    )

"""Any processor class of the installed transformers, built without a download from the defaults of its parts.

`python -m tests.tokens.any_processor` prints for which of them estimates equal the length of `input_ids`.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import transformers
from PIL import Image
from transformers.models.auto import modeling_auto
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

from vlm_stream.convert.counting import ExactCounter
from vlm_stream.encode import EncodeConfig, Encoder
from vlm_stream.errors import BadSampleError
from vlm_stream.testing import FAMILIES, build_processor
from vlm_stream.testing.families import FAMILY_PARTS
from vlm_stream.testing.tokenizer import train_tokenizer
from vlm_stream.tokens import (
    AudioSize,
    Geometry,
    ImageSize,
    MediaSizes,
    VideoSize,
    count_tokens,
    frame_indices,
    make_columns,
)
from vlm_stream.tokens.measure import Measured

if TYPE_CHECKING:
    from collections.abc import Iterator

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
_AROUND = {
    "Blip2Processor": "",
    "Florence2Processor": "",
    "FuyuProcessor": "",
    "Gemma3Processor": "{boi_token}",
    "HunYuanVLProcessor": "{image_start_token}{image_token}{image_end_token}",
}
"""What templates write for an image, where it is not the image token alone; some classes put it before all text."""
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
            if part == "image_processor" and getattr(parts[part], "image_seq_length", None) is None:
                parts[part].image_seq_length = 64  # checkpoints of PaliGemma and Florence-2 bring it along
            if getattr(parts[part], "use_token_compression", False):
                parts[part].use_token_compression = False  # else tokens depend on pixels, and the encoder refuses it
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
    if cls.__name__ == "Blip2Processor":  # takes the attribute for a string and for more than that
        named = {}
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", *_SPECIAL.findall(source), *named.values())
    return train_tokenizer(
        tuple(dict.fromkeys(special)), eos="<|im_end|>", pad="<|endoftext|>", bos="<s>", named_tokens=named
    )


TEXTS = ("hi", "\nNewline", " blank", "\n\n\nand more 12.5")
"""What follows a medium: text that merges with what a processor writes at its end, and text that does not."""


def _draw(rng: np.random.Generator, medium: str, geometry: Geometry) -> tuple[dict[str, Any], Any]:
    """Return an item of a conversation, decoded, and its size."""
    if medium == "image":
        height, width = (int(side) for side in np.exp(rng.uniform(np.log(30), np.log(500), 2)))
        return {"type": "image", "image": Image.new("RGB", (width, height))}, ImageSize(height=height, width=width)
    if medium == "audio":
        samples, rate = int(rng.integers(8000, 90000)), geometry.audio.sampling_rate
        return {"type": "audio", "audio": np.zeros(samples, np.float32)}, AudioSize(samples=samples, rate=rate)
    frames, fps = int(rng.integers(4, 16)), float(rng.choice([2.0, 7.3, 24.0]))
    height, width = (int(side) * 28 for side in rng.integers(4, 7, 2))
    indices = frame_indices(frames, fps, geometry.frames)
    item = {
        "type": "video",
        "video": np.zeros((len(indices), height, width, 3), np.uint8),
        "_video_fps": fps,
        "_frame_indices": indices.tolist(),
        "_total_frames": frames,
    }
    return item, VideoSize(frames=frames, height=height, width=width, fps=fps, seconds=frames / fps)


def compare(processor: Any, medium: str) -> tuple[list[tuple[int, int]], str]:
    """Return (estimate, length of input_ids) of drawn samples that can be encoded, and why others cannot."""
    geometry = Geometry.from_processor(processor)
    counter, encoder = ExactCounter("x", processor), Encoder(processor, EncodeConfig(allow_unlabelled=True))
    rng, pairs, reason = np.random.default_rng(3), [], ""
    for number, text in [*((1, text) for text in TEXTS), (2, "two"), (0, "none")]:
        drawn = [_draw(rng, medium, geometry) for _ in range(number)]
        words = [{"type": "text", "text": part} for part in ("a", text, "Yes.")]
        content = [words[0], *(item for item, _ in drawn), words[1]]
        conversation = [{"role": "user", "content": content}, {"role": "assistant", "content": words[2:]}]
        try:
            length = len(encoder.encode(conversation, {})["input_ids"])
        except (BadSampleError, ImportError) as error:
            reason = reason or " ".join(str(error).split())
            continue
        sizes = MediaSizes(**{f"{medium}s": tuple(size for _, size in drawn)})
        columns = make_columns([sizes], [counter.count(conversation, sizes).text_tokens])
        if number or pairs:
            pairs.append((int(count_tokens(columns, geometry).tokens[0]), length))
    return pairs, reason


class Finding(NamedTuple):
    """What was found out about one medium of one class."""

    processor: str
    medium: str
    kind: str
    """"rule", "measured", "wrong", "not encoded" or "not built"."""
    reason: str = ""


def survey() -> Iterator[Finding]:
    """Go through all classes."""
    for name, kind in list_processors().items():
        try:
            processor = build_any(name, kind)
        except Exception as error:
            yield Finding(name, "", "not built", " ".join(str(error).split()))
            continue
        rules = Geometry.from_processor(processor).rules()
        for medium, rule in rules.items():
            if rule is None:
                continue
            pairs, reason = compare(processor, medium)
            if not pairs:
                yield Finding(name, medium, "not encoded", reason)
            elif any(estimate != length for estimate, length in pairs):
                yield Finding(name, medium, "wrong", str(pairs))
            else:
                yield Finding(name, medium, "measured" if isinstance(rule, Measured) else "rule")


def main() -> None:
    """Print a table of all classes."""
    transformers.logging.set_verbosity_error()
    logging.disable()
    found = list(survey())
    for kind, number in Counter(finding.kind for finding in found).items():
        print(f"{kind}: {number}")  # noqa: T201
    for finding in found:
        print(f"| {finding.processor} | {finding.medium} | {finding.kind} | {finding.reason[:120]} |")  # noqa: T201


if __name__ == "__main__":
    main()

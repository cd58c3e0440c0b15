"""STAND-INS for processors that ship in no wheel: remote code of Kimi, Nemotron-Parse and Phi-4-multimodal.

`build_stand_in(name)`: a class with the name and the call signature of the published one, around a real tokenizer and,
where transformers has one, a real image processor. Pixels of the others are toys. They show that a family is called as
its code wants to be; what the published code computes they do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.testing.processors import build_processor
from vlm_stream.testing.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["STAND_INS", "build_stand_in"]

PATCH: Final = 14
_PAGE_TOKENS: Final = ("<s>", "</s>", "<pad>", "<predict_bbox>", "<predict_classes>", "<output_markdown>")
_PHI4_TOKENS: Final = "<|endoftext|> <|user|> <|assistant|> <|system|> <|end|> <|endoftext10|> <|endoftext11|>"
_PHI4_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
)


class _Kimi:
    """What the stand-ins share: Kimi's real tokenizer and template, images as rows of patches."""

    def __init__(self) -> None:
        native = build_processor("kimi_k25")
        self.tokenizer, self.chat_template = native.tokenizer, native.chat_template
        self.image_processor = native.image_processor

    def apply_chat_template(self, conversation: Any, tokenize: bool = False, **kwargs: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            conversation, chat_template=self.chat_template, tokenize=tokenize, **kwargs
        )

    def _patches(self, images: Sequence[Any]) -> tuple[Any, Any]:
        import torch

        sides = [[1, *(max(2, side // PATCH // 2 * 2) for side in (image.height, image.width))] for image in images]
        grids = torch.tensor(sides)
        return torch.ones(int(grids.prod(-1).sum()), 3, PATCH, PATCH), grids


class KimiVLProcessor(_Kimi):
    """Stand-in: takes a flat list of images and expands placeholders itself."""

    def __call__(
        self, text: Any, images: Any = None, return_tensors: Any = None, padding: Any = False, **options: Any
    ) -> dict[str, Any]:
        extra = {}
        if images:
            pixels, grids = self._patches(images)
            extra = {"pixel_values": pixels, "image_grid_hws": grids[:, 1:]}
            counts = iter((grids.prod(-1) // 4).tolist())
            pad = "<|media_pad|>"
            text = [
                "".join(part + (pad * next(counts) if i < t.count(pad) else "") for i, part in enumerate(t.split(pad)))
                for t in text
            ]
        return {**self.tokenizer(text, return_tensors=return_tensors, padding=padding, **options), **extra}


class KimiK25Processor(_Kimi):
    """Stand-in: takes `medias`, leaves one placeholder per image, returns `grid_thws`; refuses text without media."""

    media_placeholder_token_id: int | None = None

    def __call__(self, text: Any = None, medias: Any = None, return_tensors: Any = None) -> dict[str, Any]:
        if medias is None:
            raise ValueError("Provide either 'messages' or both 'medias' and 'text'")
        pixels, grids = self._patches([medium["image"] for medium in medias])
        return {**self.tokenizer([text], return_tensors=return_tensors), "pixel_values": pixels, "grid_thws": grids}


class NemotronParseProcessor:
    """Stand-in: an image part that stacks pages, a tokenizer, no chat template."""

    def __init__(self) -> None:
        self.tokenizer = train_tokenizer(_PAGE_TOKENS, eos="</s>", pad="<pad>", bos="<s>")
        self.image_processor = "pages of 8 x 8"

    def __call__(self, images: Any, text: Any, padding: Any, return_tensors: Any) -> dict[str, Any]:
        import numpy as np
        import torch

        ended = [each + "</s>" for each in text]
        out = dict(self.tokenizer(ended, padding=padding, return_tensors=return_tensors, add_special_tokens=False))
        pages = [np.asarray(image.resize((8, 8)), dtype=np.float32) for image in images if image is not None]
        return out | ({"pixel_values": torch.tensor(np.stack(pages))} if pages else {})


class Phi4MMProcessor:
    """Stand-in: a template that takes strings, media as numbered placeholders, flat lists, (wave, rate) pairs."""

    def __init__(self) -> None:
        native = build_processor("phi4_multimodal")
        self.tokenizer = train_tokenizer(_PHI4_TOKENS.split(), eos="<|endoftext|>", pad="<|endoftext|>")
        self.tokenizer.chat_template = _PHI4_TEMPLATE
        self.image_processor, self.audio_processor = native.image_processor, native.audio_processor

    def apply_chat_template(self, conversation: Any, tokenize: bool = False, **kwargs: Any) -> Any:
        return self.tokenizer.apply_chat_template(conversation, tokenize=tokenize, **kwargs)

    def __call__(
        self, text: Any, images: Any = None, audios: Any = None, return_tensors: Any = None, **options: Any
    ) -> dict[str, Any]:
        import re

        import torch

        repeats = {"image": "<|endoftext10|>" * 4, "audio": "<|endoftext11|>" * 3}
        text = [re.sub(r"<\|(image|audio)_\d+\|>", lambda match: repeats[match.group(1)], each) for each in text]
        out = dict(self.tokenizer(text, return_tensors=return_tensors, **options))
        empty = torch.tensor([])
        out |= {"input_image_embeds": empty, "image_sizes": empty, "image_attention_mask": empty}
        if images:
            sizes = torch.tensor([[image.height, image.width] for image in images])
            out |= {"input_image_embeds": torch.ones(len(images), 5, 3, 8, 8), "image_sizes": sizes}
            out["image_attention_mask"] = torch.ones(len(images), 5, 2, 2)
        if audios:
            waves = [torch.as_tensor(wave)[:160] for wave, _rate in audios]
            out["input_audio_embeds"] = torch.nn.utils.rnn.pad_sequence(waves, batch_first=True)[..., None]
            out["audio_embed_sizes"] = torch.tensor([3] * len(audios))
        mode = (1 if images else 0) + (2 if audios else 0)
        return out | {"input_mode": torch.tensor([mode])}


def _nano_omni() -> Any:
    processor = build_processor("nemotron_h_omni")
    processor.__class__ = type("NemotronH_Nano_Omni_Reasoning_V3Processor", (type(processor),), {})
    return processor


_MAKERS: Final = {
    "kimi_k25_remote": KimiK25Processor,
    "kimi_vl": KimiVLProcessor,
    "nemotron_omni_remote": _nano_omni,
    "nemotron_parse": NemotronParseProcessor,
    "phi4_mm": Phi4MMProcessor,
}
STAND_INS: Final = tuple(_MAKERS)
"""Names of families whose processors are stand-ins."""


def build_stand_in(name: str) -> Any:
    """Return the stand-in of a family's processor."""
    if name not in _MAKERS:
        raise ConfigError(f"There is no stand-in for {name!r}: {nearest_name(name, STAND_INS)}")
    return _MAKERS[name]()

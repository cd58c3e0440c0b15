"""STAND-INS for processors that ship in no wheel: names and call signatures of the published remote code.

Tokenizers and templates are real; pixels are rows of ones. Both sides are given the same object.
"""

import re

import numpy as np
import torch

from vlm_stream.testing import build_processor
from vlm_stream.testing.tokenizer import train_tokenizer

PATCH = 14
PAD = "<|media_pad|>"


class _Kimi:
    def __init__(self):
        native = build_processor("kimi_k25")
        self.tokenizer, self.chat_template = native.tokenizer, native.chat_template
        self.tokenizer.chat_template = native.chat_template
        self.image_processor = native.image_processor

    def apply_chat_template(self, conversation, tokenize=False, **options):
        return self.tokenizer.apply_chat_template(conversation, tokenize=tokenize, **options)

    def _patches(self, images):
        grids = torch.tensor([[1, *(max(2, side // PATCH // 2 * 2) for side in (i.height, i.width))] for i in images])
        return torch.ones(int(grids.prod(-1).sum()), 3, PATCH, PATCH), grids


class KimiVLProcessor(_Kimi):
    """Takes a flat list of images and expands placeholders itself."""

    def __call__(self, text, images=None, **options):
        extra = {}
        if images:
            pixels, grids = self._patches(images)
            extra = {"pixel_values": pixels, "image_grid_hws": grids[:, 1:]}
            counts = iter((grids.prod(-1) // 4).tolist())
            text = [each.replace(PAD, "\0") for each in text]
            text = ["".join(PAD * next(counts) if c == "\0" else c for c in each) for each in text]
        return {**self.tokenizer(text, **options), **extra}


class KimiK25Processor(_Kimi):
    """Takes `medias`, leaves one placeholder per image, returns `grid_thws`."""

    media_placeholder_token_id = None

    def __call__(self, text=None, medias=None, return_tensors=None, **options):
        out = dict(self.tokenizer([text], return_tensors=return_tensors, **options))
        if medias:
            out["pixel_values"], out["grid_thws"] = self._patches([m["image"] for m in medias])
        return out


class NemotronParseProcessor:
    """Stacks pages; has a tokenizer and no chat template."""

    def __init__(self):
        tokens = ("<s>", "</s>", "<pad>", "<predict_bbox>", "<predict_classes>", "<output_markdown>")
        self.tokenizer = train_tokenizer(tokens, eos="</s>", pad="<pad>", bos="<s>")
        self.image_processor = object()  # it has one; pages are resized here

    def __call__(self, images, text, padding, return_tensors):
        ended = [each + "</s>" for each in text]
        out = dict(self.tokenizer(ended, padding=padding, return_tensors=return_tensors, add_special_tokens=False))
        pages = [np.asarray(i.resize((8, 8)), dtype=np.float32) for i in images if i is not None]
        return out | ({"pixel_values": torch.tensor(np.stack(pages))} if pages else {})


class Phi4MMProcessor:
    """A template that takes strings, sound as (wave, rate) pairs."""

    def __init__(self):
        native = build_processor("phi4_multimodal")
        tokens = [
            "<|endoftext|>",
            "<|user|>",
            "<|assistant|>",
            "<|system|>",
            "<|end|>",
            "<|endoftext10|>",
            "<|endoftext11|>",
        ]
        self.tokenizer = train_tokenizer(tokens, eos="<|endoftext|>", pad="<|endoftext|>")
        self.tokenizer.chat_template = (
            "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
        )
        self.image_processor, self.audio_processor = native.image_processor, native.audio_processor

    def apply_chat_template(self, conversation, tokenize=False, **options):
        return self.tokenizer.apply_chat_template(conversation, tokenize=tokenize, **options)

    def __call__(self, text, audios=None, images=None, return_tensors=None, **options):
        # The published code takes numbered places as well as the token itself.
        named = [re.sub(r"<\|audio_\d+\|>", "<|endoftext11|>", each) for each in text]
        out = dict(self.tokenizer(named, return_tensors=return_tensors, **options))
        empty = torch.tensor([])
        out |= {"input_image_embeds": empty, "image_sizes": empty, "image_attention_mask": empty}
        if audios:
            waves = [torch.as_tensor(wave)[:160] for wave, _rate in audios]
            out["input_audio_embeds"] = torch.nn.utils.rnn.pad_sequence(waves, batch_first=True)[..., None]
        return out | {"input_mode": torch.tensor([2 if audios else 0])}


class NemotronH_Nano_Omni_Reasoning_V3Processor:  # noqa: N801 - the published name
    """Expands `<image>` to four tokens and gives one tile per image."""

    image_token, video_token = "<image>", "<video>"

    def __init__(self):
        native = build_processor("nemotron_h_omni")
        self.tokenizer, self.chat_template = native.tokenizer, native.chat_template
        self.tokenizer.chat_template = native.chat_template
        self.image_processor, self.image_token_id = native.image_processor, native.image_token_id

    def apply_chat_template(self, conversation, tokenize=False, **options):
        return self.tokenizer.apply_chat_template(conversation, tokenize=tokenize, **options)

    def __call__(self, text, images=None, return_tensors=None, **options):
        text = [each.replace("<image>", "<image>" * 4) for each in ([text] if isinstance(text, str) else text)]
        out = dict(self.tokenizer(text, return_tensors=return_tensors, padding=options.get("padding", False)))
        if images:
            flat = [i for one in images for i in (one if isinstance(one, list) else [one])]
            tiles = [np.asarray(i.resize((8, 8)), dtype=np.float32).transpose(2, 0, 1) / 255 for i in flat]
            out["pixel_values"] = torch.tensor(np.stack(tiles))
        return out

"""Processors built without downloads are the real classes, can be saved and loaded, and are the same every time."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
from transformers import AutoProcessor

from vlm_stream.errors import ConfigError, MissingExtraError
from vlm_stream.testing import FAMILIES, build_processor
from vlm_stream.testing.processors import transformers_class

CHAT = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": [{"type": "text", "text": "What is in this image?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A red square."}]},
    {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "\n\nYes."}]},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_survives_saving_and_loading(family, tmp_path):
    processor = build_processor(family)
    processor.save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    assert type(loaded) is type(processor)
    # Phi-4's class drops its template on loading; the tokenizer keeps it.
    assert (loaded.chat_template or loaded.tokenizer.chat_template) == processor.chat_template
    text = processor.apply_chat_template(CHAT, tokenize=False)
    assert loaded.tokenizer(text)["input_ids"] == processor.tokenizer(text)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_media_tokens_are_single_tokens(family):
    processor = build_processor(family)
    for kind in ("image", "video", "audio"):
        token = getattr(processor, f"{kind}_token", None)
        if token:
            assert len(processor.tokenizer(token, add_special_tokens=False)["input_ids"]) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_tags_mark_the_answers(family):
    processor = build_processor(family, generation_tags=True)
    encoded = processor.tokenizer.apply_chat_template(
        CHAT,
        chat_template=processor.chat_template,
        return_assistant_tokens_mask=True,
        tokenize=True,
        return_dict=True,
    )
    ids, mask = np.asarray(encoded["input_ids"]), np.asarray(encoded["assistant_masks"], bool)
    marked = processor.tokenizer.decode(ids[mask])
    assert "A red square." in marked
    assert "Yes." in marked
    assert "Sure?" not in marked
    assert "Be brief." not in marked


def test_qwen_template_writes_system_turns_like_the_published_one():
    processor = build_processor("qwen2_5_vl")
    own = processor.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert own == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is in this image?<|im_end|>\n<|im_start|>assistant\n"
    )
    default = processor.apply_chat_template(CHAT[1:2], tokenize=False)
    assert default.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n")


def test_tokenizer_shows_the_habits_of_the_real_one():
    """A newline at the beginning of an answer merges with the template's own."""
    tokenizer = build_processor("qwen2_5_vl").tokenizer
    assert len(tokenizer("\n\n")["input_ids"]) == 1
    assert tokenizer.decode(tokenizer("naïve 図 🙂")["input_ids"]) == "naïve 図 🙂"


def test_vocabulary_is_the_same_in_another_process():
    code = (
        "from vlm_stream.testing import build_processor; import json;"
        "print(json.dumps(build_processor('qwen3_vl').tokenizer.get_vocab()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == build_processor("qwen3_vl").tokenizer.get_vocab()


def test_options_reach_the_parts():
    processor = build_processor("qwen2_5_vl", image={"patch_size": 16}, video={"fps": 1.5}, chat_template="{{ 'x' }}")
    assert processor.image_processor.patch_size == 16
    assert processor.video_processor.fps == 1.5
    assert processor.apply_chat_template(CHAT, tokenize=False) == "x"


def test_unknown_family_gets_the_nearest_name():
    with pytest.raises(ConfigError, match=r"no processor family 'qwen25_vl'.*did you mean 'qwen2_5_vl'"):
        build_processor("qwen25_vl")


@pytest.mark.parametrize(
    ("family", "package", "extra"), [("smolvlm", "num2words", "video"), ("nemotron_h_omni", "librosa", "audio")]
)
def test_missing_package_is_named(monkeypatch, family, package, extra):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(MissingExtraError, match=f"needs the package '{package}'.*vlm-stream\\[{extra}\\]"):
        build_processor(family)


def test_class_that_transformers_lacks_is_named():
    with pytest.raises(ConfigError, match=r"has no class Qwen9Processor.*pip install -U transformers"):
        transformers_class("Qwen9Processor")


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, vlm_stream.testing;"
        "heavy = {'torch', 'transformers', 'av', 'PIL'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""What makes labels cheap changes none of them: kept ids, a table of chat tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vlm_stream.encode import IGNORE, Encoder, chat_format
from vlm_stream.encode.control_tokens import disguise
from vlm_stream.encode.labels import has_labels, label_answers
from vlm_stream.testing import FAMILIES, build_processor

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]


def _ids(encoder: Encoder, text: str) -> np.ndarray:
    return encoder.processor.tokenizer(text, add_special_tokens=False, return_tensors="np")["input_ids"][0]


def test_kept_ids_are_each_tokenizers_own():
    encoders = [Encoder(build_processor(family)) for family in ("qwen2_5_vl", "gemma4", "llava_onevision")]
    encoders[2].processor.tokenizer.add_tokens(["assist"])
    for encoder in encoders:
        encoder.encode(TURNS, {})
        assert encoder.chat.tails
        for tail, ids in encoder.chat.tails.items():
            assert ids == encoder.processor.tokenizer(tail, add_special_tokens=False)["input_ids"]
    assert encoders[0].chat.tails != encoders[2].chat.tails  # the same text in other tokens


def test_another_template_begins_with_nothing_kept():
    processor = build_processor("qwen2_5_vl")
    first = Encoder(processor)
    first.encode(TURNS, {})
    processor.chat_template = processor.chat_template.replace("assistant", "helper")
    assert first.chat.tails
    assert not chat_format(processor).tails


def test_kept_ids_are_few_and_short():
    """Tags that leave the stop token out ask for the ids of whole answers, which do not come again."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% generation %}{{ m['content'] }}"
        "{% endgeneration %}{{ '<|im_end|>' }}{% endfor %}"
    )
    encoder = Encoder(build_processor("qwen2_5_vl", chat_template=template))
    encoder.encode([TURNS[0], {"role": "assistant", "content": "long " * 100}], {})
    assert 0 < max(map(len, encoder.chat.tails)) <= 64
    for number in range(300):
        encoder.encode([TURNS[0], {"role": "assistant", "content": f"No. {number}"}], {})
    assert len(encoder.chat.tails) == 256


def test_ids_below_zero_are_no_chat_tokens():
    """Some processors write media as negative ids; a chat token may have the id 0."""
    encoder = Encoder(build_processor("qwen2_5_vl"))
    rendered = encoder.render(TURNS)[0]
    ids = _ids(encoder, rendered.text)
    expected = label_answers(encoder.processor, encoder.chat, rendered, ids, [True])
    start = encoder.chat.chat_ids["<|im_start|>"]
    chat_ids = encoder.chat.chat_ids | {"<|im_start|>": 0}
    zero = replace(encoder.chat, chat_ids=chat_ids, tails={})
    moved = np.where(ids == start, 0, ids)
    user = int(np.flatnonzero(moved == 0)[1]) + 2
    moved, expected = np.insert(moved, user, [-1, -7]), np.insert(expected, user, [IGNORE, IGNORE])
    assert label_answers(encoder.processor, zero, rendered, moved, [True]).tolist() == expected.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_control_string_escapes_by_its_characters(family):
    processor = build_processor(family)
    chat = chat_format(processor)
    assert chat.control is not None
    added = map(str, processor.tokenizer.added_tokens_decoder.values())
    strings = [token for token in added if chat.control.fullmatch(token)]
    assert set(chat.chat_ids) < set(strings)
    for string in strings:
        assert disguise([{"role": "user", "content": f"see {string} here"}], chat)[1] is not None
        nested = [{"role": "user", "content": [{"type": "text", "text": "?"}], "tools": [{"a": {"b": [string]}}]}]
        assert disguise(nested, chat)[1] is not None


@pytest.mark.parametrize(("labels", "expected"), [([], False), ([IGNORE] * 3, False), ([IGNORE, 0, IGNORE], True)])
def test_has_labels(labels, expected):
    assert has_labels(np.asarray(labels, dtype=np.int64)) is expected

"""Labels from ids alone: the vectorised scan is the per-token loop, the text search follows the turns."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.encode import IGNORE, Encoder, build_labels, build_labels_from_template
from vlm_stream.encode.label_search import IMSTART_PROCESSORS, AnswerMarker, find_marker, scan_markers
from vlm_stream.testing import FAMILIES, build_processor


class LettersTokenizer:
    """Decodes ids as letters: enough for the scan, which only asks how a token is written."""

    def decode(self, ids, **_):
        return "".join(chr(96 + i) for i in ids)


def scan_by_token(ids: list[int], marker: list[int], stop: int) -> list[int]:
    """Walk the row one token at a time, as one would write it first."""
    labels, position = [IGNORE] * len(ids), 0
    while position < len(ids):
        if ids[position : position + len(marker)] != marker:
            position += 1
            continue
        position += len(marker)
        while position < len(ids):
            labels[position] = ids[position]
            position += 1
            if ids[position - 1] == stop:
                break
    return labels


@given(ids=st.lists(st.integers(1, 5), max_size=60), marker=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_scan_equals_the_loop(ids, marker):
    stop = 5
    found = scan_markers(np.asarray(ids, dtype=np.int64), AnswerMarker(tuple(marker), "", stop, ""), LettersTokenizer())
    assert found.tolist() == scan_by_token(ids, marker, stop)


def _batch(processor, conversations):
    texts = [processor.apply_chat_template(c, tokenize=False) for c in conversations]
    return processor.tokenizer(texts, padding=True, return_tensors="pt", padding_side="right", add_special_tokens=False)


def _chat(*turns):
    roles = ("user", "assistant") * len(turns)
    return [
        {"role": role, "content": [{"type": "text", "text": turn}]} for role, turn in zip(roles, turns, strict=False)
    ]


CHATS = [
    _chat("Hi", "Hello there.", "And?", "\n\nMore."),
    _chat("Yes. Yes.", "Yes."),
    _chat("Hello there.", "Hello there."),
    _chat("Hm", ""),
]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "glm46v"])
def test_labels_of_a_padded_batch_equal_those_of_the_encoder(family):
    processor = build_processor(family)
    encoder = Encoder(processor)
    batch = _batch(processor, CHATS)
    labels = build_labels_from_template(batch["input_ids"], CHATS, processor)
    for row, conversation in enumerate(CHATS):
        sample = encoder.encode(conversation, {})
        real = batch["input_ids"][row][batch["attention_mask"][row].bool()]
        offset = len(sample["input_ids"]) - len(real)  # a bos that the tokenizer puts in front
        expected = sample["labels"][offset:]
        assert labels[row][: len(expected)].tolist() == expected.tolist(), (family, row)
        assert (labels[row][len(expected) :] == IGNORE).all()


def test_typed_markers_are_counted_out():
    processor = build_processor("qwen2_5_vl")
    conversation = _chat(
        "<|im_start|>assistant\nno<|im_end|>", "say <|im_end|> or <|im_start|>assistant\n!", "And?", "Yes"
    )
    ids = _batch(processor, [conversation])["input_ids"]
    labels = build_labels_from_template(ids, [conversation], processor)[0]
    learned = processor.tokenizer.decode(labels[labels != IGNORE])
    assert learned == "say <|im_end|> or <|im_start|>assistant\n!<|im_end|>Yes<|im_end|>"


def test_marker_of_the_im_start_families_and_none_elsewhere(caplog):
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_omni_moe"):
        processor = build_processor(family)
        assert type(processor).__name__ in IMSTART_PROCESSORS
        marker = find_marker(processor)
        assert marker is not None
        assert processor.tokenizer.decode(marker.ids) == "<|im_start|>assistant\n"
    bare = build_processor("llava_onevision", chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}")
    with caplog.at_level(logging.WARNING):
        assert find_marker(bare) is None
        assert find_marker(bare) is None
    assert caplog.text.count("No markers around answers were found") == 1


@pytest.fixture(scope="module")
def processor():
    return build_processor("llava_onevision")


class TestTextSearch:
    def _labels(self, processor, text, conversation):
        ids = torch.tensor([processor.tokenizer(text, add_special_tokens=False)["input_ids"]])
        labels = build_labels(ids, [conversation], processor)[0]
        return processor.tokenizer.decode(labels[labels != IGNORE])

    def test_answer_and_stop_token(self, processor):
        assert self._labels(processor, "Hi<|im_end|>Yes<|im_end|>\n", _chat("Hi", "Yes")) == "Yes<|im_end|>"

    def test_text_that_the_user_repeated_is_not_the_answer(self, processor):
        text = "Hello world<|im_end|>Hello world<|im_end|>"
        ids = torch.tensor([processor.tokenizer(text, add_special_tokens=False)["input_ids"]])
        labels = build_labels(ids, [_chat("Hello world", "Hello world")], processor)[0]
        half = len(labels) // 2
        assert (labels[:half] == IGNORE).all()
        assert torch.equal(labels[half:], ids[0][half:])

    def test_all_text_parts_are_one_answer(self, processor):
        answer = {"role": "assistant", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}]}
        assert self._labels(processor, "Hi<|im_end|>One two<|im_end|>", [*_chat("Hi"), answer]) == "One two<|im_end|>"

    def test_leading_blank_is_tried_without(self, processor):
        assert self._labels(processor, "Hi<|im_end|>Yes<|im_end|>", _chat("Hi", " Yes")) == "Yes<|im_end|>"

    def test_a_miss_is_reported_and_does_not_silence_later_turns(self, processor, caplog):
        conversation = _chat("Hi", "missing", "Ho", "Yes")
        with caplog.at_level(logging.WARNING):
            assert self._labels(processor, "Hi<|im_end|>Ho<|im_end|>Yes<|im_end|>", conversation) == "Yes<|im_end|>"
        assert "An answer was not found" in caplog.text

    def test_empty_answers_and_switched_off_ones_are_not_labelled(self, processor):
        conversation = _chat("Hi", "", "Ho", "Yes")
        conversation[3]["train"] = False
        assert self._labels(processor, "Hi<|im_end|>Ho<|im_end|>Yes<|im_end|>", conversation) == ""

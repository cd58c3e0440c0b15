"""Text that conversion has tokenised: the same sample with and without it, for every family; and who uses it."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream import StreamLoader
from vlm_stream.build import rows
from vlm_stream.collate import family_of
from vlm_stream.conversation import iter_media
from vlm_stream.convert import make_shards, verify_dataset
from vlm_stream.convert.counting import ExactCounter
from vlm_stream.convert.sample import measure_media
from vlm_stream.encode import (
    EncodeConfig,
    Encoder,
    KeptText,
    kept_text_key,
    pack_text,
    text_from_bytes,
    text_to_bytes,
    unpack_text,
)
from vlm_stream.format import FieldMap, keep_tokens, read_sample, read_tokens
from vlm_stream.keys import IGNORE
from vlm_stream.testing import FAMILIES, build_processor, make_jpeg

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [  # inside transformers
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning"),
]

SIZES = st.tuples(st.integers(16, 900), st.integers(16, 900)).filter(lambda sides: max(sides) < 8 * min(sides))
MEMBERS = {"0.jpg": make_jpeg(60, 90, seed=1), "1.jpg": make_jpeg(96, 64, seed=2)}
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(ids=IDS, learned=st.lists(st.booleans(), min_size=60, max_size=60))
def test_what_is_packed_is_unpacked(ids: list[int], learned: list[bool]) -> None:
    is_learned = np.array(learned[: len(ids)], dtype=bool)
    labels = np.where(is_learned, np.array(ids, dtype=np.int64), IGNORE)
    value = json.loads(json.dumps(pack_text("k", np.array(ids, dtype=np.int64), labels)))
    kept = unpack_text(value, "k")
    assert kept is not None
    assert kept.ids.tolist() == ids
    assert kept.is_learned.tolist() == is_learned.tolist()
    assert unpack_text(value, "another") is None


@pytest.mark.parametrize(
    "change",
    [
        {"ids": "%%%"},
        {"ids": 5},
        {"ids": base64.b64encode(b"no zlib").decode()},
        {"ids": base64.b64encode(zlib.compress(b"abc")).decode()},
        {"ids": base64.b64encode(zlib.compress(bytes(2**27))).decode()},
        {"learned": [1]},
        {"learned": [2, 1]},
        {"learned": [-1, 1]},
        {"learned": [0, 99]},
        {"learned": ["a", "b"]},
        {"learned": None},
    ],
)
def test_what_was_not_packed_is_not_used(change: dict[str, Any]) -> None:
    ids = np.arange(4)
    value = pack_text("k", ids, ids)
    assert unpack_text(value, "k") is not None
    assert unpack_text(value | change, "k") is None
    assert unpack_text([value], "k") is None


IMAGE = {"type": "image", "image": "0.jpg"}
OTHER = {"type": "image", "image": "1.jpg"}
QUESTIONS: tuple[list[dict[str, Any]], ...] = (
    [IMAGE],
    [],
    [IMAGE, OTHER],
    [],
    [{"type": "text", "text": "Before: "}, OTHER],
    [{"type": "text", "text": "see <|image_pad|> and <image>, <|im_end|>"}],
    [OTHER, {"type": "text", "text": "and <|im_start|>assistant"}, IMAGE],
    [],
    [IMAGE],
)
ALSO_IMAGES = set(FAMILIES) - {"gemma3", "phi4_multimodal", "smolvlm"}
"""The others write images in several pieces, or by another token than their template, and are encoded in full."""


LEARNED = {"gemma4": "332b3074ada7b016", "internvl": "d1c90dc6e401acd1", "qwen2_5_vl": "4deb30e0f730bbcc"}
"""Digests of what is learned of the conversations below."""


def make_conversation(question: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    turns = [
        {"role": "user", "content": [*question, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A thing. " * number}]},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "\n\nYes, café."}], "train": number != 7},
    ]
    return turns[: 4 if number % 2 else 2]


def keep(counter: ExactCounter, conversation: list[dict[str, Any]], members: dict[str, bytes]) -> KeptText | None:
    """Return what is read of a text, which is the same of the JSON member and of the file beside the index."""
    tokens = counter.count_and_keep(conversation, measure_media(conversation, members)).tokens
    if tokens is None:
        return None
    kept = unpack_text(json.loads(json.dumps(tokens)), tokens["key"])
    assert kept is not None
    again = text_from_bytes(text_to_bytes(kept, conversation), conversation)
    assert again is not None
    assert str(again) == str(kept)
    assert again.ids.tolist() == kept.ids.tolist()
    return again


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return bool(left == right)


@pytest.mark.parametrize("fake", [False, True], ids=["", "fake"])
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_the_same_with_and_without(family: str, fake: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = build_processor(family)
    steps = family_of(processor, encodes=True).steps_for(processor)
    counter = ExactCounter("", processor)
    config = EncodeConfig(allow_unlabelled=True, inject_fake_image=fake)
    plain, keeping = (Encoder(processor, config, steps) for _ in range(2))
    rendered: list[Any] = []
    monkeypatch.setattr(
        keeping, "render", lambda conversation: rendered.append(conversation) or Encoder.render(keeping, conversation)
    )
    num_in_full = {"images": 0, "text": 0}
    for number, question in enumerate(QUESTIONS, 1):
        conversation = make_conversation(question, number)
        kept = keep(counter, conversation, MEMBERS)
        expected = plain.encode(conversation, MEMBERS)
        rendered.clear()
        sample = keeping.encode(conversation, MEMBERS, kept)
        assert sample.keys() == expected.keys()
        assert [key for key in expected if not same(sample[key], expected[key])] == []
        num_in_full["images" if any(iter_media(conversation)) else "text"] += len(rendered)
    is_kept = family in ALSO_IMAGES if fake else family != "phi4_multimodal"
    assert num_in_full == {"images": 3 if family in ALSO_IMAGES else 5, "text": 3 if is_kept else 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_any_size_are_the_same_with_and_without(family: str) -> None:
    """Whatever the samples were like by which kept text came to be trusted."""
    processor = build_processor(family)
    steps = family_of(processor, encodes=True).steps_for(processor)
    counter = ExactCounter("", processor)
    plain, keeping = (Encoder(processor, EncodeConfig(), steps) for _ in range(2))
    conversation = make_conversation([IMAGE], 1)
    for _ in range(3):
        keeping.encode(conversation, MEMBERS, keep(counter, conversation, MEMBERS))

    @given(size=SIZES)
    @settings(max_examples=12, deadline=None)
    def check(size: tuple[int, int]) -> None:
        members = {"0.jpg": make_jpeg(*size, seed=1)}
        expected = plain.encode(conversation, members)
        sample = keeping.encode(conversation, members, keep(counter, conversation, members))
        assert sample.keys() == expected.keys()
        assert [key for key in expected if not same(sample[key], expected[key])] == []

    check()


def test_text_that_was_edited_is_tokenised_again() -> None:
    text = json.dumps({"conversation": make_conversation([], 1), "id": 'a,"tokens":'}).encode()
    tokens = pack_text("k", np.arange(4), np.arange(4))
    kept = keep_tokens(text, tokens)
    fields = FieldMap()
    assert read_sample(fields, ("json",), {"json": kept})[1].items() >= tokens.items()
    assert read_tokens(kept) == read_sample(fields, ("json",), {"json": kept})[1]
    written_again = json.dumps(json.loads(kept)).encode()
    for edited in (kept.replace(b"A thing", b"A think"), written_again, written_again.replace(b"A thing", b"A think")):
        assert json.loads(edited)["tokens"]
        assert read_sample(fields, ("json",), {"json": edited})[1] is None
        assert read_tokens(edited) is None
    assert read_tokens(text) is None
    assert read_tokens(b'{"a":1,"tokens":' + b"[" * 100_000) is None


@pytest.mark.parametrize("family", ["gemma4", "internvl", "qwen2_5_vl"])
def test_kept_text_of_other_label_rules_is_not_used(family: str) -> None:
    """Where this fails, other tokens are learned than before: raise `_LABEL_RULES`, or shards bring the old ones."""
    processor = build_processor(family)
    counter = ExactCounter("", processor)
    learned = [
        kept.is_learned.tolist()
        for number, question in enumerate(QUESTIONS, 1)
        if (kept := keep(counter, make_conversation(question, number), MEMBERS)) is not None
    ]
    assert (hashlib.sha256(str(learned).encode()).hexdigest()[:16], kept_text_key("")[-2:]) == (LEARNED[family], "-1")


def test_a_kind_that_differs_is_encoded_in_full(processor: Any, caplog: pytest.LogCaptureFixture) -> None:
    encoder = Encoder(processor)
    conversation = make_conversation([], 1)
    wrong = KeptText(np.arange(5), np.ones(5, dtype=bool))
    expected = Encoder(processor).encode(conversation, {})
    with caplog.at_level("INFO"):
        for _ in range(5):
            assert same(encoder.encode(conversation, {}, wrong)["input_ids"], expected["input_ids"])
    assert "kept text of samples with text is not what the processor gives" in caplog.text


def test_batches_are_the_same_from_shards_with_and_without(
    tmp_path: Path, toy_meta: Path, saved_processor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards(toy_meta, tmp_path / "kept", processor=str(saved_processor), samples_per_shard=10)
    make_shards(toy_meta, tmp_path / "bare", samples_per_shard=10)
    assert not verify_dataset(str(tmp_path / "kept")).problems
    options: dict[str, Any] = {"processor": str(saved_processor), "mode": "plain", "shuffle": False}
    expected = list(StreamLoader(str(tmp_path / "bare"), **options))
    rendered: list[Any] = []
    whole = Encoder.render
    monkeypatch.setattr(Encoder, "render", lambda self, turns: rendered.append(turns) or whole(self, turns))
    found = list(StreamLoader(str(tmp_path / "kept"), **options))
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        assert [key for key in other if key != "num_items_in_batch" and not same(batch[key], other[key])] == []
    assert 0 < len(rendered) < len(expected)  # clips, and a few of each kind


@pytest.mark.parametrize("fake_image", [False, True])
def test_trusted_text_is_built_without_reading_its_conversation(
    fake_image: bool, tmp_path: Path, saved_processor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [make_conversation([], number) for number in range(20, 40)]  # of short texts none are kept
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    (tmp_path / "meta.json").write_text(json.dumps({"all": {"file_name": "raw.jsonl", "media_dir": "."}}))
    make_shards(tmp_path / "meta.json", tmp_path / "kept", processor=str(saved_processor))
    make_shards(tmp_path / "meta.json", tmp_path / "bare")
    options: dict[str, Any] = {"processor": str(saved_processor), "mode": "plain", "fake_image": fake_image}
    expected = list(StreamLoader(str(tmp_path / "bare"), **options))
    read: list[Any] = []
    monkeypatch.setattr(rows, "read_sample", lambda *given: read.append(given) or read_sample(*given))
    found = list(StreamLoader(str(tmp_path / "kept"), **options))
    assert len(found) == len(expected) == len(turns)
    for batch, other in zip(found, expected, strict=True):
        assert [key for key in other if key != "num_items_in_batch" and not same(batch[key], other[key])] == []
    assert len(read) == 3  # until it is trusted


def test_text_for_another_tokenizer_is_said_once(
    tmp_path: Path, toy_meta: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_shards(toy_meta, tmp_path / "kept", processor=build_processor("qwen2_5_vl"), samples_per_shard=10)
    with caplog.at_level("INFO"):
        list(StreamLoader(str(tmp_path / "kept"), processor=build_processor("internvl"), mode="plain"))
    assert caplog.text.count("is of another tokenizer, template or release") == 1

"""Every family through the stream, from shards: no bad sample, labels as the span finder says, counts, pipeline media.

`pytest tests/stream/test_families.py -s` prints the table: family, mode, collate, what was checked.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.remote_processors import STAND_INS, build_stand_in
from vlm_stream.collate import family_of, find_family, merge_media
from vlm_stream.collate.family_steps import GEMMA4_THINKING_PREFIX
from vlm_stream.convert import make_shards
from vlm_stream.encode import IGNORE, Encoder, build_labels_from_template
from vlm_stream.loader import StreamLoader
from vlm_stream.pp_media import VLM_PP_MEDIA_KEY, microbatch_bounds
from vlm_stream.sources import Record
from vlm_stream.testing import FAMILIES, MORE_FAMILIES, build_processor, make_jpeg, make_mp4, make_wav

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # inside transformers
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]

TINY = {"height": 56, "width": 56}
SMALL: dict[str, dict[str, Any]] = {
    "gemma3": {"image": {"size": TINY}},
    "gemma3n": {"image": {"size": TINY}},
    "idefics3": {"image": {"size": {"longest_edge": 364}}},
    "internvl": {"image": {"size": TINY, "max_patches": 2}, "video": {"size": TINY}},
    "llava_next": {"image": {"size": {"shortest_edge": 56}, "crop_size": TINY, "image_grid_pinpoints": [[56, 112]]}},
    "qwen2_5_omni": {"audio": {"chunk_length": 2}},
    "paligemma": {"image": {"size": TINY}},
    "smolvlm": {"image": {"size": {"longest_edge": 364}}},
}
ONE_ANSWER = ("nemotron_parse", "paligemma")
"""Families that take one image, one question and one answer."""
ALL = (*FAMILIES, *MORE_FAMILIES, *STAND_INS)
PACKED = {"mode": "packed", "pack_size": 4096, "packing_ratio": 0.5, "batch_size": 2}
GROUPED = {"mode": "grouped", "batch_size": 3}
PLAIN = {"mode": "plain", "batch_size": 2}


class Samples:
    """Records with the media that a processor reads."""

    name = "toys"

    def __init__(self, media: frozenset[str], *, one_answer: bool) -> None:
        image = {"type": "image", "image": make_jpeg(56, 84, 1)}
        other = {"type": "image", "image": make_jpeg(84, 56, 2)}
        rows: list[list[dict[str, Any]]] = [[image], [other], [image]]
        if not one_answer:
            rows += [[], [image, other]]
        rows += [[{"type": "video", "video": make_mp4(num_frames=6, height=64, width=64, fps=2.0)}]] * (
            "video" in media
        )
        clips = [[{"type": "audio", "audio": make_wav(seconds, seed=3)}] for seconds in (0.4, 0.7)]
        rows += clips if "audio" in media else []
        self._rows, self._one_answer = rows, one_answer

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Record:
        turns = [("user", f"What is it, number {index}?"), ("assistant", f"A thing of size {index}.")]
        if not self._one_answer:
            turns += [("user", "Sure?"), ("assistant", "Yes. " * (index + 1))]
        messages: list[dict[str, Any]] = [
            {"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns
        ]
        for number, item in enumerate(self._rows[index]):
            messages[0]["content"][2 * number : 0] = [item, {"type": "text", "text": f"part {number}. "}]
        return Record(source=self.name, id=str(index), origin=f"toys:{index}", conversation=messages)


@cache
def processor_of(family: str) -> Any:
    processor = build_stand_in(family) if family in STAND_INS else build_processor(family, **SMALL.get(family, {}))
    processor.tokenizer.padding_side = "right"
    return processor


def samples_of(family: str) -> Samples:
    return Samples(Encoder(processor_of(family)).reads.media, one_answer=family in ONE_ANSWER)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def convert(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        make_shards(samples_of(family), folder / "shards", processor=processor_of(family), samples_per_shard=3)
        return folder / "shards"

    return convert


@cache
def encoded(family: str, name: str) -> dict[str, tuple[dict[str, Any], list[int]]]:
    """Return each sample as the family encodes it, and the ids that the span finder says are learned."""
    processor = processor_of(family)
    chosen = find_family(name) if name else family_of(processor)
    encoder = Encoder(processor, steps=chosen.steps_for(processor))
    source, found = samples_of(family), {}
    for number in range(len(source)):
        conversation = source.read(number).conversation
        sample = encoder.encode(conversation, {})
        labels = build_labels_from_template(sample["input_ids"][None], [encoder.shape(conversation)], processor)[0]
        if name == "gemma4_prefix" or family == "glm46v":  # the finder takes in the prefix; and has no stop token
            labels = sample["labels"]
        found[str(number)] = sample, labels[labels != IGNORE].tolist()
    return found


def deliveries(family: str, shards: Any, **options: Any) -> list[Any]:
    loader = StreamLoader(
        shards(family), processor=processor_of(family), with_refs=True, bad_budget=None, rank=0, world_size=1, **options
    )
    return [delivery for _, delivery in loader.stream.deliveries()]


def samples_in(row: list[tuple[str, str, str]], known: dict[str, Any]) -> list[Any]:
    return [known[str(int(key))] for _, _, key, *_ in row]


def check(family: str, found: list[Any], name: str = "") -> str:
    """Check what was delivered against samples that were encoded one by one; return what was checked."""
    known = encoded(family, name)
    assert not [bad for delivery in found for bad in delivery.bad]
    num_seen = 0
    for delivery in found:
        batch = delivery.batch
        for number, row in enumerate(batch["refs"]):
            learned = batch["labels"][number]
            expected = [token for _, ids in samples_in(row, known) for token in ids]
            assert learned[learned != IGNORE].tolist() == expected, (family, number)
            num_seen += len(row)
        assert batch["labels"].shape == batch["input_ids"].shape
    assert num_seen == len(known)
    if name == "gemma4_prefix":  # the index does not know it, so packs are planned with what some samples need
        return "runs, labels"
    assert all(delivery.num_tokens == delivery.num_planned_tokens for delivery in found)
    return "runs, labels, counts"


def check_pipeline(family: str, found: list[Any]) -> str:
    """Check that every micro-batch has the media of its own rows, and no medium stayed outside."""
    known = encoded(family, "")
    names = {name for sample, _ in known.values() for name in merge_media([sample])}
    for delivery in found:
        batch = delivery.batch
        chunks = batch.get(VLM_PP_MEDIA_KEY, {})
        assert not names & set(batch) - {"input_mode"}
        for micro, (begin, end) in enumerate(microbatch_bounds(len(batch["refs"]), 2)):
            rows = [sample for row in batch["refs"][begin:end] for sample, _ in samples_in(row, known)]
            for key, expected in merge_media(rows).items():
                if key == "input_mode":  # one for the whole batch
                    continue
                ours = chunks[key][micro]
                assert len(ours) == len(expected), (family, key)
                if isinstance(expected, torch.Tensor) and ours.shape == expected.shape:
                    assert torch.equal(ours, expected.to(ours.dtype)), (family, key)
    return "pipeline"


def show(family: str, mode: str, collate: str, what: str) -> None:
    print(f"| {family} | {mode} | {collate} | {what} |")  # noqa: T201


@pytest.mark.parametrize("family", ALL)
def test_every_mode_and_collate(family: str, shards: Any) -> None:
    chosen = family_of(processor_of(family))
    forms: list[tuple[str, dict[str, Any], str]] = [
        ("grouped", GROUPED, "auto"),
        ("plain", PLAIN | {"hf_labels": False}, "auto"),
        ("plain", PLAIN, chosen.name),
    ]
    if not chosen.no_packing:
        forms += [("packed", PACKED, form) for form in ("auto", "neat", "thd")]
    for mode, options, collate in forms:
        show(family, mode, collate, check(family, deliveries(family, shards, collate=collate, **options)))
        found = deliveries(family, shards, collate=collate, pp_microbatches=2, **options)
        show(family, mode, collate, check_pipeline(family, found))


def test_a_family_chosen_by_name_that_lengthens_answers(shards: Any, caplog: pytest.LogCaptureFixture) -> None:
    longest = max(len(sample["input_ids"]) for sample, _ in encoded("gemma4", "gemma4_prefix").values())
    for mode, options in (("grouped", GROUPED), ("plain", PLAIN)):
        found = deliveries("gemma4", shards, collate="gemma4_prefix", **options)
        show("gemma4", mode, "gemma4_prefix", check("gemma4", found, "gemma4_prefix"))
    packed = PACKED | {"pack_size": 2 * longest}
    found = deliveries("gemma4", shards, collate="gemma4_prefix", **packed)
    show("gemma4", "packed", "gemma4_prefix", check("gemma4", found, "gemma4_prefix") + ", no overflow")
    assert all(delivery.num_tokens <= delivery.num_planned_tokens for delivery in found)
    assert "times the text of its index" in caplog.text
    prefix = torch.tensor(processor_of("gemma4").tokenizer(GEMMA4_THINKING_PREFIX, add_special_tokens=False).input_ids)
    for delivery in found:
        ids, labels = delivery.batch["input_ids"], delivery.batch["labels"]
        is_prefix = (ids.unfold(1, len(prefix), 1) == prefix).all(-1)  # [rows, places]
        # Every sample has two answers; the row that fills the last step has one, of which nothing is learned.
        answers = [2 * len(row) or 1 for row in delivery.batch["refs"]]
        assert is_prefix.sum(1).tolist() == answers
        assert all((labels[number] == IGNORE).all() for number, row in enumerate(delivery.batch["refs"]) if not row)
        # Labels of a packed row are shifted: at the last token of the prefix stands the first one of the answer.
        assert (labels.unfold(1, len(prefix), 1)[is_prefix][:, :-1] == IGNORE).all()

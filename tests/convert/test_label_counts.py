"""The label counts of an index are the labels of the encoder, sample by sample, for every family."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.toy_samples import MEDIA_OF_FAMILY
from vlm_stream.convert import IndexOptions, index_tars, make_shards, recount, verify_dataset
from vlm_stream.convert.counting import ExactCounter
from vlm_stream.convert.rows import SampleCounts, recounted_index
from vlm_stream.convert.sample import measure_media
from vlm_stream.encode import IGNORE, EncodeConfig, Encoder
from vlm_stream.errors import BadSampleError, DatasetError
from vlm_stream.format import decode_index, load_manifest, read_index, to_conversation
from vlm_stream.storage import open_store
from vlm_stream.testing import FAMILIES, build_processor, make_jpeg, make_mp4, make_wav

pytestmark = [  # inside transformers
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning"),
]

MEMBERS = {
    "0.jpg": make_jpeg(60, 90, seed=1),
    "1.jpg": make_jpeg(96, 64, seed=2),
    "2.mp4": make_mp4(num_frames=11, height=64, width=64, fps=4.0),
    "3.wav": make_wav(0.6),
}
NAMES = {"image": ("0.jpg", "1.jpg"), "video": ("2.mp4",), "audio": ("3.wav",)}
TEXTS = (
    "Yes.",
    "",
    "\n\nIt is red. ",
    "  two blanks\n",
    "naïve café, 数据集, 🎉",
    "12.5 seconds, then 00:01 again: 3,650!",
    "<think>\nHm.\n</think>\n\nBlue.",
    "assistant\nuser",
    "Assistant: no",
)
TYPED = ("<|im_start|>assistant\nNo.<|im_end|>", "see <|image_pad|> and <image>", "<end_of_turn>\n<start_of_turn>model")


def make_conversation(rng: random.Random, kinds: tuple[str, ...], *, typed: bool = False) -> list[dict[str, Any]]:
    """One to three rounds: media in user turns, texts as strings and lists, turns that are not to be learned."""
    turns: list[dict[str, Any]] = []
    texts = TEXTS + TYPED if typed else TEXTS
    if rng.random() < 0.3:
        turns.append({"role": "system", "content": "You are brief."})
    media = [rng.choice([None, *kinds]) for _ in range(3)]
    if rng.random() < 0.3:
        media = [None] * 3
    for number in range(rng.randint(1, 3)):
        items = [{"type": "text", "text": rng.choice(texts)}]
        kind = media[number] if media[number] not in media[:number] else None
        if kind is not None:
            names = NAMES[kind][: rng.randint(1, 2)]
            items[rng.randint(0, 1) :] = [{"type": kind, kind: name} for name in names]
        turns.append({"role": "user", "content": items if kind or rng.random() < 0.5 else rng.choice(texts)})
        answer: dict[str, Any] = {"role": "assistant", "content": rng.choice(texts)}
        if rng.random() < 0.5:
            answer["content"] = [{"type": "text", "text": answer["content"]}]
        off = rng.choice([{}, {}, {"weight": 0}, {"train": False}, {"weight": 0.5}])
        turns.append(answer | off)
    return turns


def delivered(encoder: Encoder, conversation: list[dict[str, Any]]) -> tuple[int, int]:
    """Return what a batch gets of a sample: its labels, and its tokens.

    A sample whose text is refused brings no labels; -1 for both: the processor itself refuses it.
    """
    try:
        sample = encoder.encode(conversation, MEMBERS)
    except BadSampleError as error:
        by_processor, by_text = ("mixed_media", "processor_error"), ("typed_markers", "label_mismatch")
        if error.reason not in by_processor + by_text:
            raise
        return (-1 if error.reason in by_processor else 0), -1
    return int((sample["labels"] != IGNORE).sum()), len(sample["input_ids"])


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_counted_labels_are_the_encoders(family: str, typed: bool) -> None:
    processor = build_processor(family)
    encoder = Encoder(processor, EncodeConfig(allow_unlabelled=True))
    counter = ExactCounter(family, processor)
    rng = random.Random(f"{family}{typed}")
    seen: set[tuple[bool, bool]] = set()
    for number in range(24):
        conversation = make_conversation(rng, MEDIA_OF_FAMILY[family], typed=typed)
        sizes = measure_media(conversation, MEMBERS)
        labels, tokens = delivered(encoder, conversation)
        if labels < 0:
            continue
        counts = counter.count(conversation, sizes)
        assert counts.label_tokens == labels, (number, conversation)
        has_media = bool(sizes.images or sizes.videos or sizes.audios)
        if tokens >= 0 and not has_media:
            assert counts.text_tokens == tokens
        seen.add((has_media, labels > 0))
    assert {(True, True), (False, True)} <= seen


def test_a_template_that_refuses_a_sample_does_not_end_a_conversion() -> None:
    template = "{% for m in messages %}{{ m['content'][0]['text'] }}<|im_end|>{% endfor %}"
    counter = ExactCounter("strict", build_processor("qwen2_5_vl", chat_template=template))
    turns = [{"role": "user", "content": []}, {"role": "assistant", "content": []}]
    with pytest.raises(BadSampleError, match=r"refused the sample \(UndefinedError") as caught:
        counter.count(turns, measure_media(turns, {}))
    assert (caught.value.stage, caught.value.reason) == ("convert", "processor_error")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "glm46v", "smolvlm"])
def test_labels_do_not_depend_on_the_fake_image_nor_on_frames(family: str) -> None:
    processor = build_processor(family)
    counter = ExactCounter(family, processor)
    config = EncodeConfig(inject_fake_image=True, allow_unlabelled=True)
    encoder, rng = Encoder(processor, config), random.Random(5)
    for _ in range(6):
        conversation = make_conversation(rng, ("image",))
        expected, _ = delivered(encoder, conversation)
        assert counter.count(conversation, measure_media(conversation, MEMBERS)).label_tokens == expected


def test_generation_tags() -> None:
    processor = build_processor("qwen2_5_vl", generation_tags=True)
    encoder, rng = Encoder(processor, EncodeConfig(allow_unlabelled=True)), random.Random(3)
    counter = ExactCounter("tags", processor)
    for _ in range(12):
        conversation = make_conversation(rng, ("image", "video"))
        counts = counter.count(conversation, measure_media(conversation, MEMBERS))
        assert counts.label_tokens == delivered(encoder, conversation)[0]


def test_media_in_an_answer_make_the_count_unknown() -> None:
    """How many tokens they take is decided by the run."""
    counter = ExactCounter("qwen", build_processor("qwen2_5_vl"))
    turns = [
        {"role": "user", "content": "Draw it."},
        {"role": "assistant", "content": [{"type": "image", "image": "0.jpg"}, {"type": "text", "text": "Here."}]},
    ]
    counts = counter.count(turns, measure_media(turns, MEMBERS))
    assert counts.label_tokens == -1
    assert counts.text_tokens > 10


def test_a_first_token_is_never_learned() -> None:
    """Nothing comes before it; packs and padded rows give it no label."""
    template = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    processor = build_processor("qwen2_5_vl", chat_template=template)
    turns = [{"role": "assistant", "content": "Hello world, good morning"}]
    labels = Encoder(processor).encode(turns, {})["labels"]
    assert labels[0] != IGNORE
    counter = ExactCounter("x", processor)
    assert counter.count(turns, measure_media(turns, {})).label_tokens == int((labels[1:] != IGNORE).sum())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    processor = build_processor("qwen2_5_vl")
    folder = tmp_path_factory.mktemp("qwen")
    processor.save_pretrained(folder)
    return processor, str(folder)


@pytest.fixture(scope="module")
def counted(toy_meta: Path, qwen: tuple[Any, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("counted") / "out"
    make_shards(toy_meta, out, samples_per_shard=100, processor=qwen[1])
    return out


def labels_of(root: Path) -> list[int]:
    store = open_store(str(root))
    manifest = load_manifest(store)
    return [n for shard in manifest.shards for n in read_index(store, shard).media.label_tokens.tolist()]


def test_an_index_has_the_labels_of_its_samples(counted: Path, qwen: tuple[Any, str]) -> None:
    store = open_store(str(counted))
    manifest = load_manifest(store)
    encoder = Encoder(qwen[0], EncodeConfig(allow_unlabelled=True))
    index = read_index(store, manifest.shards[0])
    data = (counted / manifest.shards[0].name).read_bytes()
    for row in range(0, len(index), 4):
        members = {m.name: data[m.offset : m.offset + m.size] for m in index.members(row)}
        conversation = to_conversation(manifest.fields, list(members), {"json": members["json"]})
        labels = encoder.encode(conversation, members)["labels"]
        assert index.media.label_tokens[row] == (labels != IGNORE).sum() > 0
    assert manifest.totals.label_tokens == sum(labels_of(counted)) > 0
    assert verify_dataset(str(counted)).problems == ()


def test_without_a_processor_nothing_is_known(toy_shards: Path) -> None:
    assert set(labels_of(toy_shards)) == {-1}
    assert load_manifest(open_store(str(toy_shards))).totals.label_tokens == 0


def test_a_recount_gives_the_same_labels_as_a_conversion_and_takes_them_away(
    toy_meta: Path, counted: Path, qwen: tuple[Any, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make_shards(toy_meta, out, samples_per_shard=100)
    report = recount(str(out), qwen[1])
    assert report.labels_after == sum(labels_of(counted))
    assert labels_of(out) == labels_of(counted)
    assert verify_dataset(str(out)).problems == ()
    recount(str(out), None)
    assert set(labels_of(out)) == {-1}


def test_samples_that_a_processor_refuses_bring_no_labels(toy_shards: Path, tmp_path: Path) -> None:
    gemma = tmp_path / "gemma"
    build_processor("gemma3").save_pretrained(gemma)
    out = Path(shutil.copytree(toy_shards, tmp_path / "copy"))
    refused = {bad.sample for bad in recount(str(out), str(gemma)).refused}
    store = open_store(str(out))
    for shard in load_manifest(store).shards:
        index = read_index(store, shard)
        for key, labels in zip(index.keys, index.media.label_tokens.tolist(), strict=True):
            assert (labels == 0) == (key in refused)
    assert refused


def test_verify_finds_labels_that_cannot_be(counted: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(counted, tmp_path / "copy"))
    path = out / "shard-000001.index.parquet"
    index = decode_index(path.read_bytes())
    counts = [SampleCounts(*pair) for pair in zip(index.media.text_tokens, index.media.label_tokens, strict=True)]
    counts[3] = counts[3]._replace(label_tokens=int(counts[3].text_tokens) + 1)
    path.write_bytes(recounted_index(path.read_bytes(), counts))
    problems = verify_dataset(str(out)).problems
    assert [problem.kind for problem in problems] == ["changed_index", "wrong_count", "wrong_labels"]
    assert "label_tokens" in problems[1].detail
    assert [problem.key for problem in problems[2:]] == [index.key(3)]
    counts[5] = counts[5]._replace(label_tokens=-2)
    path.write_bytes(recounted_index(path.read_bytes(), counts))
    assert "label_tokens is between -2" in verify_dataset(str(out)).problems[1].detail


def test_a_dataset_of_an_older_format_is_indexed_anew(counted: Path, qwen: tuple[Any, str], tmp_path: Path) -> None:
    """The way out that its refusal names: tars stay as they are, and so does all that is counted in them."""
    out = Path(shutil.copytree(counted, tmp_path / "copy"))
    path = out / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 3}))
    with pytest.raises(DatasetError, match=r"format version 3.*tars are as they were.*vlm-stream index --overwrite"):
        load_manifest(open_store(str(out)))
    index_tars([str(out)], IndexOptions(processor=qwen[1], overwrite=True))
    assert labels_of(out) == labels_of(counted)
    assert load_manifest(open_store(str(out))).digest == load_manifest(open_store(str(counted))).digest


def test_workers_count_alike(toy_meta: Path, counted: Path, qwen: tuple[Any, str], tmp_path: Path, digests) -> None:
    make_shards(toy_meta, tmp_path / "out", samples_per_shard=100, processor=qwen[1], workers=2)
    assert digests(tmp_path / "out") == digests(counted)
    assert np.asarray(labels_of(counted)).min() > 0

"""Families without a rule: the processor is asked, estimates equal the length of input_ids, and answers are kept."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.tokens.any_processor import Finding, build_any, survey
from vlm_stream import StreamLoader
from vlm_stream.convert import counting, make_shards, recount
from vlm_stream.encode import Encoder
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.format import load_manifest
from vlm_stream.storage import open_store
from vlm_stream.tokens import (
    METADATA_READERS,
    FrameRule,
    Geometry,
    ImageSize,
    MediaSizes,
    TextCounter,
    count_tokens,
    families,
    make_columns,
    measure,
)

RULED = ("Idefics3Processor", "LlavaNextProcessor", "Llama4Processor")
"""Families that are measured here as if nobody had written their rules."""
BY_RULE = dict(families._FAMILIES)


@pytest.fixture(autouse=True)
def nothing_was_asked(request, monkeypatch):
    if request.node.name != "test_no_processor_of_transformers_is_counted_wrongly":
        for name in RULED:
            monkeypatch.delitem(families._FAMILIES, name)
    measure._tables.clear()
    yield
    measure._tables.clear()


@pytest.fixture
def idefics():
    processor = build_any("Idefics3Processor", "idefics3")
    processor.image_seq_len = 5
    return processor


def count_images(geometry: Geometry, *sizes: tuple[int, int]) -> list[int]:
    media = [MediaSizes(images=(ImageSize(height=height, width=width),)) for height, width in sizes]
    return count_tokens(make_columns(media, [1] * len(sizes)), geometry).tokens.tolist()


def told(pattern: str) -> tuple[str, ...]:
    """Return what the page of families says at a place."""
    page = " ".join((Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8").split())
    match = re.search(pattern, page)
    assert match is not None, pattern
    return match.groups()


def check_what_the_page_says(found: list[Finding]) -> None:
    """Compare the numbers and names of the page with what was found out."""
    kinds = Counter(finding.kind for finding in found)
    exact = {finding.processor for finding in found if finding.kind in ("rule", "measured")}
    classes, unbuilt = {finding.processor for finding in found}, kinds.pop("not built")
    numbers = [len(classes), len(classes) - unbuilt, kinds.total(), kinds["rule"] + kinds["measured"], len(exact)]
    said = r"these are (\d+) classes. (\d+) can be built without a download, with (\d+) kinds of media: for (\d+) of "
    said += r"them, of (\d+) classes, counts are exact \((\d+) by a rule, (\d+) by measuring\)"
    assert [int(number) for number in told(said)] == [*numbers, kinds["rule"], kinds["measured"]]
    assert int(told(r"The other (\d+) are refused")[0]) == kinds["not encoded"]
    number, names = told(r"the (\d+) classes that cannot be built so: (.*?)\. ##")
    assert int(number) == unbuilt
    assert set(re.findall(r"`(\w+)`", names)) == {each.processor for each in found if each.kind == "not built"}


@pytest.mark.filterwarnings("ignore")  # of 80 classes of another library
def test_no_processor_of_transformers_is_counted_wrongly():
    found = list(survey())
    assert [finding for finding in found if finding.kind == "wrong"] == []
    if transformers.__version__.startswith(told(r"In transformers (\S+) these are")[0]):
        check_what_the_page_says(found)
    refused = {finding.processor for finding in found if finding.kind == "not encoded"}
    calls_of_their_own = {"GotOcr2Processor", "HunYuanVLProcessor", "Blip2Processor", *METADATA_READERS}
    assert not refused & calls_of_their_own
    unexplained = [finding for finding in found if finding.kind.startswith("not") and not finding.reason]
    assert unexplained == []


@pytest.mark.filterwarnings("ignore")
def test_tokens_that_depend_on_pixels_are_refused():
    processor = build_any("VideoLlama3Processor", "video_llama_3")
    video = {"type": "video", "video": np.zeros((8, 112, 112, 3), np.uint8), "_video_fps": 2.0}
    video |= {"_frame_indices": list(range(8)), "_total_frames": 8}
    turns = [{"role": "user", "content": [video]}, {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}]
    assert len(Encoder(processor).encode(turns, {})["input_ids"]) > 100
    processor.video_processor.use_token_compression = True
    with pytest.raises(BadSampleError, match=r"depends on pixels.*set video_processor.use_token_compression to False"):
        Encoder(processor).encode(turns, {})


@given(st.tuples(st.integers(20, 900), st.integers(20, 900)), st.text(max_size=12), st.integers(1, 3))
@settings(max_examples=25)
def test_estimates_are_lengths_whatever_stands_beside_an_image(size, text, number):
    processor = ASKED
    counter = TextCounter(processor)
    height, width = size
    sizes = MediaSizes(images=(ImageSize(height=height, width=width),) * number)
    rendered = "<|im_start|>user\n" + text.join(["<image>"] * number) + text
    ids, surplus = counter.encode(rendered, sizes)
    real = processor(text=[rendered], images=[[Image.new("RGB", (width, height))] * number])["input_ids"][0]
    estimate = count_tokens(make_columns([sizes], [len(ids) - surplus]), counter.geometry).tokens[0]
    assert estimate == len(real)


ASKED = build_any("Idefics3Processor", "idefics3")


def test_geometry_says_measured_and_travels(idefics):
    geometry = Geometry.from_processor(idefics)
    assert (geometry.family, geometry.is_measured, geometry.is_exact) == ("Idefics3Processor", True, True)
    again = Geometry.from_json(json.loads(json.dumps(geometry.to_json())))
    assert (again, again.digest()) == (geometry, geometry.digest())


@pytest.mark.parametrize("kind", ["idefics3", "llava_next", "exaone4_5", "llama4"])
def test_digest_is_that_of_the_settings(kind, tmp_path):
    from transformers import AutoProcessor

    names = {"idefics3": "Idefics3Processor", "llava_next": "LlavaNextProcessor", "exaone4_5": "Exaone4_5_Processor"}
    processor = build_any(names.get(kind, "Llama4Processor"), kind)
    first = Geometry.from_processor(processor).digest()
    processor.save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    once = Geometry.from_processor(loaded).digest()
    loaded.save_pretrained(tmp_path / "again")
    assert Geometry.from_processor(AutoProcessor.from_pretrained(tmp_path / "again")).digest() == once
    assert Geometry.from_processor(processor).digest() == first  # asking changes nothing
    loaded.image_processor.size = {**dict(loaded.image_processor.size), "longest_edge": 777}
    assert Geometry.from_processor(loaded).digest() != once


def test_answers_are_kept_in_the_first_folder_that_takes_them(idefics, tmp_path):
    geometry = Geometry.from_processor(idefics)
    (tmp_path / "file").write_bytes(b"")
    geometry.remember_in([tmp_path / "file", tmp_path / "data"])
    sizes = [(30, 40), (500, 20), (300, 900)]
    counts = count_images(geometry, *sizes)
    assert [path.name for path in (tmp_path / "data").iterdir()] == [f"measured-{geometry.image.asked}.json"]
    measure._tables.clear()
    without = Geometry.from_json(geometry.to_json())
    with pytest.raises(ConfigError, match="3 sizes of images were never measured, and there is no processor to ask"):
        count_images(without, *sizes)
    without.remember_in([tmp_path / "data"])
    assert count_images(without, *sizes) == counts


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"version": 9}', b'{"version": 1, "image": [[1]]}'])
def test_damaged_files_are_measured_again(idefics, tmp_path, text):
    geometry = Geometry.from_processor(idefics)
    file = tmp_path / f"measured-{geometry.image.asked}.json"
    file.write_bytes(text)
    geometry.remember_in([tmp_path])
    assert count_images(geometry, (300, 400))[0] > 5
    assert json.loads(file.read_bytes())["image"][0][:3] == [300, 400, 1]


def test_blanks_without_memory_count_what_pixels_do(idefics):
    asker, _ = measure.ask(idefics)
    assert asker._is_weightless["image"]
    sizes = [(int(h), int(w), 1) for h, w in np.random.default_rng(0).integers(20, 1500, (12, 2))]
    weightless = [asker.count("image", size) for size in sizes]
    asker._is_weightless = dict.fromkeys(asker._is_weightless, False)
    assert [asker.count("image", size) for size in sizes] == weightless


def test_refused_sizes_are_estimated_and_named_once(caplog):
    geometry = Geometry.from_processor(build_any("Exaone4_5_Processor", "exaone4_5"))
    counts = count_images(geometry, (2, 900), (280, 560), (3, 999))
    assert counts[0] == count_images(Geometry.unknown(), (2, 900))[0]
    assert counts[1] == count_images(geometry, (280, 560))[0]
    refused = [record.getMessage() for record in caplog.records if "refuses" in record.getMessage()]
    assert len(refused) == 1
    assert "Exaone4_5_Processor refuses an image of the size 2x900x1" in refused[0]


def test_long_measuring_tells_its_progress(idefics, caplog, monkeypatch):
    monkeypatch.setattr(measure, "_PROGRESS_S", 0.0)
    geometry = Geometry.from_processor(idefics)
    with caplog.at_level(logging.INFO):
        count_images(geometry, (30, 40), (50, 60))
    assert "Idefics3Processor: 1 of 2 sizes measured" in caplog.text


def test_frame_rule_of_a_measured_family_comes_from_its_video_part():
    geometry = Geometry.from_processor(build_any("Exaone4_5_Processor", "exaone4_5"))
    assert geometry.frames == FrameRule(fps=2.0, min_frames=4, max_frames=768, temporal_patch_size=2)


def test_packs_of_a_family_without_a_rule_hold_what_was_planned(idefics, toy_meta, tmp_path):
    idefics.image_processor.size = {"longest_edge": 728}
    data, folder = tmp_path / "data", str(tmp_path / "processor")
    idefics.save_pretrained(folder)
    make_shards(toy_meta, data, names=("captions", "dialogues"), samples_per_shard=10, processor=folder)
    assert load_manifest(open_store(str(data))).tokens.kind == "exact"
    (kept,) = data.glob("measured-*.json")  # conversion has measured what the plan will ask for
    kept.unlink()
    measure._tables.clear()
    counting._opened.clear()
    recount(str(data), folder, workers=1)
    assert len(json.loads(kept.read_bytes())["image"]) > 3
    loader = StreamLoader(str(data), processor=folder, pack_size=1200, epochs=1, num_workers=0)
    num_batches = sum(1 for _ in loader)
    assert num_batches > 3
    assert loader.ledger.num_bad == 0
    assert [path.name for path in data.glob("measured-*.json")] != []


def test_an_index_whose_media_were_measured_is_named_where_a_rule_counts_them(
    idefics, toy_meta, tmp_path, caplog, monkeypatch
):
    """Marks around media are a part of what is measured, and text by rule: together they would count twice."""
    idefics.image_processor.size = {"longest_edge": 728}
    data, folder = tmp_path / "data", str(tmp_path / "processor")
    idefics.save_pretrained(folder)
    make_shards(toy_meta, data, names=("captions",), samples_per_shard=10, processor=folder)
    said = "were counted beside media that were measured, which are now counted by rule, so packs may come out too long"

    def plan() -> None:
        counting._opened.clear()
        len(StreamLoader(str(data), processor=folder, pack_size=1200, epochs=1, num_workers=0))

    plan()
    assert said not in caplog.text
    monkeypatch.setitem(families._FAMILIES, "Idefics3Processor", BY_RULE["Idefics3Processor"])
    plan()
    assert said in caplog.text

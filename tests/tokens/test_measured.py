"""Families without a rule: the processor is asked, estimates equal the length of input_ids, and answers are kept."""

from __future__ import annotations

import json
import logging
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.tokens.any_processor import build_any, survey
from vlm_stream import StreamLoader
from vlm_stream.convert import make_shards
from vlm_stream.errors import ConfigError
from vlm_stream.format import load_manifest
from vlm_stream.storage import open_store
from vlm_stream.tokens import (
    FrameRule,
    Geometry,
    ImageSize,
    MediaSizes,
    TextCounter,
    count_tokens,
    make_columns,
    measure,
)


@pytest.fixture(autouse=True)
def nothing_was_asked():
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


@pytest.mark.filterwarnings("ignore")  # of 80 classes of another library
def test_no_processor_of_transformers_is_counted_wrongly():
    found = list(survey())
    assert [finding for finding in found if finding.kind == "wrong"] == []
    kinds = Counter(finding.kind for finding in found)
    assert kinds["rule"] >= 30
    assert kinds["measured"] >= 30
    unexplained = [finding for finding in found if finding.kind.startswith("not") and not finding.reason]
    assert unexplained == []


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
    loader = StreamLoader(str(data), processor=folder, pack_size=1200, epochs=1, num_workers=0)
    num_batches = sum(1 for _ in loader)
    assert num_batches > 3
    assert loader.ledger.num_bad == 0
    assert [path.name for path in data.glob("measured-*.json")] != []

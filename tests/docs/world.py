"""The folder that pages and examples are written for: toy data under the names that they use.

A name on the hub is a folder of that name here, with a processor and a tiny model: it is found without a network.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.foreign_tars import write_captions, write_energon
from vlm_stream.convert import make_shards
from vlm_stream.testing import build_processor, build_tiny_model, make_jpeg, make_toy_dataset

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 36 * 28 * 28}}
NAME = "Qwen/Qwen2.5-VL-3B-Instruct"


def small_processor(family: str) -> Any:
    """Return a family's processor whose images are small."""
    return build_processor(family, image=LIMITS, video=LIMITS | {"cap_pixels_per_frame": False})


def turns(text: str, roles: tuple[str, str, str, str] = ("from", "value", "human", "gpt")) -> list[dict[str, str]]:
    """Return a question and its answer."""
    role, content, user, assistant = roles
    return [{role: user, content: text}, {role: assistant, content: "A cat."}]


def build_world(folder: Path) -> Any:
    """Fill a folder; return the processor of the shards in it."""
    processor = small_processor("qwen2_5_vl")
    for name in (NAME, "Qwen/Qwen2.5-VL-7B-Instruct", "processor"):
        processor.save_pretrained(folder / name)
    build_tiny_model("qwen2_5_vl", processor).save_pretrained(folder / NAME)
    small_processor("qwen3_vl").save_pretrained(folder / "Qwen/Qwen3-VL-8B-Instruct")
    build_processor("gemma3").save_pretrained(folder / "google/gemma-3-4b-it")

    meta = make_toy_dataset(folder, num_samples=36)
    make_shards(meta, folder / "shards", processor=str(folder / NAME), samples_per_shard=10, workers=1)
    entries = {"captions": "captions", "documents": "dialogues", "videos": "clips", "val": "captions"}
    for name, entry in entries.items():
        make_shards(meta, folder / name, names=(entry,), processor=str(folder / NAME), workers=1)

    write_captions(folder / "tars")
    write_captions(folder / "data")
    _write_energon(folder)
    _write_records(folder)
    recipe = {"sources": "shards/", "processor": NAME, "pack_size": 2048, "fake_image": True}
    for name in ("recipe.yaml", "my.yaml"):
        (folder / name).write_text(yaml.safe_dump(recipe))
    return processor


def _write_energon(folder: Path) -> None:
    config = {"sample_type": {"__class__": "CaptioningSample"}, "field_map": {"image": "jpg", "caption": "txt"}}
    tars = {f"{n}.tar": [(f"{n}", {"jpg": make_jpeg(30, 30), "txt": b"words"})] for n in range(2)}
    for name in ("energon", "energon_dataset"):
        write_energon(folder / name, tars, {"train": ["0.tar"], "val": ["1.tar"]}, config)
    blend = {"__class__": "MetadatasetV2", "splits": {"train": {"blend": [{"weight": 1, "path": "energon"}]}}}
    (folder / "blend.yaml").write_text(yaml.safe_dump(blend))


def _write_records(folder: Path) -> None:
    (folder / "images").mkdir()
    (folder / "images" / "1.jpg").write_bytes(make_jpeg(56, 84))
    (folder / "photos").mkdir()
    record = {"image": "1.jpg", "conversations": turns("<image>\nWhat?")}
    roles = ("who", "says", "user", "assistant")
    files: dict[str, Any] = {
        "llava.json": [record],
        "unplaced.json": [{"image": "1.jpg", "conversations": turns("What?")}],
        "dialogs.jsonl": {"photos": ["1.jpg"], "dialog": turns("<image>What?", ("who", "says", "me", "you"))},
        "data.jsonl": {"photos": [f"{folder}/images/1.jpg"], "dialog": turns("<image>What?", roles)},
        "pairs.jsonl": {"ask": "What?", "reply": "A cat."},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value) + "\n")
    with gzip.open(folder / "data.jsonl.gz", "wt") as file:
        file.write(json.dumps({"conversations": turns("Why?")}) + "\n")
    image = {"bytes": make_jpeg(20, 30), "path": None}
    rows = pa.Table.from_pylist([{"image": image, "conversations": turns("<image>")}])
    for name in ("data/train-0", "hub/data/train-0", "set/data/train-0", "set/data/test-0"):
        path = folder / f"{name}0000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, path)

"""Tars of others are datasets where they are: indexed on first use, once, and found again."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.foreign_tars import write_captions, write_tar
from tests.servers import READER_KEYS
from vlm_stream import StreamLoader
from vlm_stream.cli import main
from vlm_stream.convert import IndexOptions, index_tars, index_urls, open_dataset, tar_samples
from vlm_stream.errors import ConfigError, DatasetError
from vlm_stream.storage import StoreOptions, open_store
from vlm_stream.testing import make_jpeg

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """Let the user's cache be a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vlm_stream"


@pytest.fixture
def captions(tmp_path) -> Path:
    write_captions(tmp_path / "tars")
    return tmp_path / "tars"


def keys_of(url, **options) -> list[str]:
    loader = StreamLoader(url, processor=None, mode="plain", batch_size=4, **options)
    return sorted(sample.key for batch in loader for sample in batch["samples"])


def all_keys(*tars: int) -> list[str]:
    return [f"{tar:05d}{sample:04d}" for tar in tars for sample in range(5)]


def test_every_way_to_name_tars(captions, monkeypatch):
    monkeypatch.chdir(captions.parent)
    assert keys_of("tars/{00000..00003}.tar") == all_keys(0, 1, 2, 3)
    assert keys_of("tars/00002.tar") == all_keys(2)
    assert keys_of("tars/{00000..00001}.tar::tars/00003.tar") == all_keys(0, 1, 3)
    assert keys_of("tars/*.tar") == keys_of("tars") == keys_of(captions) == all_keys(0, 1, 2, 3)
    assert keys_of({"a": "tars/00000.tar", "b": {"url": "tars/00001.tar"}}) == all_keys(0, 1)


def test_it_says_where_the_index_goes_and_finds_it_again(captions, caplog):
    url = str(captions / "{00000..00003}.tar")
    with caplog.at_level(logging.WARNING):
        keys_of(url)
    told = caplog.text
    (place,) = captions.glob(".vlm_stream/*/dataset.json")
    assert str(place.parent) in told
    assert f"vlm-stream index '{url}' --workers N" in told
    assert "20 samples, layout 'caption'; left out, and named in the ledger there: none" in told
    caplog.clear()
    assert keys_of(str(captions)) == all_keys(0, 1, 2, 3)  # the same tars, named otherwise
    assert "indexing" not in caplog.text


def test_the_first_samples_are_read_once_for_their_layout(tmp_path, monkeypatch):
    chat = {"conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "That."}]}
    write_tar(tmp_path / "0.tar", [("a", {"jpg": make_jpeg(30, 30), "json": json.dumps(chat).encode()})])
    opened = []
    reader = tar_samples.ObjectReader
    monkeypatch.setattr(tar_samples, "ObjectReader", lambda *object_: opened.append(object_) or reader(*object_))
    assert open_dataset(str(tmp_path / "0.tar")).manifest.fields.layout == "sharegpt"
    assert len(opened) == 1


def test_tars_that_change_are_indexed_again(captions):
    assert len(keys_of(captions)) == 20
    write_tar(captions / "00003.tar", [("new", {"jpg": make_jpeg(30, 30), "txt": b"another"})])
    assert keys_of(captions) == [*all_keys(0, 1, 2), "new"]


def test_tars_of_the_same_size_that_change_are_noticed(captions):
    def words(text: bytes) -> None:
        write_tar(captions / "00000.tar", [("one", {"jpg": make_jpeg(30, 30), "txt": text})])

    words(b"before")
    size = (captions / "00000.tar").stat().st_size
    keys_of(str(captions / "00000.tar"))
    words(b"after!")
    os.utime(captions / "00000.tar", ns=(1, 1))
    assert (captions / "00000.tar").stat().st_size == size
    loader = StreamLoader(str(captions / "00000.tar"), processor=None, mode="plain")
    (batch,) = loader
    assert batch["samples"][0].conversation()[1]["content"][0]["text"] == "after!"


def test_an_index_that_a_command_wrote_serves_any_of_its_tars(captions, caplog):
    fields_prompt = "What is this?"
    assert main(["index", str(captions), "--layout", "caption", "--prompt", fields_prompt, "--quiet"]) == 0
    assert keys_of(str(captions / "{00001..00002}.tar")) == all_keys(1, 2)
    both = {"a": str(captions / "{00001..00002}.tar"), "b": str(captions / "00003.tar")}
    assert keys_of(both) == all_keys(1, 2, 3)
    assert "indexing" not in caplog.text
    assert not (captions / ".vlm_stream").exists()
    assert open_dataset(str(captions / "00003.tar")).manifest.fields.prompt == fields_prompt


def test_an_index_of_other_tars_is_refused(captions):
    index_tars([str(captions)])
    write_tar(captions / "00001.tar", [("new", {"jpg": make_jpeg(30, 30), "txt": b"x"})])
    with pytest.raises(DatasetError, match=r"00001.tar has changed since .*dataset.json was written.*--overwrite"):
        keys_of(str(captions / "{00000..00003}.tar"))


_PROGRAM = """
import logging, sys
from torch.utils.data import DataLoader
from vlm_stream import StreamOptions, VLMStream
logging.basicConfig(stream=sys.stderr, format="%(message)s")
if __name__ == "__main__":
    stream = VLMStream(sys.argv[1], processor=None, options=StreamOptions(mode="plain", batch_size=4),
                       rank=int(sys.argv[2]), world_size=3)
    loader = DataLoader(stream, batch_size=None, num_workers=2)
    print(*[sample.key for batch in loader for sample in batch["samples"]])
"""


def test_of_many_processes_one_indexes_and_all_deliver(tmp_path):
    keys = write_captions(tmp_path / "tars", num_tars=6, num_samples=40)
    program = tmp_path / "run.py"
    program.write_text(_PROGRAM)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen(
            [sys.executable, str(program), str(tmp_path / "tars" / "{00000..00005}.tar"), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    results = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], results
    assert sorted(key for out, _ in results for key in out.split()) == sorted(keys)
    told = "".join(err for _, err in results)
    assert told.count("indexing 6 tars") == 1  # of nine processes
    assert len(list((tmp_path / "tars" / ".vlm_stream").glob("*/dataset.json"))) == 1


def put_tars(server, folder: Path, prefix: str) -> str:
    store = open_store(server.url(prefix), server.options)
    for tar in sorted(folder.glob("*.tar")):
        store.put(tar.name, tar)
    return f"{server.url(prefix)}/{{00000..00003}}.tar"


def test_a_bucket_is_indexed_beside_the_tars(s3_server, captions, cache, caplog):
    url = put_tars(s3_server, captions, "in-place")
    assert keys_of(url, store=s3_server.options) == all_keys(0, 1, 2, 3)
    listed = [info.path for info in open_store(s3_server.url("in-place"), s3_server.options).list()]
    assert sum(path.endswith("dataset.json") for path in listed) == 1
    assert not (cache / "indexes").exists()
    caplog.clear()
    assert keys_of(s3_server.url("in-place"), store=s3_server.options) == all_keys(0, 1, 2, 3)
    assert keys_of(s3_server.url("in-place/0000[01].tar"), store=s3_server.options) == all_keys(0, 1)
    assert caplog.text.count("indexing") == 1  # of the two tars alone


def test_a_bucket_that_may_only_be_read_is_indexed_in_the_users_cache(
    s3_server, captions, cache, caplog, monkeypatch, capsys
):
    url = put_tars(s3_server, captions, "read-only")
    for name, value in READER_KEYS.items():
        monkeypatch.setenv(name, value)
    store = ["--endpoint", s3_server.endpoint, "--region", "us-east-1", "--allow-http"]
    assert main(["index", url, "--workers", "1", "--json", *store]) == 0
    place = json.loads(capsys.readouterr().out)["place"]
    assert place == str(next(cache.glob("indexes/*")))
    assert keys_of(url, store=s3_server.options) == all_keys(0, 1, 2, 3)
    assert "indexing" not in caplog.text
    assert keys_of(url.replace("{00000..00003}", "00001"), store=s3_server.options) == all_keys(1)
    assert len(list(cache.glob("indexes/*/dataset.json"))) == 2
    with pytest.raises(DatasetError, match=r"is not where the dataset lies; .*name it with --tars URL"):
        open_dataset(place)
    own = StoreOptions(tars=(s3_server.url("read-only"),))
    index = IndexOptions(store=s3_server.options, fields=open_dataset(place, own).manifest.fields)
    with pytest.raises(ConfigError, match=r"a layout was named"):
        index_urls([url], index)


def test_an_object_that_changes_is_indexed_again(s3_server, captions):
    url = put_tars(s3_server, captions, "changing")
    keys_of(url, store=s3_server.options)
    tar = write_tar(captions / "other.tar", [("new", {"jpg": make_jpeg(30, 30), "txt": b"x"})])
    open_store(s3_server.url("changing"), s3_server.options).put("00000.tar", tar)
    assert keys_of(url, store=s3_server.options) == [*all_keys(1, 2, 3), "new"]


def test_commands_and_recipes_take_the_same_names(captions, tmp_path, saved_processor, capsys):
    url = str(captions / "{00000..00001}.tar")
    assert main(["plan", url, "--mode", "plain", "--batch-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 10
    assert main(["stats", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["images"] == 10
    assert main(["where", url, "--mode", "plain", "--key", "000010003", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"][0]["shard"] == "00001.tar"
    assert main(["verify", url, "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    assert main(["recount", url, "--processor", str(saved_processor), "--workers", "1", "--json"]) == 0
    capsys.readouterr()
    assert open_dataset(url).manifest.tokens.kind == "exact"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"sources: '{url}'\nprocessor: {saved_processor}\nmode: packed\npack_size: 512\n")
    loader = StreamLoader.from_config(recipe, with_refs=True)
    assert sorted(ref[2] for batch in loader for row in batch["refs"] for ref in row) == all_keys(0, 1)


def test_members_without_a_layout_are_bytes_and_cannot_be_encoded(tmp_path, processor):
    samples = [(f"{n}", {"npy": bytes(16), "meta.json": b'{"a": 1}'}) for n in range(3)]
    url = str(write_tar(tmp_path / "odd.tar", samples))
    named = r"no known layout.*\(native, sharegpt, caption, bytes\).*vlm-stream index '.*odd.tar' --layout"
    with pytest.raises(ConfigError, match=named):
        next(iter(StreamLoader(url, processor=processor, mode="plain")))
    assert keys_of(url) == ["0", "1", "2"]
    assert main(["verify", url, "--workers", "1", "--quiet"]) == 0
    with pytest.raises(ConfigError, match=r"were indexed as bytes.*no conversation to encode"):
        next(iter(StreamLoader(url, processor=processor, mode="plain")))
    sample = next(iter(StreamLoader(url, processor=None, mode="plain")))["samples"][0]
    assert bytes(sample.members["npy"]) == bytes(16)
    with pytest.raises(ConfigError, match=r"they have no conversation"):
        sample.conversation()


def test_a_ledger_outlives_an_index_that_fails(tmp_path):
    url = str(write_tar(tmp_path / "odd.tar", [("1", {"npy": bytes(16)})]))
    (tmp_path / "ledger.jsonl").write_text("of another run\n")
    with pytest.raises(ConfigError, match=r"no known layout"):
        index_urls([url], IndexOptions(overwrite=True))
    assert (tmp_path / "ledger.jsonl").read_text() == "of another run\n"


def test_what_cannot_be_used_is_said(tmp_path, captions):
    with pytest.raises(ConfigError, match=r"is a command, which gives a stream"):
        keys_of("pipe:cat x.tar")
    with pytest.raises(ConfigError, match=r"compressed tars cannot be read"):
        keys_of(str(captions / "x.tar.gz"))
    (captions / "zipped.tar").write_bytes(gzip.compress((captions / "00000.tar").read_bytes()))
    with pytest.raises(ConfigError, match=r"zipped.tar.*packed by gzip; unpack it first"):
        keys_of(str(captions / "zipped.tar"))
    with pytest.raises(ConfigError, match=r"is no Energon dataset"):
        keys_of(f"{captions}#val")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"has no dataset.json"):
        keys_of(tmp_path / "empty")


def test_tars_joined_by_cat_are_read_to_the_end(captions):
    joined = captions / "joined.tar"
    joined.write_bytes((captions / "00000.tar").read_bytes() + (captions / "00001.tar").read_bytes())
    assert keys_of(str(joined)) == all_keys(0, 1)
    assert main(["verify", str(joined), "--workers", "1", "--quiet"]) == 0


def test_upper_case_names_and_the_files_of_macs(tmp_path, processor):
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "!"}]
    data = json.dumps({"messages": turns, "images": ["a.JPG"]}).encode()
    samples = [
        ("d/._x", {"JPG": b"rubbish"}),
        ("d/x", {"JPG": make_jpeg(60, 60), "JSON": data}),
        ("d/.DS_Store", {"x": b""}),
    ]
    url = str(write_tar(tmp_path / "mac.tar", samples))
    batch = next(iter(StreamLoader(url, processor=processor, mode="plain")))
    assert batch["pixel_values"].shape[0] > 0
    bare = next(iter(StreamLoader(url, processor=processor, mode="plain", pixels=False)))
    assert bare["input_ids"].tolist() == batch["input_ids"].tolist()
    assert keys_of(url) == ["d/x"]


def test_classes_are_captions(tmp_path):
    url = str(write_tar(tmp_path / "c.tar", [("1", {"jpg": make_jpeg(20, 20), "cls": b"281"})]))
    sample = next(iter(StreamLoader(url, processor=None, mode="plain")))["samples"][0]
    question, answer = sample.conversation()
    assert question["content"][0] == {"type": "image", "image": make_jpeg(20, 20)}
    assert answer["content"] == [{"type": "text", "text": "281"}]

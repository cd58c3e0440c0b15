"""Kinds of bad input and the sentence each gets: bad records when they are read, bad files before anything is done."""

from __future__ import annotations

import errno
import gzip
import json
import pickle
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from vlm_stream.errors import BadSampleError, ConfigError, MissingExtraError, SourceError
from vlm_stream.sources import SourceGroup, local_file, open_source


def sample(name: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": "A"}], **more}


def samples(num: int) -> list[dict[str, Any]]:
    return [sample(f"Q{i}") for i in range(num)]


def lines(values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def write_meta(folder: Path, **entries: Any) -> str:
    path = folder / "meta.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return str(path)


# --- bad records: each raises when it is read, alone, with file:line --------------------------------------------------

BAD_LINES = {
    "broken_json": (
        b'{"messages": [',
        r"broken JSON at character \d+ \(.*\)\. The sample is left out; mend it",
    ),
    "not_utf8": (b'{"messages": "\xff"}', r"byte 0xff at column 15 is not UTF-8"),
    "lone_surrogate": (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', r"half of a surrogate pair"),
    "not_an_object": (b"[1, 2]", r"the record is \[1, 2\], not a JSON object"),
    "surplus_media": (json.dumps(sample("q", images=["1.jpg"])).encode(), r"'images' has 1, but the user turns show"),
}
OTHER_BROKEN = [b'{"a": NaN}', b"[" * 100_000, b'{"a": 1} {"b": 2}', b'{"a": ' + b"1" * 5000 + b"}", b'"\x00"']


@pytest.mark.parametrize("reason", BAD_LINES)
def test_a_bad_line_is_one_bad_record(tmp_path: Path, reason: str):
    bad, sentence = BAD_LINES[reason]
    good = json.dumps(sample("Q")).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good, b"", bad, good]))
    source = open_source(str(tmp_path / "a.jsonl"))
    assert len(source) == 3
    with pytest.raises(BadSampleError, match=rf"a\.jsonl:3: .*{sentence}") as caught:
        source.read(1)
    assert (caught.value.stage, caught.value.reason) == ("convert", reason)
    assert source.read(2).origin.endswith("a.jsonl:4")
    with pytest.raises(SourceError, match=r"a\.jsonl:3: .* The job ends here, as on_mismatch='raise' asks"):
        open_source(str(tmp_path / "a.jsonl"), on_mismatch="raise").read(1)


@pytest.mark.parametrize("bad", OTHER_BROKEN)
def test_json_that_cannot_be_kept(tmp_path: Path, bad: bytes):
    (tmp_path / "a.jsonl").write_bytes(bad)
    with pytest.raises(BadSampleError, match=r"a\.jsonl:1: broken JSON") as caught:
        open_source(str(tmp_path / "a.jsonl")).read(0)
    assert caught.value.reason == "broken_json"


def test_bad_elements_of_an_array(tmp_path: Path):
    good = json.dumps(sample("Q"))
    (tmp_path / "a.json").write_text(f'[\n{good},\n{{"a" 1}},\n3,\n"x",\n{good},\n]')
    source = open_source(str(tmp_path / "a.json"))

    def line_or_reason(index: int) -> str:
        try:
            return source.read(index).origin.rpartition("[")[2]
        except BadSampleError as error:
            return error.reason

    assert [line_or_reason(i) for i in range(len(source))] == [
        "0]",
        "broken_json",
        "not_an_object",
        "not_an_object",
        "4]",
        "broken_json",
    ]


def test_keep_notes_what_it_left_out(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(lines([sample("q", images=["1.jpg"], mm_inputs_meta={}, _text_tokens=3)]))
    record = open_source(str(tmp_path / "a.jsonl"), on_mismatch="keep").read(0)
    assert record.extras["_mismatches"] == ["surplus_media: 'images' has 1, but the user turns show <image> 0 times"]
    assert record.extras["mm_inputs_meta"] == {}
    assert record.extras["_text_tokens"] == 3


# --- files that cannot be used at all: refused before anything is done ---------------------------------------------

BAD_FILES = {
    "missing": (
        "none.jsonl",
        None,
        r"none\.jsonl: cannot be opened \(No such file or directory\).*relative to that file",
    ),
    "a folder": (".", None, r"is a folder without \.parquet or \.arrow files, so there is nothing to read"),
    "cut array": ("a.json", b'[{"a": "b', r"the array does not end: the file stops inside a string, in record 0"),
    "glued arrays": ("a.json", b"[1]\n[2]", r"the array ends near byte 3 .* and more follows"),
    "a number": ("a.json", b"42", r"Expected a JSON array of records or one JSON object per line, found '42'"),
    "empty": ("a.json", b" \n", r"Expected a JSON array .* found nothing"),
    "one record": ("a.json", b'{"messages": []}', r"Expected a JSON array .* one object with the keys messages"),
    "utf-16": ("a.jsonl", '{"a": 1}'.encode("utf-16"), r"the file is UTF-16 or UTF-32.*iconv"),
    "gzip by another name": ("a.jsonl", gzip.compress(b"{}\n" * 9), r"a\.jsonl: .*packed by gzip.*end in \.gz"),
    "zstd by another name": ("a.json", zstandard.compress(b"[]"), r"a\.json: .*packed by zstd.*end in \.zst"),
    "array named lines": ("a.jsonl", b'[\n {"a": 1},\n {"a": 2}\n]', r"a\.jsonl: .*one JSON array.*end in \.json\."),
    "array on one line": ("a.jsonl", b'[{"a": 1}, {"a": 2}]\n', r"a\.jsonl: .*one JSON array.*end in \.json\."),
    "cut gzip": ("a.jsonl.gz", gzip.compress(b"{}\n" * 99)[:-9], r"a\.jsonl\.gz: cannot be decompressed \(.*cut off"),
    "no gzip": ("a.jsonl.gz", b"plain text", r"cannot be decompressed \(Not a gzipped file"),
    "no zstd": ("a.jsonl.zst", b"plain text", r"cannot be decompressed \(.*Fetch it again, or give the plain file"),
    "cut zstd": (
        "a.jsonl.zst",
        zstandard.compress(random.Random(0).randbytes(999))[:-9],
        r"cannot be decompressed \(.*cut off",
    ),
    "unknown scheme": ("nope://b/a.jsonl", None, r"nope://b/a\.jsonl: cannot be fetched"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files(tmp_path: Path, kind: str):
    name, content, sentence = BAD_FILES[kind]
    path = name if "://" in name else str(tmp_path / name)
    if content is not None:
        Path(path).write_bytes(content)
    with pytest.raises(SourceError, match=sentence):
        open_source(path)


BAD_METAS = {
    "missing file_name": ({"a": {"media_dir": "x"}}, r"dataset 'a' is missing 'file_name'"),
    "empty file_name": ({"a": {"file_name": ""}}, r"dataset 'a' is missing 'file_name'"),
    "unknown key": (
        {"a": {"file_name": "a.jsonl", "media_dri": "x"}},
        r"the key 'media_dri'.*did you mean 'media_dir'",
    ),
    "unknown column": (
        {"a": {"file_name": "a.jsonl", "columns": {"msgs": "x"}}},
        r"dataset 'a': 'msgs' is no key of 'columns'",
    ),
    "unknown tag": ({"a": {"file_name": "a.jsonl", "tags": {"roletag": "x"}}}, r"'roletag'.*did you mean 'role_tag'"),
    "tags no object": (
        {"a": {"file_name": "a.jsonl", "tags": "x"}},
        r"'tags' is 'x', which cannot be used; write an object",
    ),
    "file_name no string": (
        {"a": {"file_name": ["a"]}},
        r"'file_name' is \['a'\], which cannot be used; write a string",
    ),
    "ratio zero": (
        {"a": {"file_name": "a.jsonl", "sample_ratio": 0}},
        r"dataset 'a': sample_ratio is 0, which takes no",
    ),
    "ratio text": ({"a": {"file_name": "a.jsonl", "sample_ratio": "1"}}, r"sample_ratio is '1', which takes no sample"),
    "ratio negative": ({"a": {"file_name": "a.jsonl", "sample_ratio": -1.5}}, r"sample_ratio is -1.5"),
    "missing data": ({"a": {"file_name": "b.jsonl"}}, r"b\.jsonl: cannot be opened"),
    "no datasets": ({}, r"the meta file names no datasets"),
}


@pytest.mark.parametrize("kind", BAD_METAS)
def test_bad_meta_files(tmp_path: Path, kind: str):
    (tmp_path / "a.jsonl").write_text(lines(samples(2)))
    meta, sentence = BAD_METAS[kind]
    with pytest.raises(SourceError, match=sentence):
        open_source(write_meta(tmp_path, **meta))


def test_meta_files_that_are_not_json(tmp_path: Path):
    path = tmp_path / "meta.json"
    path.write_text('{"a": {"file_name": "x"},\n "a": {"file_name": "y"}}')
    with pytest.raises(SourceError, match=r"broken JSON \(the key 'a' occurs twice in one object"):
        open_source(str(path))
    path.write_text('{"a": {"file_name": }}')
    with pytest.raises(SourceError, match=r"meta\.json: not a meta file, broken JSON \(Expecting value: line 1"):
        open_source(str(path))


def test_the_names_filter(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(lines(samples(2)))
    meta = write_meta(tmp_path, alpha={"file_name": "a.jsonl"})
    with pytest.raises(SourceError, match=r"dataset 'alpah' not found in meta file .*did you mean 'alpha'"):
        open_source(meta, names=["alpah"])
    with pytest.raises(SourceError, match=r"the names filter is empty.*Allowed: alpha"):
        open_source(meta, names=[])
    with pytest.raises(SourceError, match=r"a data file has no names to choose from"):
        open_source(str(tmp_path / "a.jsonl"), names=["a"])
    with pytest.raises(
        SourceError, match=r"a meta file says columns, tags and media_dir for each entry; put them there"
    ):
        open_source(meta, media_dir="x")
    (tmp_path / "nested.json").write_text(json.dumps({"data": samples(2)}))
    with pytest.raises(SourceError, match=r"Expected a JSON array .* one object with the keys data"):
        open_source(str(tmp_path / "nested.json"), media_dir="x")
    with pytest.raises(ConfigError, match=r"on_mismatch is 'dorp'"):
        open_source(meta, on_mismatch="dorp")  # type: ignore[arg-type]


def test_two_sources_of_one_name(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(lines(samples(1)))
    one = open_source(str(tmp_path / "a.jsonl"))
    with pytest.raises(SourceError, match=r"two sources are called 'a', so their records could not be told apart"):
        SourceGroup([*one.members, *one.members], name="both")


def test_a_file_that_changes_while_it_is_read(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(samples(5)))
    source = open_source(str(path))
    elsewhere = pickle.loads(pickle.dumps(source))
    path.write_text(lines(samples(2)))
    with pytest.raises(SourceError, match=r"the file became shorter while it was read: \d+ bytes are missing"):
        source.read(4)
    with pytest.raises(SourceError, match=r"the file has changed since its records were located"):
        elsewhere.read(0)


def test_no_room_to_unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(samples(2)).encode()))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(
        ConfigError,
        match=r"no room to unpack .*: the folder .*nowhere cannot be written \(No such.* by TMPDIR",
    ):
        open_source(str(path))

    def full_disk(raw: object) -> list[bytes]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local_file, "_gunzip", full_disk)
    (tmp_path / "spill").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spill"))
    with pytest.raises(SourceError, match=r"the plain bytes do not fit into .*spill, which is full.*room by TMPDIR"):
        open_source(str(path))
    assert not list((tmp_path / "spill").iterdir())


def test_zstd_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(b"{}"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        MissingExtraError, match=r"Reading \.zst files needs the package 'zstandard'.*vlm-stream\[zstd\]"
    ):
        open_source(str(tmp_path / "a.jsonl.zst"))


def test_a_file_without_records_is_no_error_but_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "a.jsonl").write_text("\n")
    meta = write_meta(tmp_path, a={"file_name": "a.jsonl", "sample_ratio": 0.5})
    assert len(open_source(meta)) == 0
    assert "a.jsonl: the file has no records" in caplog.text


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "arrow"])
def test_more_files_are_read_than_may_be_open(tmp_path: Path, suffix: str):
    table = pa.table({"text": ["x"]})
    for number in range(400):
        path = tmp_path / f"train-{number:05d}.{suffix}"
        if suffix == "jsonl":
            path.write_text('{"text": "x"}\n')
        elif suffix == "parquet":
            pq.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
    program = (
        "import resource, sys; from vlm_stream.sources import open_source; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (350, 350)); source = open_source(sys.argv[1]); "
        "print(len([source.read(number) for number in range(len(source))]))"
    )
    pattern = str(tmp_path / f"*.{suffix}")
    done = subprocess.run([sys.executable, "-c", program, pattern], capture_output=True, text=True, check=False)
    assert done.stdout == "400\n", done.stderr

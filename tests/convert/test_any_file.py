"""Files as their makers write them become shards: every form, every kind of file, with its line."""

from __future__ import annotations

import base64
import functools
import gzip
import http.server
import json
import pickle
import subprocess
import sys
import tarfile
import threading
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlm_stream.cli import main
from vlm_stream.convert import make_shards
from vlm_stream.convert.engines import LocalEngine
from vlm_stream.convert.job import record_order
from vlm_stream.errors import BadSampleError, SourceError
from vlm_stream.sources import collect_sample_stats, open_source, table_file
from vlm_stream.storage import open_store
from vlm_stream.testing import make_jpeg, make_wav

if TYPE_CHECKING:
    from pathlib import Path

NUM = 12


def llava(i: int, text: str = "<image>\nWhat?") -> list[dict[str, str]]:
    return [{"from": "human", "value": text}, {"from": "gpt", "value": f"It is {i}."}]


def chat(i: int, *items: dict[str, Any]) -> list[dict[str, Any]]:
    ask = [*items, {"type": "text", "text": "What?"}]
    return [{"role": "user", "content": ask}, {"role": "assistant", "content": f"It is {i}."}]


def url(i: int) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(make_jpeg(20, 30 + i)).decode()


def sound() -> str:
    return base64.b64encode(make_wav(0.2)).decode()


def stored(i: int) -> dict[str, Any]:
    return {"bytes": make_jpeg(20, 30 + i), "path": f"{i}.jpg"}


RECORDS: dict[str, tuple[Any, str, str]] = {
    "LLaVA": (
        lambda i: {"id": f"{i:04}", "image": f"{i}.jpg", "conversations": llava(i)},
        "LLaVA conversations, images in 'image'", "image",
    ),
    "LLaVA with text only": (
        lambda i: (
            {"id": i, "image": [f"{i}.jpg"], "conversations": llava(i)}
            if i % 2
            else {"id": i, "conversations": llava(i, "Why?")}
        ),
        "LLaVA conversations, images in 'image'", "half",
    ),
    "ShareGPT": (lambda i: {"conversations": llava(i, "What?")}, "ShareGPT conversations", ""),
    "ShareGPT messages": (
        lambda i: {
            "messages": [{"role": "user", "content": "<image>Q"}, {"role": "assistant", "content": "A"}],
            "images": [f"{i}.jpg"],
        },
        "chat messages, images in 'images'", "image",
    ),
    "InternVL": (
        lambda i: {
            "id": i, "image": [f"{i}.jpg"], "width_list": [30], "height_list": [20], "conversations": llava(i, "What?"),
        },
        "InternVL conversations, images in 'image'", "image",
    ),
    "OpenAI": (
        lambda i: {"messages": chat(i, {"type": "image_url", "image_url": {"url": url(i), "detail": "low"}})},
        "OpenAI messages, images in content parts", "image",
    ),
    "OpenAI audio": (
        lambda i: {"messages": chat(i, {"type": "input_audio", "input_audio": {"data": sound(), "format": "wav"}})},
        "OpenAI messages, audios in content parts", "audio",
    ),
    "Qwen": (
        lambda i: {"messages": chat(i, {"type": "image", "image": f"{i}.jpg"})},
        "Qwen messages, images in content parts", "image",
    ),
    "prompt and completion": (
        lambda i: {"prompt": "Why?", "completion": "So."},
        "prompt and completion, prompt in 'prompt', completion in 'completion'", "",
    ),
    "instruction": (
        lambda i: {"instruction": "Add.", "input": "1, 2" if i % 2 else "", "output": "3"},
        "instruction and output, prompt in 'instruction', completion in 'output'", "",
    ),
    "question and answer": (
        lambda i: {"image": f"{i}.jpg", "question": "What?", "answer": "It."},
        "question and answer, prompt in 'question', completion in 'answer', images in 'image'", "image",
    ),
    "plain text": (lambda i: {"text": f"Text {i}."}, "plain text in 'text'", ""),
}  # fmt: skip
ROWS: dict[str, tuple[Any, str, str]] = {
    "HF chat": (
        lambda i: {
            "messages": [
                {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "Q"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "A"}]},
            ],
            "images": [stored(i)],
        },
        "chat messages, images in 'images'", "image",
    ),
    "FineVision": (
        lambda i: {
            "images": [stored(i)],
            "texts": [{"user": "Q", "assistant": "A"}, {"user": "R", "assistant": "B"}],
            "source": "x",
        },
        "Cauldron texts, images in 'images'", "image",
    ),
    "LLaVA-OneVision": (
        lambda i: {"id": str(i), "image": stored(i), "conversations": llava(i), "data_source": "x"},
        "LLaVA conversations, images in 'image'", "image",
    ),
    "VQA": (
        lambda i: {"image": stored(i), "question": "Q", "answer": "A"},
        "question and answer, prompt in 'question', completion in 'answer', images in 'image'", "image",
    ),
}  # fmt: skip


@pytest.fixture
def media(tmp_path: Path) -> str:
    (tmp_path / "media").mkdir()
    for i in range(NUM):
        (tmp_path / "media" / f"{i}.jpg").write_bytes(make_jpeg(20, 30 + i))
    return str(tmp_path / "media")


def check(report: Any, shows: str) -> None:
    totals = report.totals
    assert (report.num_records, totals.samples, report.dropped) == (NUM, NUM, {})
    assert totals.images == {"image": NUM, "half": NUM // 2}.get(shows, 0)
    assert totals.audios == (NUM if shows == "audio" else 0)


@pytest.mark.parametrize("kind", ["json", "jsonl", "jsonl.gz"])
@pytest.mark.parametrize("name", RECORDS)
def test_json_files(name: str, kind: str, media: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, line, shows = RECORDS[name]
    values = [make(i) for i in range(NUM)]
    text = json.dumps(values) if kind == "json" else "\n".join(map(json.dumps, values))
    path = tmp_path / f"data.{kind}"
    path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    if kind == "jsonl":  # from the command line, with its line
        assert main(["make-shards", str(path), str(tmp_path / "out"), "--media-dir", media, "--workers", "1"]) == 0
        assert f"data: {line}\n" in capsys.readouterr().err
        report = make_shards(path, tmp_path / "again", media_dir=media)
    else:
        assert open_source(str(path), media_dir=media).lines == {"data": line}
        report = make_shards(path, tmp_path / "out", media_dir=media)
    check(report, shows)


def write_rows(folder: Path, kind: str, values: list[dict[str, Any]]) -> str:
    """Write rows as they are found in the wild; return what a user would name."""
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(values), folder / "rows.parquet", row_group_size=5)
        return str(folder / "rows.parquet")
    if kind == "hub layout":
        (folder / "set" / "data").mkdir(parents=True)
        for part in range(2):
            table = pa.Table.from_pylist(values[part * NUM // 2 : (part + 1) * NUM // 2])
            pq.write_table(table, folder / "set" / "data" / f"train-{part:05}-of-00002.parquet", row_group_size=4)
        return str(folder / "set")
    if kind == "save_to_disk":
        datasets.Dataset.from_list(values).save_to_disk(str(folder / "saved"))
        return str(folder / "saved")
    table = pa.Table.from_pylist(values)
    new = pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return str(folder / "rows.arrow")


@pytest.mark.parametrize("kind", ["parquet", "hub layout", "arrow file", "arrow stream", "save_to_disk"])
@pytest.mark.parametrize("name", ROWS)
def test_tables(name: str, kind: str, tmp_path: Path) -> None:
    make, line, shows = ROWS[name]
    path = write_rows(tmp_path, kind, [make(i) for i in range(NUM)])
    source = open_source(path)
    assert list(source.lines.values()) == [line]
    workers, size = (2, 2) if (name, kind) == ("VQA", "hub layout") else (1, 5)
    check(make_shards(path, tmp_path / "out", shuffle=3, samples_per_shard=size, workers=workers), shows)
    pictures = []
    for shard in sorted((tmp_path / "out").glob("*.tar")):
        with tarfile.open(shard) as tar:
            pictures += [tar.extractfile(m).read() for m in tar if m.name.endswith(".jpg")]  # type: ignore[union-attr]
    assert sorted(pictures) == sorted(make_jpeg(20, 30 + i) for i in range(NUM))


def test_places_of_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "parquet", [ROWS["LLaVA-OneVision"][0](i) for i in range(NUM)])
    source = pickle.loads(pickle.dumps(open_source(path)))
    assert source.read(7).origin == f"{path}: row group 1, row 2 (id 7)"
    assert source.block_ends.tolist() == [5, 10, 12]
    assert open_source(write_rows(tmp_path, "arrow file", [{"text": "x"}])).block_ends is None
    (tmp_path / "data.json").write_text(json.dumps([{"id": "own", "text": "x"}, {"text": "x"}]))
    array = open_source(str(tmp_path / "data.json"))
    assert [array.read(i).origin for i in range(2)] == [f"{tmp_path}/data.json[0] (id own)", f"{tmp_path}/data.json[1]"]


def test_a_shuffle_reads_each_block_once() -> None:
    ends = np.array([5, 10, 12])
    order = record_order(12, 7, ends)
    assert sorted(order.tolist()) == list(range(12))
    blocks = np.searchsorted(ends, order, side="right")
    assert np.count_nonzero(np.diff(blocks)) == 2
    assert not np.array_equal(order, record_order(12, 8, ends))


@pytest.mark.parametrize(("rows", "most"), [(25, 4 + 2), (100, 1 + 1), (5, 20)])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_row_group_is_read_by_one_process(
    rows: int, most: int, seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups, and those again in which a process begins that has not read them; here each task is a process."""
    pq.write_table(pa.table({"text": [str(row) for row in range(100)]}), tmp_path / "a.parquet", row_group_size=rows)
    make_shards(tmp_path / "a.parquet", tmp_path / "alone", samples_per_shard=10, workers=1, shuffle=seed)
    reads: list[int] = []
    tasks: list[Any] = []
    read = table_file._ParquetFile.read

    def noted(self: Any, block: int, columns: Any) -> Any:
        reads.append(block)
        return read(self, block, columns)

    def run(self: Any, function: Any, given: Any) -> Any:
        reads.clear()
        for task in given:
            tasks.append(task)
            yield pickle.loads(pickle.dumps(function))(task)

    monkeypatch.setattr(table_file._ParquetFile, "read", noted)
    monkeypatch.setattr(LocalEngine, "run", run)
    make_shards(tmp_path / "a.parquet", tmp_path / "out", samples_per_shard=10, workers=2, shuffle=seed)
    assert len(reads) <= most
    assert len(tasks) >= 2
    shards = [path.name for path in (tmp_path / "alone").glob("*.tar")]
    assert len(shards) == 10
    assert all((tmp_path / "alone" / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in shards)


def test_row_groups_are_kept_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"text": ["x" * 1000] * 100}), tmp_path / "a.parquet", row_group_size=10)
    monkeypatch.setattr(table_file, "_CACHE_BYTES", 25_000)
    data = open_source(str(tmp_path / "a.parquet")).members[0].data  # type: ignore[attr-defined]
    for number in range(100):
        assert data.load(number)["text"] == "x" * 1000
        assert data._kept_bytes <= 25_000
        assert len(data._cache) <= 2


def test_a_damaged_row_group_is_bad_and_the_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [f"text {i} " * 50 for i in range(30)]}), path, row_group_size=10, compression="zstd"
    )
    begin = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    data = bytearray(path.read_bytes())
    data[begin : begin + 60] = b"\xff" * 60
    path.write_bytes(data)
    source = open_source(str(path))
    assert source.read(5).conversation[1]["content"][0]["text"].startswith("text 5")
    assert source.read(25).conversation[1]["content"][0]["text"].startswith("text 25")
    with pytest.raises(BadSampleError, match=r"row group 1, row 2: row group 1 is damaged") as caught:
        source.read(12)
    assert caught.value.reason == "damaged_table"


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    for name, kind in (("a.parquet", "Parquet"), ("b.arrow", "Arrow")):
        (tmp_path / name).write_bytes(b"no table at all")
        with pytest.raises(SourceError, match=rf"{name}: cannot be opened as {kind} \(.*Check the path"):
            open_source(str(tmp_path / name))
    with pytest.raises(SourceError, match=r"none\.parquet: cannot be opened as Parquet"):
        open_source(str(tmp_path / "none.parquet"))
    with pytest.raises(SourceError, match=r"x-\*\.parquet: matches no file"):
        open_source(str(tmp_path / "x-*.parquet"))


def test_splits_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        pq.write_table(pa.table({"text": [split]}), tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    with pytest.raises(SourceError, match=r"the splits test, train, .* Choose with --names train\."):
        open_source(str(tmp_path))
    assert open_source(str(tmp_path), names=["train"]).counts == {"train": 1}
    assert open_source(str(tmp_path / "data" / "te*.parquet")).counts == {"test": 1}
    datasets.DatasetDict(
        {split: datasets.Dataset.from_dict({"text": ["x"]}) for split in ("train", "test")}
    ).save_to_disk(str(tmp_path / "dict"))
    assert open_source(str(tmp_path / "dict"), names=["test"]).counts == {"test": 1}


def test_tables_of_a_web_server_are_read_by_ranges(tmp_path: Path) -> None:
    write_rows(tmp_path, "parquet", [{"text": "x" * 5000 + str(i)} for i in range(NUM)])
    write_rows(tmp_path, "arrow stream", [{"text": str(i)} for i in range(NUM)])
    asked: list[str] = []

    class Ranges(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            data = (tmp_path / self.path.lstrip("/")).read_bytes()
            begin, end = 0, len(data)
            if asking := self.headers.get("Range"):
                asked.append(asking)
                first, last = asking.removeprefix("bytes=").split("-")
                begin, end = int(first), min(int(last) + 1, len(data))
            self.send_response(206 if asking else 200)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
            self.send_header("Content-Length", str(end - begin))
            self.send_header("Last-Modified", self.date_time_string(0))
            self.send_header("ETag", '"1"')
            self.end_headers()
            self.wfile.write(data[begin:end])

        def log_message(self, *args: Any) -> None:
            pass

    handler = functools.partial(Ranges, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            root = f"http://127.0.0.1:{server.server_address[1]}"
            source = pickle.loads(pickle.dumps(open_source(f"{root}/rows.parquet")))
            assert source.read(11).conversation[1]["content"][0]["text"].endswith("x11")
            assert asked
            assert open_source(f"{root}/rows.arrow").read(3).conversation[1]["content"][0]["text"] == "3"
        finally:
            server.shutdown()
            thread.join()


def test_internvl_meta_file(media: str, tmp_path: Path) -> None:
    (tmp_path / "ai2d.jsonl").write_text("\n".join(json.dumps(RECORDS["InternVL"][0](i)) for i in range(NUM)))
    entry = {"root": "media", "annotation": "ai2d.jsonl", "data_augment": False, "repeat_time": 2, "length": NUM}
    (tmp_path / "meta.json").write_text(json.dumps({"ai2d": entry}))
    report = make_shards(tmp_path / "meta.json", tmp_path / "out")
    assert (report.num_records, report.totals.samples, report.totals.images) == (2 * NUM, 2 * NUM, 2 * NUM)


def test_compressed_streams_are_decoded_batch_by_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_file, "_CACHE_BYTES", 3_000_000)
    table = pa.table({"text": [str(row) + " " * 1_000_000 for row in range(20)]})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema, options=options) as writer,
    ):
        writer.write_table(table, max_chunksize=2)
    del table
    before = pa.total_allocated_bytes()
    rows = pickle.loads(pickle.dumps(table_file.TableFiles([str(tmp_path / "rows.arrow")])))
    peak = 0
    for number in (*range(20), 3, 19, 0):
        assert rows.load(number)["text"].strip() == str(number)
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert 2_000_000 <= peak < 6_000_000
    encoded = pa.table({"text": pa.array(["x", "y"] * 3).dictionary_encode()})
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_stream(sink, encoded.schema) as writer:
        writer.write_table(encoded, max_chunksize=2)
    rows = table_file.TableFiles([str(tmp_path / "rows.arrow")])
    assert [rows.load(number)["text"] for number in range(6)] == ["x", "y"] * 3


def test_python_is_told_the_form(tmp_path: Path) -> None:
    """In a line on standard error, without a log set up; the command says the same line once."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"conversations": llava(1, "What?")}) + "\n")
    line = "data: ShareGPT conversations"
    made = "from vlm_stream import make_shards; make_shards('data.jsonl', 'out')"
    command = "from vlm_stream.cli import main; main(['make-shards', 'data.jsonl', 'out2'])"
    for program in (made, command):
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr.count(line) == 1, done.stderr


def test_file_urls_with_escapes(tmp_path: Path) -> None:
    (tmp_path / "a b.jsonl").write_text('{"text": "x"}\n')
    assert len(open_source(f"file://{tmp_path}/a%20b.jsonl")) == 1


def test_given_counts_are_read_alike() -> None:
    from vlm_stream.collate import estimate_sample_length

    sample = {"conversation": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}
    for text, media_tokens in ((7, 9), (7.0, 9.0)):
        counted = {**sample, "_text_tokens": text, "_media_tokens": media_tokens}
        assert estimate_sample_length(counted, return_media_tokens=True) == (16, 9)
        stats = collect_sample_stats([counted])
        assert (stats["n_text_tokens"], stats["n_media_tokens"], stats["n_missing_mm_inputs_meta"]) == (7, 9, 0)


def test_placeholders_of_tars_made_elsewhere_take_their_members() -> None:
    from vlm_stream.format.fields import FieldMap, to_conversation

    fields = FieldMap(layout="sharegpt", columns={"messages": "conversations"}, tags={
        "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    })  # fmt: skip
    texts = {"json": json.dumps({"conversations": llava(0)}).encode()}
    assert to_conversation(fields, ["json", "jpg"], texts)[0]["content"][0] == {"type": "image", "image": "jpg"}
    with pytest.raises(BadSampleError, match="'images' has 2, but the user turns show <image> 1 times"):
        to_conversation(fields, ["json", "0.jpg", "1.jpg"], texts)


@pytest.mark.parametrize("name", ["", "/", "/train-*.parquet", "/train-1.parquet"])
def test_tables_on_an_object_store(s3_server, tmp_path, name):
    rows = [{"texts": [{"user": f"What is {n}?", "assistant": f"Number {n}."}]} for n in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=4)
    store = open_store(s3_server.url("tables"), s3_server.options)
    for number in range(3):
        store.put(f"data/train-{number}.parquet", tmp_path / "rows.parquet")
    report = make_shards(f"{s3_server.url('tables')}/data{name}", tmp_path / "out", store=s3_server.options)
    assert report.totals.samples == (8 if name.endswith("1.parquet") else 24)

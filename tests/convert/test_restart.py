"""The same bytes for any number of workers, and after any interruption."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlm_stream.convert import ShardOptions, make_shards
from vlm_stream.convert.engines import LocalEngine
from vlm_stream.convert.shard_task import ShardContext, write_shard
from vlm_stream.errors import BadBudgetError, ConfigError, StorageError, VlmStreamError
from vlm_stream.format import load_manifest
from vlm_stream.sources import open_source
from vlm_stream.storage import open_store


def test_two_workers_give_the_bytes_of_one(toy_meta: Path, tmp_path: Path, digests) -> None:
    settings = {"samples_per_shard": 16, "shuffle": 3, "max_shard_bytes": 100_000}
    one = make_shards(toy_meta, tmp_path / "one", workers=1, **settings)
    two = make_shards(toy_meta, tmp_path / "two", workers=2, **settings)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert one.digest == two.digest
    assert not (tmp_path / "one" / ".job").exists()


def test_shuffle_changes_the_order_and_nothing_else(toy_meta: Path, tmp_path: Path, toy_shards: Path) -> None:
    assert ShardOptions(shuffle=False).shuffle is None
    make_shards(toy_meta, tmp_path / "out", samples_per_shard=64, shuffle=5)
    shuffled, plain = (load_manifest(open_store(str(path))) for path in (tmp_path / "out", toy_shards))
    assert shuffled.digest != plain.digest
    assert [shard.totals.samples for shard in shuffled.shards] == [64, 64, 64, 8]
    assert shuffled.totals == plain.totals


def _kill_after_shards(command: list[str], out: Path, num_shards: int) -> None:
    """Start a conversion and kill its whole process group once so many shards are finished."""
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while len(list(out.glob(".job/shard-*.json"))) < num_shards and time.monotonic() < deadline:
        assert process.poll() is None, "the conversion ended before it could be killed"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_killed_and_resumed_gives_the_same_bytes(toy_meta: Path, tmp_path: Path, digests) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    tool = Path(__file__).parents[2] / "tools" / "make_shards.py"
    command = [
        sys.executable,
        str(tool),
        str(toy_meta),
        str(cut),
        "--samples-per-shard",
        "4",
        "--workers",
        "2",
    ]
    _kill_after_shards(command, cut, 5)
    assert not (cut / "dataset.json").exists()
    (cut / ".job" / "shard-000049.tar.leftover.tmp").write_bytes(b"what a killed writer leaves")
    (cut / ".vlm-stream-leftover").write_bytes(b"what a killed write of the store leaves")

    with pytest.raises(ConfigError, match=r"unfinished conversion; nothing was written.*overwrite=True"):
        make_shards(toy_meta, cut, samples_per_shard=4, resume=False)
    with pytest.raises(ConfigError, match="samples_per_shard was 4 and is 5"):
        make_shards(toy_meta, cut, samples_per_shard=5)
    num_notes = len(list(cut.glob(".job/shard-??????.json")))
    finished = sorted(cut.glob(".job/shard-??????.json"))[:3]
    (cut / f"{finished[0].stem}.tar").write_bytes(b"cut short")  # as after a power cut
    (cut / f"{finished[1].stem}.index.parquet").write_bytes(b"cut short")
    finished[2].write_bytes(b"")

    report = make_shards(toy_meta, cut, samples_per_shard=4)
    make_shards(toy_meta, whole, samples_per_shard=4)
    assert 0 < report.num_kept == num_notes - 3 < report.num_shards == 50
    assert digests(cut) == digests(whole)


def test_full_disk_ends_with_a_sentence_and_can_be_continued(
    toy_meta: Path, tmp_path: Path, toy_shards, digests
) -> None:
    tool = Path(__file__).parents[2] / "tools" / "make_shards.py"
    command = (
        f"ulimit -f 200; exec {sys.executable} {tool} {toy_meta} {tmp_path}/out --samples-per-shard 64 --workers 1"
    )
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "shard-000000.tar could not be written (File too large); what is finished is kept" in result.stderr
    assert "Traceback" not in result.stderr
    make_shards(toy_meta, tmp_path / "out", samples_per_shard=64)
    assert digests(tmp_path / "out") == digests(toy_shards)


def test_a_shard_that_the_disk_lost_is_written_again(toy_meta: Path, tmp_path: Path, monkeypatch, digests) -> None:
    """The system says once that a flush failed, and may have forgotten the bytes."""
    fsync, failed = os.fsync, []

    def fail_once(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name == "shard-000001.tar" and not failed:
            failed.append(path)
            path.write_bytes(bytes(path.stat().st_size))
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises(StorageError, match=r"shard-000001.tar could not be brought to disk \(Input/output error\)"):
        make_shards(toy_meta, tmp_path / "cut", samples_per_shard=64)
    assert failed
    make_shards(toy_meta, tmp_path / "cut", samples_per_shard=64)
    make_shards(toy_meta, tmp_path / "whole", samples_per_shard=64)
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux for the path of a descriptor")
def test_shards_are_on_disk_before_the_manifest_promises_them(write_jsonl, tmp_path: Path, monkeypatch) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fsync", record)
    good = {"messages": [{"role": "user", "content": "hello"}]}
    path = write_jsonl([good, good, {"messages": None}, good])
    shards = {f"shard-{number:06d}{end}" for number in range(4) for end in (".tar", ".index.parquet")}
    with pytest.raises(BadBudgetError):
        make_shards(path, tmp_path / "out", samples_per_shard=1, bad_budget=0.2)
    for settings in ({}, {"overwrite": True}):  # all shards of an earlier run; all of this one
        flushed.clear()
        make_shards(path, tmp_path / "out", samples_per_shard=1, bad_budget=0.3, **settings)
        manifest = max(number for number, name in enumerate(flushed) if name.startswith(".vlm-stream-"))
        assert shards <= set(flushed[:manifest])


def test_overwrite_replaces_only_what_is_ours(toy_meta: Path, tmp_path: Path, digests) -> None:
    out = tmp_path / "out"
    make_shards(toy_meta, out, samples_per_shard=10)
    (out / "notes.txt").write_text("mine")
    (out / "shard-000000.tokens.0123456789abcdef.bin").write_text("of a recount")
    make_shards(toy_meta, out, samples_per_shard=100, overwrite=True)
    assert not list(out.glob("*.tokens.*"))
    assert sorted(path.name for path in out.glob("*.tar")) == ["shard-000000.tar", "shard-000001.tar"]
    assert (out / "notes.txt").read_text() == "mine"


def test_no_process_outlives_a_conversion_that_ends_in_an_error(toy_meta: Path, tmp_path: Path) -> None:
    """One that still writes would mix its shards with those of the next conversion into the same target."""
    with pytest.raises(ZeroDivisionError) as caught:
        make_shards(toy_meta, tmp_path / "out", samples_per_shard=10, workers=2, on_part=lambda *_: 1 / 0)
    assert multiprocessing.active_children() == [], caught  # while somebody holds the error, and with it all frames


def test_damaged_job_file_is_refused(toy_meta: Path, tmp_path: Path) -> None:
    (tmp_path / ".job").mkdir()
    (tmp_path / ".job" / "job.json").write_text("{")
    with pytest.raises(ConfigError, match=r"job\.json is damaged"):
        make_shards(toy_meta, tmp_path)


def test_byte_limit_holds_without_gaps_or_waste(toy_meta: Path, tmp_path: Path) -> None:
    settings = {"samples_per_shard": 50, "max_shard_bytes": 100_000}
    report = make_shards(toy_meta, tmp_path / "one", **settings)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "one").glob("*.tar")}
    assert sorted(sizes) == [f"shard-{number:06d}.tar" for number in range(report.num_shards)]
    assert max(sizes.values()) <= 100_000 + 1024
    assert sum(sizes.values()) > 0.8 * 100_000 * (report.num_shards - 1)


def test_sample_beyond_the_byte_limit_is_alone(write_jsonl, tmp_path: Path) -> None:
    texts = ["a" * 100, "b" * 5000, "c" * 100, "d" * 100]
    path = write_jsonl([{"messages": [{"role": "user", "content": text}]} for text in texts])
    make_shards(path, tmp_path / "out", max_shard_bytes=2048)
    manifest = load_manifest(open_store(str(tmp_path / "out")))
    assert [shard.totals.samples for shard in manifest.shards] == [1, 1, 2]


def test_bad_budget_stops_before_the_manifest_and_can_be_raised(write_jsonl, tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "hello"}]}
    path = write_jsonl([good, {"messages": None}, good, good])
    with pytest.raises(BadBudgetError, match=r"1 of 4 records cannot be used, more than bad_budget allows \(20.00% "):
        make_shards(path, tmp_path / "out", bad_budget=0.2)
    assert not (tmp_path / "out" / "dataset.json").exists()
    report = make_shards(path, tmp_path / "out", bad_budget=0.3)
    assert (report.totals.samples, report.num_dropped, report.num_kept) == (3, 1, 1)


class _DyingOnce:
    """A shard writer whose process dies the first time it meets shard 1."""

    def __init__(self, context: ShardContext, flag: Path) -> None:
        self.context = context
        self.flag = flag

    def __call__(self, tasks):
        (task,) = tasks
        if task.number == 1 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [write_shard(self.context, task)]


def _die(task: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_loses_nothing(
    toy_meta: Path, toy_shards: Path, tmp_path: Path, monkeypatch, digests
) -> None:
    run = LocalEngine.run
    monkeypatch.setattr(LocalEngine, "run", lambda self, f, tasks: run(self, _DyingOnce(f, tmp_path / "flag"), tasks))
    make_shards(toy_meta, tmp_path / "out", samples_per_shard=64, workers=2)
    assert (tmp_path / "flag").exists()
    assert digests(tmp_path / "out") == digests(toy_shards)


class _DyingOver:
    """A source whose record 70 ends every process that reads it, as a decoder may, and another one once."""

    def __init__(self, source, flag: Path) -> None:
        self.source, self.flag, self.name, self.parent = source, flag, source.name, os.getpid()

    def __len__(self) -> int:
        return len(self.source)

    def origin(self, number: int) -> str:
        return f"the file:{number}"

    def read(self, number: int):
        if os.getpid() != self.parent and (number == 70 or (number == 5 and not self.flag.exists())):
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.source.read(number)


@pytest.mark.parametrize("max_shard_bytes", [None, 1 << 30])
def test_a_record_that_ends_its_process_is_left_out_by_name(
    toy_meta: Path, toy_shards: Path, tmp_path: Path, caplog, max_shard_bytes
) -> None:
    source = _DyingOver(open_source(str(toy_meta)), tmp_path / "flag")
    limits = {} if max_shard_bytes is None else {"max_shard_bytes": max_shard_bytes}
    make_shards(source, tmp_path / "out", samples_per_shard=64, workers=2, **limits)
    assert load_manifest(open_store(str(tmp_path / "out"))).totals.samples == len(source) - 1
    (line,) = map(json.loads, (tmp_path / "out" / "ledger.jsonl").read_text().splitlines())
    assert (line["stage"], line["reason"], line["sample"]) == ("convert", "killed_process", "the file:70")
    assert "every process that worked on it died, so it is left out" in line["detail"]
    assert "record 70 ended every process that worked on it, so it is left out" in caplog.text
    assert "record 5 " not in caplog.text


def test_workers_that_always_die_end_the_job_with_a_sentence() -> None:
    with pytest.raises(VlmStreamError, match="worker processes died 4 times in a row"):
        list(LocalEngine(2).run(_die, [1, 2, 3]))


def test_ledger_is_the_same_for_any_number_of_workers(write_jsonl, tmp_path: Path) -> None:
    records = [
        {"id": f"r{n}", "messages": [{"role": "user", "content": "<image>"}], "images": [f"no{n}.jpg"]}
        for n in range(40)
    ]
    path = write_jsonl(records)
    records.append({"messages": [{"role": "user", "content": "fine"}]})
    path = write_jsonl(records)
    for workers in (1, 2):
        report = make_shards(path, tmp_path / str(workers), samples_per_shard=7, workers=workers, bad_budget=1)
        assert report.dropped == {"convert: missing_file": 40}
        assert report.num_shards == 6
    ledger = (tmp_path / "1" / "ledger.jsonl").read_text()
    assert ledger == (tmp_path / "2" / "ledger.jsonl").read_text()
    lines = [json.loads(line) for line in ledger.splitlines()]
    assert [line["sample"] for line in lines] == [f"r{n}" for n in range(40)]
    assert lines[3] == {
        "origin": f"{path}:4 (id r3)",
        "detail": "there is no file no3.jpg (looked for in the current folder; media_dir says where files lie).",
        "reason": "missing_file",
        "sample": "r3",
        "source": "data",
        "stage": "convert",
    }

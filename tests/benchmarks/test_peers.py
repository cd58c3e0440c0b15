"""The comparison of loaders, as far as our own loader goes: the same work, whole epochs, rows of what was found."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.peers.data import make_raw, read_raw
from benchmarks.peers.linked import link
from benchmarks.peers.loaders.base import Opening
from benchmarks.peers.loaders.ours import OurLoader
from benchmarks.peers.questions import QUESTIONS, Prices, check_same
from benchmarks.peers.report import reasons_of, results_text, rows_of
from benchmarks.peers.tree import CpuMeter
from benchmarks.peers.work import CAPACITY, HandPacked, encode_members
from vlm_stream.testing import make_mp4

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 12


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a raw file of small pictures, and of clips whose frames are picked in different ways."""
    folder = tmp_path_factory.mktemp("peers")
    file = make_raw(folder, "small", SAMPLES - 3)
    lines = file.read_text().splitlines()
    for number, frames in enumerate((3, 25, 400), start=SAMPLES - 3):
        (folder / f"{number}.mp4").write_bytes(make_mp4(num_frames=frames, height=56, width=56, fps=10, seed=number))
        turns = [{"role": "user", "content": "<video>what?"}, {"role": "assistant", "content": "that"}]
        lines.append(json.dumps({"id": f"{number:08d}", "messages": turns, "videos": [f"{number}.mp4"]}))
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def written(raw: Path) -> Path:
    out = raw.parent / "ours"
    OurLoader().write(read_raw(raw), out, 4)
    return out


def _key_and_length(members: dict[str, Any]) -> dict[str, Any]:
    return {"key": members["__key__"], "length": 3000}


@pytest.mark.parametrize("options", [{}, {"pixels": "compact"}])
def test_what_peers_encode_has_the_tokens_of_our_packs(raw: Path, written: Path, options: dict[str, Any]) -> None:
    theirs = [encode_members({"__key__": each.key} | each.members()) for each in read_raw(raw)]  # type: ignore[dict-item]
    opening = Opening(str(written), transform=encode_members, options=options)
    samples = [
        sample
        for pack in OurLoader().packs(opening, CAPACITY)
        for sample in zip(pack["keys"], pack["lengths"], strict=True)
    ]
    runs = {"vlm_stream": [{"samples": samples}]}
    check_same(runs, {sample["key"]: sample["length"] for sample in theirs}, whole=True)
    assert runs == {"vlm_stream": [{"delivered": SAMPLES}]}


def test_other_tokens_and_repeated_samples_are_not_the_same_work() -> None:
    expected = {"a": 1, "b": 2}
    for samples, what in (([("a", 2)], "other tokens"), ([("a", 1), ("a", 1)], "twice")):
        runs: dict[str, Any] = {"x": [{"samples": samples}]}
        check_same(runs, expected, whole=False)
        assert what in runs["x"][0]["error"]
    runs = {"x": [{"samples": [("b", 2)]}]}
    check_same(runs, expected, whole=True)
    assert runs["x"][0]["missing"] == 1


@pytest.mark.parametrize("world", [1, 2])
def test_packs_by_hand_go_on_where_they_were_stopped(written: Path, world: int) -> None:
    opening = Opening(str(written), transform=_key_and_length, batch_size=3, shuffle=8)
    run = HandPacked(OurLoader(), opening, CAPACITY, ())
    packs = iter(run)
    keys = [key for _ in range(3) for key in next(packs)["keys"]]
    state = run.state()
    run.close()
    for rank in range(world):
        there = replace(opening, rank=rank, world_size=world)
        keys += [key for pack in HandPacked(OurLoader(), there, CAPACITY, [state]) for key in pack["keys"]]
    assert len(keys) == SAMPLES
    assert len(set(keys)) == SAMPLES


def test_a_linked_dataset_draws_every_sample_as_often_as_it_was_linked(written: Path, tmp_path: Path) -> None:
    link("vlm_stream", written, tmp_path / "large", 3)
    opening = Opening(str(tmp_path / "large"), transform=_key_and_length, shuffle=8)
    keys = [sample["key"] for batch in OurLoader().open(opening) for sample in batch]
    assert {key: keys.count(key) for key in keys} == {f"{number:08d}": 3 for number in range(SAMPLES)}


_WORK = "import time\nwhile time.process_time() < 0.5: pass\nprint(1, flush=True)\ntime.sleep(60)"


@pytest.mark.parametrize("waited", [True, False])
def test_processor_time_of_a_process_that_has_ended_counts(waited: bool) -> None:
    code = f"import subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', {_WORK!r}])\n"
    if not waited:  # whoever ignores that children end has nothing to wait for, and is told nothing of them
        code = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + code
    code += "sys.stdin.readline()\nchild.kill()\nchild.wait()\nprint(2, flush=True)\ntime.sleep(60)"
    meter = CpuMeter()
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "1\n"
        before = meter.seconds()
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "2\n"
        assert before <= meter.seconds() < before + 0.45  # neither lost nor counted twice
        parent.kill()
    assert before >= 0.5


FOUND: dict[str, Any] = {
    "tokens": 1000,
    "all_tokens": 1100,
    "seconds": 2.0,
    "cpu": 4.0,
    "waited": 0.5,
    "delivered": 7,
    "requests": 14,
    "sent": 2200,
    "megabytes": 300.0,
    "lost": 0,
    "repeated": 2,
    "state_bytes": 700,
    "fill": 0.9,
    "padding": 0.5,
    "llm": 1.1,
    "vit": 1.2,
    "wrong": 1,
    "died": None,
    "said": [],
    "killed": 1,
    "peak": 1e9,
    "first step s": 0.5,
    "MB above imports": 40,
    "state bytes, first and largest": [100, 200],
}
ONE: dict[str, Any] = {"vlm_stream": FOUND, "lance": {"cannot": "it has no way"}, "hf": {"error": "it broke"}}
RUNS: dict[str, Any] = {name: [run, run] for name, run in ONE.items()}
RESULTS: dict[str, Any] = {
    "core": {"runs": RUNS, "loop": 30_000.0},
    "clips": {"runs": RUNS, "loop": 30_000.0, "step": 0.25},
    "s3": {"images": RUNS, "clips": RUNS},
    "memory": {"runs": RUNS, "samples": 10_000_000, "shuffled": 10_000},
    "start": {"process": RUNS, "opening": RUNS, "samples": 10_000_000},
    "resume": {name: dict.fromkeys("213", run) for name, run in ONE.items()},
    "packing": {"fill": ONE, "8": ONE, "64": ONE},
    "faults": {"kill": ONE, "header": ONE, "byte": ONE},
    "ray": {"runs": RUNS},
    "cost": {},
    "growth": {"groups": {"1": FOUND}, "workers": {"2": FOUND}, "samples": {"100": FOUND}},
}
ABOUT = {
    "date": "today",
    "scale": "full",
    "machine": "2 cores",
    "python": "3",
    "torch": "2",
    "versions": {"lance": "1"},
}


@pytest.mark.parametrize("name", list(QUESTIONS))
def test_every_question_has_rows_and_says_what_explains_them(name: str) -> None:
    rows = rows_of(RESULTS, name, Prices())
    assert [row for row in rows if row.cells.get("vlm_stream")]
    for row in rows:
        assert row.cells.get("lance", "-") == "-"
        assert row.cells.get("hf", "fails") == "fails"
    assert QUESTIONS[name].title.endswith("?")
    assert QUESTIONS[name].why.endswith(".")


def test_results_are_written_of_a_part_of_the_questions_too() -> None:
    text = results_text({name: RESULTS[name] for name in ("s3", "cost")} | {"about": ABOUT}, Prices(3600.0, 0.0))
    assert "| images: core-hours | 1,111.1 |" in text
    assert "HF datasets: it broke" in text
    assert reasons_of(RESULTS["core"]) == ["Lance: it has no way", "HF datasets: it broke"]

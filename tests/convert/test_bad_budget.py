"""What a conversion drops is counted, named and limited, and the same conversion again goes on or does nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlm_stream.cli import main
from vlm_stream.convert import engines, make_shards
from vlm_stream.convert.engines import choose_workers
from vlm_stream.errors import BadBudgetError, ConfigError, SourceError
from vlm_stream.ledger import BadSample
from vlm_stream.testing import build_processor, make_jpeg

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]}


def _lost(number: int) -> dict[str, object]:
    return {"id": f"r{number}", "messages": [{"role": "user", "content": "<image>"}], "images": [f"no{number}.jpg"]}


def _mixed(num_records: int, every: int) -> list[object]:
    return [GOOD if number % every else _lost(number) for number in range(num_records)]


def test_below_the_budget_what_was_dropped_is_said(write_jsonl, tmp_path: Path, caplog) -> None:
    report = make_shards(write_jsonl(_mixed(100, 50)), tmp_path / "out")
    assert (report.totals.samples, report.dropped) == (98, {"convert: missing_file": 2})
    assert f"2 of 100 records were dropped (2 x convert: missing_file); each is named in {report.ledger}" in caplog.text
    assert "text was counted by a guess" in caplog.text
    assert "vlm-stream recount --processor NAME" in caplog.text


def test_above_it_the_error_has_number_reasons_names_and_the_way_out(write_jsonl, tmp_path: Path) -> None:
    path = write_jsonl([*_mixed(20, 5), {"messages": None}, {"messages": 5}, {"id": "x", "messages": []}])
    with pytest.raises(BadBudgetError) as caught:
        make_shards(path, tmp_path / "out")
    text = str(caught.value)
    assert "7 of 23 records cannot be used, more than bad_budget allows (3.00% of 23)" in text
    assert (
        f"4 x missing_file, first data: r0 ({path}:1 (id r0)): convert: missing_file: there is no file no0.jpg" in text
    )
    assert text.count(" x ") == 3
    assert "start again with overwrite=True" in text
    assert "bad_budget=0.32 (1: any number may be bad)" in text
    assert not (tmp_path / "out" / "dataset.json").exists()
    lines = [BadSample.from_json(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()]
    assert len(lines) == 7
    assert (lines[1].sample, lines[1].origin) == ("r5", f"{path}:6 (id r5)")


def test_it_ends_as_soon_as_it_is_certain_and_goes_on_without_work_done_twice(write_jsonl, tmp_path: Path) -> None:
    path = write_jsonl([*(_lost(number) for number in range(10)), *[GOOD] * 90])
    with pytest.raises(BadBudgetError, match=r"10 of the 10 records looked at cannot be used"):
        make_shards(path, tmp_path / "out", samples_per_shard=10, workers=1)
    with pytest.raises(BadBudgetError, match=r"10 of the 10 records looked at"):  # again, without another shard
        make_shards(path, tmp_path / "out", samples_per_shard=10, workers=1)
    assert len(list((tmp_path / "out").glob("*.tar"))) == 1
    tar = tmp_path / "out" / "shard-000000.tar"
    written = tar.stat().st_mtime_ns
    report = make_shards(path, tmp_path / "out", samples_per_shard=10, workers=1, bad_budget=0.1)
    assert (report.num_kept, report.num_dropped, report.totals.samples) == (1, 10, 90)
    assert tar.stat().st_mtime_ns == written


@pytest.mark.parametrize("budget", [1, None])
def test_a_dataset_without_samples_is_not_written(write_jsonl, tmp_path: Path, budget: float | None) -> None:
    path = write_jsonl([_lost(0), _lost(1)])
    with pytest.raises(BadBudgetError, match="2 of 2 records cannot be used, and a dataset without samples is of no"):
        make_shards(path, tmp_path / "out", bad_budget=budget)
    assert not (tmp_path / "out" / "dataset.json").exists()
    with pytest.raises(SourceError, match=r"empty.jsonl has no records, so .* nothing was written"):
        make_shards(write_jsonl([], "empty.jsonl"), tmp_path / "none", bad_budget=budget)
    assert not (tmp_path / "none").exists()


def test_the_command_speaks_in_flags(write_jsonl, tmp_path: Path, capsys, caplog) -> None:
    path, out = str(write_jsonl(_mixed(10, 5))), str(tmp_path / "out")
    assert main(["make-shards", path, out]) == 1
    told = capsys.readouterr().err
    assert "more than --bad-budget allows" in told
    assert "--overwrite" in told
    assert "--bad-budget 0.21 (1: any" in told
    assert main(["make-shards", path, out, "--bad-budget", "0.21"]) == 0
    assert f"each is named in {out}/ledger.jsonl" in caplog.text
    assert main(["make-shards", path, out, "--bad-budget", "1"]) == 0  # the same job: it is there already
    assert main(["make-shards", path, out, "--samples-per-shard", "3"]) == 2
    told = capsys.readouterr().err
    assert "--samples-per-shard was 1000 and is 3" in told
    assert "replace what is there with --overwrite" in told


def test_an_edited_record_is_another_job(write_jsonl, tmp_path: Path) -> None:
    """Also one that no probe looks at, whose shard is finished."""
    records = [{"messages": [{"role": "user", "content": f"text {number:04d}"}]} for number in range(1000)]
    make_shards(write_jsonl(records), tmp_path / "done", samples_per_shard=100)
    bad = [*records, *(_lost(number) for number in range(100))]
    with pytest.raises(BadBudgetError):
        make_shards(write_jsonl(bad), tmp_path / "begun", samples_per_shard=100)
    for number in (1, 2, 3, 497, 778):
        edited = [*bad]
        edited[number] = {"messages": [{"role": "user", "content": f"TEXT {number:04d}"}]}
        with pytest.raises(ConfigError, match=r"with other parameters \(the input or its form is another\)"):
            make_shards(write_jsonl(edited), tmp_path / "begun", samples_per_shard=100, bad_budget=1)
        with pytest.raises(ConfigError, match=r"of another conversion \(the input or its form is another\)"):
            make_shards(write_jsonl(edited[:1000]), tmp_path / "done", samples_per_shard=100)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_manifest_of_somebody_else_is_left_alone(write_jsonl, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "dataset.json").write_text('{"name": "theirs"}')
    with pytest.raises(ConfigError, match=r"holds a dataset.json that is none of ours, and nothing was written"):
        make_shards(write_jsonl([GOOD]), tmp_path / "out", overwrite=overwrite)
    assert json.loads((tmp_path / "out" / "dataset.json").read_text()) == {"name": "theirs"}


def test_names_and_targets_that_are_none_are_refused_with_a_sentence(write_jsonl, tmp_path: Path) -> None:
    path = write_jsonl([GOOD])
    with pytest.raises(ConfigError, match="make_shards has no option 'procesor'; did you mean 'processor'"):
        make_shards(path, tmp_path / "out", procesor="x")
    with pytest.raises(ConfigError, match="cannot be a dataset's folder"):
        make_shards(path, path)
    with pytest.raises(ConfigError, match="the input is a list, which is neither a path or URL nor a source"):
        make_shards([GOOD], tmp_path / "out")
    with pytest.raises(ConfigError, match="the processor is a dict_keys, with which no text can be counted"):
        make_shards(path, tmp_path / "out", processor={}.keys())
    with pytest.raises(ConfigError, match="workers is 0, but must be a whole number of at least 1"):
        make_shards(path, tmp_path / "out", workers=0)
    with pytest.raises(ConfigError, match=r"shuffle is 1\.5, but must be a whole number of at least 0"):
        make_shards(path, tmp_path / "out", shuffle=1.5)
    assert main(["verify", str(path)]) == 2


def test_an_input_without_records_is_named_as_the_user_named_it(tmp_path: Path, capsys) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    assert main(["make-shards", str(tmp_path / "empty.jsonl"), str(tmp_path / "out")]) == 2
    assert f"{tmp_path}/empty.jsonl has no records, so there is nothing to convert" in capsys.readouterr().err


def test_a_processor_may_be_an_object(write_jsonl, tmp_path: Path) -> None:
    processor = build_processor("qwen2_5_vl")
    processor.save_pretrained(tmp_path / "processor")
    path = write_jsonl([GOOD] * 3)
    named = make_shards(path, tmp_path / "named", processor=str(tmp_path / "processor"), workers=1)
    given = make_shards(path, tmp_path / "given", processor=processor, workers=2, samples_per_shard=1000)
    assert given.digest == named.digest
    assert given.tokens == "exact"


def test_processes_are_started_where_they_pay(monkeypatch) -> None:
    monkeypatch.setattr(engines, "num_cores", lambda: 8)
    assert choose_workers(2.0, 100) == 1
    assert choose_workers(60.0, 100) == 8
    assert choose_workers(60.0, 3) == 3
    assert choose_workers(600.0, 1) == 1
    assert choose_workers(5.0, 100) == 8
    assert choose_workers(5.0, 100, with_processor=True) == 1


def test_a_text_in_the_place_of_a_path_gives_a_short_line(write_jsonl, tmp_path: Path) -> None:
    record = {"id": "i" * 9000, "messages": [{"role": "user", "content": "<image>"}], "images": ["/9j/4AAQ" * 50_000]}
    make_shards(write_jsonl([record, GOOD]), tmp_path / "out", bad_budget=1)
    (line,) = (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()
    assert len(line) < 4000
    assert "400,000 characters" in line
    assert "data:image/jpeg;base64, before it" in line


def test_other_tags_are_another_job(write_jsonl, tmp_path: Path) -> None:
    """Also where a single record among many shows them."""
    records = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}] * 300
    records[150] = {"messages": [*records[0]["messages"], {"role": "expert", "content": "4"}]}
    path = write_jsonl(records)
    assert make_shards(path, tmp_path / "out").dropped == {"convert: unmapped_role": 1}
    with pytest.raises(ConfigError, match=r"of another conversion \(the input or its form is another\)"):
        make_shards(path, tmp_path / "out", tags={"tool_tag": "expert"})


def test_a_table_of_other_texts_is_another_job(tmp_path: Path) -> None:
    """Also where one row of many differs."""
    texts = [f"text {number:04d}" for number in range(1000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    make_shards(tmp_path / "a.parquet", tmp_path / "out")
    texts[500] = "text 0500 and more"
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"of another conversion \(the input or its form is another\)"):
        make_shards(tmp_path / "a.parquet", tmp_path / "out")


def test_media_that_are_there_by_now_are_found(write_jsonl, tmp_path: Path) -> None:
    """Shards with records that were bad are written again: for another folder of media, and above the budget."""
    path, media = write_jsonl([*[GOOD] * 6, *map(_lost, range(4))]), tmp_path / "media"
    settings = {"samples_per_shard": 4, "workers": 1}
    with pytest.raises(BadBudgetError, match=r"cannot be used(?s:.*)there is no file no0.jpg \(looked for"):
        make_shards(path, tmp_path / "out", **settings)
    with pytest.raises(BadBudgetError, match=r"cannot be used(?s:.*)there is no file .*media/no0.jpg\."):
        make_shards(path, tmp_path / "out", media_dir=str(media), **settings)
    lost = write_jsonl([_lost(0)], "lost.jsonl")
    with pytest.raises(BadBudgetError, match="1 of 1 records"):
        make_shards(lost, tmp_path / "one", media_dir=str(media), bad_budget=1)
    media.mkdir()
    for number in range(4):
        (media / f"no{number}.jpg").write_bytes(make_jpeg(20, 30))
    report = make_shards(path, tmp_path / "out", media_dir=str(media), **settings)
    assert (report.num_kept, report.num_shards, report.totals.samples, report.dropped) == (1, 3, 10, {})
    assert make_shards(lost, tmp_path / "one", media_dir=str(media), bad_budget=1).totals.images == 1


def test_an_entry_without_rows(tmp_path: Path) -> None:
    for name, texts in (("a", []), ("b", ["x"])):
        pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), tmp_path / f"{name}.parquet")
    (tmp_path / "meta.json").write_text(json.dumps({name: {"file_name": f"{name}.parquet"} for name in "ab"}))
    assert make_shards(tmp_path / "meta.json", tmp_path / "out").totals.samples == 1

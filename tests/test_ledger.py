import pytest

from vlm_stream.errors import BadBudgetError, ConfigError
from vlm_stream.ledger import BadSample, Ledger


def bad(number: int = 0, **changes: object) -> BadSample:
    values = {"source": "a", "sample": f"k{number}", "stage": "read", "reason": "crc_mismatch", "detail": "differs"}
    return BadSample(**{**values, **changes})  # type: ignore[arg-type]


def test_a_line_round_trips_and_leaves_out_what_is_unknown():
    entry = bad(shard="shard-000000.tar", offset=512)
    assert BadSample.from_json(entry.to_json()) == entry
    assert "offset" not in bad().to_json()


def test_people_read_place_stage_and_reason():
    assert str(bad(shard="s.tar", offset=7)) == "a: k0 in s.tar at byte 7: read: crc_mismatch: differs"


def test_people_read_the_place_of_a_record_once():
    nameless = bad(sample="a.json[7]", origin="a.json[7]", detail="a.json[7]: turn 2 has no role")
    assert str(nameless) == "a: a.json[7]: read: crc_mismatch: turn 2 has no role"
    assert str(bad(origin="a.json[7]")) == "a: k0 (a.json[7]): read: crc_mismatch: differs"


def test_counts_by_reason():
    ledger = Ledger()
    ledger.saw(5)
    ledger.extend([bad(0), bad(1), bad(2, reason="truncated")])
    assert ledger.to_dict() == {"seen": 5, "bad": 3, "by_reason": {"read: crc_mismatch": 2, "read: truncated": 1}}


def test_a_budget_is_a_rate_and_its_error_shows_the_newest():
    ledger = Ledger(max_rate=0.1, min_bad=3)
    ledger.saw(20)
    ledger.extend([bad(0), bad(1)])  # two of twenty: within the rate
    with pytest.raises(BadBudgetError, match=r"(?s)3 of 20 samples were bad.*10\.00%.*raise bad_budget.*a: k2"):
        ledger.add(bad(2))


def test_one_early_bad_sample_does_not_end_a_run():
    ledger = Ledger(max_rate=0.01, min_bad=3)
    ledger.saw(1)
    ledger.add(bad())
    assert ledger.num_bad == 1


def test_a_ledger_is_written_to_its_file_and_shows_itself(tmp_path, caplog):
    ledger = Ledger()
    ledger.path = tmp_path / "ledger.jsonl"
    bads = [BadSample(source="s", sample=str(n), stage="read", reason="crc", detail="d") for n in range(20)]
    ledger.saw(40)
    ledger.extend(bads)
    assert [BadSample.from_json(line) for line in ledger.path.read_text().splitlines()] == bads == list(ledger.newest)
    text = repr(ledger)
    assert text.startswith("20 of 40 samples were bad\n  20 x read: crc\n")
    assert text.count("\n") == 11
    ledger.path = tmp_path / "missing" / "ledger.jsonl"
    ledger.extend(bads[:2])
    assert ledger.num_bad == 22
    assert len([record for record in caplog.records if "cannot be written" in record.getMessage()]) == 1


def test_a_line_is_bounded_whatever_a_record_holds() -> None:
    long = "iVBORw0KGgo" * 40_000
    bad = BadSample(source=long, sample=long, stage="convert", reason="x", detail=long, origin=long, id=long)
    assert len(bad.to_json()) < 5000


EVIL = "a\x1b[2Jb\x9b31mc\u202ed\ne\x7f\u2066\r"


def test_a_line_of_the_ledger_is_one_line_that_no_terminal_obeys() -> None:
    bad = BadSample(source=EVIL, sample=EVIL, stage="read", reason="x", detail=EVIL, shard=EVIL, entry=EVIL, id=EVIL)
    for text in (str(bad), bad.to_json(), repr(bad)):
        assert text.isprintable()
    assert bad.sample == r"a\x1b[2Jb\x9b31mc\u202ed\ne\x7f\u2066\r"
    assert BadSample.from_json(bad.to_json()) == bad
    harmless = "é 中文 👩\u200d👩 עברית"
    assert BadSample(source="", sample=harmless, stage="", reason="", detail="").sample == harmless


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    ledger = Ledger()
    for place, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "x.jsonl", "(Not a directory|File exists)")):
        (tmp_path / "file").touch()
        with pytest.raises(
            ConfigError, match=rf"the ledger .* cannot be written \({why}\).*choose another ledger_path"
        ):
            ledger.append_to(place)
    ledger.append_to(tmp_path / "new" / "ledger.jsonl")
    ledger.add(bad())
    assert len((tmp_path / "new" / "ledger.jsonl").read_text().splitlines()) == 1

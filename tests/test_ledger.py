import pytest

from vlm_stream.errors import BadBudgetError
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

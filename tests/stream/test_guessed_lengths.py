"""Datasets whose text was guessed: packs hold what was planned, and nothing is lost."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from vlm_stream import StreamLoader
from vlm_stream.convert import GuessFit, make_shards, recount
from vlm_stream.testing import build_processor

if TYPE_CHECKING:
    from pathlib import Path

PACK = 512


@pytest.fixture
def guessed(tmp_path: Path) -> Path:
    """Short turns, whose template is longer than they are, beside long ones."""
    rng = random.Random(3)
    words = ["the", "a", "red", "blue", "small", "large", "square", "circle", "line", "street", "house", "river"]
    with (tmp_path / "data.jsonl").open("w") as file:
        for _ in range(200):
            most = rng.choice([2, 10, 20])
            turns = [
                {"role": role, "content": " ".join(rng.choices(words, k=rng.randint(1, most)))}
                for _ in range(rng.randint(1, 3))
                for role in ("user", "assistant")
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    make_shards(tmp_path / "data.jsonl", tmp_path / "out", samples_per_shard=32)
    return tmp_path / "out"


def test_packs_of_guessed_text_do_not_overflow(guessed: Path, caplog) -> None:
    processor = build_processor("qwen2_5_vl")
    loader = StreamLoader(str(guessed), processor=processor, pack_size=PACK, with_refs=True)
    keys = [ref[2] for batch in loader for row in batch["refs"] for ref in row]
    assert len(keys) == len(set(keys)) == 200
    assert loader.ledger.num_bad == 0
    assert loader.metrics()["fill"] > 0.6
    assert "were counted by a guess" in caplog.text
    assert "of its samples need" in caplog.text

    again = StreamLoader(str(guessed), processor=processor, pack_size=PACK, with_refs=True)
    state = None
    first = []
    for number, batch in enumerate(again):
        first.append(batch["refs"])
        if number == 3:
            state = again.state_dict()
            break
    resumed = StreamLoader(str(guessed), processor=processor, pack_size=PACK, with_refs=True)
    resumed.load_state_dict(state)
    rest = [batch["refs"] for batch in resumed]
    assert [ref[2] for refs in first + rest for row in refs for ref in row] == keys


def test_counted_text_is_planned_as_counted(guessed: Path, tmp_path: Path, caplog) -> None:
    processor = build_processor("qwen2_5_vl")
    processor.save_pretrained(tmp_path / "processor")
    recount(str(guessed), str(tmp_path / "processor"))
    loader = StreamLoader(str(guessed), processor=processor, pack_size=PACK)
    for _ in loader:
        pass
    assert loader.ledger.num_bad == 0
    assert "samples need" not in caplog.text
    assert loader.metrics()["fill"] > 0.9


def test_what_fits_a_row_alone_is_not_planned_out_of_it() -> None:
    fit = GuessFit(slope=1.5, offset=10.0, margin=1.2, num_samples=9)
    tokens, text = np.array([100, 600, 700]), np.array([100, 600, 100])
    assert fit.correct(tokens, text, 1000).tolist() == [192, 1000, 792]
    assert fit.correct(tokens, text, 800).tolist() == [192, 910, 792]  # which is too long, most likely

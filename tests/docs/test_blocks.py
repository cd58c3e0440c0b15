"""Every code block of the README and of the pages runs, offline, in the order of its page."""

from __future__ import annotations

import builtins
import json
import os
import re
import symtable
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.docs.blocks import LANGUAGES, ROOT, Block, blocks_of, pages, run_block, say_counts
from tests.docs.world import NAME

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_NOT_RUN = 16
PAGES = [page for page in pages() if any(block.language in ("python", "bash", "yaml") for block in blocks_of(page))]


def _loaders(model: Any, **options: Any) -> dict[str, Any]:
    from vlm_stream import StreamLoader

    given = {"processor": NAME, "pack_size": 2048, **options}
    evaluation = StreamLoader("val/", **given | {"train": False, "micro_batches": 1})
    return {"model": model, "loader": StreamLoader("shards/", **given), "eval_loader": evaluation}


def _transformers(model: Any) -> dict[str, Any]:
    from transformers import TrainingArguments

    arguments = TrainingArguments("run", max_steps=1, report_to=[], save_strategy="no", use_cpu=True)
    return _loaders(model) | {"arguments": arguments}


def _trl(model: Any) -> dict[str, Any]:
    from trl import SFTConfig

    arguments = SFTConfig(
        "run", max_steps=1, report_to=[], save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False
    )
    return _loaders(model) | {"arguments": arguments}


def _loss(model: Any) -> dict[str, Any]:
    import torch

    names = _loaders(model, micro_batches=2)
    batches = list(names["loader"])
    steps = [batches[place : place + 2] for place in range(0, len(batches), 2)]
    return names | {"steps": steps, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3)}


YOURS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "docs/loss.md": _loss,
    "docs/viewer.md": _loaders,
    "docs/trainers/transformers.md": _transformers,
    "docs/trainers/trl.md": _trl,
    "docs/trainers/torch.md": lambda model: {"model": model, "mesh": None},
}
"""What readers of a page bring; the page says so behind `Yours:`."""
_SAID = re.compile(r"\b[Yy]ours:\s([^.)]+)")


def taken_for_granted(page: str) -> set[str]:
    """Return the names that a page's code reads, and none of it makes."""
    known, found = set(dir(builtins)), set()
    for block in blocks_of(page):
        if block.language == "python" and block.not_run is None:
            whole = symtable.symtable(block.text, block.where, "exec")
            known |= {each.get_name() for each in whole.get_symbols() if each.is_assigned() or each.is_imported()}
            waiting = [whole]
            while waiting:
                table = waiting.pop()
                waiting += table.get_children()
                read = {each.get_name() for each in table.get_symbols() if each.is_referenced() and each.is_global()}
                found |= read - known
    return found


@pytest.mark.parametrize("page", PAGES)
def test_names_come_from_the_page_or_are_said_to_be_the_readers(page: str) -> None:
    said = re.findall(r"`(\w+)`", " ".join(_SAID.findall((ROOT / page).read_text(encoding="utf-8"))))
    assert taken_for_granted(page) - set(said) == set()


def test_a_name_that_nothing_makes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ("import a\nfor b in a: pass\ndef f(c): return b + c + d", "f(a); e = [g for h in e]")
    monkeypatch.setattr(
        sys.modules[__name__], "blocks_of", lambda page: [Block(page, 1, "python", text, None) for text in texts]
    )
    assert taken_for_granted("page") == {"d", "g"}


def _formats(_: dict[str, Any]) -> None:
    for number in range(1, 8):
        totals = json.loads(Path(f"out-{number}", "dataset.json").read_text())["totals"]
        assert totals["samples"] == (36 if number == 7 else 1)
        assert bool(totals["images"]) == (number != 5)
    assert json.loads(Path("counted.json").read_text())[0]["_media_tokens"] > 0


def _webdataset(names: dict[str, Any]) -> None:
    assert len(list(names["resumed"])) == 20  # all was consumed, so this is the next epoch
    assert names["image"].height == 40
    for name in ("train", "val", "mix"):
        assert sum(1 for _ in names[name]) == 1


def _quickstart(names: dict[str, Any]) -> None:
    assert len(names["seen"]) == len(set(names["seen"])) == 120


def _resume(_: dict[str, Any]) -> None:
    import torch

    assert torch.load("batch.pt", weights_only=False)


def _viewer(names: dict[str, Any]) -> None:
    names["server"].close()
    assert "<html" in Path("step.html").read_text(encoding="utf-8")


AFTER: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/formats.md": _formats,
    "docs/webdataset.md": _webdataset,
    "docs/resume.md": _resume,
    "docs/viewer.md": _viewer,
    "docs/quickstart.md": _quickstart,
}
"""What must be there behind the last block."""


@pytest.mark.filterwarnings("default")  # other people's libraries warn
@pytest.mark.usefixtures("s3", "family_table", "folder")
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page: str, world: tuple[Path, Any]) -> None:
    from vlm_stream.testing import build_tiny_model

    names: dict[str, Any] = {"__name__": "page"}
    if page in YOURS:
        brought = YOURS[page](build_tiny_model("qwen2_5_vl", world[1]))
        names |= {name: value for name, value in brought.items() if name in taken_for_granted(page)}
    before = dict(os.environ)
    for block in blocks_of(page):
        if block.not_run is None:
            try:
                run_block(block, names)
            except Exception as error:
                error.add_note(block.where)
                raise
    os.environ.clear()
    os.environ.update(before)
    AFTER.get(page, lambda names: None)(names)


def test_blocks_have_a_language_and_few_are_not_run() -> None:
    blocks = [block for page in pages() for block in blocks_of(page)]
    assert [block.where for block in blocks if block.language not in LANGUAGES] == []
    code = [block for block in blocks if block.language in ("python", "bash")]
    left_out = [block for block in code if block.not_run is not None]
    assert len(left_out) <= MOST_NOT_RUN, say_counts()
    assert len(code) - len(left_out) > 50


def test_yaml_blocks_are_refused_where_a_recipe_would_be() -> None:
    from vlm_stream.errors import ConfigError

    for text, error in (("pack_sise: 3", ConfigError), ("data: {_target_: vlm_stream.StreamLoader, a: 1}", TypeError)):
        with pytest.raises(error):
            run_block(Block("page", 1, "yaml", text, None), {})

"""The page on WebDataset and Energon: its code and its commands run."""

from __future__ import annotations

import re
import shlex
import types
from pathlib import Path

import pytest
import yaml

from tests.foreign_tars import write_captions, write_energon
from vlm_stream.cli import main
from vlm_stream.testing import make_jpeg

PAGE = Path(__file__).parents[2] / "docs" / "webdataset.md"


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_page_runs(tmp_path, monkeypatch, saved_processor, processor):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_captions(tmp_path / "tars")
    (tmp_path / "processor").symlink_to(saved_processor)
    config = {"sample_type": {"__class__": "CaptioningSample"}, "field_map": {"image": "jpg", "caption": "txt"}}
    tars = {f"{n}.tar": [(f"{n}", {"jpg": make_jpeg(30, 30), "txt": b"words"})] for n in range(2)}
    write_energon(tmp_path / "energon", tars, {"train": ["0.tar"], "val": ["1.tar"]}, config)
    blend = {"__class__": "MetadatasetV2", "splits": {"train": {"blend": [{"weight": 1, "path": "energon"}]}}}
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(blend))

    def model(**batch):
        assert "pixel_values" in batch
        return types.SimpleNamespace(loss=0.0)

    names = {"processor": processor, "model": model}
    blocks = re.findall(r"```(python|bash)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [language for language, _ in blocks].count("python") == 5
    for language, text in blocks:
        if language == "python":
            exec(compile(text, str(PAGE), "exec"), names)
        else:
            for line in text.splitlines():
                assert main(shlex.split(line)[1:]) == 0
    assert len(list(names["resumed"])) == 20  # all was consumed, so this is the next epoch
    assert names["image"].height == 40
    for name in ("train", "val", "mix"):
        assert sum(1 for _ in names[name]) == 1

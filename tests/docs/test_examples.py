"""The examples that `--help` shows run, and every recipe of configs/ is planned."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, run_block
from vlm_stream.cli import COMMANDS

NOT_RUN = {
    "index 'https://host/set/{000..015}.tar' --out indexes/": "there is no such host; tests/storage has a web server",
    "plan recipe.yaml --world 64 --costs costs.json --step-seconds 3.5": "docs/service.md has it, with measured costs",
    "bench recipe.yaml --set 'builders={address: auto, count: 8}' --save-costs costs.json": "needs a Ray cluster",
    "builders": "needs a Ray cluster; tests/service has one",
    "view": "serves until it is ended; has tests of its own with a browser",
    "chaos": "takes minutes; has tests of its own",
}
"""Examples, or all those of a command."""
SMALL = {
    "{00000..00331}": "{00000..00003}",
    "41200": "1",
    "--step 1200": "--step 1",
    "--world 64": "--world 2",
    "--world 8": "--world 2",
    "--rank 13": "--rank 1",
    "000000512": "000000012",
    "s1894": "caption-1",
    "--seconds 60": "--batches 1",
    "--batches 200": "--batches 1",
    "8192": "2048",
}
"""Toy data has few steps, tars and keys."""


def examples() -> list[str]:
    found = []
    for command in COMMANDS:
        text = import_module(f"vlm_stream.commands.{command.replace('-', '_')}").EXAMPLES
        lines = [line.strip() for line in text.splitlines()[1:]]
        assert lines, f"{command} has no example"
        found += [re.sub(r"\s{2,}\(.*\)$", "", line) for line in lines if line]
    return found


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("s3")
def test_the_examples_run(folder: Path) -> None:
    import torch

    from vlm_stream import StreamLoader

    loader = StreamLoader("shards/", processor="Qwen/Qwen2.5-VL-3B-Instruct", pack_size=2048, rank=0, world_size=2)
    for name in ("checkpoint.pt", "run.pt"):
        torch.save({"data": loader.state_dict()}, name)
    run("vlm-stream make-shards meta.json out/")
    run("vlm-stream make-shards meta.json s3://bucket/data")
    upload("tars", "cc3m")
    for example in examples():
        if example in NOT_RUN or example.split()[0] in NOT_RUN:
            continue
        text = example
        for long, short in SMALL.items():
            text = text.replace(long, short)
        if text.startswith("make-shards"):
            text += " --overwrite"
        if text.startswith("precount"):  # its file is of a form that is recognised
            Path("data.jsonl").write_text(json.dumps(json.loads(Path("llava.json").read_text())[0]) + "\n")
        run(f"vlm-stream {text}")


def run(command: str) -> None:
    run_block(Block("examples", 1, "bash", command, None), {})


def upload(source: str, target: str) -> None:
    from tests.servers import S3Server
    from vlm_stream.storage import open_store

    store = open_store(f"s3://{S3Server.bucket}/examples/{target}")
    for path in sorted(Path(source).glob("*.tar")):
        store.put(path.name, path.read_bytes())


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("recipe", sorted(path.name for path in ROOT.glob("configs/*.yaml")))
def test_every_recipe_is_planned(recipe: str) -> None:
    text = (ROOT / "configs" / recipe).read_text(encoding="utf-8")
    places = {"my-dataset": "shards", "my-videos": "videos", "captions": "captions", "data/shards": "shards"}
    text = re.sub(r"s3://my-bucket/([\w-]+)", lambda match: places.get(match[1], match[1]), text)
    Path("own.yaml").write_text(text.replace("data/shards", "shards"), encoding="utf-8")
    run("vlm-stream plan --config own.yaml --world 2 --max-steps 2")


def test_the_demo_ends_with_a_picture_of_a_pack_and_the_command_of_the_viewer(tmp_path: Path) -> None:
    from PIL import Image

    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--samples", "48", "--steps", "4", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A pack, drawn: out/pack.png; with its samples: out/pack.html" in done.stdout
    assert "view out/shards --processor out/processor --pack-size 2048" in done.stdout.splitlines()[-1]
    picture = Image.open(tmp_path / "out" / "pack.png").convert("RGB")
    assert {(235, 150, 60), (31, 138, 76), (90, 120, 190)} <= {colour for _, colour in picture.getcolors(1 << 20)}

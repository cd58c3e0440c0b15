"""Code blocks of the documentation: found in the pages, run in one process for each page.

A block that is not run stands behind `<!-- not run: why -->`; `python -m tests.docs.blocks` lists them. Of a bash
block, commands of `vlm-stream` run in this process. What is substituted, so that pages can be written for clusters:
worker processes beyond two are none; s3:// URLs name a folder in the bucket of the test's server.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from tests.servers import S3Server
from vlm_stream.cli import main
from vlm_stream.loader_options import parse_keywords
from vlm_stream.options import RUN_ARGUMENTS

ROOT = Path(__file__).parents[2]
LANGUAGES = {"python", "bash", "yaml", "json", "text"}
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_PACKED = {"pack_size": 2048}
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*$")


def pages() -> list[str]:
    """Return the pages whose blocks are run, as paths from the root."""
    folders = [ROOT / "README.md", ROOT / "configs" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in folders]


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        reason = _NOT_RUN.search(text[: match.start()])
        line = text[: match.start()].count("\n") + 2
        body = re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE)
        found.append(Block(page, line, match[2], body, reason[1] if reason else None))
    return found


def run_block(block: Block, names: dict[str, Any]) -> None:
    """Run one block in the working directory, with the names that the blocks before it made."""
    body = block.text.replace("s3://bucket/", f"s3://{S3Server.bucket}/{block.page}/")
    if block.language == "python":
        text = re.sub(r"num_workers=(?:[3-9]|\d\d+)", "num_workers=0", body)
        exec(compile("\n" * (block.line - 1) + text, str(ROOT / block.page), "exec"), names)
    elif block.language == "bash":
        for command in _commands(body):
            code = _run(command)
            assert code == 0, f"{block.where}: exit code {code} of: {command}"
    elif block.language == "yaml":
        _check_recipe(yaml.safe_load(block.text))
    elif block.language == "json":
        json.loads(block.text)


def _check_recipe(found: Any) -> None:
    """Refuse what a recipe, or a call that a trainer's recipe names, would refuse."""
    calls = [found] if "_target_" in found else [each for each in found.values() if isinstance(each, dict)]
    calls = [each for each in calls if "_target_" in each]
    for call in calls:
        module, _, name = call["_target_"].rpartition(".")
        given = {key: value for key, value in call.items() if key != "_target_"}
        inspect.signature(getattr(import_module(module), name)).bind(**given)
        parse_keywords(None, _PACKED | given.get("options", {}))
    if not calls:
        parse_keywords(None, _PACKED | {key: value for key, value in found.items() if key not in RUN_ARGUMENTS})


def _serve(words: list[str]) -> int:
    """Start the viewer at a free port, ask it for its first page, and end it."""
    code = "import sys; from vlm_stream.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-u", "-c", code, *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().partition("viewer: ")[2].strip()
            with urllib.request.urlopen(url, timeout=60) as answer:
                return 0 if answer.status == 200 else 1
        finally:
            process.terminate()


def _commands(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _run(command: str) -> int:
    words = shlex.split(command, comments=True)
    if words[0] != "vlm-stream":
        command = re.sub(r"^python\b", sys.executable, command)
        return subprocess.run(["bash", "-c", command], check=False, timeout=120).returncode
    if words[1] == "view":
        return _serve(words[1:])
    words = [re.sub(r"^num_workers=(?:[3-9]|\d\d+)", "num_workers=0", word) for word in words[1:]]
    if "--workers" in words:
        words[words.index("--workers") + 1] = "1"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return main(words)
    except SystemExit as error:  # argparse
        return int(error.code or 0)


def say_counts() -> str:
    """Return how many code blocks are run, and which are not."""
    code = [block for page in pages() for block in blocks_of(page) if block.language in ("python", "bash")]
    left_out = [block for block in code if block.not_run is not None]
    lines = [f"{len(code) - len(left_out)} code blocks are run, {len(left_out)} are not:"]
    return "\n".join(lines + [f"  {block.where}: {block.not_run}" for block in left_out])


if __name__ == "__main__":
    sys.stdout.write(say_counts() + "\n")

"""Walk through docs/quickstart.md as a new user: a clean environment, the wheel, every code block; print what it took.

`make quickstart` runs it. What the page installs by its name is the wheel of this checkout, with the torch that
constraints.txt names. Beside it is one thing: the shim with which a torchvision of pip is imported beside a CPU torch.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Final

from docs.scripts.links import ROOT

PAGE: Final = ROOT / "docs" / "quickstart.md"
_BLOCK: Final = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STATIC: Final = {"vlm_stream/view/static/view.css", "vlm_stream/view/static/view.js", "vlm_stream/py.typed"}
_PIP: Final = "pip install "
_VIEW: Final = """
import urllib.request

with subprocess.Popen(["bash", "-c", "exec " + {command!r}], stdout=subprocess.PIPE, text=True) as process:
    address = process.stdout.readline().partition("viewer: ")[2].strip()
    print("viewer:", urllib.request.urlopen(address, timeout=60).status)
    process.terminate()
"""


def blocks() -> list[tuple[str, str]]:
    """Return language and text of the page's blocks."""
    return _BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def script(wheel: Path) -> str:
    """Return the blocks as one program: what Python names stays named, commands run in between."""
    lines = ["import subprocess"]
    for language, text in blocks()[1:]:
        command = text.partition("#")[0].strip()
        if language == "python":
            lines.append(text)
        elif text.startswith(_PIP):
            lines.append(f"subprocess.run({_installation(wheel.parent / 'new/bin/python', text, wheel)!r}, check=True)")
        elif text.startswith("vlm-stream view "):
            lines.append(_VIEW.format(command=f"{command} --port 0"))
        else:
            lines.append(f"subprocess.run({text!r}, shell=True, check=True)")
    return "\n".join(lines)


def _installation(python: str | Path, command: str, wheel: Path) -> list[str]:
    """Return the command of the page, for this checkout's wheel."""
    (what,) = shlex.split(command.removeprefix(_PIP))
    options = ["install", "--quiet", what.replace("vlm-stream", str(wheel)), "-c", str(ROOT / "constraints.txt")]
    return [str(python), "-m", "pip", *options]


def main() -> int:
    """Make the environment, install, run; fail where a block fails."""
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def timed(what: str, *command: str | Path, **more: str) -> None:
            begin = time.perf_counter()
            subprocess.run([str(word) for word in command], check=True, cwd=folder, env=os.environ | more)  # noqa: S603
            times[what] = time.perf_counter() - begin

        timed("environment", sys.executable, "-m", "venv", "new")
        python = folder / "new" / "bin" / "python"
        timed("wheel", python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
        (wheel,) = folder.glob("*.whl")
        missing = _STATIC - set(zipfile.ZipFile(wheel).namelist())
        if missing:
            sys.stderr.write(
                f"the wheel lacks {', '.join(sorted(missing))}, so the viewer has no style; mend the build\n"
            )
            return 1
        timed("installation", *_installation(python, blocks()[0][1], wheel))
        _write_shim(python)
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        timed("the page's blocks", python, "-c", script(wheel), PATH=path, PYTHONPATH="")
    sys.stdout.write("".join(f"{what}: {seconds:.0f} s\n" for what, seconds in times.items()))
    sys.stdout.write(
        f"all of it: {sum(times.values()):.0f} s, {len(blocks())} blocks; beside the wheel: a shim of torchvision\n"
    )
    return 0


def _write_shim(python: Path) -> None:
    """Let torchvision be imported beside a CPU torch, as the Makefile does it."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)  # noqa: S603
    site = Path(done.stdout.strip())
    shim = (ROOT / "vlm_stream" / "testing" / "torchvision_shim.py").read_text(encoding="utf-8")
    (site / "_torchvision_shim.py").write_text(shim, encoding="utf-8")
    (site / "torchvision_shim.pth").write_text("import _torchvision_shim; _torchvision_shim.install()\n")


if __name__ == "__main__":
    sys.exit(main())

"""The run: make data, write it in every format, then each question for each loader in turns, a process each."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.data import make_raw
from benchmarks.peers.linked import link
from benchmarks.peers.loaders import open_loader
from benchmarks.peers.proxy import CountingProxy
from benchmarks.peers.questions import QUESTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Scale", "Suite", "load_results"]

Results = dict[str, Any]
Runs = dict[str, list[dict[str, Any]]]
LATENCY_S = 0.03
FORM = 2
"""Of the file of results: one of another form is not read."""


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    name: str
    images: int
    """Samples of which a window is measured."""
    epoch_images: int
    """Samples of whole epochs."""
    epoch_clips: int
    warm_s: float
    window_s: float
    turns: int
    lengths: int
    ranks: tuple[int, ...]
    shard_samples: int
    """Samples of a shard of the large dataset, which has two of them."""
    copies: int
    """How often these two are linked."""
    shuffled: int
    """Samples that a shuffle mixes where memory is measured."""
    grown: tuple[int, ...]
    """Samples of datasets of which there are only indexes."""
    workers: tuple[int, ...]
    asked: tuple[str, ...] = tuple(QUESTIONS)
    """Questions that are measured if none is named."""
    limit_s: float = 240.0
    """How long a measurement may take."""

    @classmethod
    def short(cls) -> Scale:
        """About five minutes for three questions, each on little data: rates say little."""
        sizes = {"images": 160, "epoch_images": 60, "epoch_clips": 30, "lengths": 6_400, "shard_samples": 100}
        return cls(
            "short",
            **sizes,
            warm_s=0.5,
            window_s=2,
            turns=1,
            ranks=(),
            copies=500,
            shuffled=200,
            grown=(10_000, 1_000_000),
            workers=(1, 2),
            asked=("core", "clips", "packing"),
        )

    @classmethod
    def full(cls) -> Scale:
        """What RESULTS.md holds."""
        sizes = {"images": 1600, "epoch_images": 400, "epoch_clips": 120, "lengths": 51_200, "shard_samples": 1000}
        return cls(
            "full",
            **sizes,
            warm_s=3,
            window_s=7,
            turns=2,
            ranks=(64,),
            copies=5000,
            shuffled=10_000,
            grown=(10_000, 1_000_000, 10_000_000, 100_000_000),
            workers=(1, 2, 4),
        )


class Suite:
    """One run over some loaders."""

    def __init__(self, data: Path, loaders: Sequence[str], scale: Scale) -> None:
        """Keep the settings; data is made when a question first needs it."""
        self.data = data.resolve()
        self.loaders = list(loaders)
        self.scale = scale
        self.results: Results = {}

    def run(self, names: Sequence[str], file: Path, kept: Results) -> Results:
        """Measure, saving after each question beside what is kept of an earlier run."""
        self.results = kept | {"about": self._about()}
        for name in names:
            began = time.perf_counter()
            self.results[name] = QUESTIONS[name].measure(self)
            print(f"-- {name}: {time.perf_counter() - began:.0f} s", flush=True)
            file.write_text(json.dumps(self.results, indent=1))
        return self.results

    def job(self, loader: str, do: str, **settings: Any) -> dict[str, Any]:
        """Run one measurement in a process of its own: `do` is a question's module and function."""
        scratch = self.data / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        environment = os.environ | settings.pop("environment", {}) | {"TOKENIZERS_PARALLELISM": "false"}
        module, _, function = do.partition(".")
        job = {"loader": loader, "module": module, "do": function, "scratch": str(scratch)} | settings
        given, found = self.data / "job.json", self.data / "numbers.json"
        given.write_text(json.dumps(job))
        # Files, not pipes: whoever waits for the end of a pipe waits for workers that are left behind, too.
        with (self.data / f"{loader}-{do}.log").open("ab") as log, given.open() as stdin, found.open("w") as stdout:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers.job"],
                stdin=stdin,
                stdout=stdout,
                stderr=log,
                cwd=Path(__file__).resolve().parents[2],
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(self.scale.limit_s)
                lines = found.read_text().splitlines()
                numbers = json.loads(lines[-1]) if lines else {"error": f"the process ended with {code}"}
            except subprocess.TimeoutExpired:
                numbers = {"error": f"not done after {self.scale.limit_s:.0f} s"}
            finally:
                _end_group(process)
        shown = {name: value for name, value in numbers.items() if not isinstance(value, list | dict)}
        print(f"   {do} {loader}: {json.dumps(shown)[:200]}", flush=True)
        return numbers

    def in_turns(
        self, do: str, ways: dict[str, tuple[str, dict[str, Any]]], times: int | None = None, **settings: Any
    ) -> Runs:
        """Measure every way (a title: a loader and its options), A B C A B C ...

        Settings may be functions of the loader's name. A way that failed is not tried again.
        """
        found: Runs = {title: [] for title in ways}
        for _ in range(times or self.scale.turns):
            for title, (name, options) in ways.items():
                if found[title] and found[title][0].keys() & {"error", "cannot"}:
                    continue
                given = {key: value(name) if callable(value) else value for key, value in settings.items()}
                found[title].append(self.job(name, do, options=options, **given))
        return found

    def ways(self, *, compact: bool = False) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return a way for each loader; ours also with compact pixels."""
        ways: dict[str, tuple[str, dict[str, Any]]] = {}
        for name in self.loaders:
            ways[name] = (name, {})
            if compact and name == "vlm_stream":
                ways["vlm_stream compact"] = (name, {"pixels": "compact"})
        return ways

    def raw(self, mixture: str, num_samples: int) -> Path:
        """Return a raw file of so many samples."""
        return make_raw(self.data / "raw", mixture, num_samples)

    def expected(self, raw: Path) -> dict[str, Any]:
        """Return what a plain loop over a raw file gives: tokens of every sample, and tokens in a second."""
        file = raw.with_suffix(".expected.json")
        if not file.exists():
            found = self.job("vlm_stream", "throughput.plain_loop", raw=str(raw))
            if "error" in found:
                raise RuntimeError(f"the plain loop failed: {found['error']}")
            file.write_text(json.dumps(found))
        return json.loads(file.read_text())  # type: ignore[no-any-return]

    def written(self, loader: str, raw: Path | str, samples_per_shard: int) -> Path:
        """Return the folder with a loader's own form of a raw file, written if it is not there.

        Instead of a file, a number: so many samples that are only lengths.
        """
        out = self.data / f"{loader}-{raw.stem if isinstance(raw, Path) else f'lengths-{raw}'}-{samples_per_shard}"
        if not out.exists():
            numbers = self.job(loader, "write.write", raw=str(raw), out=str(out), samples_per_shard=samples_per_shard)
            if "error" in numbers:
                shutil.rmtree(out, ignore_errors=True)
                raise RuntimeError(f"{loader} could not write its data: {numbers['error']}")
        return out

    def large(self, loader: str) -> Path:
        """Return the folder with a loader's large dataset: two real shards under many names."""
        source = self.written(loader, self.raw("images", 2 * self.scale.shard_samples), self.scale.shard_samples)
        out = self.data / f"{loader}-large-{self.scale.name}"
        if not out.exists():
            link(loader, source, out, self.scale.copies)
        return out

    @staticmethod
    def drop_cache(folder: Path) -> None:
        """Have the system forget the content of a folder's files."""
        seen = set()
        for path in folder.rglob("*"):
            status = path.stat()
            if path.is_file() and status.st_ino not in seen:
                seen.add(status.st_ino)
                with path.open("rb") as file:
                    os.fdatasync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def s3(self, folders: dict[str, Path]) -> Iterator[tuple[dict[str, str], CountingProxy]]:
        """Run a real S3 server that holds the folders, behind a proxy."""
        from tests.servers import S3Server
        from vlm_stream.storage import open_store

        home = self.data / "s3"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        with S3Server(home) as server:
            os.environ.update(server.environment)
            for name, folder in folders.items():
                store = open_store(server.url(name), server.options)
                for path in sorted(each for each in folder.rglob("*") if each.is_file()):
                    store.put(str(path.relative_to(folder)), path.read_bytes())
            with CountingProxy(("127.0.0.1", server.port), LATENCY_S) as proxy:
                endpoints = dict.fromkeys(("AWS_ENDPOINT_URL", "S3_ENDPOINT_URL"), proxy.endpoint)
                region = dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), "us-east-1")
                yield server.environment | endpoints | region | {"AWS_ALLOW_HTTP": "true"}, proxy

    def _about(self) -> dict[str, Any]:
        import torch

        cpu = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
        memory = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
        return {
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "scale": self.scale.name,
            "form": FORM,
            "machine": f"{os.cpu_count()} cores ({cpu[0] if cpu else platform.machine()}), {memory / 2**20:.0f} GiB",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "versions": {name: open_loader(name).version() for name in self.loaders},
        }


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what a measurement has left running, so that it does not run on beside the next one.

    Politely first: Python's tracker of shared memory stays until its users are gone, and then removes what they left.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        for _ in range(10):
            process.poll()
            time.sleep(0.1)
            os.killpg(process.pid, 0)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def load_results(file: Path) -> Results:
    """Return what an earlier run saved; nothing, if there is none that can be read."""
    found: Results = json.loads(file.read_text()) if file.exists() else {}
    return found if found.get("about", {}).get("form") == FORM else {}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()

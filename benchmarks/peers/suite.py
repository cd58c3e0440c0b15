"""The run: make data, write it in every format, then each figure for each loader in turns, a process each."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.damage import damage_header, flip_payload_byte
from benchmarks.peers.data import make_raw
from benchmarks.peers.loaders import open_loader
from benchmarks.peers.proxy import CountingProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["FIGURES", "Scale", "Suite"]

Results = dict[str, Any]
_TIMEOUT_S = 1800
_BATCH = 16


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    name: str
    main: int
    """Samples of the media data."""
    encoded: int
    """Samples that are decoded and encoded."""
    shuffled: int
    """Samples that a shuffle mixes where memory is measured; the data has a fifth more."""
    ranks: tuple[int, ...]
    shards: tuple[int, ...]
    repeats: int
    s3_turns: int = 1
    latencies: tuple[float, ...] = (0.0, 0.03)

    @classmethod
    def quick(cls) -> Scale:
        """A few minutes."""
        return cls("quick", main=1000, encoded=48, shuffled=2000, ranks=(8,), shards=(100,), repeats=3)

    @classmethod
    def full(cls) -> Scale:
        """What RESULTS.md holds."""
        return cls(
            "full",
            main=2000,
            encoded=480,
            shuffled=10_000,
            ranks=(8, 64),
            shards=(100, 1000),
            repeats=3,
            s3_turns=3,
        )


class Suite:
    """One run over some loaders."""

    def __init__(self, data: Path, loaders: Sequence[str], scale: Scale) -> None:
        """Keep the settings; data is made when a figure first needs it."""
        self.data = data.resolve()
        self.loaders = list(loaders)
        self.scale = scale
        self.results: Results = {}

    def run(self, figures: Sequence[str], file: Path) -> Results:
        """Measure, saving after each figure; figures of an earlier run in the same file stay."""
        if file.exists():
            self.results = json.loads(file.read_text())
        self.results["about"] = self._about()
        for name in figures:
            began = time.perf_counter()
            self.results[name] = FIGURES[name](self)
            print(f"-- {name}: {time.perf_counter() - began:.0f} s", flush=True)
            file.write_text(json.dumps(self.results, indent=1))
        return self.results

    def job(self, loader: str, figure: str, **settings: Any) -> dict[str, Any]:
        """Run one measurement in a process of its own."""
        scratch = self.data / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        job = {"loader": loader, "figure": figure, "scratch": str(scratch)} | settings
        environment = os.environ | settings.get("environment", {}) | {"TOKENIZERS_PARALLELISM": "false"}
        with (self.data / f"{loader}-{figure}.log").open("ab") as log:
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.peers.figures"],
                    input=json.dumps(job),
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    cwd=Path(__file__).resolve().parents[2],
                    env=environment,
                    timeout=_TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                return {"error": f"still not done after {_TIMEOUT_S} s"}
        lines = done.stdout.splitlines()
        numbers = json.loads(lines[-1]) if lines else {"error": f"the process ended with {done.returncode}"}
        shown = {name: value for name, value in numbers.items() if name != "keys"}
        print(f"   {figure} {loader}: {json.dumps(shown)[:200]}", flush=True)
        return numbers

    def in_turns(self, figure: str, times: int = 1, **settings: Any) -> dict[str, list[dict[str, Any]]]:
        """Run a figure for every loader, A B C A B C ...; settings may be functions of the loader's name."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.loaders}
        for _ in range(times * self.scale.repeats):
            for name in self.loaders:
                if found[name] and ("error" in found[name][0] or "cannot" in found[name][0]):
                    continue
                given = {key: value(name) if callable(value) else value for key, value in settings.items()}
                found[name].append(self.job(name, figure, **given))
        return found

    def raw(self, num_samples: int, *, small: bool = False) -> Path:
        """Return a raw file of so many samples."""
        return make_raw(self.data / "raw", num_samples, small=small)

    def written(self, loader: str, raw: Path | str, samples_per_shard: int, *, counted: bool = False) -> Path:
        """Return the folder with a loader's own form of a raw file, written if it is not there.

        Args:
            loader: Whose form.
            raw: The file.
            samples_per_shard: How many samples share a file.
            counted: Whether tokens are counted too, by loaders that do such a thing when they write.
        """
        name = raw if isinstance(raw, str) else raw.stem
        out = self.data / f"{loader}-{name}-{samples_per_shard}"
        times = self.results.setdefault("write", {}).setdefault(loader, {})
        if not out.exists():
            settings = {"raw": str(raw), "out": str(out), "samples_per_shard": samples_per_shard, "counted": counted}
            numbers = self.job(loader, "write", **settings)
            if "error" in numbers:
                raise RuntimeError(f"{loader} could not write its data: {numbers['error']}")
            times[name] = numbers
        return out

    @contextmanager
    def s3(self, folders: dict[str, Path], latency_s: float) -> Iterator[tuple[dict[str, str], CountingProxy]]:
        """Run a real S3 server that holds the folders, behind a proxy."""
        import obstore
        from obstore.store import S3Store

        from tests.servers import S3Server

        home = self.data / "s3"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        with S3Server(home) as server:
            keys = server.environment
            client = S3Store(
                server.bucket,
                endpoint=server.endpoint,
                access_key_id=keys["AWS_ACCESS_KEY_ID"],
                secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
                region="us-east-1",
                client_options={"allow_http": True},
            )
            for name, folder in folders.items():
                for path in sorted(each for each in folder.rglob("*") if each.is_file()):
                    obstore.put(client, f"{name}/{path.relative_to(folder)}", path.read_bytes())
            with CountingProxy(("127.0.0.1", server.port), latency_s) as proxy:
                environment = keys | {
                    "AWS_ENDPOINT_URL": proxy.endpoint,
                    "S3_ENDPOINT_URL": proxy.endpoint,
                    "AWS_REGION": "us-east-1",
                    "AWS_DEFAULT_REGION": "us-east-1",
                    "AWS_ALLOW_HTTP": "true",
                }
                yield environment, proxy

    def _about(self) -> dict[str, Any]:
        import torch

        cpu = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
        memory = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
        return {
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "scale": self.scale.name,
            "machine": f"{os.cpu_count()} cores ({cpu[0] if cpu else platform.machine()}), {memory / 2**20:.0f} GiB",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "versions": {name: open_loader(name).version() for name in self.loaders},
        }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


# --- Figures ------------------------------------------------------------------------------------------------------


def bytes_local(suite: Suite) -> Results:
    """1. Bytes only, local disk, one process."""
    raw = suite.raw(suite.scale.main)
    folders = {name: str(suite.written(name, raw, 250)) for name in suite.loaders}
    for path in (path for folder in folders.values() for path in Path(folder).rglob("*") if path.is_file()):
        path.read_bytes()  # all from the page cache, the first turn too
    # More often and longer than once: that takes a fraction of a second, in which a machine's noise counts most.
    return suite.in_turns("read_bytes", times=2, where=folders.get, warm=folders.get, passes=4, checked=True)


def bytes_s3(suite: Suite) -> Results:
    """2. Bytes only from S3 on loopback, with and without latency; requests and bytes at the proxy."""
    raw = suite.raw(suite.scale.main)
    folders = {name: suite.written(name, raw, 250) for name in suite.loaders}
    found: Results = {}
    for latency in suite.scale.latencies:
        with suite.s3(folders, latency) as (environment, proxy):
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in suite.loaders}
            for _ in range(suite.scale.s3_turns):
                for name in suite.loaders:
                    proxy.reset()
                    where = f"s3://test-bucket/{name}"
                    numbers = suite.job(
                        name, "read_bytes", where=where, warm=str(folders[name]), environment=environment
                    )
                    runs[name].append(numbers | {"requests": proxy.requests, "sent": proxy.num_bytes})
            found[f"{latency * 1000:.0f} ms"] = runs
    return found


def end_to_end(suite: Suite) -> Results:
    """3. Decode, encode, pack: 1 and 2 workers; ours also with compact pixels; and the processor in a loop."""
    raw = suite.raw(suite.scale.encoded)
    folders = {name: str(suite.written(name, raw, 20, counted=True)) for name in suite.loaders}
    variants = [(name, {}) for name in suite.loaders]
    if "vlm_stream" in suite.loaders:
        variants.append(("vlm_stream", {"pixels": "compact"}))
    found: Results = {"loop": []}
    for _ in range(max(1, suite.scale.repeats - 1)):
        found["loop"].append(suite.job("vlm_stream", "processor_loop", raw=str(raw)))
        for workers in (1, 2):
            for name, more in variants:
                title = f"{name} compact" if more else name
                numbers = suite.job(name, "end_to_end", where=folders[name], workers=workers, **more)
                found.setdefault(f"{workers} workers", {}).setdefault(title, []).append(numbers)
    return found


def packing(suite: Suite) -> Results:
    """4. Fill and padding."""
    folders = {name: str(suite.written(name, "lengths", 400)) for name in suite.loaders if name != "vlm_stream"}
    return {
        name: suite.job(name, "packing", where=folders.get(name, ""), shuffle=1000, batch_size=64)
        for name in suite.loaders
    }


def balance(suite: Suite) -> Results:
    """5. Imbalance over ranks."""
    folders = {name: str(suite.written(name, "lengths", 400)) for name in suite.loaders if name != "vlm_stream"}
    return {
        str(ranks): {
            name: suite.job(name, "balance", where=folders.get(name, ""), ranks=ranks, shuffle=1000)
            for name in suite.loaders
        }
        for ranks in suite.scale.ranks
    }


def resume(suite: Suite) -> Results:
    """6, 7. An epoch; stop at 10 % and 90 %, go on in a new process; stop with 2 ranks, go on with 1."""
    raw = suite.raw(suite.scale.main)
    found: Results = {}
    for name in suite.loaders:
        where = str(suite.written(name, raw, 250))
        common = {"where": where, "warm": where, "shuffle": 1000, "batch_size": _BATCH, "seed": 5}
        rows = {"0%": suite.job(name, "resume", **common) | {"before": []}}
        for share in (0.1, 0.9):
            rows[f"{share:.0%}"] = _stop_and_go_on(suite, name, common, share, world_size=1)
        rows["2 ranks -> 1"] = _stop_and_go_on(suite, name, common, 0.5, world_size=2)
        fresh = rows["0%"]
        overhead = fresh["read"] / fresh["delivered"] if "read" in fresh else 1.0
        found[name] = {title: _continuity(row, suite.scale.main, overhead) for title, row in rows.items()}
    return found


def _stop_and_go_on(suite: Suite, name: str, common: dict[str, Any], share: float, world_size: int) -> dict[str, Any]:
    """Stop all ranks at a share of the epoch; go on with one, from the first one's state."""
    batches = int(suite.scale.main * share / _BATCH / world_size)
    before: list[str] = []
    stopped: dict[str, Any] = {}
    for rank in reversed(range(world_size)):
        state = suite.data / f"{name}-{share}-{rank}.state"
        ranks = {"rank": rank, "world_size": world_size}
        stopped = suite.job(name, "stop", batches=batches, state=str(state), **common, **ranks)
        if "keys" not in stopped:
            return stopped
        before += stopped["keys"]
    after = suite.job(name, "resume", state=str(state), limit=suite.scale.main - len(before), **common)
    return stopped | after | {"before": before}


def _continuity(row: dict[str, Any], total: int, overhead: float) -> dict[str, Any]:
    """Replace lists of keys by what they say: how many samples of the epoch never came, how many came again.

    What a whole epoch reads for each byte that it delivers (headers, indexes) is no re-reading; nor is what is left
    when that is less than a sample, because an index is read as a whole however little of the epoch is left. Files
    that are mapped are not read in a way that is counted.
    """
    if "before" not in row or "delivered" not in row:
        return {name: value for name, value in row.items() if name not in ("keys", "before")}
    before, after = row.pop("before"), row.pop("keys")
    mean = row["delivered"] / max(1, len(after))
    return row | {
        "lost": total - len({*before, *after}),
        "repeated": len(before) + len(after) - len({*before, *after}),
        "reread": max(0, int((row["read"] - row["delivered"] * overhead) / mean)) if overhead >= 1 else None,
    }


def start(suite: Suite) -> Results:
    """8. First batch with many shards, 20 samples each."""
    found = {}
    for shards in suite.scale.shards:
        raw = suite.raw(shards * 20, small=True)
        folders = {name: str(suite.written(name, raw, 20)) for name in suite.loaders}
        warm = {name: str(suite.written(name, suite.raw(200, small=True), 20)) for name in suite.loaders}
        # More often than the rest: a few milliseconds are even noisier than bytes.
        found[str(shards)] = suite.in_turns("start", times=5, where=folders.get, warm=warm.get, shuffle=1000)
    return found


def memory(suite: Suite) -> Results:
    """9. Peak resident memory with a large shuffle."""
    raw = suite.raw(suite.scale.shuffled * 6 // 5)
    found = {}
    for name in suite.loaders:
        where = suite.written(name, raw, 250)
        found[name] = suite.job(name, "memory", where=str(where), shuffle=suite.scale.shuffled)
        shutil.rmtree(where)  # gigabytes each
    return found | {"shuffled": suite.scale.shuffled}


def damage(suite: Suite) -> Results:
    """10. One damaged header, one flipped byte."""
    raw = suite.raw(300)
    found: Results = {}
    for name in suite.loaders:
        whole = suite.written(name, raw, 250)
        found[name] = {}
        for title, harm in (("header", damage_header), ("payload", flip_payload_byte)):
            copy = suite.data / "damaged"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            harm(copy, open_loader(name).files)
            found[name][title] = suite.job(name, "damage", where=str(copy), raw=str(raw), kind=title)
    return found


FIGURES: dict[str, Callable[[Suite], Results]] = {
    "bytes": bytes_local,
    "s3": bytes_s3,
    "encode": end_to_end,
    "packing": packing,
    "balance": balance,
    "resume": resume,
    "start": start,
    "memory": memory,
    "damage": damage,
}

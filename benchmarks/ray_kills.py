"""Random kills of builders, nodes and trainers: what was lost, repeated or reordered; and a node that stands still.

    python benchmarks/ray_kills.py [--kills 200] [--load 0] [--seed 0]
    python benchmarks/ray_kills.py --stopped

A Ray cluster of real raylets on this machine, on loopback: a head without CPUs, and nodes with builders. A trainer, a
process of its own, takes batches from 3 builders with one process in reserve, and writes down each batch with the state
after it. Builders (70 %), nodes (15 %, another one comes) and the trainer (15 %, another one goes on)
are ended by SIGKILL, at random. `--load` starts so many processes that do nothing but count.

`--stopped`: 2 nodes of 2 builders, one of which is stopped by SIGSTOP for 20 s, with all its processes; how long the
trainer waits. It has no more ahead than one batch for each builder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ADDRESS = "127.0.0.2"  # Ray takes 127.0.0.1 for the address of the network
NODE = {"num_cpus": 3, "object_store_memory": 100 << 20, "node_ip_address": ADDRESS}
BUILDERS = 3
PATIENCE = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 300_000,
    "gcs_rpc_server_reconnect_timeout_s": 600,
    "worker_register_timeout_seconds": 300,
    "memory_monitor_refresh_ms": 0,
}
"""A node that is killed is noticed by its connections; one that answers late, under load, is not given up."""
WAIT_S = 600.0


def keys(rows: list[Any], _processor: Any) -> dict[str, Any]:
    """Return names."""
    return {"keys": [row.key for row in rows]}


def keys_after_a_while(rows: list[Any], processor: Any) -> dict[str, Any]:
    """Take as long as a small batch does."""
    time.sleep(0.05)
    return keys(rows, processor)


def make_loader(shards: str, collate_fn: Callable[..., dict[str, Any]], **options: Any) -> Any:
    """Return a loader of names."""
    from vlm_stream import StreamLoader

    return StreamLoader(shards, processor=None, mode="plain", epochs=None, collate_fn=collate_fn, **options)


def train(shards: str, address: str, record: str) -> None:
    """Be a trainer: go on from the last line of the record, for ever."""
    import ray

    from vlm_stream import RayBuilders

    ray.init(address=address, _node_ip_address=ADDRESS, log_to_driver=False, logging_level=40)
    builders = RayBuilders(count=BUILDERS, num_cpus=0.5, local=1)
    loader = make_loader(shards, keys_after_a_while, builders=builders)
    with Path(record).open("a+b") as file:
        lines = whole_lines(Path(record))
        file.truncate(sum(len(line) + 1 for line in lines))
        if lines:
            loader.load_state_dict(json.loads(lines[-1])["state"])
        for batch in loader:
            file.write(json.dumps({"keys": batch["keys"], "state": loader.state_dict()}).encode() + b"\n")
            file.flush()


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a record without a last one that was cut."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


class Killer:
    """A cluster, a trainer, and what happens to them."""

    def __init__(self, shards: Path, record: Path, seed: int) -> None:
        """Start all."""
        from ray.cluster_utils import Cluster

        self.draw = random.Random(seed)
        self.first = ["builders", "nodes", "trainers"]
        """However few strikes there are, some are of each kind."""
        self.record, self.shards = record, shards
        self.counts = {"builders": 0, "nodes": 0, "trainers": 0}
        head = {**NODE, "num_cpus": 0, "include_dashboard": False, "_system_config": PATIENCE}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.add_node() for _ in range(2)]
        self.start_trainer()

    def add_node(self) -> Any:
        """Start a node; it comes when it comes."""
        return self.cluster.add_node(wait=False, **NODE)

    def start_trainer(self) -> None:
        """Start a trainer that goes on."""
        command = [sys.executable, __file__, "--train", str(self.shards), self.cluster.address, str(self.record)]
        self.trainer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def num_batches(self) -> int:
        """Return how many batches were written down."""
        return len(whole_lines(self.record))

    def wait(self, num_batches: int) -> None:
        """Wait for so many batches in all."""
        self._wait_until(lambda: self.num_batches() >= num_batches, "batch")

    def _wait_until(self, is_there: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not is_there():
            if self.trainer.poll() is not None:
                raise SystemExit(f"the trainer ended by itself (exit code {self.trainer.returncode})")
            if time.monotonic() > end:
                raise SystemExit(f"no {what} for {WAIT_S:.0f} s after {self.counts}")
            time.sleep(0.05)

    def builder_processes(self) -> list[Any]:
        """Return the builders that run."""
        import psutil

        found = []
        for node in self.nodes:
            for kind, processes in node.all_processes.items():
                for info in processes if "raylet" in str(kind) else ():
                    try:
                        children = psutil.Process(info.process.pid).children(recursive=True)
                        found += [child for child in children if any("RayBuilder" in word for word in child.cmdline())]
                    except psutil.Error:
                        continue
        return found

    def strike(self) -> None:
        """Kill something; a builder once there is one, or under load nothing but nodes and trainers would be killed."""
        what = self.first[0] if self.first else self.draw.choices(["builders", "nodes", "trainers"], [70, 15, 15])[0]
        if what == "builders":
            builders: list[Any] = []
            self._wait_until(lambda: bool(builders.extend(self.builder_processes()) or builders), "builder")
            self.draw.choice(builders).kill()
        elif what == "nodes":
            node = self.nodes.pop(self.draw.randrange(len(self.nodes)))
            self.cluster.remove_node(node, allow_graceful=False)
            self.nodes.append(self.add_node())
        else:
            self.trainer.kill()
            self.trainer.wait()
            self.start_trainer()
        self.counts[what] += 1
        self.first = self.first[1:]

    def close(self) -> None:
        """End all."""
        self.trainer.kill()
        self.trainer.wait()
        self.cluster.shutdown()


def run_kills(folder: Path, num_kills: int, seed: int = 0) -> dict[str, Any]:
    """Kill so often; return what became of the batches."""
    from vlm_stream import make_shards
    from vlm_stream.testing import make_toy_dataset

    make_shards(make_toy_dataset(folder / "raw", num_samples=60), folder / "shards", samples_per_shard=10)
    killer = Killer(folder / "shards", folder / "record.jsonl", seed)
    try:
        killer.wait(5)
        while sum(killer.counts.values()) < num_kills:
            killer.strike()
            killer.wait(killer.num_batches() + killer.draw.randrange(1, 30))
        killer.wait(killer.num_batches() + 50)
    finally:
        killer.close()
    found = [tuple(json.loads(line)["keys"]) for line in whole_lines(folder / "record.jsonl")]
    expected = []
    for batch in make_loader(str(folder / "shards"), keys):
        expected.append(tuple(batch["keys"]))
        if len(expected) == len(found):
            break
    return {
        "kills": killer.counts,
        "batches": len(found),
        "differing": sum(one != other for one, other in zip(found, expected, strict=True)),
    }


def quarter_of_a_second(rows: list[Any], _processor: Any) -> dict[str, Any]:
    """Take as long as a batch with a clip does."""
    import torch

    time.sleep(0.25)
    return {"keys": [row.key for row in rows], "pixels": torch.zeros(1 << 20, dtype=torch.uint8)}


def measure_stopped(seconds: float = 20.0) -> None:
    """Stop a node and print how long the trainer waited."""
    import psutil
    import ray
    from ray.cluster_utils import Cluster

    from vlm_stream import RayBuilders, StreamLoader, make_shards
    from vlm_stream.testing import make_toy_dataset

    node = {"num_cpus": 2, "object_store_memory": 100 << 20, "node_ip_address": ADDRESS}
    head = {**node, "num_cpus": 0, "include_dashboard": False, "_system_config": PATIENCE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(**node) for _ in range(2)]
    ray.init(address=cluster.address, _node_ip_address=ADDRESS, log_to_driver=False, logging_level=40)
    raylets = [
        info.process.pid for kind, infos in nodes[0].all_processes.items() if "raylet" in str(kind) for info in infos
    ]
    stopped = []

    def signal_node(sign: int) -> None:
        if not stopped:
            for raylet in raylets:
                stopped.extend([psutil.Process(raylet), *psutil.Process(raylet).children(recursive=True)])
        for process in stopped:
            if process.is_running():
                os.kill(process.pid, sign)

    try:
        with tempfile.TemporaryDirectory() as folder:
            make_shards(make_toy_dataset(Path(folder) / "raw", num_samples=60), Path(folder) / "shards")
            loader = StreamLoader(
                Path(folder) / "shards",
                processor=None,
                mode="plain",
                epochs=None,
                collate_fn=quarter_of_a_second,
                builders=RayBuilders(count=4, num_cpus=1, local=0),
                prefetch_bytes="4M",  # one batch for each builder, so that no store of batches hides it
            )
            with loader:
                batches = iter(loader)
                while sum(row["built"] > 2 for row in loader.builders()) < 4:
                    next(batches)
                for _ in range(40):
                    time.sleep(0.1)  # the trainer's step: 2.5 of the 4 builders would do
                    next(batches)
                signal_node(signal.SIGSTOP)
                waits, begin = [], time.monotonic()
                while time.monotonic() < begin + seconds + 10:
                    asked = time.monotonic()
                    next(batches)
                    waits.append(time.monotonic() - asked)
                    time.sleep(0.15)
                    if stopped and time.monotonic() > begin + seconds:
                        signal_node(signal.SIGCONT)
                hedged = loader.metrics()["built_twice"]
    finally:
        for process in stopped:
            if process.is_running():
                os.kill(process.pid, signal.SIGCONT)
        ray.shutdown()
        cluster.shutdown()
    print(
        f"stopped: a node of 2 with half of the builders, for {seconds:.0f} s; a build takes 0.25 s; longest wait "
        f"{max(waits):.2f} s, {sum(wait > 0.3 for wait in waits)} of {len(waits)} waits above 0.3 s, "
        f"{hedged:.0f} batches built twice"
    )


def main() -> None:
    """Kill and print."""
    if sys.argv[1:2] == ["--train"]:
        train(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stopped", action="store_true")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    if args.stopped:
        measure_stopped()
        return
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.load)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            begin = time.monotonic()
            found = run_kills(Path(folder), args.kills, args.seed)
    finally:
        for burner in burners:
            burner.kill()
    same = "none lost, repeated or reordered" if not found["differing"] else f"{found['differing']} DIFFER"
    print(
        f"kills: {found['kills']}, {args.load} processes of load: {found['batches']} batches, {same}, "
        f"{time.monotonic() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()

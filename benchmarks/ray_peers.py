"""Tensor-parallel trainers that share their batches: how many are built for each one that is delivered.

    python benchmarks/ray_peers.py [--peers 2] [--builders ray|workers] [--samples 200]

So many trainers, processes that gloo connects, are tensor-parallel peers of one data-parallel rank. Each has one worker
process, or one builder on a Ray cluster on this machine, on loopback, and waits for the others after each batch, as
trainers in step do. Without sharing each batch would be built by every peer.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ray_kills import ADDRESS, PATIENCE, WAIT_S


def train(folder: str, address: str) -> None:
    """Be a peer; print what was delivered to it, built by its builders, taken from others, and built twice."""
    import torch.distributed as dist

    from vlm_stream import RayBuilders, StreamLoader

    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    options: dict[str, Any] = {"num_workers": 1}
    if address:
        import ray

        ray.init(address=address, _node_ip_address=ADDRESS, log_to_driver=False, logging_level=40)
        options = {"builders": RayBuilders(count=1, local=0)}
    loader = StreamLoader(
        f"{folder}/shards", processor=f"{folder}/processor", device_mesh=mesh, pack_size=1024, **options
    )
    built = delivered = 0
    metrics: dict[str, float] = {}
    for _ in loader:
        delivered += 1
        dist.barrier()
        built, metrics = sum(row["built"] for row in loader.builders()), dict(loader.metrics())
    taken, twice = int(metrics["built_by_peers"]), int(metrics["built_twice"])
    print(json.dumps({"delivered": delivered, "built": built, "taken": taken, "twice": twice}), flush=True)
    dist.barrier()
    os._exit(0)  # threads of Ray and gloo would fight over the exit


def run_peers(folder: Path, num_peers: int, address: str) -> list[dict[str, int]]:
    """Run peers to the end; return what each has printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(num_peers)}
    command = [sys.executable, __file__, "--train", str(folder), address]
    peers = [
        subprocess.Popen(command, env=os.environ | meet | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(num_peers)
    ]
    try:
        printed = [peer.communicate(timeout=WAIT_S)[0] for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
    if any(peer.returncode for peer in peers):
        raise SystemExit("a peer has failed")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def measure(num_peers: int, builders: str, num_samples: int) -> dict[str, int]:
    """Share batches; return the sums over all peers."""
    from vlm_stream import make_shards
    from vlm_stream.testing import build_processor, make_toy_dataset

    cluster = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_processor("qwen2_5_vl").save_pretrained(folder / "processor")
        toys = make_toy_dataset(folder / "raw", num_samples=num_samples)
        make_shards(toys, folder / "shards", processor=str(folder / "processor"))
        if builders == "ray":
            from ray.cluster_utils import Cluster

            node = {"num_cpus": num_peers, "object_store_memory": 200 << 20, "node_ip_address": ADDRESS}
            node |= {"include_dashboard": False, "_system_config": PATIENCE}
            cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            peers = run_peers(folder, num_peers, "" if cluster is None else cluster.address)
        finally:
            if cluster is not None:
                cluster.shutdown()
    return {key: sum(peer[key] for peer in peers) for key in peers[0]}


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--train"]:
        train(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--builders", choices=("ray", "workers"), default="ray")
    parser.add_argument("--samples", type=int, default=200)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    found = measure(args.peers, args.builders, args.samples)
    print(
        f"{args.peers} tensor-parallel trainers, {args.builders}: {found['built']} batches built for "
        f"{found['delivered']} delivered, one for {found['delivered'] / max(found['built'], 1):.2f}; {found['taken']} "
        f"taken from peers, {found['twice']} given to a second builder because one was late"
    )


if __name__ == "__main__":
    main()

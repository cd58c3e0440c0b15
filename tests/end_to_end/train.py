"""A trainer as people write it: DDP, packed batches from S3, a checkpoint every few steps. Run by torchrun.

torchrun --nproc-per-node 2 train.py SHARDS PROCESSOR OUT ENDPOINT [steps]
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from vlm_stream import StreamLoader
from vlm_stream.storage import StoreOptions
from vlm_stream.testing import build_tiny_model

CHECKPOINT_EVERY = 5


def main(shards: str, processor_path: str, out: Path, endpoint: str) -> None:
    from transformers import AutoProcessor

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (out / f"pid-{os.environ['RUN_NAME']}-{rank}").write_text(str(os.getpid()))
    processor = AutoProcessor.from_pretrained(processor_path)
    loader = StreamLoader(
        shards,
        processor=processor,
        pack_size=1024,
        fake_image=True,  # every rank runs its vision tower in every micro-batch
        with_refs=True,
        num_workers=1,
        store=StoreOptions(endpoint=endpoint, region="us-east-1", allow_http=True),
    )
    model = build_tiny_model("qwen2_5_vl", processor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if (out / "checkpoint.pt").exists():
        saved = torch.load(out / "checkpoint.pt", weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(json.loads(saved["data"]))
        step = saved["step"]
    parallel = DistributedDataParallel(model)
    log = (out / f"log-{os.environ['RUN_NAME']}-{rank}.jsonl").open("a")
    for batch in loader:
        refs = batch.pop("refs")
        loss = parallel(**batch, use_cache=False).loss * loader.world.size  # DDP averages over ranks
        loss.backward()
        print(json.dumps({"step": step, "loss": loss.item(), "keys": [n[2] for row in refs for n in row]}), file=log)
        log.flush()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % CHECKPOINT_EVERY == 0:
            save(out, rank, model, optimizer, loader, step)
    if rank == 0:
        (out / f"done-{os.environ['RUN_NAME']}").write_text(str(step))
    dist.destroy_process_group()


def save(out: Path, rank: int, model, optimizer, loader, step: int) -> None:
    if rank == 0:
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        content["data"] = json.dumps(loader.state_dict())
        torch.save(content, out / "checkpoint.tmp")
        (out / "checkpoint.tmp").rename(out / "checkpoint.pt")
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])

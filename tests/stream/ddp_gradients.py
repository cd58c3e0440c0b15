"""One rank of two DDP steps, as people write them: accumulate, average over ranks; and keep the gradients.

python ddp_gradients.py SHARDS PROCESSOR OUT MICRO_BATCHES      with torchrun's environment
"""

import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from vlm_stream import StreamLoader
from vlm_stream.integrations.torch import count_items
from vlm_stream.testing import build_tiny_model

OPTIONS = {"pack_size": 1024, "fake_image": True}  # every rank runs its vision tower in every micro-batch


def main(shards: str, folder: str, out: str, micro_batches: int) -> None:
    from transformers import AutoProcessor

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    processor = AutoProcessor.from_pretrained(folder)
    model = build_tiny_model("qwen2_5_vl", processor)
    parallel = DistributedDataParallel(model)
    loader = StreamLoader(shards, processor=processor, micro_batches=micro_batches, **OPTIONS)
    batches = iter(loader)
    for way in ("index", "all-reduce"):
        model.zero_grad(set_to_none=True)
        micro = list(itertools.islice(batches, micro_batches))
        if way == "all-reduce":
            count = count_items(micro)
            micro = [batch | {"num_items_in_batch": count} for batch in micro]
        for number, batch in enumerate(micro):
            parallel.require_backward_grad_sync = number == len(micro) - 1
            loss = parallel(**batch, use_cache=False).loss
            (loss * loader.world.size).backward()  # DDP averages over ranks
        if dist.get_rank() == 0:
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            torch.save(grads, Path(out) / f"{way}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))

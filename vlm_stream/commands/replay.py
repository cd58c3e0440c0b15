"""replay: rebuild exactly the batches that one rank had at one step, on any machine."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Final

from vlm_stream.commands import arguments, output
from vlm_stream.errors import ConfigError

EXAMPLES: Final = """\
examples:
  replay --config recipe.yaml --world 64 --rank 13 --step 41200 --out batch.pt
  replay shards/ --processor Qwen/Qwen2.5-VL-3B-Instruct --pack-size 8192 --state run.pt --step 1200 --out batch.pt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_stream_arguments(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="default: %(default)s")
    arguments.add_state_argument(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="where torch.save writes the list of batches")
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from vlm_stream.pixels import finish_pixels
    from vlm_stream.stream import VLMStream

    given = arguments.loader_arguments(args)
    arguments.need_processor(given)
    sources, processor, options = arguments.split_options(given)
    dtype = arguments.device_dtype(given)
    stream = VLMStream(
        sources,
        processor=processor,
        options=replace(options, with_refs=True),
        rank=args.rank,
        world_size=args.world or 1,
    )
    state, epochs_before = arguments.read_saved_state(args.state, stream.options)
    deliveries = list(stream.replay(args.step, state, epochs_before=epochs_before))
    batches = [dict(delivery.batch) for delivery in deliveries]
    batches = batches if dtype is None else [finish_pixels(batch, "cpu", dtype) for batch in batches]
    try:
        with Path(args.out).open("wb") as file:
            torch.save(batches, file)
    except (OSError, RuntimeError) as error:  # torch's own: of a full disk
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the batches cannot be written to {args.out} ({why}); choose another --out") from error
    summary = {
        "step": args.step,
        "rank": args.rank,
        "batches": len(deliveries),
        "samples": sum(len(row) for delivery in deliveries for row in delivery.batch["refs"]),
        "bad": [str(line) for delivery in deliveries for line in delivery.bad],
        "pixels": "as builders send them" if dtype is None else f"finished on the CPU as {dtype}".replace("torch.", ""),
        "out": args.out,
    }
    if args.json:
        output.print_json(summary)
    else:
        output.say(
            f"step {args.step}, rank {args.rank}: {summary['batches']} batches with {summary['samples']} samples -> "
            f"{args.out}\npixels: {summary['pixels']}" + "".join(f"\nbad: {line}" for line in summary["bad"])
        )
    return 0

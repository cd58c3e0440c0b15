"""Toy data on disk and on a real S3 server under chaos: `python -m tests.chaos --minutes N --seed S [--out FILE]`.

The last table is that of both together, in Markdown as docs/chaos.md has it. It ends with exit code 1 if anything was
lost, repeated, silent or out of order, or hung; with 3 if all that went wrong is how a run ended.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.servers import ACCESS_KEY, SECRET_KEY, S3Server
from vlm_stream.chaos import ChaosOptions, Report, run_chaos
from vlm_stream.commands.chaos import COLUMNS, cells
from vlm_stream.convert import make_shards
from vlm_stream.testing import build_processor, make_toy_dataset

LIMITS = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 36 * 28 * 28}}
COMMON = {"pack_size": 512, "num_workers": 2, "epochs": 8, "window": 64, "prefetch_bytes": 8 << 20}

SHARES = {"disk": 0.6, "s3": 0.4}
"""Of the time: on the disk there are more faults a minute."""


def prepare(folder, num_samples):
    """Return the arguments of a recipe over local shards."""
    processor = build_processor("qwen2_5_vl", image=LIMITS, video=LIMITS | {"cap_pixels_per_frame": False})
    processor.save_pretrained(folder / "processor")
    meta = make_toy_dataset(folder / "raw", num_samples=num_samples)
    make_shards(meta, folder / "shards", processor=str(folder / "processor"), samples_per_shard=20)
    return {"sources": str(folder / "shards"), "processor": str(folder / "processor"), **COMMON}


def upload(server, shards):
    from vlm_stream.storage import open_store

    store = open_store(server.url("chaos"), server.options)
    for path in sorted(shards.iterdir()):
        if path.is_file():
            store.put(path.name, path)
    return server.url("chaos")


def markdown(report):
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cells(row))} |" for row in [*report.rows, report.total])])


def together(reports):
    """Return the rows of several reports as those of one."""
    rows = {}
    for row in (row for report in reports for row in report.rows):
        rows.setdefault(row.fault, []).append(row)
    found = Report(reports[0].seed)
    for fault, same in rows.items():
        total = Report(0, rows=same).total
        total.fault = fault
        found.rows.append(total)
    return found


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, help="most faults in each place")
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--where", choices=("disk", "s3"), nargs="*", default=("disk", "s3"))
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--out", type=Path, help="JSON of both tables")
    args = parser.parse_args()
    total = sum(SHARES[where] for where in args.where)

    def options(where):
        return ChaosOptions(
            minutes=args.minutes * SHARES[where] / total, seed=args.seed, only=tuple(args.only), max_faults=args.faults
        )

    reports = {}
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with tempfile.TemporaryDirectory(prefix="vlm-stream-chaos-data-") as name:
        folder = Path(name)
        local = prepare(folder, args.samples)
        if "disk" in args.where:
            reports["disk"] = run_chaos(local | {"start_method": "fork"}, options("disk"), tell)
        if "s3" in args.where:
            (folder / "s3").mkdir()
            with S3Server(folder / "s3") as server:
                remote = local | {
                    "sources": upload(server, folder / "shards"),
                    "store": asdict(server.options),
                    "cache_dir": str(folder / "cache"),
                    "cache_bytes": 1 << 20,
                }
                reports["s3"] = run_chaos(remote, options("s3"), tell)
    for where, report in reports.items():
        print(
            f"\n{where}: seed {report.seed}, {report.batches} batches, {report.samples} samples, "
            f"{report.rounds} rounds, {report.seconds:.0f} s\n"
        )
        print(markdown(report))
        for note in report.notes:
            print(" ", note[:400])
    if len(reports) > 1:
        print(f"\nboth: seed {args.seed}, {args.minutes:g} minutes\n")
        print(markdown(together(list(reports.values()))))
    if args.out is not None:
        args.out.write_text(json.dumps({where: report.to_dict() for where, report in reports.items()}, indent=1))
    return exit_code(list(reports.values()))


def exit_code(reports):
    if all(report.is_good for report in reports):
        return 0
    total = together(reports).total
    words = (f": {kind}: " for kind in ("OrderError", "HangError"))
    is_grave = any(word in note for word in words for report in reports for note in report.notes)
    return 1 if is_grave or total.lost or total.repeated or total.silent else 3


def tell(line):
    print("chaos:", line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

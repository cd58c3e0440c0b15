"""Compare loaders: the same work for each, in turns, in one run.

python -m benchmarks.peers                 # a few minutes
python -m benchmarks.peers --full          # larger data, more repeats: what RESULTS.md holds
python -m benchmarks.peers --only bytes damage --loaders vlm_stream webdataset
python -m benchmarks.peers --report        # write RESULTS.md and the README's table from the last full run
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.peers.loaders import LOADERS
from benchmarks.peers.report import print_table, write_results
from benchmarks.peers.suite import FIGURES, Scale, Suite

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run the figures that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="larger data, more repeats, 64 ranks")
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--loaders", nargs="+", choices=list(LOADERS), default=list(LOADERS), metavar="LOADER")
    parser.add_argument("--data", type=Path, help="where data is made and kept (default: a folder that is removed)")
    parser.add_argument(
        "--results", type=Path, help="JSON file for the numbers (default: beside RESULTS.md for --full)"
    )
    parser.add_argument("--report", action="store_true", help="only write RESULTS.md and the README's table")
    args = parser.parse_args()
    kept = HERE.parent / "results.json"
    if args.report:
        write_results(json.loads(kept.read_text()), HERE.parent / "RESULTS.md", HERE.parents[1] / "README.md")
        return
    with tempfile.TemporaryDirectory(prefix="vlm-stream-peers-") as scratch:
        file = args.results or (kept if args.full else Path(scratch) / "results.json")
        suite = Suite(args.data or Path(scratch) / "data", args.loaders, Scale.full() if args.full else Scale.quick())
        results = suite.run(args.only or list(FIGURES), file)
    print_table(results)


if __name__ == "__main__":
    main()

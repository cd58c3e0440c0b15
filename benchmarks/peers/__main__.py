"""Compare loaders: the same work for each, in turns, in one run.

python -m benchmarks.peers                 # about five minutes: three questions, on little data
python -m benchmarks.peers --full          # what RESULTS.md holds; saved after each question
python -m benchmarks.peers --full --missing            # go on where a full run was ended
python -m benchmarks.peers --only clips faults --loaders vlm_stream webdataset
python -m benchmarks.peers --report        # write RESULTS.md and the README's table from what was saved
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.peers.loaders import LOADERS
from benchmarks.peers.questions import QUESTIONS, Prices
from benchmarks.peers.report import print_tables, write_results
from benchmarks.peers.suite import Scale, Suite, load_results

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Measure what was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="larger data, two turns, ten million samples")
    parser.add_argument("--only", nargs="+", choices=list(QUESTIONS), metavar="QUESTION", help=", ".join(QUESTIONS))
    parser.add_argument("--missing", action="store_true", help="only questions that the file of results has not")
    parser.add_argument("--loaders", nargs="+", choices=list(LOADERS), default=list(LOADERS), metavar="LOADER")
    parser.add_argument("--data", type=Path, help="where data is made and kept (default: a folder that is removed)")
    parser.add_argument("--results", type=Path, help="file of results (default: results.json for --full and --report)")
    parser.add_argument("--report", action="store_true", help="only write RESULTS.md and the README's table")
    parser.add_argument("--core-hour", type=float, default=Prices.core_hour, help="its price, for the cost of tokens")
    parser.add_argument("--gb", type=float, default=Prices.gigabyte, help="price of a gigabyte that is fetched")
    parser.add_argument(
        "--requests", type=float, default=Prices.thousand_requests, help="price of 1,000 requests to the store"
    )
    args = parser.parse_args()
    prices = Prices(args.core_hour, args.gb, args.requests)
    kept = args.results or HERE.parent / "results.json"
    if args.report:
        if not (results := load_results(kept)):
            parser.error(f"{kept} has no results of this form: measure with --full first")
        write_results(results, prices, HERE.parent / "RESULTS.md", HERE.parents[1] / "README.md")
        return
    with tempfile.TemporaryDirectory(prefix="vlm-stream-peers-", ignore_cleanup_errors=True) as scratch:
        file = kept if args.full or args.results else Path(scratch) / "results.json"
        had = load_results(file) if args.only or args.missing else {}
        scale = Scale.full() if args.full else Scale.short()
        suite = Suite(args.data or Path(scratch) / "data", args.loaders, scale)
        names = [name for name in args.only or scale.asked if not (args.missing and name in had)]
        results = suite.run(names, file, had)
        print_tables(results, prices)


if __name__ == "__main__":
    main()

"""Write data in a loader's own form: not a question, but a job before each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peers.job import Job, Numbers
    from benchmarks.peers.loaders.base import Loader


def write(loader: Loader, job: Job) -> Numbers:
    """Write the records of a raw file, or samples that are only lengths."""
    from benchmarks.peers.data import read_raw
    from benchmarks.peers.lengths import length_records, write_ours

    out, begin = Path(job["out"]), time.perf_counter()
    if not job["raw"].isdigit():
        loader.write(read_raw(Path(job["raw"])), out, job["samples_per_shard"])
    elif loader.name == "vlm_stream":
        write_ours(out, int(job["raw"]), job["samples_per_shard"])
    else:
        loader.write(length_records(int(job["raw"])), out, job["samples_per_shard"])
    return {"seconds": time.perf_counter() - begin}

"""Bytes that a pipeline rank fetches with and without pixels.

Run by hand: `python benchmarks/bytes_without_pixels.py [NUM_SAMPLES]`. One process, one run; read the ratios.
Captions beside pictures of 1280x720, and the toy dataset of small pictures, dialogues and clips, in local files.
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from vlm_stream import StreamLoader
from vlm_stream.convert import index_tars, make_shards
from vlm_stream.testing import build_processor, make_jpeg, make_toy_dataset


def write_photographs(folder: Path, num_samples: int) -> Path:
    """Write pictures and captions as others do."""
    folder.mkdir()
    with tarfile.open(folder / "0.tar", "w") as tar:
        for number in range(num_samples):
            caption = f"A street with {number} windows, seen from the other side of the river in the evening."
            for name, data in (("jpg", make_jpeg(720, 1280, number)), ("txt", caption.encode())):
                info = tarfile.TarInfo(f"{number:06d}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    index_tars([str(folder / "0.tar")])
    return folder


def main(num_samples: int) -> None:
    """Print the table."""
    limits = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 36 * 28 * 28}}
    processor: Any = build_processor("qwen2_5_vl", image=limits, video=limits | {"cap_pixels_per_frame": False})
    print(
        f"{'dataset':<14}{'pixels':<7}{'samples':>8}{'bytes read':>14}{'per sample':>12}{'reads':>9}{'encode ms':>10}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        toys = Path(scratch) / "toys"
        make_shards(make_toy_dataset(Path(scratch) / "raw", num_samples), toys)
        for folder in (write_photographs(Path(scratch) / "photographs", num_samples), toys):
            for pixels in (True, False):
                loader = StreamLoader(folder, processor=processor, mode="plain", batch_size=4, pixels=pixels)
                for _ in loader:
                    pass
                seen = loader.metrics()
                encode_ms = 1000 * seen["encode_s_per_batch"] * seen["batches"] / seen["samples"]
                requests = seen["requests_per_sample"] * seen["samples"]
                print(
                    f"{folder.name:<14}{pixels!s:<7}{seen['samples']:>8.0f}{seen['bytes_read']:>14,.0f}"
                    f"{seen['bytes_read'] / seen['samples']:>12,.0f}{requests:>9.0f}{encode_ms:>10.2f}"
                )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)

"""Tars as others write them, and Energon's notes beside them, for the tests of datasets that are used in place."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import yaml

from vlm_stream.testing import make_jpeg

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


def write_tar(path: Path, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> Path:
    """Write samples: keys, and contents by extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, members in samples:
            for extension, data in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def write_captions(folder: Path, num_tars: int = 4, num_samples: int = 5) -> list[str]:
    """Write img2dataset's layout; return the keys."""
    keys = []
    for number in range(num_tars):
        own = [f"{number:05d}{sample:04d}" for sample in range(num_samples)]
        image = make_jpeg(40, 50 + number)
        write_tar(
            folder / f"{number:05d}.tar", [(key, {"jpg": image, "txt": f"caption {key}".encode()}) for key in own]
        )
        keys += own
    return keys


def write_energon(
    folder: Path,
    tars: Mapping[str, Iterable[tuple[str, Mapping[str, bytes]]]],
    splits: Mapping[str, list[str]],
    config: Mapping[str, Any],
    *,
    exclude: Iterable[str] = (),
) -> Path:
    """Write tars and what `energon prepare` (7.4) writes beside them, without its SQLite index."""
    counts = {name: len(list(samples)) for name, samples in tars.items()}
    for name, samples in tars.items():
        write_tar(folder / name, samples)
    meta = folder / ".nv-meta"
    meta.mkdir(parents=True)
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}, indent=2))
    (meta / "split.yaml").write_text(yaml.safe_dump({"split_parts": dict(splits), "exclude": list(exclude)}))
    (meta / "dataset.yaml").write_text(yaml.safe_dump(dict(config)))
    return folder

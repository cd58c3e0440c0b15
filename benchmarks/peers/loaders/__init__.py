"""The loaders of the comparison, one file each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peers.loaders.base import Loader

__all__ = ["LOADERS", "open_loader"]

LOADERS = {
    "vlm_stream": "ours.OurLoader",
    "webdataset": "webdataset_tars.WebDatasetLoader",
    "energon": "energon.EnergonLoader",
    "mosaic": "mosaic.MosaicLoader",
    "litdata": "litdata_chunks.LitDataLoader",
    "hf": "hf_datasets.HfDatasetsLoader",
    "ray_data": "ray_tars.RayDataLoader",
    "lance": "lance_table.LanceLoader",
}


def open_loader(name: str) -> Loader:
    """Import one loader; the others need not be installed."""
    module, _, kind = LOADERS[name].partition(".")
    return getattr(import_module(f"benchmarks.peers.loaders.{module}"), kind)()

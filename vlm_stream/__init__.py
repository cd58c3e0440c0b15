"""vlm_stream: stream vision-language training data from tar shards; plan on metadata, fetch late.

The public names load on first use, so that `import vlm_stream` costs nothing: torch and transformers come in only
with the rooms that need them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Batch": "vlm_stream.batch",
    "MediaLimits": "vlm_stream.media",
    "RawSample": "vlm_stream.build",
    "RayBuilders": "vlm_stream.loader_options",
    "StoreOptions": "vlm_stream.storage",
    "StreamLoader": "vlm_stream.loader",
    "StreamOptions": "vlm_stream.options",
    "VLMStream": "vlm_stream.stream",
    "VlmStreamError": "vlm_stream.errors",
    "finish_pixels": "vlm_stream.pixels",
    "make_shards": "vlm_stream.convert",
}

__all__ = [
    "Batch",
    "MediaLimits",
    "RawSample",
    "RayBuilders",
    "StoreOptions",
    "StreamLoader",
    "StreamOptions",
    "VLMStream",
    "VlmStreamError",
    "__version__",
    "finish_pixels",
    "make_shards",
]

if TYPE_CHECKING:
    from vlm_stream.batch import Batch
    from vlm_stream.build import RawSample
    from vlm_stream.convert import make_shards
    from vlm_stream.errors import VlmStreamError
    from vlm_stream.loader import StreamLoader
    from vlm_stream.loader_options import RayBuilders
    from vlm_stream.media import MediaLimits
    from vlm_stream.options import StreamOptions
    from vlm_stream.pixels import finish_pixels
    from vlm_stream.storage import StoreOptions
    from vlm_stream.stream import VLMStream


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vlm_stream' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

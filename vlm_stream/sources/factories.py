"""The factories by name, so that a command line can name one: `factory:rdr`, `factory:medpix=/data/medpix`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import SourceError, nearest_name
from vlm_stream.sources.make_images import (
    make_cord_v2_dataset,
    make_llava_onevision_dataset,
    make_medpix_dataset,
    make_rdr_dataset,
    make_sharegpt_dataset,
    make_shopify_product_catalogue_dataset,
    make_unimm_chat_dataset,
)
from vlm_stream.sources.make_text import make_cv17_dataset, make_tulu3_dataset, make_tulu3_magicoder_text_mix_dataset

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlm_stream.sources.record import RecordSource

__all__ = ["FACTORIES", "PREFIX", "open_factory"]

PREFIX: Final = "factory:"

FACTORIES: Final[dict[str, Callable[..., Any]]] = {
    "cord_v2": make_cord_v2_dataset,
    "cv17": make_cv17_dataset,
    "llava_onevision": make_llava_onevision_dataset,
    "medpix": make_medpix_dataset,
    "rdr": make_rdr_dataset,
    "sharegpt": make_sharegpt_dataset,
    "shopify_product_catalogue": make_shopify_product_catalogue_dataset,
    "tulu3": make_tulu3_dataset,
    "tulu3_magicoder": make_tulu3_magicoder_text_mix_dataset,
    "unimm_chat": make_unimm_chat_dataset,
}


def open_factory(spec: str, **options: Any) -> RecordSource:
    """Return the source that `factory:NAME` or `factory:NAME=PATH_OR_HUB_ID` names."""
    name, _, path = spec.removeprefix(PREFIX).partition("=")
    if name not in FACTORIES:
        raise SourceError(f"there is no dataset factory '{name}' (in {spec}); {nearest_name(name, FACTORIES)}")
    if name == "sharegpt" and not path:
        raise SourceError(f"{spec} names no dataset; write {PREFIX}sharegpt=PATH_OR_HUB_ID.")
    source: RecordSource = FACTORIES[name](path, **options) if path else FACTORIES[name](**options)
    return source

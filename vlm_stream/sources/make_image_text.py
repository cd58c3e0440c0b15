"""Datasets of an image with a text about it: RDR, CORD-v2, MedPix, Shopify's product catalogue."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import BadSampleError
from vlm_stream.sources.hf_rows import load_rows
from vlm_stream.sources.hf_source import HFSource, media_item, text_item, turn
from vlm_stream.sources.json2token import json2token

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "make_cord_v2_dataset",
    "make_medpix_dataset",
    "make_rdr_dataset",
    "make_shopify_product_catalogue_dataset",
]

_DESCRIBE: Final = "Describe this image."
_CATEGORY: Final = "What product category does this item belong to?"


def make_rdr_dataset(
    path_or_dataset: Any = "quintend/rdr-items",
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return images with descriptions (columns `image`, `text`)."""
    rows = load_rows(path_or_dataset, split, ("image", "text"), limit=limit_dataset_samples, ignored=tuple(kwargs))
    return HFSource(rows, name="rdr", convert=_rdr)


def make_cord_v2_dataset(
    path_or_dataset: Any = "naver-clova-ix/cord-v2",
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    seed: int = 42,
    **kwargs: Any,
) -> HFSource:
    """Return receipts with their parse (columns `image`, `ground_truth`).

    Where a row has several parses, one is chosen by (seed, row number), so the choice is the same in every process.
    """
    rows = load_rows(
        path_or_dataset, split, ("image", "ground_truth"), limit=limit_dataset_samples, ignored=tuple(kwargs)
    )
    return HFSource(rows, name="cord_v2", convert=partial(_cord, seed=seed))


def make_medpix_dataset(
    path_or_dataset: Any = "medpix-dataset/medpix-dataset",
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return medical images with a question and its answer (columns `image_id`, `question`, `answer`)."""
    columns = ("image_id", "question", "answer")
    rows = load_rows(path_or_dataset, split, columns, limit=limit_dataset_samples, ignored=tuple(kwargs))
    return HFSource(rows, name="medpix", convert=_medpix)


def make_shopify_product_catalogue_dataset(
    path_or_dataset: Any = "Shopify/product-catalogue",
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return product images with their category (columns `product_image`, `ground_truth_category`)."""
    columns = ("product_image", "ground_truth_category")
    rows = load_rows(path_or_dataset, split, columns, limit=limit_dataset_samples, ignored=tuple(kwargs))
    return HFSource(rows, name="shopify_product_catalogue", convert=_shopify)


def _about_image(image: Any, question: object, answer: object) -> dict[str, Any]:
    user = turn("user", media_item("image", image), text_item(question))
    return {"conversation": [user, turn("assistant", text_item(answer))]}


def _rdr(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    return _about_image(row["image"], _DESCRIBE, row["text"])


def _medpix(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    return _about_image(row["image_id"], row["question"], row["answer"])


def _shopify(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    return _about_image(row["product_image"], _CATEGORY, row["ground_truth_category"])


def _cord(row: Mapping[str, Any], number: int, seed: int) -> dict[str, Any]:
    truth = json.loads(row["ground_truth"]) if isinstance(row["ground_truth"], str) else None
    if not isinstance(truth, dict):
        raise BadSampleError("convert", "no_ground_truth", "'ground_truth' is not a JSON object")
    parses = truth.get("gt_parses")
    if parses is None and isinstance(truth.get("gt_parse"), dict):
        parses = [truth["gt_parse"]]
    if not isinstance(parses, list) or not parses:
        keys = ", ".join(sorted(truth)) or "none"
        raise BadSampleError("convert", "no_ground_truth", f"'ground_truth' has no parse (keys: {keys})")
    # Keyed by the row alone: a shared generator would make the choice depend on the order of reading.
    chosen = random.Random(f"cord_v2:{seed}:{number}").choice(parses)
    return _about_image(row["image"], _DESCRIBE, json2token(chosen))

"""HF datasets with images: an image with a text (RDR, CORD-v2, MedPix, Shopify), and dialogues (UniMM-Chat, LLaVA)."""

from __future__ import annotations

import json
import random
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import BadSampleError
from vlm_stream.sources.form import MISMATCHES_KEY, OnMismatch, ShareGptForm, check_policy
from vlm_stream.sources.hf_source import HFSource, load_rows, media_item, text_item, turn
from vlm_stream.sources.sharegpt import convert_example

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vlm_stream.conversation import Item

__all__ = [
    "json2token",
    "make_cord_v2_dataset",
    "make_llava_onevision_dataset",
    "make_medpix_dataset",
    "make_rdr_dataset",
    "make_sharegpt_dataset",
    "make_shopify_product_catalogue_dataset",
    "make_unimm_chat_dataset",
]

_DESCRIBE: Final = "Describe this image."
_CATEGORY: Final = "What product category does this item belong to?"
_ROLES: Final = {"human": "user", "gpt": "assistant"}
_UNSEEN: Final = "surplus_media: the row has an image, but no turn shows <image>"
_IMAGE = re.compile(r"<image\s*>", re.IGNORECASE)


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


def make_unimm_chat_dataset(
    path_or_dataset: Any = "Yirany/UniMM-Chat",
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return dialogues about an image (columns `image`, `conversation`: JSON of from/value turns)."""
    columns = ("image", "conversation")
    rows = load_rows(path_or_dataset, split, columns, limit=limit_dataset_samples, ignored=tuple(kwargs))
    return HFSource(rows, name="unimm_chat", convert=_unimm)


def make_llava_onevision_dataset(
    path_or_dataset: Any = "liuhaotian/LLaVA-Instruct-150K",
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return dialogues about an image, or without one (columns `conversations`, `image`).

    `source[i]` also has the image itself under `image`, None where there is none.
    """
    columns = ("conversations", "image")
    rows = load_rows(path_or_dataset, split, columns, limit=limit_dataset_samples, ignored=tuple(kwargs))
    return HFSource(rows, name="llava_onevision", convert=_llava, finish=_with_image)


def _unimm(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    image = media_item("image", row["image"])
    conversation, notes, shown = [], [], False
    for number, role, text in _turns(row["conversation"]):
        if role == "user":
            items = _around_images(text, image) or [image]
            shown = shown or any(item["type"] == "image" for item in items)
            conversation.append(turn("user", *items))
        elif role == "assistant":
            conversation.append(turn("assistant", text_item(text.strip())))
        else:
            notes.append(_skipped(number, role))
    return _example(conversation, notes if shown else [*notes, _UNSEEN])


def _around_images(text: str, image: Item) -> list[Item]:
    """Return the stripped pieces of a text with the one image at every placeholder between them."""
    items: list[Item] = []
    for number, piece in enumerate(_IMAGE.split(text)):
        if number:
            items.append(dict(image))
        if stripped := piece.strip():
            items.append(text_item(stripped))
    return items


def _llava(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    conversation, notes, shown = [], [], False
    for number, role, text in _turns(row["conversations"]):
        if role not in ("user", "assistant"):
            notes.append(_skipped(number, role))
            continue
        items = [text_item(_IMAGE.sub("", text).strip())] if role == "user" else [text_item(text)]
        if role == "user" and _IMAGE.search(text):
            items.insert(0, media_item("image", row["image"]))
            shown = True
        conversation.append(turn(role, *items))
    if row["image"] is not None and not shown:
        notes.append(_UNSEEN)
    return _example(conversation, notes)


def _with_image(example: dict[str, Any]) -> dict[str, Any]:
    from vlm_stream.conversation import iter_media
    from vlm_stream.sources.hf_source import decode_images

    decoded = decode_images(example)
    first = next(iter_media(decoded["conversation"]), None)
    return {**decoded, "image": None if first is None else first["image"]}


def _turns(value: Any) -> Iterator[tuple[int, str, str]]:
    """Yield number, role (as written where it has no name here) and text of from/value turns, parsed if need be."""
    turns = json.loads(value) if isinstance(value, str) else value
    if not isinstance(turns, list) or not turns:
        raise BadSampleError("convert", "messages_not_a_list", "the conversation is not a list of turns, or is empty")
    for number, message in enumerate(turns, 1):
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            raise BadSampleError("convert", "null_content", f"turn {number} has no text under 'value'")
        role = message.get("from")
        yield number, _ROLES.get(str(role), str(role)), message["value"]


def _skipped(number: int, role: str) -> str:
    return f"unmapped_role: turn {number} has the role '{role}'; mapped are {', '.join(sorted(_ROLES))}"


def _example(conversation: list[dict[str, Any]], notes: list[str]) -> dict[str, Any]:
    if not conversation:
        raise BadSampleError("convert", "empty_conversation", "no turn maps: " + "; ".join(notes))
    return {"conversation": conversation, **({MISMATCHES_KEY: notes} if notes else {})}


def make_sharegpt_dataset(
    path_or_dataset: Any,
    split: str = "train",
    *,
    columns: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    on_mismatch: OnMismatch = "drop",
    limit_dataset_samples: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return the dialogues of a dataset whose columns and roles are called as `columns` and `tags` say."""
    check_policy(on_mismatch)
    form = ShareGptForm.from_dicts(columns, tags)
    rows = load_rows(path_or_dataset, split, (form.messages,), limit=limit_dataset_samples, ignored=tuple(kwargs))
    return HFSource(rows, name="sharegpt", convert=partial(_convert, form=form, on_mismatch=on_mismatch))


def _convert(row: Mapping[str, Any], _: int, form: ShareGptForm, on_mismatch: OnMismatch) -> dict[str, Any]:
    return convert_example(dict(row), form, on_mismatch)


def json2token(value: Any, sort_json_key: bool = True) -> str:
    """Write dicts as `<s_key>...</s_key>`, lists with `<sep/>` between their entries, everything else as text.

    >>> json2token({"b": 2, "a": [{"x": 1}, {"y": "z"}]})
    '<s_b>2</s_b><s_a><s_x>1</s_x><sep/><s_y>z</s_y></s_a>'
    """
    if isinstance(value, dict):
        if value.keys() == {"text_sequence"}:
            return str(value["text_sequence"])
        keys = sorted(value, reverse=True) if sort_json_key else list(value)
        return "".join(f"<s_{key}>{json2token(value[key], sort_json_key)}</s_{key}>" for key in keys)
    if isinstance(value, list):
        return "<sep/>".join(json2token(entry, sort_json_key) for entry in value)
    return str(value)

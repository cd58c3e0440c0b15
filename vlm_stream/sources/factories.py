"""HF datasets by name: what is in their columns, and how a row becomes a conversation.

A command line names them `factory:rdr`, `factory:medpix=/data/medpix`.
"""

import json
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from vlm_stream.conversation import Item, iter_media
from vlm_stream.errors import BadSampleError, SourceError, nearest_name
from vlm_stream.sources.forms import ShareGptForm, recognise
from vlm_stream.sources.hf_source import (
    HFSource,
    MixedSource,
    Rows,
    decode_images,
    interleave,
    load_rows,
    media_item,
    mono_samples,
    text_item,
    turn,
)
from vlm_stream.sources.record import RecordSource
from vlm_stream.sources.sharegpt import MISMATCHES_KEY, OnMismatch, check_policy, convert_example

PREFIX: Final = "factory:"
_LOG = logging.getLogger(__name__)
_DESCRIBE: Final = "Describe this image."
SHOPIFY_PRODUCT_CATALOGUE_PROMPT: Final = "What product category does this item belong to?"
"""What the user asks in `make_shopify_product_catalogue_dataset`."""
_TULU: Final = "allenai/tulu-3-sft-mixture"
_MAGICODER: Final = "ise-uiuc/Magicoder-OSS-Instruct-75K"
_ROLES: Final = {"human": "user", "gpt": "assistant"}
_UNSEEN: Final = "surplus_media: the row has an image, but no turn shows <image>"
_IMAGE = re.compile(r"<image\s*>", re.IGNORECASE)
_NUM_FIRST: Final = 50
_RATE: Final = 16_000
_TRANSCRIBE: Final = "Transcribe the Turkish audio clip."
_AUDIO_TOKEN: Final = "<|endoftext11|>"  # noqa: S105


def _factory(
    name: str,
    default: str,
    columns: tuple[str, ...],
    convert: Callable[..., dict[str, Any]],
    finish: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Callable[..., HFSource]:
    """Return `make_NAME_dataset` for a dataset with these columns; `convert` and `finish` are those of `HFSource`."""

    def make(
        path_or_dataset: Any = default, split: str = "train", *, limit_dataset_samples: int | None = None, **kwargs: Any
    ) -> HFSource:
        rows = load_rows(path_or_dataset, split, columns, limit=limit_dataset_samples, ignored=tuple(kwargs))
        return HFSource(rows, name=name, convert=convert, finish=finish)

    make.__name__ = make.__qualname__ = f"make_{name}_dataset"
    make.__doc__ = f"Return the examples of '{default}' or another dataset with the columns {', '.join(columns)}."
    return make


def _about_image(row: Mapping[str, Any], _: int, *, image: str, question: str, answer: str) -> dict[str, Any]:
    """Return an image with its answer; a question that is no name of a column is asked as it stands."""
    asked = row[question] if question.isidentifier() else question
    user = turn("user", media_item("image", row[image]), text_item(asked))
    return {"conversation": [user, turn("assistant", text_item(row[answer]))]}


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
    parsed = {"image": row["image"], "parse": json2token(chosen)}
    return _about_image(parsed, number, image="image", question=_DESCRIBE, answer="parse")


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
    """Decode, and show the image itself under `image` too, None where there is none."""
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


def _about_images(name: str, default: str, image: str, question: str, answer: str) -> Callable[..., HFSource]:
    columns = tuple(column for column in (image, question, answer) if column.isidentifier())
    return _factory(name, default, columns, partial(_about_image, image=image, question=question, answer=answer))


make_rdr_dataset = _about_images("rdr", "quintend/rdr-items", "image", _DESCRIBE, "text")
make_medpix_dataset = _about_images("medpix", "medpix-dataset/medpix-dataset", "image_id", "question", "answer")
make_shopify_product_catalogue_dataset = _about_images(
    "shopify_product_catalogue",
    "Shopify/product-catalogue",
    "product_image",
    SHOPIFY_PRODUCT_CATALOGUE_PROMPT,
    "ground_truth_category",
)
make_unimm_chat_dataset = _factory("unimm_chat", "Yirany/UniMM-Chat", ("image", "conversation"), _unimm)
make_llava_onevision_dataset = _factory(
    "llava_onevision", "liuhaotian/LLaVA-Instruct-150K", ("conversations", "image"), _llava, _with_image
)


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


def make_cv17_dataset(
    path_or_dataset: Any = "ysdede/commonvoice_17_tr_fixed",
    split: str = "train",
    *,
    sampling_rate: int = _RATE,
    audio_column: str = "audio",
    text_column: str = "transcription",
    limit_dataset_samples: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return Turkish clips with transcriptions.

    `source[i]` has plain strings as contents, the user's beginning with the audio token of Phi-4, and
    `audio` = (mono float32 samples, their rate). Records hold the stored clip as an audio item before the text.
    """
    columns = (audio_column, text_column)
    rows = load_rows(path_or_dataset, split, columns, limit=limit_dataset_samples, ignored=tuple(kwargs))
    convert = partial(_cv17, audio=audio_column, text=text_column)
    return HFSource(rows, name="cv17", convert=convert, finish=partial(_with_samples, rate=sampling_rate))


def _cv17(row: Mapping[str, Any], _: int, audio: str, text: str) -> dict[str, Any]:
    user = turn("user", media_item("audio", row[audio]), text_item(_TRANSCRIBE))
    return {"conversation": [user, turn("assistant", text_item(row[text]))]}


def _with_samples(example: dict[str, Any], rate: int) -> dict[str, Any]:
    user, assistant = example["conversation"]
    audio, instruction = user["content"]
    return {
        "conversation": [
            {"role": "user", "content": _AUDIO_TOKEN + instruction["text"]},
            {"role": "assistant", "content": assistant["content"][0]["text"]},
        ],
        "audio": (mono_samples(audio["audio"], rate), rate),
    }


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
    """Return the dialogues of a dataset of any known form; `columns` and `tags` go before what is recognised."""
    check_policy(on_mismatch)
    rows = load_rows(path_or_dataset, split, (), limit=limit_dataset_samples, ignored=tuple(kwargs))
    found = recognise([dict(rows[i]) for i in range(min(_NUM_FIRST, len(rows)))], columns, tags)
    form = found.form if found else ShareGptForm.from_dicts(columns, tags)
    rows = load_rows(rows, split, form.columns)
    convert = partial(_convert, form=form, on_mismatch=on_mismatch)
    return HFSource(rows, name="sharegpt", convert=convert, line=found.line if found else "")


def _convert(row: Mapping[str, Any], _: int, form: ShareGptForm, on_mismatch: OnMismatch) -> dict[str, Any]:
    return convert_example(dict(row), form, on_mismatch)


def make_tulu3_dataset(
    path_or_dataset: Any = _TULU,
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    max_turns: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return instruction dialogues (column `messages`); those of more than `max_turns` messages are left out."""
    rows = load_rows(path_or_dataset, split, ("messages",), ignored=tuple(kwargs))
    if max_turns is not None:
        rows = _up_to_turns(rows, max_turns)
    if limit_dataset_samples is not None:
        rows = load_rows(rows, split, ("messages",), limit=limit_dataset_samples)
    return HFSource(rows, name="tulu3", convert=_tulu)


def make_tulu3_magicoder_text_mix_dataset(
    path_or_dataset: Any = _TULU,
    magicoder_path_or_dataset: Any = _MAGICODER,
    split: str = "train",
    *,
    tulu_split: str | None = None,
    magicoder_split: str | None = None,
    probabilities: Sequence[float] = (0.8, 0.2),
    seed: int = 42,
    max_turns: int = 16,
    limit_total: int | None = None,
    **kwargs: Any,
) -> MixedSource:
    """Return Tulu-3 dialogues and Magicoder problems, drawn by `probabilities` until both were seen whole.

    Dialogues of more than `max_turns` messages are left out; `limit_total` is that of both together. Either may have a
    split of its own.
    """
    tulu = make_tulu3_dataset(path_or_dataset, tulu_split or split, max_turns=max_turns, **kwargs)
    rows = load_rows(magicoder_path_or_dataset, magicoder_split or split, ("problem", "solution"))
    code = HFSource(rows, name="magicoder", convert=_magicoder)
    for source in (tulu, code):
        if not len(source):
            raise SourceError(f"'{source.name}' has no rows (left), so there is nothing to mix; leave it out.")
    if len(probabilities) != 2 or min(probabilities) <= 0 or abs(sum(probabilities) - 1) > 1e-6:
        raise SourceError(
            f"probabilities {tuple(probabilities)} are no mixture of two; give two above 0 that add up to 1."
        )
    order = interleave([len(tulu), len(code)], probabilities, seed)
    return MixedSource((tulu, code), order[:limit_total], name="tulu3_magicoder")


def _tulu(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    return convert_example({"messages": row["messages"]}, ShareGptForm(), "drop")


def _magicoder(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    return {"conversation": [turn("user", text_item(row["problem"])), turn("assistant", text_item(row["solution"]))]}


def _up_to_turns(rows: Any, max_turns: int) -> Rows:
    """Return the rows with no more than so many messages; how many went is logged."""
    if hasattr(rows, "select_columns"):
        batches = rows.select_columns(["messages"]).with_format("arrow").iter(batch_size=10_000)
        lengths = np.concatenate([_list_lengths(batch["messages"]) for batch in batches] or [np.zeros(0, np.int64)])
    else:
        lengths = np.array([len(row["messages"] or ()) for row in rows], np.int64)
    kept = np.flatnonzero(lengths <= max_turns)
    if len(kept) < len(rows):
        _LOG.warning(
            "tulu3: %d of %d dialogues have more than %d turns and are left out.",
            len(rows) - len(kept), len(rows), max_turns
        )  # fmt: skip
    selected: Rows = rows.select(kept) if hasattr(rows, "select") else [rows[i] for i in kept.tolist()]
    return selected


def _list_lengths(column: Any) -> Any:
    import pyarrow.compute as pc

    return pc.fill_null(pc.list_value_length(column), 0).to_numpy()


FACTORIES: Final[dict[str, Callable[..., Any]]] = {
    make.__name__.removeprefix("make_").removesuffix("_dataset").removesuffix("_text_mix"): make
    for make in (
        make_cord_v2_dataset,
        make_cv17_dataset,
        make_llava_onevision_dataset,
        make_medpix_dataset,
        make_rdr_dataset,
        make_sharegpt_dataset,
        make_shopify_product_catalogue_dataset,
        make_tulu3_dataset,
        make_tulu3_magicoder_text_mix_dataset,
        make_unimm_chat_dataset,
    )
}
"""What `factory:NAME` may name as input of a conversion."""


def open_factory(spec: str, **options: Any) -> RecordSource:
    """Return the source that `factory:NAME` or `factory:NAME=PATH_OR_HUB_ID` names."""
    name, _, path = spec.removeprefix(PREFIX).partition("=")
    if name not in FACTORIES:
        raise SourceError(f"there is no dataset factory '{name}' (in {spec}); {nearest_name(name, FACTORIES)}")
    if name == "sharegpt" and not path:
        raise SourceError(f"{spec} names no dataset; write {PREFIX}sharegpt=PATH_OR_HUB_ID.")
    source: RecordSource = FACTORIES[name](path, **options) if path else FACTORIES[name](**options)
    return source

"""Our packed batches against those of NeMo Automodel's own packing and collation, of the same encoded samples.

Run in the environment of its own: `python -m tests.integrations.automodel_forms SHARDS MODEL_FOLDER OUT.json`.
"""

import itertools
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from nemo_automodel.components.datasets.vlm import collate_fns, neat_packing_vlm, pp_media
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlm_stream import StreamLoader
from vlm_stream.integrations.automodel import PackedRows

PACK_SIZE = 1024
FORMS = ("block_causal", "document_ids", "flash_varlen", "thd")


def encoded_rows(shards, processor):
    """Some batches of encoded samples, before any collation."""
    seen = []

    def keep(rows, _):
        seen.append(rows)
        return {"input_ids": torch.zeros(1, 1)}

    loader = StreamLoader(shards, processor=processor, pack_size=PACK_SIZE, batch_size=4, collate_fn=keep)
    for _ in itertools.islice(loader, 3):
        pass
    return seen


def their_batch(rows, model, pad_id, form, metadata):
    pack = partial(neat_packing_vlm._build_packed_vlm_sample, has_mrope=True)
    packs = []
    for row in rows:
        positions = [neat_packing_vlm._compute_mrope_position_ids(one, model.model.get_rope_index) for one in row]
        samples = [dict(one) | {"position_ids": axes} for one, axes in zip(row, positions, strict=True)]
        packs.append(pack([neat_packing_vlm._shift_sample(one, has_mrope=True) for one in samples], PACK_SIZE, pad_id))
    if form == "thd":
        return collate_fns.packed_sequence_thd_vlm_collater(packs, padding_idx=pad_id)
    contract = SimpleNamespace(packed_mask_type=form, requires_packed_sequence_metadata=metadata)
    return collate_fns.neat_packed_vlm_collater(packs, padding_idx=pad_id, packing=contract)


def differences(ours, theirs):
    for key in sorted(set(ours) | set(theirs)):
        one, other = ours.get(key), theirs.get(key)
        if key == "attention_mask" and one is not None and one.ndim == 4:
            # A padding slot of theirs sees nothing at all, which some kernels answer with NaN; ours sees itself.
            shown = (ours["_packed_seq_ids"] > 0)[:, None, :, None]
            one, other = one & shown, other & shown
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if one.dtype != other.dtype or not torch.equal(one, other):
                yield f"{key}: {one.dtype} {list(one.shape)} against {other.dtype} {list(other.shape)}"
        elif one != other:
            yield f"{key}: {one} against {other}"


def pipeline_differences(collate, rows, processor):
    """Their cut of our batch's media for two pipeline micro-batches, against the media of each half of its rows."""
    batch = pp_media.wrap_vlm_collate_for_pp(lambda _: collate(rows, processor), n_microbatches=2)(None)
    halves = [collate(half, processor) for half in (rows[:2], rows[2:])]
    chunks = batch[pp_media.VLM_PP_MEDIA_KEY]
    if "pixel_values" in batch or set(chunks) != {"pixel_values", "image_grid_hws"}:
        yield f"pipeline: {sorted(batch)} and {sorted(chunks)}"
    for key, name in (("pixel_values", "pixel_values"), ("image_grid_hws", "image_grid_thw")):
        if not all(map(torch.equal, chunks[key], (half[name] for half in halves))):
            yield f"pipeline: {key}"


def main(shards, folder, out):
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    found, compared = [], 0
    for rows, form, metadata in itertools.product(encoded_rows(shards, processor), FORMS, (False, True)):
        metadata = metadata and form != "thd"
        collate = PackedRows(packed_as=form, pack_size=PACK_SIZE, sequence_metadata=metadata)
        batch = collate(rows, processor)
        theirs = their_batch(rows, model, processor.tokenizer.pad_token_id, form, metadata)
        found += [f"{form}: {text}" for text in differences(batch, theirs)]
        found += [f"{form}: {text}" for text in pipeline_differences(collate, rows, processor)]
        compared += len(batch)
    Path(out).write_text(json.dumps({"differences": found, "compared": compared}))


if __name__ == "__main__":
    main(*sys.argv[1:])

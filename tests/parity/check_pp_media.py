"""pp_media."""

from types import SimpleNamespace

import torch
from hypothesis import strategies as st
from nemo_automodel.components.datasets.vlm import pp_media as theirs

from tests.parity.compare import same
from tests.parity.inputs import tensor
from vlm_stream import pp_media as ours

PP = "vlm.pp_media"
UNEVEN = (
    "Rows are cut where torch.distributed.pipelining cuts them (tensor_split: 7 rows in 3 are 3, 2, 2); theirs makes "
    "3, 3, 1, and media reach the micro-batch of another sample."
)
RANK = (
    "Counts decide whenever they are given; theirs takes pixels of rank 3 or 4 that happen to have as many rows as the "
    "batch for one each, and images of rank 4 for flat patches."
)


@st.composite
def media(draw, flat=True, prefix="image"):
    """Rows of pixels, their grids, how many each sample owns."""
    rows = draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    grids = tensor([[1, *draw(st.tuples(*[st.sampled_from((2, 4))] * 2))] for _ in range(sum(counts))]).reshape(-1, 3)
    patches = int(grids.prod(-1).sum()) if flat else sum(counts)
    pixels = torch.arange(patches * 2.0).reshape(patches, 2)
    return rows, tensor(counts), grids, pixels if flat else pixels[..., None].expand(-1, -1, 3)


def even(draw, rows):
    return draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0]))


@same(PP, "chunk_vlm_media", ours.chunk_vlm_media, 150, why={"uneven*": UNEVEN, "ranks*": RANK})
def chunks(draw):
    flat = draw(st.booleans())
    rows, counts, grids, pixels = draw(media(flat))
    parts = even(draw, rows)
    given = draw(st.sampled_from([counts, None])) if int(counts.max()) == int(counts.min()) == 1 else counts
    tag = "ranks" if not flat and len(pixels) == rows and parts > 1 else ""
    args = (pixels, grids, rows)
    yield tag, lambda: ours.chunk_vlm_media(*args, parts, given), lambda: theirs.chunk_vlm_media(*args, parts, given)
    other = draw(st.integers(1, rows))
    if flat:
        pair = [lambda m=m: m.chunk_vlm_media(*args, other, given) for m in (ours, theirs)]
        yield "uneven" if rows % other else "", *pair
    three, two = torch.arange(24.0).reshape(12, 2), torch.arange(12.0).reshape(2, 2, 3)
    odd = (three, tensor([[1, 2, 2]] * 3), 3, 2, tensor([1, 1, 1]))
    yield "uneven", *(lambda m=m: m.chunk_vlm_media(*odd) for m in (ours, theirs))
    both = (two, tensor([[1, 2, 2]] * 2), 2, 2, tensor([2, 0]))
    yield "ranks", *(lambda m=m: m.chunk_vlm_media(*both) for m in (ours, theirs))


@same(PP, "chunk_step3_media", ours.chunk_step3_media, 80, why={"uneven*": UNEVEN})
def step3(draw):
    rows = draw(st.integers(1, 4))
    counts = tensor(draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    crops = torch.arange(int(counts.sum()) * 2.0).reshape(-1, 2)
    given = {"num_patches": counts, "patch_pixel_values": crops, "patch_newline_mask": crops[:, 0] > 1}
    given = draw(st.sampled_from([given, {}]))
    pixels = torch.arange(rows * 3.0).reshape(rows, 3)
    for tag, parts in (("", even(draw, rows)), ("uneven", draw(st.integers(1, rows)))):
        options = {"batch_size": rows, "n_microbatches": parts, **given}
        yield (
            tag if rows % parts else "",
            *(lambda m=m, o=options: m.chunk_step3_media(pixels, **o) for m in (ours, theirs)),
        )


@st.composite
def pp_batches(draw):
    rows, counts, grids, pixels = draw(media())
    batch = {"input_ids": torch.arange(rows * 4).reshape(rows, 4), "labels": torch.zeros(rows, 4)}
    if len(grids):
        batch |= {"pixel_values": pixels, "image_grid_thw": grids, "n_images_per_sample": counts}
    if draw(st.booleans()):
        shown = tensor([[1, 2, 2]] * rows)
        batch |= {"pixel_values_videos": torch.arange(rows * 8.0).reshape(-1, 2), "video_grid_thw": shown}
    return rows, batch


NAMES = {
    f"*{ours.VLM_PP_MEDIA_KEY}.image_grid_thw.only_ours": "Grids are kept under their own name too; theirs only as "
    "image_grid_hws.",
}


@same(PP, "prepare_vlm_media_for_pp", ours.prepare_vlm_media_for_pp, 80, why=NAMES)
def prepare(draw):
    rows, batch = draw(pp_batches())
    options = {"batch_size": rows, "n_microbatches": even(draw, rows)}
    yield "", *(lambda m=m: m.prepare_vlm_media_for_pp(dict(batch), **options) for m in (ours, theirs))
    yield (
        "none",
        *(
            lambda m=m: m.prepare_vlm_media_for_pp(dict(batch), batch_size=rows, n_microbatches=0)
            for m in (ours, theirs)
        ),
    )


@same(PP, "wrap_vlm_collate_for_pp", ours.wrap_vlm_collate_for_pp, 60, why=NAMES)
def wrap(draw):
    rows, batch = draw(pp_batches())
    parts = even(draw, rows)
    if draw(st.booleans()):
        del batch["input_ids"]
    result = draw(st.sampled_from([batch, [1]]))
    made = lambda _: dict(result) if isinstance(result, dict) else result  # noqa: E731
    yield "", *(lambda m=m: m.wrap_vlm_collate_for_pp(made, n_microbatches=parts)(None) for m in (ours, theirs))


@same(PP, "stage_vlm_media_for_pp", ours.stage_vlm_media_for_pp, 60)
def stage(draw):
    rows, batch = draw(pp_batches())
    first = draw(st.booleans())
    batch = theirs.prepare_vlm_media_for_pp(batch, batch_size=rows, n_microbatches=even(draw, rows))
    pp = SimpleNamespace(info=SimpleNamespace(has_first_stage=first, schedule=None, stages=None))

    def staged(module):
        part, given = torch.nn.Linear(1, 1), dict(batch)
        seen = lambda: {  # noqa: E731
            name: value
            for name, value in sorted(vars(part).items())
            if name.startswith("_vlm") and name in THEIR_ATTRIBUTES and value is not None
        }
        with module.stage_vlm_media_for_pp(pp, [part], given):
            inside = seen()
        return inside, seen(), sorted(given)

    yield "", lambda: staged(ours), lambda: staged(theirs)


THEIR_ATTRIBUTES = {
    "_vlm_chunk_idx",
    "_vlm_image_grid_hws_chunks",
    "_vlm_num_patches_chunks",
    "_vlm_patch_newline_mask_chunks",
    "_vlm_patch_pixel_values_chunks",
    "_vlm_pixel_values_chunks",
    "_vlm_pixel_values_videos_chunks",
    "_vlm_video_grid_thw_chunks",
}
"""What models of NeMo Automodel read; ours stages more."""


@same(PP, "VLM_PP_MEDIA_KEY", "vlm_stream.pp_media.VLM_PP_MEDIA_KEY", 1)
def key(draw):
    yield "", ours.VLM_PP_MEDIA_KEY, theirs.VLM_PP_MEDIA_KEY

"""collate_fns on encoded samples and packs; make_robust_collate."""

from types import SimpleNamespace

import torch
from hypothesis import strategies as st
from nemo_automodel.components.datasets.vlm import collate_fns as theirs
from nemo_automodel.components.datasets.vlm import neat_packing_vlm as their_packing

from tests.parity.compare import Raised, outcome, same
from tests.parity.inputs import encoded, processor_of
from vlm_stream import collate, mapstyle

COLLATE = "vlm.collate_fns"
PADDING = (
    "A slot of padding sees itself; theirs sees nothing at all, which some kernels answer with NaN. Rows of "
    "tokens are equal."
)


@same(
    COLLATE,
    "pad_collate_fn",
    collate.pad_collate_fn,
    80,
    why={"cut.error": "A cut through media is an error; theirs leaves pixels that match no token."},
)
def pad(draw):
    rows, processor = draw(st.lists(encoded(), min_size=1, max_size=3)), processor_of("qwen2_5_vl")
    yield "", lambda: collate.pad_collate_fn(rows, processor), lambda: theirs.pad_collate_fn(rows, processor)
    length = draw(st.integers(4, 16))
    plain = [{k: v for k, v in row.items() if "pixel" not in k and "grid" not in k} for row in rows]
    pair = [lambda m=m: m.pad_collate_fn(plain, processor, length) for m in (collate, theirs)]
    yield "fixed", *pair
    ids = torch.full((6,), processor.image_token_id)
    torn = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}]
    yield "cut", *(lambda m=m: m.pad_collate_fn(torn, processor, 4)["input_ids"] for m in (collate, theirs))


@st.composite
def packs(draw):
    samples = [their_packing._shift_sample(draw(encoded())) for _ in range(draw(st.integers(1, 3)))]
    return their_packing._build_packed_vlm_sample(samples, 100, 7)


def unpadded(batch, documents):
    """The batch with the mask of padding slots blanked."""
    if isinstance(batch, Raised) or batch["attention_mask"].ndim != 4:
        return batch
    shown = (documents > 0)[:, None, :, None]
    return batch | {"attention_mask": batch["attention_mask"] & shown}


@same(
    COLLATE,
    "neat_packed_vlm_collater",
    "vlm_stream.collate.neat_packed_vlm_collater",
    100,
    why={
        "raw.attention_mask.values": PADDING,
        "flash*attention*": "flash_attention_* keeps the mask of document numbers, as its API page says; 0.7.0 gives "
        "cumulative lengths, which packing= and VlmDataloaderConfig give too.",
        "flash*.cu_seq_lens_?.only_theirs": "As above.",
        "flash*.max_length_?.only_theirs": "As above.",
        "long.error": "A pack that is longer than max_length is an error.",
    },
)
def neat(draw):
    batch = draw(st.lists(packs(), min_size=1, max_size=3))
    form = draw(st.sampled_from([{}, {"max_length": 64}, {"materialize_4d_mask": False}]))
    ours, other = (outcome(lambda m=m: m.neat_packed_vlm_collater(batch, 3, **form)) for m in (collate, theirs))
    documents = torch.nn.utils.rnn.pad_sequence([one["attention_mask"] for one in batch], batch_first=True)
    documents = torch.nn.functional.pad(documents, (0, ours["input_ids"].shape[1] - documents.shape[1]))
    yield "raw", ours, other
    yield "", unpadded(ours, documents), unpadded(other, documents)
    flash = [
        outcome(lambda m=m: m.neat_packed_vlm_collater(batch, 3, None, "flash_attention_2")) for m in (collate, theirs)
    ]
    yield "flash", *flash
    yield "long", *(lambda m=m: len(m.neat_packed_vlm_collater(batch[:1], 0, 0)) for m in (collate, theirs))


@same(
    COLLATE,
    "neat_packed_vlm_collater(packing=)",
    collate.neat_packed_vlm_collater,
    80,
    why={"raw.attention_mask.values": PADDING},
)
def contracts(draw):
    batch = draw(st.lists(packs(), min_size=1, max_size=3))
    form = draw(st.sampled_from(["block_causal"] * 3 + ["document_ids", "flash_varlen", "other"]))
    contract = SimpleNamespace(packed_mask_type=form, requires_packed_sequence_metadata=draw(st.booleans()))
    options = {"packing": contract, "materialize_4d_mask": draw(st.booleans())}
    ours = outcome(lambda: collate.neat_packed_vlm_collater(batch, 3, **options))
    other = outcome(lambda: theirs.neat_packed_vlm_collater(batch, 3, **options))
    yield "raw", ours, other
    if form == "block_causal":
        documents = torch.nn.utils.rnn.pad_sequence([one["attention_mask"] for one in batch], batch_first=True)
        yield "", unpadded(ours, documents), unpadded(other, documents)


@same(COLLATE, "packed_sequence_thd_vlm_collater", collate.packed_sequence_thd_vlm_collater, 80)
def thd(draw):
    batch = [dict(one) for one in draw(st.lists(packs(), min_size=1, max_size=3))]
    length = draw(st.sampled_from([None, None, 64, 5]))
    for one in batch:
        for key in draw(st.sampled_from([(), (), ("seq_lens", "seq_lens_padded"), ("seq_lens",)])):
            del one[key]
    yield "", *(lambda m=m: m.packed_sequence_thd_vlm_collater(batch, 3, length) for m in (collate, theirs))


@same(
    COLLATE,
    "make_robust_collate",
    mapstyle.make_robust_collate,
    60,
    why={"batch*": "Which examples stand in depends on the batch alone, not on a global generator."},
)
def robust(draw):
    dataset, fails = list(range(50)), draw(st.integers(0, 4))

    def called(module):
        left = [fails]

        def collate_fn(batch):
            left[0] -= 1
            if left[0] >= 0:
                raise OSError("no")
            return batch

        return module.make_robust_collate(dataset, collate_fn, max_retries=3)([1, 2, 3])

    ours, other = outcome(lambda: called(mapstyle)), outcome(lambda: called(theirs))
    yield "size", lambda: len(ours), lambda: len(other)
    if fails == 0:
        yield "", ours, other
    elif fails < 3:
        yield "batch", ours, other

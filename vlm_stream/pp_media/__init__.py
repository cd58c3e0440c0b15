"""Media of a batch, cut for the micro-batches of a pipeline: NeMo Automodel's `pp_media`.

Enters: a collated batch whose media rows are flat over the batch, and the number of micro-batches. Leaves: the same
batch with its media pre-cut per micro-batch, staged on the first pipeline stage for one schedule call. Must not be
known here: which model reads the media, how batches are made, who launched the processes.

    cut        where torch cuts a batch; chunk_vlm_media, chunk_step3_media: tensors -> a list per micro-batch
    prepare    prepare_vlm_media_for_pp, wrap_vlm_collate_for_pp: batch -> batch with VLM_PP_MEDIA_KEY;
               stage_vlm_media_for_pp, take_vlm_media: chunks on the first stage, read by its forward; pp_chunk_specs
"""

from vlm_stream.pp_media.cut import MediaCutError, chunk_step3_media, chunk_vlm_media, microbatch_bounds
from vlm_stream.pp_media.prepare import (
    VLM_PP_MEDIA_KEY,
    drop_vlm_media,
    pp_chunk_specs,
    prepare_vlm_media_for_pp,
    stage_vlm_media_for_pp,
    take_vlm_media,
    wrap_vlm_collate_for_pp,
)

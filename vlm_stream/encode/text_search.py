"""Labels by searching for the answers' own text: for processors without a chat template.

Enters: padded ids [B, S], conversations, the processor. Leaves: labels [B, S]. All turns are searched in their order,
so that an answer's text that a user repeated before is not taken for the answer; a turn that is not found is reported
and does not silence the ones after it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.encode.chat_format import STOP_TOKENS, tokenizer_of
from vlm_stream.encode.labels import IGNORE

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

__all__ = ["build_labels", "decode_single_token", "message_text"]

logger = logging.getLogger(__name__)


def build_labels(
    input_ids_batch: torch.Tensor, conversations: Sequence[Sequence[dict[str, Any]]], processor: Any
) -> torch.Tensor:
    """Return labels [B, S]: the tokens of each assistant text and the stop token after it, IGNORE elsewhere."""
    import torch

    tokenizer = tokenizer_of(processor)
    stops = {*STOP_TOKENS, getattr(tokenizer, "eos_token", None)} - {None}
    labels = np.full(tuple(input_ids_batch.shape), IGNORE, dtype=np.int64)
    rows = input_ids_batch.cpu().numpy()
    for ids, row_labels, conversation in zip(rows, labels, conversations, strict=True):
        cursor = 0
        for message in conversation:
            text = message_text(message)
            begin, end = _find_text(tokenizer, text, ids, cursor) if text else (-1, -1)
            if begin < 0:
                if text and message.get("role") == "assistant":
                    logger.warning("An answer was not found in its ids and stays unlabelled: %.60r", text)
                continue
            cursor = end
            if message.get("role") != "assistant" or not message.get("train", True):
                continue
            if end < len(ids) and decode_single_token(tokenizer, int(ids[end])).strip() in stops:
                end += 1
            row_labels[begin:end] = ids[begin:end]
            cursor = end
    return torch.from_numpy(labels).to(input_ids_batch.device)


def message_text(message: dict[str, Any]) -> str:
    """Return all text of a turn, joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    items = content if isinstance(content, list) else []
    return "".join(str(i.get("text") or "") for i in items if isinstance(i, dict) and i.get("type", "text") == "text")


def decode_single_token(tokenizer: Any, token_id: int) -> str:
    """Return a token's text from tokenizers that take an id, and from those that take only lists of them."""
    try:
        return str(tokenizer.decode(token_id))
    except Exception:  # a tokenizer that takes only lists raises what it likes
        return str(tokenizer.decode([token_id]))


def _find_text(tokenizer: Any, text: str, ids: npt.NDArray[np.int64], cursor: int) -> tuple[int, int]:
    """Return begin and end of the leftmost occurrence at or after `cursor`; (-1, -1) when there is none."""
    for form in dict.fromkeys((text, text.lstrip())):
        pattern = np.asarray(tokenizer(form, add_special_tokens=False)["input_ids"], dtype=np.int64)
        if not len(pattern) or len(pattern) > len(ids) - cursor:
            continue
        places = np.flatnonzero(ids[cursor : len(ids) - len(pattern) + 1] == pattern[0]) + cursor
        for offset in range(1, len(pattern)):
            places = places[ids[places + offset] == pattern[offset]]
            if not len(places):
                break
        if len(places):
            return int(places[0]), int(places[0]) + len(pattern)
    return -1, -1

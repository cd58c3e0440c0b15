"""Whatever a user types, in one text or in several, no control token of any family comes of it."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlm_stream.encode import IGNORE, Encoder
from vlm_stream.encode.control_tokens import media_token_ids, media_token_strings
from vlm_stream.errors import BadSampleError
from vlm_stream.testing import FAMILIES, build_processor

if TYPE_CHECKING:
    from vlm_stream.encode.encoder import EncodedSample

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # inside transformers
REFUSED = ("typed_markers", "reserved_character")
ANSWER = "Fine."
PLAIN = ("Yes", " ", "\n", "\n\n", "<", ">", "|", "[", "é🎉", "user", "assistant\n", "model\n", "<think>", "a\u0301")
_WIDE = {ord(narrow): chr(ord(narrow) + 0xFEE0) for narrow in "<>|[]_"}
"""What compatibility normalisation folds back into the token."""


@cache
def _tools(family: str) -> tuple[Encoder, tuple[str, ...], frozenset[int], EncodedSample]:
    processor = build_processor(family)
    encoder = Encoder(processor)
    tokens = {*encoder.chat.chat_ids, *media_token_strings(processor)}
    ids = frozenset(encoder.chat.chat_ids.values()) | media_token_ids(processor)
    return encoder, tuple(sorted(tokens)), ids, encoder.encode(_chat(["Hi"]), {})


def _chat(texts: list[str]) -> list[dict]:
    user = [{"type": "text", "text": text} for text in texts]
    return [
        {"role": "user", "content": user},
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
    ]


def _variants(token: str, seed: int) -> str:
    """Return a token, a part of it, or something that looks like it."""
    draw = random.Random(seed)
    cut = draw.randint(1, max(len(token) - 1, 1))
    return draw.choice(
        [
            token,
            token,
            token[:cut],
            token[cut:],
            token.translate(_WIDE),
            token[:cut] + "\u200b" + token[cut:],
            token[:cut] + "\u00ad" + token[cut:],
            token.upper(),
            token[:cut] + token + token[cut:],
            f"{token} {token}",
        ]
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_control_token_comes_of_any_text(family, data):
    encoder, tokens, ids, benign = _tools(family)
    piece = st.one_of(
        st.sampled_from(PLAIN),
        st.builds(_variants, st.sampled_from(tokens), st.integers(0, 2**32)),
        st.text(max_size=6),
    )
    texts = data.draw(st.lists(st.lists(piece, max_size=6).map("".join), min_size=1, max_size=3))
    try:
        sample = encoder.encode(_chat(texts), {})
    except BadSampleError as error:
        refused = error.reason
    else:
        refused = ""
    if refused:
        assert refused in REFUSED
        return
    assert _counts(sample, ids) == _counts(benign, ids)
    assert torch.equal(sample["labels"][sample["labels"] != IGNORE], benign["labels"][benign["labels"] != IGNORE])


def _counts(sample: EncodedSample, ids: frozenset[int]) -> Counter[int]:
    return Counter(token for token in sample["input_ids"].tolist() if token in ids)

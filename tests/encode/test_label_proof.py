"""Labels against an independent method: the assistant mask that transformers derives from `{% generation %}` tags.

Our labels come from the plain template, found by its chat tokens; the mask comes from the same template with tags, by
character offsets. 200 conversations per family: unicode, empty turns, repeated text, system and tool turns, thinking
text, answers that begin with newlines and blanks.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from vlm_stream.encode import IGNORE, EncodeConfig, Encoder
from vlm_stream.testing import FAMILIES, build_processor, make_toy_image

# 200 for every template that writes something of its own; families that share ChatML with the first need no more proof.
NUM_CONVERSATIONS = {
    "qwen2_5_vl": 200,
    "gemma3": 200,
    "gemma4": 200,
    "glm46v": 200,
    "kimi_k25": 200,
    "phi4_multimodal": 200,
    "smolvlm": 200,
}
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # inside transformers
PIECES = [
    "Yes.",
    "",
    " ",
    "\n",
    "\n\n",
    "\nIt is red.",
    " leading blank",
    "  two blanks\n",
    "\t tab",
    "trailing newline\n",
    "Hello world",
    "naïve café, 数据集, 한국어, 🎉🚀",
    "a\u0301 combining, \u200bzero width",
    "<think>\nLet me see.\n</think>\n\nIt is blue.",
    "assistant\nassistant",
    "user",
    "1234567890",
    "code:\n\n    x = 1\n\n",
    "model\n",
    "Assistant: no",
]


def _turn(rng: random.Random, role: str) -> dict:
    text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 3)))
    if rng.random() < 0.3:
        return {"role": role, "content": text}
    half = rng.randrange(len(text) + 1)
    parts = [text] if rng.random() < 0.6 else [text[:half], text[half:]]
    return {"role": role, "content": [{"type": "text", "text": part} for part in parts]}


def make_conversation(seed: int) -> list[dict]:
    rng = random.Random(seed)
    conversation = [_turn(rng, "system")] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 4)):
        conversation.append(_turn(rng, "user"))
        conversation.append(_turn(rng, "assistant"))
        if rng.random() < 0.2:
            conversation.append(_turn(rng, "tool"))
            conversation.append(_turn(rng, "assistant"))
    if rng.random() < 0.2:  # a user who repeats the answer before it is given
        conversation[-2] = {"role": "user", "content": conversation[-1]["content"]}
    if rng.random() < 0.1:
        conversation.append(_turn(rng, "user"))
    return conversation


def masked_by_transformers(processor, conversation) -> tuple[np.ndarray, np.ndarray]:
    out = processor.apply_chat_template(
        conversation, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
    )
    ids, mask = out["input_ids"][0].numpy(), np.asarray(out["assistant_masks"][0], dtype=bool)
    # Where a template writes no end of turn, the token that the model stops at opens the next turn; an empty answer
    # then consists of that token alone.
    follows = np.zeros_like(mask)
    follows[1:] = mask[:-1] & ~mask[1:]
    opening = processor.tokenizer("<|assistant|>\n", add_special_tokens=False)["input_ids"]
    if len(opening) == 2:
        follows[2:] |= (ids[:-2] == opening[0]) & (ids[1:-1] == opening[1])
    stops = follows & (ids == processor.tokenizer.eos_token_id)
    return ids, mask | stops


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_equal_the_mask_of_transformers(family):
    plain = Encoder(build_processor(family), EncodeConfig(allow_unlabelled=True))
    tagged_processor = build_processor(family, generation_tags=True)
    tagged = Encoder(tagged_processor, EncodeConfig(allow_unlabelled=True))
    assert tagged.chat.has_generation_tags
    assert not plain.chat.has_generation_tags
    for seed in range(NUM_CONVERSATIONS.get(family, 20)):
        conversation = make_conversation(seed)
        ids, mask = masked_by_transformers(tagged_processor, conversation)
        expected = np.where(mask, ids, IGNORE)
        for encoder in (plain, tagged) if seed % 5 == 0 else (plain,):
            sample = encoder.encode(conversation, {})
            assert sample["input_ids"].numpy().tolist() == ids.tolist(), (family, seed)
            assert sample["labels"].numpy().tolist() == expected.tolist(), (family, seed, conversation)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_labels_with_images_equal_the_mask_of_transformers(family):
    tagged = build_processor(family, generation_tags=True)
    encoder = Encoder(build_processor(family), EncodeConfig(allow_unlabelled=True))
    for seed in range(6):
        conversation = make_conversation(seed)
        user = next(i for i, message in enumerate(conversation) if message["role"] == "user")
        text = conversation[user]["content"]
        items = text if isinstance(text, list) else [{"type": "text", "text": text}]
        image = {"type": "image", "image": make_toy_image(60, 90, seed)}
        conversation[user] = {"role": "user", "content": [image, *items, image, {"type": "text", "text": "?"}]}
        ids, mask = masked_by_transformers(tagged, conversation)
        sample = encoder.encode(conversation, {})
        assert sample["input_ids"].tolist() == ids.tolist()
        assert sample["labels"].tolist() == np.where(mask, ids, IGNORE).tolist()

"""Templates in the manner of published ones that do more than wrap turns: thinking, trimming, default turns."""

from __future__ import annotations

import numpy as np
import pytest

from vlm_stream.encode import IGNORE, EncodeConfig, Encoder
from vlm_stream.testing import build_processor

# Earlier answers lose their thoughts, the last one gets empty thoughts when it has none: no answer is what was given.
THINKING = (
    "{% for m in messages %}{% set text = m['content'] %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}OPEN"
    "{% if '</think>' in text %}{% set answer = text.split('</think>')[-1].lstrip('\\n') %}"
    "{% if loop.last %}{{ text.split('</think>')[0] + '</think>\\n\\n' + answer }}{% else %}{{ answer }}{% endif %}"
    "{% else %}{% if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' + text }}{% else %}{{ text }}{% endif %}{% endif %}"
    "{{ '<|im_end|>' }}CLOSE{% else %}{{ text + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
# Contents are trimmed, the assistant has another name, a first system turn is written into the user's.
TRIMMING = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] != 'system' %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}"
    "{% if loop.index0 == 1 and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{% if m['role'] == 'assistant' %}OPEN{{ m['content'] | trim }}{{ '<end_of_turn>' }}CLOSE"
    "{% else %}{{ m['content'] | trim }}{{ '<end_of_turn>' }}{% endif %}{{ '\\n' }}{% endif %}{% endfor %}"
)
TEXTS = [
    "Yes.",
    "",
    "\n\nNo. ",
    "<think>\nHm.\n</think>\n\nBlue.",
    "  blanks  ",
    "é 数据 🎉",
    "assistant\nuser",
    "<think>\n</think>",
]


def _conversations():
    rng = np.random.default_rng(0)
    for number in range(200):
        turns = [{"role": "system", "content": str(rng.choice(TEXTS))}] if number % 3 == 0 else []
        for _ in range(int(rng.integers(1, 4))):
            turns.append({"role": "user", "content": str(rng.choice(TEXTS))})
            turns.append({"role": "assistant", "content": str(rng.choice(TEXTS))})
        yield turns


@pytest.mark.parametrize(("family", "template"), [("qwen3_vl", THINKING), ("gemma3", TRIMMING)])
def test_labels_equal_the_mask_of_transformers(family, template):
    plain = build_processor(family, chat_template=template.replace("OPEN", "").replace("CLOSE", ""))
    tags = template.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}")
    tagged = build_processor(family, chat_template=tags)
    encoder = Encoder(plain, EncodeConfig(allow_unlabelled=True))
    for conversation in _conversations():
        out = tagged.apply_chat_template(
            conversation, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
        )
        ids, mask = out["input_ids"][0], np.asarray(out["assistant_masks"][0], dtype=bool)
        sample = encoder.encode(conversation, {})
        assert sample["input_ids"].tolist() == ids.tolist()
        assert sample["labels"].tolist() == np.where(mask, ids, IGNORE).tolist(), conversation


def test_tags_that_leave_the_stop_token_out_still_get_it():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}"
    )
    encoder = Encoder(build_processor("qwen2_5_vl", chat_template=template))
    for answer in ("Yes", "\n\nYes\n", " "):
        conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
        labels = encoder.encode(conversation, {})["labels"]
        learned = encoder.processor.tokenizer.decode(labels[labels != IGNORE])
        assert learned.strip("\n") == f"{answer}<|im_end|>".strip("\n")


def test_answer_before_any_user_turn_is_labelled():
    encoder = Encoder(build_processor("smolvlm"))
    conversation = [
        {"role": "assistant", "content": "I begin."},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "I end."},
    ]
    labels = encoder.encode(conversation, {})["labels"]
    learned = encoder.processor.tokenizer.decode(labels[labels != IGNORE])
    assert learned == "I begin.<end_of_utterance>I end.<end_of_utterance>"


def test_template_that_hides_answers_falls_back_to_searching_for_them():
    """The sentinel does not show as it was given, so no header can be learned: the answers' text is searched for."""
    template = "{% for m in messages %}{{ m['content'] | upper }}<|im_end|>{% endfor %}"
    encoder = Encoder(build_processor("llava_onevision", chat_template=template))
    assert encoder.chat.header == ""
    conversation = [{"role": "user", "content": "HI"}, {"role": "assistant", "content": "YES"}]
    labels = encoder.encode(conversation, {})["labels"]
    assert encoder.processor.tokenizer.decode(labels[labels != IGNORE]) == "YES<|im_end|>"

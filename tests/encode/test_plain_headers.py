"""Templates in the manner of LLaVA-1.5: `USER: ... ASSISTANT: ...`, no chat token opens an answer.

The oracle expands media in the rendered text by hand and finds answers by character offsets.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vlm_stream.encode import IGNORE, Encoder, build_labels_from_template
from vlm_stream.errors import BadSampleError
from vlm_stream.testing import FAMILIES, build_processor, make_toy_image
from vlm_stream.testing.processors import transformers_class
from vlm_stream.testing.tokenizer import train_tokenizer

TURN = (
    "{% macro show(m) %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for item in m['content'] %}"
    "{% if item['type'] == 'image' %}{{ '<image>\\n' }}{% elif item['type'] == 'video' %}{{ '<video>' }}"
    "{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}ASSISTANT: OPEN{{ show(m) }}STOPCLOSE"
    "{% else %}{{ m['role'].upper() + ': ' + show(m) + ' ' }}{% endif %}{% endfor %}"
)
WITHOUT_STOP, WITH_STOP = "{{ ' ' }}", "{{ '</s>' }}"


def _template(stop: str, *, tagged: bool = False) -> str:
    tags = ("{% generation %}", "{% endgeneration %}") if tagged else ("", "")
    return TURN.replace("STOP", stop).replace("OPEN", tags[0]).replace("CLOSE", tags[1])


def llava(template: str, *, add_bos: bool = True):
    tokens = ("<unk>", "<s>", "</s>", "<pad>", "<image>")
    return transformers_class("LlavaProcessor")(
        image_processor=transformers_class("CLIPImageProcessor")(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        ),
        tokenizer=train_tokenizer(tokens, eos="</s>", pad="<pad>", bos="<s>", add_bos=add_bos),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def _user(*items):
    return {"role": "user", "content": [_item(item) for item in items]}


def _answer(text):
    return {"role": "assistant", "content": [_item(text)] if isinstance(text, str) else [_item(one) for one in text]}


def _item(item):
    return {"type": "text", "text": item} if isinstance(item, str) else {"type": "image", "image": item}


IMAGE = make_toy_image(60, 90, 0)
CONVERSATIONS = {
    "one": [_user(IMAGE, "What is it?"), _answer("A red fox.")],
    "text first": [_user("What is it?", IMAGE), _answer("A red fox.")],
    "no text": [_user(IMAGE), _answer("Yes")],
    "no image": [_user("Hello"), _answer("Hi"), _user("And?"), _answer("So.")],
    "two side by side": [_user(IMAGE, IMAGE, "Which one?"), _answer("The first one.\n")],
    "two turns": [_user(IMAGE, "A?"), _answer("Yes."), _user(IMAGE, "A?"), _answer("Yes."), _user("B"), _answer("No")],
    "image later": [_user("Hi"), _answer("Hello world"), _user("This", IMAGE, "?"), _answer("naïve 数据集 🎉")],
    "system": [{"role": "system", "content": "You are helpful."}, _user(IMAGE, "So?"), _answer(" blank first")],
    "user speaks last": [_user(IMAGE, "A?"), _answer("Yes."), _user(IMAGE, "B?")],
    "image in an answer": [_user("Draw."), _answer(["Here: ", IMAGE, "done"]), _user(IMAGE, "x"), _answer("y")],
}


def _expected(processor, conversation, stop: str) -> list[int]:
    """Return the labels by character offsets of the text with all placeholders written out."""
    text, spans = "", []
    for message in conversation:
        content = message["content"]
        items = [_item(content)] if isinstance(content, str) else content
        shown = "".join(item.get("text", "<image>" * 16 + "\n") for item in items)
        if message["role"] == "assistant":
            text += "ASSISTANT: "
            spans.append((len(text), len(text) + len(shown) + (4 if stop == WITH_STOP else 0)))
            text += shown + ("</s>" if stop == WITH_STOP else " ")
        else:
            text += f"{message['role'].upper()}: {shown} "
    encoded = processor.tokenizer(text, return_offsets_mapping=True)
    placeholder = processor.tokenizer.convert_tokens_to_ids("<image>")
    return [
        token if token != placeholder and any(begin < e and end > b and end > begin for b, e in spans) else IGNORE
        for token, (begin, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("stop", [WITHOUT_STOP, WITH_STOP])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_answers_and_nothing_else_are_labelled(name, stop, tagged, add_bos):
    processor, conversation = llava(_template(stop, tagged=tagged), add_bos=add_bos), CONVERSATIONS[name]
    sample = Encoder(processor).encode(conversation, {})
    labels = sample["labels"].tolist()
    placeholder = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert placeholder not in labels
    expected = _expected(processor, conversation, stop)
    if tagged and stop == WITHOUT_STOP:  # the tags hold the blank after the answer too
        blanks = np.flatnonzero(np.asarray(labels) != np.asarray(expected))
        assert {processor.tokenizer.decode([sample["input_ids"][i]])[0] for i in blanks} <= {" "}
    else:
        assert labels == expected


def test_text_that_is_not_in_the_ids_is_a_bad_sample():
    encoder = Encoder(llava(_template(WITHOUT_STOP)))
    conversation = CONVERSATIONS["two turns"]
    rendered, _ = encoder.render(conversation)
    ids = encoder.encode(conversation, {})["input_ids"]
    is_image = ids == encoder.processor.tokenizer.convert_tokens_to_ids("<image>")
    last = int(is_image.nonzero()[-1])
    emptied = torch.cat([ids[:last][is_image[:last]], ids[last:]])  # no text between the images
    with pytest.raises(BadSampleError, match="Text after a medium was not found in the ids") as caught:
        encoder.label(conversation, rendered, emptied)
    assert caught.value.reason == "label_mismatch"


@pytest.mark.parametrize("family", FAMILIES)
def test_images_in_answers_are_no_labels_with_chat_tokens_either(family):
    processor = build_processor(family)
    conversation = [_user("Draw."), _answer(["Here: ", make_toy_image(200, 300, 0), "done"])]
    sample = Encoder(processor).encode(conversation, {})
    ids, labels = sample["input_ids"], sample["labels"]
    is_image = ids == ids.mode().values  # nothing is as frequent as the token that is repeated for embeddings
    assert int(is_image.sum()) > 40
    searched = build_labels_from_template(ids[None], [conversation], processor)[0]
    for made in (labels, searched):
        assert bool((made[is_image] == IGNORE).all())
    learned = processor.tokenizer.decode(labels[labels != IGNORE])
    assert learned.startswith("Here: ")
    assert "done" in learned
    assert "Draw" not in learned

"""Every known form is told from its records, maps as explicit columns and tags would, and says so in a line."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream.commands.arguments import parse_mapping
from vlm_stream.conversation import iter_media
from vlm_stream.errors import BadSampleError, SourceError
from vlm_stream.sources import ShareGptForm, convert_sharegpt_to_conversation, map_sharegpt, open_source, recognise

if TYPE_CHECKING:
    from pathlib import Path

FROM = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}


def said(*texts: str, role: str = "role", content: str = "content", names: tuple[str, str] = ("user", "assistant")):
    return [{role: names[i % 2], content: text} for i, text in enumerate(texts)]


def llava(*texts: str) -> list[dict[str, str]]:
    return said(*texts, role="from", content="value", names=("human", "gpt"))


def parts(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*items, {"type": "text", "text": "q"}]}, {"role": "assistant", "content": "a"}]


PICTURE = {"bytes": b"picture", "path": None}
Q, A = {"type": "text", "text": "q"}, {"type": "text", "text": "a"}
IMAGE = {"type": "image", "image": "1.jpg"}

# record -> line, the user's items, and what columns and tags would say
KNOWN: dict[str, tuple[dict[str, Any], str, list[Any], dict[str, str], dict[str, str]]] = {
    "llava": (
        {"id": "x", "image": "1.jpg", "conversations": llava("<image>\nq", "a")},
        "LLaVA conversations, images in 'image'",
        [IMAGE, Q],
        {"messages": "conversations", "images": "image"},
        FROM,
    ),
    "llava video": (
        {"video": "1.mp4", "conversations": llava("<video>\nq", "a")},
        "LLaVA conversations, videos in 'video'",
        [{"type": "video", "video": "1.mp4"}, Q],
        {"messages": "conversations", "videos": "video"},
        FROM,
    ),
    "sharegpt": (
        {"conversations": llava("q", "a")},
        "ShareGPT conversations",
        [Q],
        {"messages": "conversations"},
        FROM,
    ),
    "sharegpt with other words": (
        {"conversations": said("q", "a", role="from", content="value", names=("User", "model"))},
        "ShareGPT conversations",
        [Q],
        {"messages": "conversations"},
        {**FROM, "user_tag": "User", "assistant_tag": "model"},
    ),
    "sharegpt messages": (
        {"messages": said("<image>q", "a"), "images": ["1.jpg"]},
        "chat messages, images in 'images'",
        [IMAGE, Q],
        {},
        {},
    ),
    "internvl": (
        {"id": 0, "image": ["1.jpg"], "width_list": [4], "height_list": [4], "conversations": llava("<image>\nq", "a")},
        "InternVL conversations, images in 'image'",
        [IMAGE, Q],
        {"messages": "conversations", "images": "image"},
        FROM,
    ),
    "openai": (
        {"messages": parts({"type": "image_url", "image_url": {"url": "1.jpg"}})},
        "OpenAI messages, images in content parts",
        [IMAGE, Q],
        {},
        {},
    ),
    "openai audio": (
        {"messages": parts({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}})},
        "OpenAI messages, audios in content parts",
        [{"type": "audio", "audio": "data:audio/mp3;base64,AAAA"}, Q],
        {},
        {},
    ),
    "qwen": (
        {"messages": parts({"type": "image", "image": "1.jpg"}, {"type": "video", "video": ["1.jpg", "2.jpg"]})},
        "Qwen messages, images in content parts, videos in content parts",
        [IMAGE, {"type": "video", "video": ["1.jpg", "2.jpg"]}, Q],
        {},
        {},
    ),
    "hf chat": (
        {"messages": parts({"type": "image", "text": None}), "images": [PICTURE]},
        "chat messages, images in 'images'",
        [{"type": "image", "image": b"picture"}, Q],
        {},
        {},
    ),
    "cauldron": (
        {"images": [PICTURE], "texts": [{"user": "q", "assistant": "a", "source": "x"}]},
        "Cauldron texts, images in 'images'",
        [{"type": "image", "image": b"picture"}, Q],
        {"texts": "texts"},
        {},
    ),
    "prompt": (
        {"prompt": "q", "completion": "a"},
        "prompt and completion, prompt in 'prompt', completion in 'completion'",
        [Q],
        {"prompt": "prompt", "completion": "completion"},
        {},
    ),
    "alpaca": (
        {"instruction": "do", "input": "this", "output": "a", "text": "do this a"},
        "instruction and output, prompt in 'instruction', completion in 'output'",
        [{"type": "text", "text": "do\nthis"}],
        {"prompt": "instruction", "completion": "output", "input": "input"},
        {},
    ),
    "vqa": (
        {"image": PICTURE, "question": "q", "answer": "a"},
        "question and answer, prompt in 'question', completion in 'answer', images in 'image'",
        [{"type": "image", "image": b"picture"}, Q],
        {"prompt": "question", "completion": "answer", "images": "image"},
        {},
    ),
    "text": ({"text": "a"}, "plain text in 'text'", [{"type": "text", "text": ""}], {"text": "text"}, {}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_forms(name: str):
    record, line, user, columns, tags = KNOWN[name]
    found = recognise([record])
    assert found is not None
    assert found.line == line
    conversation, mismatches = map_sharegpt(record, found.form)
    assert not mismatches
    assert conversation == [{"role": "user", "content": user}, {"role": "assistant", "content": [A]}]
    explicit = ShareGptForm.from_dicts(columns, tags, media_first=found.form.media_first)
    assert map_sharegpt(record, explicit) == (conversation, [])


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


@st.composite
def llava_records(draw: st.DrawFn) -> dict[str, Any]:
    turns = draw(st.lists(st.tuples(texts, texts, st.integers(0, 2)), min_size=1, max_size=3))
    num = sum(images for _, _, images in turns)
    return {
        "conversations": [turn for q, a, n in turns for turn in llava("<image>" * n + q, a)],
        **({"image": [f"{i}.jpg" for i in range(num)]} if num else {}),
    }


@st.composite
def pair_records(draw: st.DrawFn) -> dict[str, Any]:
    images = [f"{i}.jpg" for i in range(draw(st.integers(0, 2)))]
    return {"question": draw(texts), "answer": draw(texts), "image": images or None}


@st.composite
def chat_records(draw: st.DrawFn) -> dict[str, Any]:
    content = st.lists(
        st.builds(lambda text: {"type": "text", "text": text}, texts) | st.just({"type": "image"}), max_size=4
    )
    user, answer = draw(content | texts), draw(texts)
    num = user.count({"type": "image"}) if isinstance(user, list) else user.lower().count("<image>")
    return {"messages": said(user, answer), "images": [f"{i}.jpg" for i in range(num)]}  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    st.one_of(
        st.tuples(
            st.lists(llava_records(), min_size=1, max_size=4),
            st.just(({"messages": "conversations", "images": "image"}, FROM)),
        ),
        st.tuples(st.lists(chat_records(), min_size=1, max_size=4), st.just(({}, {}))),
        st.tuples(
            st.lists(pair_records(), min_size=1, max_size=4),
            st.just(({"prompt": "question", "completion": "answer", "images": "image"}, {})),
        ),
    )
)
def test_what_is_recognised_maps_as_what_is_said(drawn: tuple[list[Any], tuple[dict[str, str], dict[str, str]]]):
    records, (columns, tags) = drawn
    found = recognise(records)
    assert found is not None
    explicit = ShareGptForm.from_dicts(columns, tags, media_first=found.form.media_first)
    for record in records:
        assert map_sharegpt(record, found.form) == map_sharegpt(record, explicit)
        assert not map_sharegpt(record, explicit)[1]
        shown = list(iter_media(map_sharegpt(record, explicit)[0]))
        assert len(shown) == len(record.get(explicit.images) or ())


def test_what_the_user_says_wins():
    record = {"dialog": llava("<image>q", "a"), "photo": "1.jpg", "image": "thumb.jpg"}
    found = recognise([record], {"messages": "dialog", "images": "photo"})
    assert found is not None
    assert found.line == "LLaVA conversations in 'dialog', images in 'photo'"
    assert map_sharegpt(record, found.form)[0][0]["content"] == [IMAGE, Q]
    renamed = recognise(
        [{"conversations": said("q", "a", role="from", content="value", names=("me", "you"))}],
        None,
        {"user_tag": "me", "assistant_tag": "you"},
    )
    assert renamed is not None
    assert renamed.form.roles["me"] == "user"
    assert renamed.form.content_tag == "value"


TWO_OR_NONE = [
    (
        {"messages": said("q", "a"), "prompt": "q", "completion": "a"},
        r"fit 2 forms \(chat messages, prompt and completion\)",
    ),
    (
        {"prompt": "q", "completion": "a", "response": "b"},
        r"fit 2 forms .* the keys completion, prompt, response\. Choose with",
    ),
    (
        {"image": "1.jpg", "images": ["2.jpg"], "messages": said("<image>q", "a")},
        r"images are in 'images' and 'image', and one column",
    ),
    (
        {"dialog": [{"who": "me", "says": "hello you"}, {"who": "bot", "says": "hi there"}]},
        r"the keys dialog, which is no known form",
    ),
    ({"frage": "q", "antwort": "a"}, r"the keys antwort, frage, which is no known form"),
    ({"body": "a long text", "n": 1}, r"no known form.* --columns text=body"),
]


@pytest.mark.parametrize(("record", "sentence"), TWO_OR_NONE)
def test_two_forms_or_none(tmp_path: Path, record: dict[str, Any], sentence: str):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(SourceError, match=rf"a\.jsonl: .*{sentence}") as caught:
        open_source(str(path))
    # the flags that it names do
    for flags in re.findall(r"(--columns [^ ]+(?: --tags [^ ]+)?)", str(caught.value)):
        words = [word.rstrip(".") for word in shlex.split(flags)]
        options = dict(zip(words[::2], words[1::2], strict=True))
        source = open_source(
            str(path), columns=parse_mapping(options["--columns"]), tags=parse_mapping(options.get("--tags"))
        )
        assert source.read(0).conversation[-1]["role"] == "assistant"


def test_nothing_to_tell_by():
    assert recognise([]) is None
    assert recognise([3, "x"]) is None
    assert recognise([{"messages": []}]) is None
    with pytest.raises(SourceError, match="No column holds turns or text"):
        recognise([{"n": 1}])


def test_placeholders_without_media_are_text():
    html = {"messages": said("Use <video> or <audio> here, <image> there", "ok")}
    assert convert_sharegpt_to_conversation(html)["conversation"][0]["content"] == [
        {"type": "text", "text": "Use <video> or <audio> here, <image> there"}
    ]
    mixed = {"messages": said("<image> a <video> b", "ok"), "images": ["1.jpg"]}
    assert convert_sharegpt_to_conversation(mixed)["conversation"][0]["content"] == [
        IMAGE,
        {"type": "text", "text": "a <video> b"},
    ]
    few = {"messages": said("<image><image>", "ok"), "images": ["1.jpg"]}
    with pytest.raises(BadSampleError, match="number 2, but 'images' has 1"):
        convert_sharegpt_to_conversation(few)
    unread = {"messages": said("<image>q", "a"), "image": "1.jpg"}
    with pytest.raises(BadSampleError, match=r"nothing reads 'image' \(add --columns images=image\)"):
        convert_sharegpt_to_conversation(unread)


def test_turns_that_are_not_learned():
    turns = [{"role": "user", "content": "q", "weight": None}, {"role": "assistant", "content": "a", "weight": 0}]
    turns += [{"role": "assistant", "content": "b", "train": False}, {"role": "assistant", "content": "c", "weight": 1}]
    conversation = convert_sharegpt_to_conversation({"messages": turns})["conversation"]
    assert [(m.get("weight"), m.get("train")) for m in conversation] == [
        (None, None),
        (0, None),
        (None, False),
        (1, None),
    ]
    with pytest.raises(BadSampleError, match=r"turn 1 \(user\) has 0\.5 for 'weight', which is 0 or 1"):
        convert_sharegpt_to_conversation({"messages": [{"role": "user", "content": "q", "weight": 0.5}]})


def test_media_that_nothing_shows():
    record = {
        "image": ["1.jpg", "2.jpg"],
        "width_list": [1, 1],
        "height_list": [1, 1],
        "conversations": llava("q", "a"),
    }
    found = recognise([record])
    assert found is not None
    assert map_sharegpt(record, found.form)[0][0]["content"] == [IMAGE, {"type": "image", "image": "2.jpg"}, Q]
    plain = recognise([{"image": "1.jpg", "conversations": llava("q", "a")}])
    assert plain is not None
    assert [m.reason for m in map_sharegpt({"image": "1.jpg", "conversations": llava("q", "a")}, plain.form)[1]] == [
        "surplus_media"
    ]


def test_parts_name_their_media():
    index = [
        {"type": "image", "index": 1, "text": None},
        {"type": "text", "text": "q", "index": None},
        {"image": "own.jpg"},
    ]
    record = {"messages": [{"role": "user", "content": index}], "images": ["0.jpg", "1.jpg"]}
    items = map_sharegpt(record, ShareGptForm())[0][0]["content"]
    assert items == [IMAGE, Q, {"type": "image", "image": "own.jpg"}]


def test_turns_as_json_text_and_as_columns():
    for turns in (json.dumps(said("q", "a")), {"role": ["user", "assistant"], "content": ["q", "a"]}):
        found = recognise([{"messages": turns}])
        assert found is not None
        assert map_sharegpt({"messages": turns}, found.form)[0][1]["content"] == [A]

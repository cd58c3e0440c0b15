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
    "llava-video": (
        {"video": "1.mp4", "data_source": "x", "conversations": llava("<image>\nq", "a")},
        "LLaVA conversations, videos in 'video'",
        [{"type": "video", "video": "1.mp4"}, Q],
        {"messages": "conversations", "videos": "video"},
        FROM,
    ),
    "qwen-vl": (
        {"id": "0", "conversations": said("Picture 1: <img>1.jpg</img>\nq", "a", role="from", content="value")},
        "ShareGPT conversations, images in the text",
        [{"type": "text", "text": "Picture 1:"}, IMAGE, Q],
        {"messages": "conversations"},
        {**FROM, "user_tag": "user", "assistant_tag": "assistant"},
    ),
    "qwen-audio": (
        {"conversations": said("Audio 1:<audio>1.wav</audio>q", "a", role="from", content="value")},
        "ShareGPT conversations, audios in the text",
        [{"type": "text", "text": "Audio 1:"}, {"type": "audio", "audio": "1.wav"}, Q],
        {"messages": "conversations"},
        {**FROM, "user_tag": "user", "assistant_tag": "assistant"},
    ),
    "captions": (
        {"image": "1.jpg", "caption": "a", "alt": "b"},
        "captions in 'caption', images in 'image'",
        [IMAGE],
        {"text": "caption", "images": "image"},
        {},
    ),
    "pixmo": (
        {"image_url": "https://x/1.jpg", "caption": "a", "transcripts": ["b"]},
        "captions in 'caption', images in 'image_url'",
        [{"type": "image", "image": "https://x/1.jpg"}],
        {"text": "caption", "images": "image_url"},
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


@pytest.mark.parametrize("column", ["conversation", "conversations"])
def test_pairs_of_turns_are_a_question_and_its_answer_each(column: str):
    record = {"image": "1.jpg", column: [{"human": "q", "assistant": "a"}, {"human": "r", "assistant": "b"}]}
    found = recognise([record])
    assert found is not None
    assert found.line == "pairs of turns, images in 'image'"
    told = [(m["role"], m["content"]) for m in map_sharegpt(record, found.form)[0]]
    more = [("user", [{"type": "text", "text": "r"}]), ("assistant", [{"type": "text", "text": "b"}])]
    assert told == [("user", [IMAGE, Q]), ("assistant", [A]), *more]


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
    (
        {"dialog": [{"q": "one", "a": "two"}, {"q": "three", "a": "four"}]},
        r"no known form.* --columns texts=dialog --tags user_tag=q,assistant_tag=a\.",
    ),
    (
        {"dialog": [{"who": "me", "says": "yes"}, {"who": "you", "says": "no, it is not"}] * 2},
        r"no known form.* messages=dialog --tags role_tag=who,content_tag=says,user_tag=me,assistant_tag=you\.",
    ),
    ({"dialog": [{"x": "what is it?", "y": "yes"}]}, "No column holds turns or text"),
    (
        {"dialog": [{"answer": "two", "question": "is it one?"}]},
        r"no known form.* --columns texts=dialog --tags user_tag=question,assistant_tag=answer\.",
    ),
    (
        {"dialog": [{"system": "s", "input": "q", "output": "a"}]},
        r"the keys dialog, which is no known form.*No column holds turns or text",
    ),
    (
        {"question_id": 1, "question": "what?", "answers": ["a", "b"]},
        r"no known form.* 'question' asks, and no column has its answer as a text",
    ),
    (
        {"question_type": "what is", "question": "what is it?", "multiple_choice_answer": "it", "answers": ["it"]},
        r"no known form.* --columns prompt=question,completion=multiple_choice_answer\.",
    ),
    ({"frage": "q", "antwort": "a"}, r"the keys antwort, frage, which is no known form"),
    ({"image": "1.jpg", "story": "a text", "img": None}, r"the keys image, img, story.* --columns text=story"),
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


def test_media_that_begin_after_the_first_records_are_not_lost(tmp_path: Path):
    path = tmp_path / "late.jsonl"
    records = [{"conversations": llava("q", "a")}] * 60 + [{"image": "1.jpg", "conversations": llava("q", "a")}]
    path.write_text("\n".join(map(json.dumps, records)))
    source = open_source(str(path))
    assert source.read(59).conversation[0]["content"] == [Q]
    with pytest.raises(
        BadSampleError, match=r"'image' has images, and nothing reads them \(add --columns images=image"
    ):
        source.read(60)
    thumbnails = {"messages": said("q", "a"), "photos": [], "image": "thumbnail.jpg"}
    assert map_sharegpt(thumbnails, ShareGptForm(images="photos"))[1] == []
    shown = {"messages": parts({"type": "image", "image": "1.jpg"}), "image": "1.jpg"}
    assert map_sharegpt(shown, ShareGptForm())[1] == []


def test_image_shows_a_video_only_where_nothing_else_can():
    both = {"conversations": llava("<image> in <video>", "a"), "video": "1.mp4"}
    found = recognise([both])
    assert found is not None
    assert map_sharegpt(both, found.form)[0][0]["content"] == [
        {"type": "text", "text": "<image> in"},
        {"type": "video", "video": "1.mp4"},
    ]
    tags = {"messages": said("<img>1.jpg</img><audio>is a tag</audio>", "a"), "audios": ["1.wav"]}
    assert map_sharegpt(tags, ShareGptForm())[0][0]["content"] == [
        IMAGE,
        {"type": "audio", "audio": "1.wav"},
        {"type": "text", "text": "is a tag</audio>"},
    ]


def test_earlier_pairs_come_before_the_question():
    record = {"query": "q", "response": "a", "system": "s", "history": [["q0", "a0"], ["q1", "a1"]]}
    found = recognise([record])
    assert found is not None
    told = [(m["role"], m["content"][0]["text"]) for m in map_sharegpt(record, found.form)[0]]
    asked = [
        ("user", "q0"),
        ("assistant", "a0"),
        ("user", "q1"),
        ("assistant", "a1"),
        ("user", "q"),
        ("assistant", "a"),
    ]
    assert told == [("system", "s"), *asked]
    assert len(map_sharegpt({"query": "q", "response": "a"}, found.form)[0]) == 2


def test_functions_that_the_model_would_not_see_are_named():
    calls = [{"role": "developer", "content": "s"}, {"role": "user", "content": "q"}]
    assert [m["role"] for m in map_sharegpt({"messages": calls}, ShareGptForm())[0]] == ["system", "user"]
    calls += [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    with pytest.raises(BadSampleError, match=r"turn 3 \(assistant\) has 'tool_calls', which nothing reads; write them"):
        convert_sharegpt_to_conversation({"messages": calls})
    tools = {"messages": said("q", "a"), "tools": '[{"name": "f"}]'}
    with pytest.raises(BadSampleError, match=r"'tools' has functions, and nothing shows them .*--columns system=tools"):
        convert_sharegpt_to_conversation(tools)
    read = convert_sharegpt_to_conversation(tools, columns={"system": "tools"})["conversation"]
    assert read[0] == {"role": "system", "content": [{"type": "text", "text": '[{"name": "f"}]'}]}
    odd = {"query": "q", "response": "a", "history": [["q0"]]}
    with pytest.raises(BadSampleError, match=r"'history' has \['q0'\], not a question and its answer"):
        convert_sharegpt_to_conversation(
            odd, columns={"prompt": "query", "completion": "response", "history": "history"}
        )


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

"""One example in, one conversation out, and a sentence for everything that does not map."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream.conversation import iter_media
from vlm_stream.errors import BadSampleError, ConfigError, SourceError
from vlm_stream.sources import ShareGptForm, convert_sharegpt_to_conversation
from vlm_stream.sources.sharegpt import map_sharegpt


def example(*contents: Any, **columns: Any) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)], **columns}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_text_only():
    assert convert_sharegpt_to_conversation(example(" hi ", " ho ")) == {
        "conversation": [
            {"role": "user", "content": [text("hi")]},
            {"role": "assistant", "content": [text(" ho ")]},  # answers are trained on as they are
        ]
    }


def test_media_are_taken_in_order_over_the_whole_example():
    sample = example(
        "<image>a<VIDEO>b<Image>", "seen", "<audio> and <image>", "heard",
        images=["1.jpg", "2.jpg", "/abs/3.jpg"], videos=["v.mp4"], audios=["s.wav"],
    )  # fmt: skip
    result = convert_sharegpt_to_conversation(sample, media_dir="m")
    assert result["conversation"][0]["content"] == [
        {"type": "image", "image": "m/1.jpg"},
        text("a"),
        {"type": "video", "video": "m/v.mp4"},
        text("b"),
        {"type": "image", "image": "m/2.jpg"},
    ]
    assert result["conversation"][2]["content"] == [
        {"type": "audio", "audio": "m/s.wav"},
        text("and"),
        {"type": "image", "image": "/abs/3.jpg"},
    ]


@pytest.mark.parametrize(
    ("media_dir", "path", "where"),
    [
        (None, "a.jpg", "a.jpg"),
        ("", "a.jpg", "a.jpg"),
        ("m", "/a.jpg", "/a.jpg"),
        ("s3://b/m", "a.jpg", "s3://b/m/a.jpg"),
        ("m", "https://h/a.jpg", "https://h/a.jpg"),
        ("m", "data:image/png;base64,AAAA", "data:image/png;base64,AAAA"),
        ("m", "env.lmdb::key", "m/env.lmdb::key"),
    ],
)
def test_where_a_medium_lies(media_dir: str | None, path: str, where: str):
    result = convert_sharegpt_to_conversation(example("<image>", "x", images=[path]), media_dir=media_dir)
    assert result["conversation"][0]["content"] == [{"type": "image", "image": where}]


def test_extras_of_dict_entries_survive():
    clip = {"path": "v.mp4", "frame_indices": [0, 4], "fps": 2.0}
    result = convert_sharegpt_to_conversation(example("<video>", "x", videos=[clip]), media_dir="m")
    assert result["conversation"][0]["content"] == [
        {"type": "video", "video": "m/v.mp4", "frame_indices": [0, 4], "fps": 2.0}
    ]
    assert clip["path"] == "v.mp4"


@pytest.mark.parametrize("entry", [["a.jpg", "/b.jpg"], {"path": ["a.jpg", "/b.jpg"]}])
def test_frame_lists_are_joined_to_media_dir(entry: Any):
    result = convert_sharegpt_to_conversation(example("<video>", "x", videos=[entry]), media_dir="m")
    assert result["conversation"][0]["content"] == [{"type": "video", "video": ["m/a.jpg", "/b.jpg"]}]


@pytest.mark.parametrize("one", ["abc.jpg", {"path": "abc.jpg"}])
def test_one_medium_outside_a_list_is_one_medium(one: Any):
    result = convert_sharegpt_to_conversation(example("<image>", "x", images=one))
    assert result["conversation"][0]["content"] == [{"type": "image", "image": "abc.jpg"}]


@pytest.mark.parametrize("nothing", [None, "", []])
def test_no_media(nothing: Any):
    result = convert_sharegpt_to_conversation(example("hi", "ho", images=nothing, videos=nothing, audios=nothing))
    assert not list(iter_media(result["conversation"]))


def test_columns_and_tags():
    sample = {
        "conversations": [
            {"from": "sys", "value": "<image> stays text"},
            {"from": "human", "value": "<image>q"},
            {"from": "call", "value": "f()"},
            {"from": "observation", "value": "42"},
            {"from": "gpt", "value": "a"},
            {"from": "gpt", "value": "b"},
        ],
        "pics": ["1.jpg"],
    }
    result = convert_sharegpt_to_conversation(
        sample,
        columns={"messages": "conversations", "images": "pics"},
        tags={
            "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
            "system_tag": "sys", "function_tag": "call", "tool_tag": "observation",
        },
    )  # fmt: skip
    roles = [message["role"] for message in result["conversation"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "assistant"]
    assert result["conversation"][0]["content"] == [text("<image> stays text")]


def test_passengers_are_the_same_objects_and_nothing_else_survives():
    meta = {"images_meta": [[1, 2]]}
    result = convert_sharegpt_to_conversation(
        {**example("a", "b"), "mm_inputs_meta": meta, "_text_tokens": None, "z": 1}
    )
    assert result.keys() == {"conversation", "mm_inputs_meta", "_text_tokens"}
    assert result["mm_inputs_meta"] is meta


def test_an_empty_user_turn_keeps_one_empty_text():
    assert convert_sharegpt_to_conversation(example("  ", "b"))["conversation"][0]["content"] == [text("")]


def test_typed_parts():
    parts = [{"type": "text", "text": " q "}, {"type": "image"}, {"type": "image", "image": "own.jpg", "detail": "low"}]
    result = convert_sharegpt_to_conversation(
        example(parts, [{"type": "text", "text": "a"}], images=["1.jpg"]), media_dir="m"
    )
    assert result["conversation"][0]["content"] == [
        text(" q "),
        {"type": "image", "image": "m/1.jpg"},
        {"type": "image", "image": "m/own.jpg", "detail": "low"},
    ]


BAD = {
    "surplus_placeholder": (
        example("<image><image>q", "a", images=["1.jpg"]),
        r"turn 1 \(user\) shows <image> number 2, but 'images' has 1\. The sample is left out; mend it, or keep what "
        r"does map with --on-mismatch keep",
    ),
    "surplus_media": (
        example("<image>q", "a", images=["1.jpg", "2.jpg"]),
        r"'images' has 2, but the user turns show <image> 1 times",
    ),
    "unmapped_role": (
        {"messages": [{"role": "user", "content": "q"}, {"role": "tool", "content": "t"}]},
        r"turn 2 has the role 'tool'; mapped are assistant, developer, system, user",
    ),
    "no_role": (
        {"messages": [{"from": "user", "content": "q"}, {"role": "user", "content": "q"}]},
        r"turn 1 has no 'role' \(keys: content, from\)",
    ),
    "null_content": (example("q", None), r"turn 2 \(assistant\) has no 'content'"),
    "content_not_text": (example("q", 7), r"turn 2 \(assistant\) has 7 for content, not text"),
    "unknown_part": (
        example([{"type": "text", "text": "q"}, {"type": "table"}], "a"),
        r"content part \{'type': 'table'\}",
    ),
    "turn_not_an_object": ({"messages": ["hi", {"role": "user", "content": "q"}]}, r"turn 1 is 'hi', not an object"),
    "media_not_a_list": (example("q", "a", images=5), r"column 'images' is 5, not a list of media"),
    "media_without_path": (
        example("<image>", "a", images=[{"url": "u"}]),
        r"'images' number 1 has no 'path' \(keys: url\)",
    ),
    "reserved_media_key": (
        example("<image>", "a", images=[{"path": "p", "type": "x"}]),
        r"'images' number 1 has the key 'type', which the media item itself needs",
    ),
    "media_not_a_path": (example("<image>", "a", images=[None]), r"'images' number 1 is null, not a path"),
    "bad_frame_list": (
        example("<video>", "a", videos=[["a.jpg", ""]]),
        r"'videos' number 1 is a list of frames that is",
    ),
}
HOPELESS = {
    "no_messages": ({"conversations": []}, r"column 'messages' is missing \(columns here: conversations\)"),
    "messages_not_a_list": ({"messages": "hi"}, r"'messages' is 'hi', not a list of turns"),
    "empty_conversation": ({"messages": []}, r"'messages' has no turns\. The sample is left out; mend it\."),
    "not_an_object": ([1, 2], r"the record is \[1, 2\], not a JSON object"),
}


@pytest.mark.parametrize("reason", [*BAD, *HOPELESS])
def test_drop_names_what_does_not_map(reason: str):
    sample, sentence = {**BAD, **HOPELESS}[reason]
    with pytest.raises(BadSampleError, match=sentence) as caught:
        convert_sharegpt_to_conversation(sample)
    assert (caught.value.stage, caught.value.reason) == ("convert", reason)


@pytest.mark.parametrize("reason", BAD)
def test_keep_keeps_what_maps_and_notes_the_rest(reason: str):
    result = convert_sharegpt_to_conversation(BAD[reason][0], on_mismatch="keep")
    assert result["conversation"]
    assert [note.partition(":")[0] for note in result["_mismatches"]] == [reason]


@pytest.mark.parametrize("reason", HOPELESS)
def test_keep_has_nothing_to_keep(reason: str):
    with pytest.raises(BadSampleError, match=HOPELESS[reason][1]):
        convert_sharegpt_to_conversation(HOPELESS[reason][0], on_mismatch="keep")


@pytest.mark.parametrize("reason", [*BAD, *HOPELESS])
def test_raise_ends_the_job(reason: str):
    with pytest.raises(SourceError, match=r"The job ends here, as on_mismatch='raise' asks"):
        convert_sharegpt_to_conversation({**BAD, **HOPELESS}[reason][0], on_mismatch="raise")


def test_keep_gives_what_the_reference_gives():
    """Surplus placeholders and media, and unmapped turns, go; everything around them stays."""
    sample = {
        "messages": [
            {"role": "user", "content": "a<image>b<image>"},
            {"role": "tool", "content": "t"},
            {"role": "assistant", "content": "c"},
        ],
        "images": ["1.jpg"],
        "videos": ["unused.mp4"],
    }
    assert convert_sharegpt_to_conversation(sample, on_mismatch="keep")["conversation"] == [
        {"role": "user", "content": [text("a"), {"type": "image", "image": "1.jpg"}, text("b")]},
        {"role": "assistant", "content": [text("c")]},
    ]


def test_unknown_options_get_the_nearest_name():
    with pytest.raises(SourceError, match=r"'image' is no key of 'columns'.*did you mean 'images'"):
        convert_sharegpt_to_conversation(example("a", "b"), columns={"image": "x"})
    with pytest.raises(SourceError, match=r"'usr_tag' is no key of 'tags'.*did you mean 'user_tag'"):
        convert_sharegpt_to_conversation(example("a", "b"), tags={"usr_tag": "x"})
    with pytest.raises(SourceError, match=r"'user_tag' in 'tags' is 3, so it names no field"):
        convert_sharegpt_to_conversation(example("a", "b"), tags={"user_tag": 3})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"on_mismatch is 'dorp'.*did you mean 'drop'"):
        convert_sharegpt_to_conversation(example("a", "b"), on_mismatch="dorp")  # type: ignore[arg-type]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["<image>", "user"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "path", "type", "image", "text", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["messages", "images", "videos", "audios", "x"]), json_values, max_size=5)
    | json_values
)
def test_any_json_value_maps_or_is_named(value: Any):
    conversation, mismatches = map_sharegpt(value, ShareGptForm(media_dir="m"))
    assert conversation or mismatches
    for message in conversation:
        assert message["role"] in ("user", "assistant", "system")
        assert message["content"]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["<image>", "<video>", "<audio>", "word"]), max_size=5), min_size=1, max_size=4)
)
def test_every_medium_is_shown_once_in_order(turns: list[list[str]]):
    counts = {medium: sum(t.count(f"<{medium}>") for t in turns) for medium in ("image", "video", "audio")}
    media = {f"{medium}s": [f"{medium}{i}" for i in range(num)] for medium, num in counts.items()}
    sample = {"messages": [{"role": "user", "content": " ".join(t)} for t in turns], **media}
    shown = list(iter_media(convert_sharegpt_to_conversation(sample)["conversation"]))
    for medium, num in counts.items():
        assert [item[medium] for item in shown if item["type"] == medium] == [f"{medium}{i}" for i in range(num)]

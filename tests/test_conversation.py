"""What is not a conversation is refused where it stands, with its turn."""

import json

import numpy as np
import pytest

from vlm_stream.conversation import check_conversation, frame_rate, named_frames
from vlm_stream.errors import BadSampleError
from vlm_stream.format import FieldMap, to_conversation


@pytest.mark.parametrize(
    ("conversation", "reason", "sentence"),
    [
        ("hello", "no_messages", "the conversation is text, not a list of turns"),
        ([{"content": "a"}, None], "turn_not_an_object", "turn 2 is null, not an object"),
        ([{"role": ["user"], "content": "a"}], "bad_role", "turn 1 has a list for a role, not text"),
        ([{"role": "user"}], "content_not_text", "turn 1 has null for content, not text or a list"),
        ([{"role": "user", "content": 5}], "content_not_text", "turn 1 has a number for content"),
        ([{"role": "user", "content": ["a"]}], "item_not_an_object", "turn 1 has text among its content"),
        ([{"role": "user", "content": [{"type": "text", "text": True}]}], "content_not_text", "holds true or false"),
        (
            [{"role": "user", "content": "half \ud800"}],
            "lone_surrogate",
            "turn 1 has half of a surrogate pair.*position 5",
        ),
    ],
)
def test_what_has_no_form_is_refused(conversation, reason, sentence):
    with pytest.raises(BadSampleError, match=sentence) as caught:
        check_conversation(conversation)
    assert caught.value.reason == reason


def test_what_has_the_form_passes():
    items = [{"type": "text", "text": "Größe 🙂"}, {"type": "image", "image": "0.jpg"}, {"type": "other"}, {}]
    check_conversation([{"role": "user", "content": items}, {"content": "ja", "train": False}])


@pytest.mark.parametrize("fps", ["30", -1, True, False, [30], {}, float("nan"), float("inf"), 10**400, "", "nan"])
def test_what_is_no_rate_is_refused(fps):
    with pytest.raises(BadSampleError, match=r"the fps of a list of frames is .+, not a rate; write a positive number"):
        frame_rate({"fps": fps})


def test_rates_are_numbers():
    assert frame_rate({"fps": 30}) == 30.0
    assert frame_rate({"fps": np.float32(0.5)}) == 0.5
    assert frame_rate({}) is frame_rate({"fps": None}) is frame_rate({"fps": 0}) is None


@pytest.mark.parametrize("indices", ["0,1", 3, [], [0.5], [True], [None], [[0]], [2**31], {"0": 1}])
def test_what_are_no_frame_numbers_is_refused(indices):
    with pytest.raises(BadSampleError, match=r"frame_indices are .+, not frame numbers"):
        named_frames({"frame_indices": indices})


def test_frame_numbers_are_whole():
    assert named_frames({"frame_indices": [0, -1, 2**31 - 1]}) == [0, -1, 2**31 - 1]
    assert named_frames({"frame_indices": np.arange(3)}) == [0, 1, 2]
    assert named_frames({}) is None


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ({"type": "image", "image": ["0.jpg"]}, "one image item names a list; give each its own item"),
        ({"type": "video", "video": []}, "a list of frames is empty or has an entry that is no name"),
        ({"type": "video", "video": [["0.jpg"]]}, "a list of frames is empty or has an entry that is no name"),
        ({"type": "video", "video": ["0.jpg", "x" * 999]}, "the frame 'x{200}' is not in the tar"),
    ],
)
def test_lists_of_frames_name_members(item, sentence):
    data = json.dumps({"conversation": [{"role": "user", "content": [item]}]}).encode()
    with pytest.raises(BadSampleError, match=sentence):
        to_conversation(FieldMap(), ["json", "0.jpg"], {"json": data})


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"{", r"the sample's .json is not JSON \(JSONDecodeError: Expecting"),
        (b"[" * 100_000, "the sample's .json is nested too deeply to be read"),
        (b"[]", "the sample's .json is not a JSON object"),
        (b'{"conversation": []}', "the sample's .json has no list of turns in 'conversation'"),
    ],
)
def test_json_that_is_none_is_refused(data, sentence):
    with pytest.raises(BadSampleError, match=sentence):
        to_conversation(FieldMap(), ["json"], {"json": data})

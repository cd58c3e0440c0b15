"""The state of a run: one text, the same shape always; every alteration is refused with a sentence."""

from __future__ import annotations

import copy
import io
import json
import random
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream import StreamLoader, VLMStream
from vlm_stream.errors import StateError
from vlm_stream.state import STATE_KEY, RunState, _checksum

OPTIONS = {"pack_size": 1024, "micro_batches": 2, "batch_size": 2, "horizon": 2, "window": 16}


@pytest.fixture(scope="module")
def loader(toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, **OPTIONS)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    len(loader)
    return loader


@pytest.fixture(scope="module")
def text(loader):
    return loader.state_dict()[STATE_KEY]


def alterations_of(value):
    """Yield a JSON value with one thing in it changed: a number, a text, an entry more, an entry less."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield {k: v for k, v in value.items() if k != key}
            yield {f"{k}x" if k == key else k: v for k, v in value.items()}
            for changed in alterations_of(inner):
                yield value | {key: changed}
        yield value | {"more": 1}
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield value[:number] + value[number + 1 :]
            yield [*value[:number], inner, *value[number:]]
            for changed in alterations_of(inner):
                yield [*value[:number], changed, *value[number + 1 :]]
    others = [None, True, -1, 0, 1, 1.5, 2**31, 2**62, 2**200, "", "x", "AAAA", [], {}, [[]], float("inf")]
    if isinstance(value, int | float) and not isinstance(value, bool):
        others += [value + 1, value - 1, value * 2, str(value)]
    if isinstance(value, str):
        others += [value[:-1], value + "=", value.swapcase(), value * 1000]
    yield from (other for other in others if other != value or type(other) is not type(value))


def sealed(body):
    return f'{{"checksum":"{_checksum(body)}","state":{body}}}'


def test_a_new_loader_and_a_used_one_have_states_of_one_shape(loader, toy_shards, processor):
    new = StreamLoader(toy_shards, processor=processor, **OPTIONS).state_dict()
    used = loader.state_dict()
    assert list(new) == list(used) == [STATE_KEY]
    assert all(isinstance(state[STATE_KEY], str) for state in (new, used))
    StreamLoader(toy_shards, processor=processor, **OPTIONS).load_state_dict(new)


def test_torch_saves_it_as_weights(loader, toy_shards, processor):
    file = io.BytesIO()
    torch.save({"data": loader.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)["data"]
    resumed = StreamLoader(toy_shards, processor=processor, **OPTIONS)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == loader.state_dict()


def test_every_altered_text_is_refused(text, toy_shards, processor):
    fresh = StreamLoader(toy_shards, processor=processor, **OPTIONS)
    rng = random.Random(0)
    altered = [text[:at] + text[at + 1 :] for at in range(len(text))]
    altered += [text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :] for at in range(len(text))]
    altered += [text[:at] + rng.choice(' 0"}') + text[at:] for at in range(len(text))]
    altered += [text + " ", " " + text, "", "{}", text * 2]
    values = json.loads(text)
    for body in alterations_of(values["state"]):
        altered.append(json.dumps(values | {"state": body}, separators=(",", ":")))
    for state in altered:
        with pytest.raises(StateError, match="the state is damaged"):
            fresh.load_state_dict({STATE_KEY: state})
    sys.stdout.write(f"\n{len(altered)} altered states, all refused\n")


def test_forged_checksums_end_in_a_sentence_or_in_a_place(text, toy_shards, processor):
    """A checksum keeps out accidents; behind a right one, types and sizes are checked, and nothing else is raised."""
    body = json.loads(text)["state"]
    counts = {"refused": 0, "accepted": 0}
    for changed in alterations_of(body):
        loader = StreamLoader(toy_shards, processor=processor, **OPTIONS)
        try:
            loader.load_state_dict({STATE_KEY: sealed(json.dumps(changed))})
            if changed.get("plan") is not None:
                _plan(loader).start(changed["plan"])
        except StateError:
            counts["refused"] += 1
        else:
            counts["accepted"] += 1
    sys.stdout.write(f"\nstates with a forged checksum: {counts}\n")
    assert counts["refused"] > 500


def _plan(loader):
    return loader.stream.plan().planner


@settings(max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_anything_else_is_refused(value):
    for state in (value, {STATE_KEY: value}, {STATE_KEY: json.dumps(value)}, {STATE_KEY: sealed(json.dumps(value))}):
        with pytest.raises(StateError):
            RunState.from_dict(state)


def test_a_bomb_in_the_state_is_refused(text):
    body = json.loads(text)["state"]
    bomb = copy.deepcopy(body)
    bomb["plan"]["carry"][0] = [[1 << 20]]
    with pytest.raises(StateError, match="do not have the size that they name"):
        RunState.from_dict({STATE_KEY: sealed(json.dumps(bomb))})
    with pytest.raises(StateError, match="damaged"):
        RunState.from_dict({STATE_KEY: sealed("[" * 100_000)})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rounds": 10**6}, "its rounds are 1000000, and its plan has come to the end of 1 at most"),
        ({"rounds": 2**40}, "its rounds are 1099511627776"),
        ({"plan": None, "rounds": 1}, "come to the end of 0 at most"),
        ({"plan": None}, "its batches are 3"),
        ({"done": 2**26}, "the plan has no such units there"),
        ({"done": 2**62}, "done is 4611686018427387904"),
        ({"done": 500}, "the plan has no such units there"),
        ({"planned": 2**60}, "planned is 1152921504606846976"),
        ({"planned": 0, "done": 1}, "the plan has no such units there"),
    ],
)
def test_a_forged_place_that_the_plan_does_not_have_is_refused(
    text, toy_shards, processor, change: dict, sentence: str
) -> None:
    """Not by planning for hours, and not by delivering nothing."""
    body = json.loads(text)["state"]
    body["plan"].pop("done_beyond", None)
    for name, value in change.items():
        (body if name in body or name == "rounds" else body["plan"])[name] = value
    loader = StreamLoader(toy_shards, processor=processor, **OPTIONS)

    def go_on() -> None:
        loader.load_state_dict({STATE_KEY: sealed(json.dumps(body))})
        next(_plan(loader).steps(loader.options.shape(1), body["plan"]))

    with pytest.raises(StateError, match=sentence):
        go_on()


def test_another_tokenizer_or_template_is_refused(loader, toy_shards, processor):
    state = loader.state_dict()
    other = copy.deepcopy(processor)
    other.chat_template = processor.chat_template.replace("assistant", "Assistant")
    resumed = StreamLoader(toy_shards, processor=other, **OPTIONS)
    resumed.load_state_dict(state)
    with pytest.raises(StateError, match="another tokenizer or chat template"):
        next(iter(resumed))
    allowed = StreamLoader(toy_shards, processor=other, allow=("tokenizer",), **OPTIONS)
    allowed.load_state_dict(state)
    assert next(iter(allowed))


def test_another_vocabulary_is_refused(loader, toy_shards, processor):
    other = copy.deepcopy(processor)
    other.tokenizer.add_tokens(["<|one_more|>"])
    resumed = StreamLoader(toy_shards, processor=other, **OPTIONS)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="another tokenizer or chat template"):
        next(iter(resumed))


def test_the_states_of_streams_and_loaders_are_told_apart(loader, toy_shards, processor):
    stream = VLMStream(toy_shards, processor=processor, **OPTIONS)
    with pytest.raises(StateError, match="this is the state of a StreamLoader"):
        stream.load_state_dict(loader.state_dict())
    next(iter(stream))
    fresh = StreamLoader(toy_shards, processor=processor, **OPTIONS)
    with pytest.raises(StateError, match="this is the state of one worker of a VLMStream"):
        fresh.load_state_dict(stream.state_dict())


def test_a_state_some_batches_ago(toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, **OPTIONS)
    states = [loader.state_dict()]
    for _ in loader:
        states.append(loader.state_dict())
        for ago, state in enumerate(reversed(states)):
            assert loader.state_dict(ago=ago) == state
    ended = loader.state_dict()
    assert json.loads(ended[STATE_KEY])["state"]["rounds"] == 1
    assert loader.state_dict(ago=1) == states[-2]  # the last batch was taken and not trained on
    with pytest.raises(StateError, match="ago is not kept"):
        loader.state_dict(ago=1000)

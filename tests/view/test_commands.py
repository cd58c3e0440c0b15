"""`vlm-stream view` and `vlm-stream show`, as people call them."""

import json
import subprocess
import sys
import urllib.request

import pytest
import torch

from tests.view.conftest import EVIL
from vlm_stream import StreamLoader
from vlm_stream.cli import main
from vlm_stream.errors import clean
from vlm_stream.ledger import BadSample


def call(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_show_prints_a_sample_and_writes_it_as_one_file(capsys, mixed_shards, saved_processor, tmp_path):
    given = [mixed_shards, "--processor", saved_processor, "--key", "caption-3"]
    code, out, _ = call(capsys, "show", *given, "--images", "blocks")
    assert code == 0
    for words in ("user", "assistant (learned)", "<|im_start|>", "media tokens", "members: json", "▀"):
        assert words in out
    code, out, _ = call(capsys, "show", *given, "--images", "kitty")
    assert "\033_Gf=100,a=T" in out
    code, out, _ = call(capsys, "show", *given, "--images", "iterm")
    assert "\033]1337;File=inline=1" in out
    page = tmp_path / "sample.html"
    code, out, _ = call(capsys, "show", *given, "--html", page)
    text = page.read_text()
    assert "data:image/jpeg;base64," in text
    assert "<script" not in text
    assert 'http-equiv="Content-Security-Policy"' in text


def test_show_prints_what_where_names(capsys, mixed_shards, saved_processor, tmp_path):
    given = [mixed_shards, "--pack-size", 1024, "--world", 2, "--step", 3, "--rank", 1]
    _, out, _ = call(capsys, "where", *given, "--json")
    keys = [line["key"] for line in json.loads(out)["samples"]]
    code, out, _ = call(capsys, "show", *given)
    assert code == 0
    assert all(key in out for key in keys)
    assert "█" in out
    page = tmp_path / "step.html"
    call(capsys, "show", *given, "--processor", saved_processor, "--html", page)
    assert all(key in page.read_text() for key in keys)
    code, _, err = call(capsys, "show", mixed_shards, "--pack-size", 1024, "--step", 99999)
    assert code == 2
    assert "there is no step 99999" in err


def test_text_cannot_rewrite_the_terminal(capsys, evil_shards, saved_processor):
    code, out, _ = call(capsys, "show", evil_shards, "--processor", saved_processor, "--step", 0, "--pack-size", 1024)
    assert code == 0
    assert "\x1b[31m" not in out
    code, out, _ = call(capsys, "show", evil_shards, "--processor", saved_processor, "--key", f"{EVIL}1")
    assert code == 0
    assert "\x1b" not in out
    assert "\x00" not in clean(EVIL)


def test_view_serves_a_state_and_a_ledger(mixed_shards, saved_processor, processor, tmp_path):
    loader = StreamLoader(mixed_shards, processor=processor, pack_size=1024)
    batches = iter(loader)
    next(batches), next(batches)
    torch.save({"data": loader.state_dict()}, tmp_path / "state.pt")
    loader.close()
    bad = BadSample(
        source="data",
        sample="000000003",
        stage="decode",
        reason="bad_image",
        detail="<b>cut</b>",
        shard="shard-000000.tar",
    )
    (tmp_path / "ledger.jsonl").write_text(bad.to_json() + "\n")
    code = "import vlm_stream.testing, sys; from vlm_stream.cli import main; sys.exit(main(sys.argv[1:]))"
    given = [mixed_shards, "--processor", saved_processor, "--pack-size", 1024, "--port", 0]
    given += ["--state", tmp_path / "state.pt", "--ledger", tmp_path / "ledger.jsonl"]
    command = [sys.executable, "-u", "-c", code, "view", *map(str, given)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("viewer: http://127.0.0.1:")
            base = line.split()[1].rstrip("/")
            waits = True
            while waits:
                with urllib.request.urlopen(f"{base}/run", timeout=240) as answer:
                    text, waits = answer.read().decode(), "refresh" in answer.headers
            for words in ("A saved run", "decode: bad_image", "&lt;b&gt;cut&lt;/b&gt;", "/sample?source=data", "<b>2"):
                assert words in text
        finally:
            process.terminate()


@pytest.mark.parametrize("text", ["{}", "no json\n", '{"sample": 1}\n'])
def test_what_is_no_ledger_is_refused(capsys, mixed_shards, tmp_path, text):
    path = tmp_path / "ledger.jsonl"
    path.write_text(text)
    code, _, err = call(capsys, "view", mixed_shards, "--ledger", path)
    assert code == 2
    assert "is not a ledger that can be read" in err


@pytest.mark.parametrize("command", [["show", "--key", "caption-3"], ["stats"]])
def test_a_page_is_written_into_a_folder_that_is_made_or_says_why_not(capsys, mixed_shards, tmp_path, command):
    given = [command[0], mixed_shards, *command[1:], "--html"]
    code, _, _ = call(capsys, *given, tmp_path / "new" / "folder" / "page.html")
    assert code == 0
    assert "<html" in (tmp_path / "new" / "folder" / "page.html").read_text()
    (tmp_path / "file").write_text("")
    code, _, err = call(capsys, *given, tmp_path / "file" / "page.html")
    assert code == 2
    assert "page.html cannot be written" in err
    assert "choose another --html" in err

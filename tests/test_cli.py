import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_stream import __version__
from vlm_stream.cli import COMMANDS, main


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"vlm-stream {__version__}"


def test_bare_call_prints_the_commands_and_is_a_usage_error(capsys):
    assert main([]) == 2
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_unknown_command_names_the_nearest(capsys):
    assert main(["make-shard"]) == 2
    assert "did you mean 'make-shards'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert "examples:" in out
    assert f"vlm-stream {command}" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_option_is_a_usage_error(command):
    with pytest.raises(SystemExit, match="2"):
        main([command, "--no-such-option"])


def test_flags_are_not_guessed_from_their_beginning_and_the_nearest_is_named(capsys):
    for wrong, right in (("--pack-siz", "--pack-size"), ("--procesor=x", "--processor")):
        with pytest.raises(SystemExit, match="2"):
            main(["plan", "data", wrong, "8"])
        err = capsys.readouterr().err
        assert f"unrecognized arguments: {wrong}" in err
        assert f"did you mean '{right}'?" in err
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "data", "--zzz"])
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("form", [["--json"], []])
def test_a_full_disk_under_the_output_is_said(toy_shards, form):
    command = [sys.executable, "-m", "vlm_stream.cli", "stats", str(toy_shards), *form]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: the output could not be written (No space left on device), so it is not whole\n"


def test_ctrl_c_promises_no_more_than_the_command_holds(monkeypatch, capsys, toy_shards):
    def interrupt(args):
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
    try:
        for command, sentence in (
            ("stats", "error: interrupted\n"),
            ("recount", "error: interrupted; what was finished stays, run the same command again to go on\n"),
        ):
            for point in ("run", "add_arguments"):  # at work, and before it
                with monkeypatch.context() as patched:
                    patched.setattr(f"vlm_stream.commands.{command}.{point}", interrupt)
                    assert main([command, str(toy_shards), "--processor", "x"]) == 130
                assert capsys.readouterr().err == sentence
    finally:
        signal.signal(signal.SIGINT, before)

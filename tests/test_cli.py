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

"""Credentials out of the shared AWS files, in front of a server that checks them."""

from __future__ import annotations

import sys

import pytest

from tests.servers import ACCESS_KEY, SECRET_KEY
from vlm_stream.errors import AccessError, ConfigError, MissingExtraError
from vlm_stream.storage import StoreOptions, open_store
from vlm_stream.storage.credentials import ProfileCredentials, aws_config


@pytest.fixture
def aws_files(monkeypatch, tmp_path):
    """Shared files of a user with three profiles, and no AWS variable beside."""
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = other\naws_secret_access_key = wrong-secret\n"
        f"[work]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    (tmp_path / "config").write_text(
        "[profile work]\nregion = eu-central-1\n[profile login]\nsso_session = x\nregion = eu-west-1\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


def test_profiles_are_found_by_option_and_by_variable(s3_server, aws_files, monkeypatch):
    options = StoreOptions(endpoint=s3_server.endpoint, allow_http=True, profile="work")
    open_store(s3_server.url("profiles"), options).put("x", b"1")
    without = StoreOptions(endpoint=s3_server.endpoint, allow_http=True)
    with pytest.raises(AccessError, match="Check the credentials") as caught:
        open_store(s3_server.url("profiles"), without).get("x")
    assert "wrong-secret" not in str(caught.value)
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert open_store(s3_server.url("profiles"), without).get("x") == b"1"


def test_keys_in_the_environment_come_first(aws_files, monkeypatch):
    assert aws_config(None)["credential_provider"].profile == "default"
    assert aws_config("work")["region"] == "eu-central-1"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    assert aws_config(None) == {}
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert "region" not in aws_config("work")


def test_renewed_keys_are_read_again(aws_files):
    provider = ProfileCredentials("work")
    assert provider()["access_key_id"] == ACCESS_KEY
    (aws_files / "credentials").write_text(
        "[work]\naws_access_key_id=new\naws_secret_access_key=s\naws_session_token=t"
    )
    assert (provider()["access_key_id"], provider()["token"]) == ("new", "t")
    (aws_files / "credentials").write_text("")
    with pytest.raises(AccessError, match="profile 'work' has no aws_access_key_id"):
        provider()


def test_profiles_that_cannot_be_used_say_why(aws_files, monkeypatch):
    with pytest.raises(ConfigError, match="There is no AWS profile 'nobody'"):
        aws_config("nobody")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(MissingExtraError, match=r"profile 'login' .* needs the package 'boto3'"):
        aws_config("login")
    (aws_files / "credentials").write_text("aws_secret_access_key = very-secret\n")
    with pytest.raises(ConfigError, match="is not a valid AWS profile file") as caught:
        aws_config("work")
    assert "very-secret" not in str(caught.value)


def test_no_files_at_all_leave_the_rest_to_the_client(aws_files):
    (aws_files / "credentials").unlink()
    (aws_files / "config").unlink()
    assert aws_config(None) == {}

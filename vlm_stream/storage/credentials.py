"""AWS credentials from the standard places, as far as the object-store client does not look there itself.

The client reads `AWS_*` variables, web identity, container and instance roles. It does not read profiles, so this file
does: static keys of the shared credentials and config files are read here, and read again every quarter of an hour,
because tools that hand out short-lived keys rewrite the file. Profiles that need a conversation with AWS (SSO, assumed
roles, credential processes) are left to boto3, if it is installed.

Environment variables are read here because they are one of the standard places for credentials.
"""

from __future__ import annotations

import configparser
import importlib
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from vlm_stream.errors import AccessError, ConfigError, MissingExtraError

__all__ = ["ProfileCredentials", "aws_config"]

_REREAD = timedelta(minutes=15)
_NEEDS_BOTO3 = ("sso_session", "sso_start_url", "role_arn", "credential_process", "web_identity_token_file")


class ProfileCredentials:
    """Callable for the client: the profile's keys, read from the file each time they are asked for."""

    def __init__(self, profile: str) -> None:
        """Remember the profile's name, not its keys."""
        self.profile = profile

    def __call__(self) -> dict[str, Any]:
        """Return the keys in the client's form."""
        section = read_profile(self.profile)
        if "aws_access_key_id" not in section or "aws_secret_access_key" not in section:
            raise AccessError(
                f"The AWS profile '{self.profile}' has no aws_access_key_id and aws_secret_access_key any more. "
                f"Renew it, or name another profile."
            )
        return {
            "access_key_id": section["aws_access_key_id"],
            "secret_access_key": section["aws_secret_access_key"],
            "token": section.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + _REREAD,
        }


def read_profile(profile: str) -> dict[str, str]:
    """Return a profile's settings out of both shared files; credentials win over config; empty when unknown."""
    home = Path.home() / ".aws"
    config_file = os.environ.get("AWS_CONFIG_FILE") or home / "config"
    credentials_file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"
    merged: dict[str, str] = {}
    names = {config_file: ("default" if profile == "default" else f"profile {profile}"), credentials_file: profile}
    for file, section in names.items():
        parser = configparser.RawConfigParser()
        try:
            parser.read(Path(file).expanduser(), encoding="utf-8")
        except configparser.Error as error:
            # The parser's own message quotes the line, which may hold a key.
            raise ConfigError(f"{file} is not a valid AWS profile file ({type(error).__name__}). Mend it.") from None
        if parser.has_section(section):
            merged.update(parser.items(section))
    return merged


def aws_config(profile: str | None) -> dict[str, Any]:
    """Return what the client must be told about credentials: a provider, and the profile's region and endpoint.

    Empty when the environment holds keys, or when there is no profile: then the client's own chain finds them.
    """
    if profile is None and os.environ.get("AWS_ACCESS_KEY_ID"):
        return {}
    name = profile or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    section = read_profile(name)
    if not section:
        if name == "default":
            return {}
        raise ConfigError(
            f"There is no AWS profile '{name}' in the shared config and credentials files. "
            f"Check AWS_PROFILE and the profile option, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    found: dict[str, Any] = {}
    if "aws_access_key_id" in section:
        found["credential_provider"] = ProfileCredentials(name)
    elif any(key in section for key in _NEEDS_BOTO3):
        found["credential_provider"] = _boto3_provider(name)
    if "region" in section and not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        found["region"] = section["region"]
    if "endpoint_url" in section and not os.environ.get("AWS_ENDPOINT_URL"):
        found["endpoint"] = section["endpoint_url"]
    return found


def _boto3_provider(profile: str) -> Any:
    """Return the client library's own bridge to boto3's credential chain."""
    try:
        boto3 = importlib.import_module("boto3")
    except ImportError:
        raise MissingExtraError("boto3", "aws", f"The AWS profile '{profile}' (SSO, role or process)") from None
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider(boto3.Session(profile_name=profile))

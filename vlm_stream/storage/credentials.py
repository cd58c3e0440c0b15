"""Options and the environment -> the settings of an obstore client. The only file here that reads the environment.

obstore itself reads `AWS_*` and the other clouds' variables, web identity, container and instance roles. It does not
read AWS profiles: their static keys are read here, again every quarter of an hour, because tools that hand out
short-lived keys rewrite the file. Profiles that need a conversation with AWS (SSO, roles, credential processes) are
left to boto3, if it is installed.
"""

from __future__ import annotations

import configparser
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vlm_stream.errors import AccessError, ConfigError, require

if TYPE_CHECKING:
    from vlm_stream.storage.options import StoreOptions

_REREAD = timedelta(minutes=15)
_NEEDS_BOTO3 = ("sso_session", "sso_start_url", "role_arn", "credential_process", "web_identity_token_file")


def client_settings(root: str, options: StoreOptions) -> tuple[str, dict[str, Any]]:
    """Return the client's class name and arguments for a URL: everything but the retries."""
    parts = urlsplit(root)
    transport: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        "read_timeout": timedelta(seconds=options.read_timeout_s),
        # The client's own default would end large reads.
        "timeout": timedelta(seconds=options.retry.deadline_s),
    }
    # The client takes these options from one place, so its own look at the variable would be lost.
    allowed = parts.scheme == "s3" and os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    if options.allow_http or parts.scheme == "http" or allowed:
        transport["allow_http"] = True
    elif parts.scheme == "s3" and not options.endpoint and os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        raise ConfigError(
            "AWS_ENDPOINT_URL begins with http://, which is not encrypted, so nothing is sent there. "
            "Use https://, or set AWS_ALLOW_HTTP=true (or allow_http) where the network is trusted."
        )
    if options.ca_file is not None:
        try:
            transport["root_certificate"] = Path(options.ca_file).read_bytes()
        except OSError as error:
            raise ConfigError(f"StoreOptions.ca_file {options.ca_file} cannot be read: {error.strerror}.") from error
    arguments: dict[str, Any] = {"client_options": transport}
    if parts.scheme in ("http", "https"):
        return "HTTPStore", {"url": root, **arguments}
    if parts.path.strip("/"):
        arguments["prefix"] = parts.path.strip("/")
    if options.anonymous:
        arguments["skip_signature"] = True
    if parts.scheme == "s3":
        return "S3Store", {"bucket": parts.netloc, **arguments, **_s3_settings(parts.netloc, options)}
    if parts.scheme == "gs":
        endpoint = {"base_url": options.endpoint} if options.endpoint else {}
        return "GCSStore", {"bucket": parts.netloc, **arguments, **endpoint}
    endpoint = {"endpoint": options.endpoint} if options.endpoint else {}
    return "AzureStore", {"container_name": parts.netloc, **arguments, **endpoint}


def _s3_settings(bucket: str, options: StoreOptions) -> dict[str, Any]:
    """Return region, endpoint, addressing and the credentials' provider."""
    found: dict[str, Any] = {} if options.anonymous else aws_config(options.profile)
    if options.region:
        found["region"] = options.region
    if options.endpoint:
        found["endpoint"] = options.endpoint.rstrip("/")
    if options.path_style is False:
        found["virtual_hosted_style_request"] = True
        if "endpoint" in found:
            scheme, host = found["endpoint"].split("://", 1)
            found["endpoint"] = f"{scheme}://{bucket}.{host}"
    return found


def aws_config(profile: str | None) -> dict[str, Any]:
    """Return what the client must be told about credentials: a provider, and the profile's region and endpoint.

    Empty when the environment holds keys, or when there is no profile: then the client's own chain finds them.
    """
    if profile is None and os.environ.get("AWS_ACCESS_KEY_ID"):
        return {}
    name = profile or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    section = _read_profile(name)
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


class ProfileCredentials:
    """Callable for the client: the profile's keys, read from the file each time they are asked for."""

    def __init__(self, profile: str) -> None:
        """Remember the profile's name, not its keys."""
        self.profile = profile

    def __call__(self) -> dict[str, Any]:
        """Return the keys in the client's form."""
        section = _read_profile(self.profile)
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


def _read_profile(profile: str) -> dict[str, str]:
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


def _boto3_provider(profile: str) -> Any:
    """Return obstore's own bridge to boto3's credential chain."""
    boto3 = require("boto3", "aws", f"The AWS profile '{profile}' (SSO, role or process)")
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider(boto3.Session(profile_name=profile))

from __future__ import annotations

import obstore
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.errors import ConfigError
from vlm_stream.storage import StoreOptions, join_url, local_path, open_store, split_url
from vlm_stream.storage.credentials import client_settings

NAMES = st.text("abcxyz0._- ", min_size=1).filter(lambda name: name.strip(". "))


@given(
    st.sampled_from(["/", "./", "s3://bucket/", "gs://b/", "az://c/", "https://host/", "hf://datasets/o/n/", ""]),
    st.lists(NAMES, min_size=1, max_size=3),
)
def test_what_is_split_can_be_joined(base, names):
    url = base + "/".join(names)
    root, name = split_url(url)
    assert name == names[-1]
    joined = join_url(root, name)
    assert joined in (url, f"./{url}")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("/a.json", ("/", "a.json")),
        ("a.json", (".", "a.json")),
        ("file:///data/a.json", ("file:///data", "a.json")),
        ("s3://bucket/a.json", ("s3://bucket", "a.json")),
    ],
)
def test_split(url, parts):
    assert split_url(url) == parts


def test_urls_that_name_no_file():
    with pytest.raises(ConfigError, match="ends without a file name"):
        split_url("s3://bucket/folder/")
    with pytest.raises(ConfigError, match="names a store and no file in it"):
        split_url("s3://bucket")


def test_local_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("data").root == str(tmp_path / "data")
    assert local_path("file:///a%20b/c") == "/a b/c"
    assert local_path("file://localhost/a") == "/a"
    with pytest.raises(ConfigError, match="Write three slashes"):
        local_path("file://data/set")


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x"])
def test_paths_stay_under_the_root(path, tmp_path):
    for url in (str(tmp_path), "s3://bucket/x"):
        with pytest.raises(ConfigError, match="is not a path under"):
            open_store(url).head(path)


def test_unknown_schemes_name_the_known_ones():
    with pytest.raises(ConfigError, match=r"No store is known for 'https3://' .*did you mean 'https'\?"):
        open_store("https3://bucket/x")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3:///path", "names no bucket or host"),
        ("https://user:secret@host/x", "holds a user or password"),
        ("https://host/x?signature=secret", "has a query or fragment"),
    ],
)
def test_urls_that_cannot_be_opened(url, message):
    with pytest.raises(ConfigError, match=message) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


@pytest.fixture
def bare_environment(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def settings_of(url: str, **options):
    name, found = client_settings(url, StoreOptions(**options))
    transport = found.pop("client_options")
    return name, found, transport


@pytest.mark.usefixtures("bare_environment")
def test_settings_of_each_cloud():
    assert settings_of("s3://bucket/a/b", region="eu-west-1")[:2] == (
        "S3Store",
        {"bucket": "bucket", "prefix": "a/b", "region": "eu-west-1"},
    )
    assert settings_of("s3://bucket", anonymous=True, endpoint="https://minio/", path_style=False)[:2] == (
        "S3Store",
        {
            "bucket": "bucket",
            "skip_signature": True,
            "endpoint": "https://bucket.minio",
            "virtual_hosted_style_request": True,
        },
    )
    assert settings_of("gs://bucket/a", endpoint="https://emulator")[:2] == (
        "GCSStore",
        {"bucket": "bucket", "prefix": "a", "base_url": "https://emulator"},
    )
    assert settings_of("az://container/a", anonymous=True)[:2] == (
        "AzureStore",
        {"container_name": "container", "prefix": "a", "skip_signature": True},
    )
    assert settings_of("https://host/a")[:2] == ("HTTPStore", {"url": "https://host/a"})
    assert "allow_http" not in settings_of("https://host/a")[2]
    assert settings_of("http://host/a")[2]["allow_http"]


@pytest.mark.usefixtures("bare_environment")
def test_an_endpoint_of_the_environment_without_tls_must_be_allowed(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:secret@minio:9000")
    with pytest.raises(ConfigError, match=r"AWS_ENDPOINT_URL begins with http://.*AWS_ALLOW_HTTP=true") as caught:
        settings_of("s3://bucket/a")
    assert "secret" not in str(caught.value)
    assert settings_of("s3://bucket/a", allow_http=True)[2]["allow_http"]
    assert "allow_http" not in settings_of("s3://bucket/a", endpoint="https://other")[2]
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert settings_of("s3://bucket/a")[2]["allow_http"]


@pytest.mark.usefixtures("bare_environment")
def test_clients_of_gcs_and_azure_can_be_built(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for url in ("gs://bucket/a", "az://container/a"):
        store = open_store(url, StoreOptions(anonymous=True))
        assert store._build(obstore) is not None


def test_azure_without_an_account_says_so(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match="az://container/a cannot be opened with these options"):
        open_store("az://container/a").get("x")

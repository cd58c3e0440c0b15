"""Real servers for tests, on loopback, with ports and folders of their own.

S3 is SeaweedFS: a test that needs it and cannot have it fails, because a suite that passes without its server has
tested nothing. Azure is Azurite, which comes by npm: where that is missing, its tests are skipped.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import hmac
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from vlm_stream.chaos import Fault
from vlm_stream.storage import StoreOptions

ACCESS_KEY = "testkey"
SECRET_KEY = "testsecret"
READER_KEYS = {"AWS_ACCESS_KEY_ID": "readerkey", "AWS_SECRET_ACCESS_KEY": "readersecret"}
"""Of somebody who may read and list, and not write."""
_FLAGS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "s3.port.iceberg",
    "s3.port.lance",
)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _start_process(command: list[str], folder: Path, log_name: str) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)
    with (folder / log_name).open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            # A server must not outlive a test run that is killed.
            preexec_fn=lambda: libc.prctl(1, signal.SIGKILL, 0, 0, 0),
        )


class S3Server:
    """SeaweedFS with its S3 gateway. Use it as a context manager."""

    bucket = "test-bucket"
    """Below `public/` anybody may read and list, without a signature."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.flags = flags
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> StoreOptions:
        """Options that reach this server; the keys are in the environment."""
        return StoreOptions(endpoint=self.endpoint, region="us-east-1", allow_http=True)

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}

    def url(self, path: str = "") -> str:
        return f"s3://{self.bucket}/{path}"

    def __enter__(self) -> S3Server:
        for attempt in range(3):  # a port may be taken between choosing and listening
            self._start(attempt)
            if self._answers():
                return self
            self.__exit__()
        log = (self.folder / "weed.log").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"The S3 server did not start. Its last words:\n{log}")

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            # Its folder is thrown away: there is nothing to close in good order.
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self, attempt: int) -> None:
        data = self.folder / f"data-{attempt}"
        data.mkdir(parents=True)
        identity = {
            "name": "test",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        access, secret = READER_KEYS.values()
        reader = {
            "name": "reader",
            "credentials": [{"accessKey": access, "secretKey": secret}],
            "actions": ["Read", "List"],
        }
        config = self.folder / "s3.json"
        public = {"name": "anonymous", "actions": [f"{act}:{self.bucket}/public/*" for act in ("Read", "List")]}
        config.write_text(json.dumps({"identities": [identity, reader, public]}))
        ports = dict(zip(_FLAGS, free_ports(len(_FLAGS)), strict=True))
        self.port = ports["s3.port"]
        weed = Path(sys.executable).with_name("weed")
        command = [str(weed), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={data}", "-filer", "-s3"]
        command += ["-master.telemetry=false", "-volume.max=5", f"-s3.config={config}"]
        command += [*(f"-{flag}={port}" for flag, port in ports.items()), *self.flags]
        self._process = _start_process(command, self.folder, "weed.log")

    def _answers(self) -> bool:
        """Wait until an object can be written and the bucket is there."""
        import obstore
        from obstore.store import S3Store

        end = time.monotonic() + 180
        client = S3Store(
            self.bucket,
            endpoint=self.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        while time.monotonic() < end and self._process is not None and self._process.poll() is None:
            try:
                urllib.request.urlopen(self.endpoint, timeout=5).close()
            except urllib.error.HTTPError:
                pass
            except OSError:
                time.sleep(0.1)
                continue
            try:
                obstore.put(client, "ready", b"yes")
            except Exception:
                time.sleep(0.1)
                continue
            return True
        return False


def find_azurite() -> str | None:
    """Return the program, as `make test` or the system's npm has installed it."""
    own = Path(sys.prefix) / "node_modules" / ".bin" / "azurite-blob"
    return str(own) if own.exists() else shutil.which("azurite-blob")


class AzureServer:
    """Azurite's Blob service with one container. Use it as a context manager."""

    container = "test-container"
    _account = "devstoreaccount1"
    _key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    """The account that every Azurite has."""

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self.folder = folder
        self.endpoint = f"http://127.0.0.1:{port}/{self._account}"
        self.options = StoreOptions(endpoint=self.endpoint, allow_http=True)
        self.environment = {"AZURE_STORAGE_ACCOUNT_NAME": self._account, "AZURE_STORAGE_ACCOUNT_KEY": self._key}
        self._port = port

    def url(self, path: str = "") -> str:
        return f"az://{self.container}/{path}"

    def __enter__(self) -> AzureServer:
        program = find_azurite()
        assert program is not None
        flags = ["--blobHost", "127.0.0.1", "--blobPort", str(self._port), "--location", str(self.folder)]
        command = [program, *flags, "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
        self._process = _start_process(command, self.folder, "azurite.log")
        end = time.monotonic() + 180
        while time.monotonic() < end and self._process.poll() is None:
            try:
                self._make_container()
            except OSError:
                time.sleep(0.1)
                continue
            return self
        self.__exit__()
        log = (self.folder / "azurite.log").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"Azurite did not start. Its last words:\n{log}")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _make_container(self) -> None:
        """Sign and send the one request that no client of ours has."""
        headers = {
            "x-ms-date": datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"),
            "x-ms-version": "2021-08-06",
        }
        lines = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        what = f"/{self._account}/{self._account}/{self.container}\nrestype:container"
        text = "PUT" + "\n" * 12 + lines + what
        signature = hmac.new(base64.b64decode(self._key), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {self._account}:{base64.b64encode(signature).decode()}"
        url = f"{self.endpoint}/{self.container}?restype=container"
        urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=5).close()


@dataclass
class FaultMix:
    """Random faults at fixed rates, the same for the same seed."""

    failing: float = 0.0
    throttled: float = 0.0
    cut: float = 0.0
    seed: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        """Begin the sequence."""
        self._rng = random.Random(self.seed)

    def __call__(self, number: int, method: str, path: str) -> Fault | None:
        """Draw one."""
        draw = self._rng.random()
        for kind, rate in (("failing", self.failing), ("throttled", self.throttled), ("cut", self.cut)):
            if draw < rate:
                if kind == "cut":
                    return Fault("cut", at=self._rng.randrange(100_000))
                return Fault("status", status=500 if kind == "failing" else 503)
            draw -= rate
        return None

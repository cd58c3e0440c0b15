"""A real S3 server for tests: SeaweedFS on loopback, with ports and a folder of its own.

A test that needs it and cannot have it fails: a suite that passes without its server has tested nothing.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

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


class S3Server:
    """SeaweedFS with its S3 gateway. Use it as a context manager."""

    bucket = "test-bucket"

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
        config.write_text(json.dumps({"identities": [identity, reader]}))
        ports = dict(zip(_FLAGS, free_ports(len(_FLAGS)), strict=True))
        self.port = ports["s3.port"]
        weed = Path(sys.executable).with_name("weed")
        command = [str(weed), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={data}", "-filer", "-s3"]
        command += ["-master.telemetry=false", "-volume.max=5", f"-s3.config={config}"]
        command += [*(f"-{flag}={port}" for flag, port in ports.items()), *self.flags]
        libc = ctypes.CDLL(None)
        with (self.folder / "weed.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                # The server must not outlive a test run that is killed.
                preexec_fn=lambda: libc.prctl(1, signal.SIGKILL, 0, 0, 0),
            )

    def _answers(self) -> bool:
        """Wait until an object can be written and the bucket is there."""
        import obstore
        from obstore.store import S3Store

        end = time.monotonic() + 60
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

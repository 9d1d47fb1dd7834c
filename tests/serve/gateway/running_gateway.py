"""A gateway as a process of its own, before stubs of engines."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import httpx2
import tomli_w
from stub_engine import Stub

from access_keys import Keys
from phalanx.serve.access import read_usage_by_day

START_S = 120


class RunningGateway:
    """A process, and how to talk to it."""

    def __init__(self, folder: Path, keys: Keys, config: dict, launcher: tuple[str, ...] = ()) -> None:
        self.folder, self.keys, self.launcher = folder, keys, launcher
        self.file = folder / "gateway.toml"
        self.file.write_text(tomli_w.dumps({"access": "access", **config}))
        self.start()

    def start(self) -> None:
        self.log = (self.folder / "gateway.log").open("ab")
        command = [*self.launcher, sys.executable, "-m", "phalanx", "gateway", str(self.file), "--set", "listen.port=0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.log, text=True, env={**os.environ, "NO_COLOR": "1"}
        )
        first = self.process.stdout.readline()
        assert first.startswith("gateway at "), (self.folder / "gateway.log").read_text()
        self.url = first.split()[-1]
        self.port = int(self.url.rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(START_S)
        self.process.stdout.close()
        self.log.close()
        return code

    def client(self, secret: str | None, **more) -> httpx2.Client:
        headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
        # reading the certificates of the system takes longer than a request
        more = {"verify": False, **more}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=250, trust_env=False, **more)

    def ask(self, secret: str, text: str = "say hi", **more) -> httpx2.Response:
        body = {"model": "small", "messages": [{"role": "user", "content": text}], **more}
        with self.client(secret) as client:
            return client.post("/v1/chat/completions", json=body)

    def list_models(self, secret: str) -> httpx2.Response:
        """Ask until a connection is taken: the gateway learns of closed ones in its own time."""
        while True:
            with self.client(secret) as client, contextlib.suppress(httpx2.TransportError):
                return client.get("/v1/models")

    def used(self, key_id: str) -> tuple[int, int, int]:
        days = [
            day
            for (key, _), day in read_usage_by_day(self.folder / "access" / "budgets.jsonl").items()
            if key == key_id
        ]
        return tuple(
            sum(getattr(day, name) for day in days) for name in ("requests", "prompt_tokens", "completion_tokens")
        )

    def log_text(self) -> str:
        return (self.folder / "gateway.log").read_text()


class Lab(NamedTuple):
    """A gateway with two engines: one of this site, one of a cloud."""

    gateway: RunningGateway
    local: Stub
    cloud: Stub
    key_id: str
    secret: str

    @property
    def keys(self) -> Keys:
        return self.gateway.keys

    def reset(self) -> None:
        for stub in (self.local, self.cloud):
            stub.requests.clear()
            stub.hits.clear()
            stub.status = 200
            stub.left.clear()
            stub.may_answer.clear()


WIDE = {
    "requests_per_minute": 10**6,
    "requests_per_month": 10**6,
    "tokens_per_minute": 10**9,
    "tokens_per_month": 10**9,
    "concurrency": 500,
}


def backends(local: Stub, cloud: Stub) -> list[dict]:
    routes = ["chat", "completions", "embeddings", "messages", "responses"]
    return [
        {"name": "site", "url": local.url, "models": {"small": "inner/small"}, "local": True, "routes": routes},
        {"name": "cloud", "url": cloud.url, "models": {"small": "c-small", "large": "c-large"}, "routes": routes},
    ]

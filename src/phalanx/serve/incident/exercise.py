"""An exercise: a playbook's steps are done to a server process of its own, and the effect of each is checked.

The server runs in a scratch access directory on a loopback port that the system chooses; keys, log and orders of the
operator's own servers are not touched.
"""

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx2

from phalanx.errors import PhalanxError, TransportError
from phalanx.security.crypto import steady_now
from phalanx.serve.access import KeyLimits, KeyStore, KeyTerms
from phalanx.serve.incident.case import IncidentCase, operator_of
from phalanx.serve.incident.certified import CertifiedModel, find_certified
from phalanx.serve.incident.playbook import Playbook, PlaybookStep
from phalanx.serve.incident.report import REPORT_FILE, verify_report, write_report
from phalanx.serve.place import checkpoint_place, is_run

_MODEL = "exercised"
_STREAM = "/v1/completions"
_PATIENCE_S = 120
_LONG, _SHORT = 256, 8
_WIDE = KeyLimits(requests_per_minute=100_000, tokens_per_minute=10**9, requests_per_month=10**6, concurrency=100)
Outcome = Literal["worked", "failed", "for people", "not exercised"]


class _StepFailedError(Exception):
    """What a step looks for did not happen."""


class _NotExercisedError(Exception):
    """A step cannot be done with this model."""


@dataclass(frozen=True)
class ExerciseResult:
    """The result of one step.

    Attributes:
        detail: An observation, such as the status of an answer.
        seconds: From its beginning until that.
    """

    say: str
    do: str
    outcome: Outcome
    detail: str
    seconds: float


class _OpenStream:
    """A client that streams one text after the other in a thread, until one breaks off or is refused."""

    def __init__(self, url: str, secret: str) -> None:
        self._headers = {"authorization": f"Bearer {secret}"}
        self._url = url
        self._ends: queue.Queue[str] = queue.Queue()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._stream_on, daemon=True)
        self._thread.start()

    def wait_begun(self) -> None:
        """Wait until the first piece of a text is there."""
        if not self._begun.wait(_PATIENCE_S):
            raise _StepFailedError("no text came")
        if not self._ends.empty():
            raise _StepFailedError(f"no text came: {self._ends.get()}")

    def wait_end(self) -> str:
        """Wait until a text breaks off or is refused, and return which."""
        try:
            return self._ends.get(timeout=_PATIENCE_S)
        except queue.Empty:
            raise _StepFailedError("texts are still written") from None

    def _stream_on(self) -> None:
        try:
            self._ends.put(self._repeat_streams())
        finally:
            self._begun.set()

    def _repeat_streams(self) -> str:
        """Stream one text after the other, and return how the last one ended."""
        body: dict[str, object] = {"model": _MODEL, "prompt": "the", "stream": True, "temperature": 1.5}
        body["max_tokens"] = _LONG
        with httpx2.Client(base_url=self._url, headers=self._headers, timeout=_PATIENCE_S, trust_env=False) as client:
            while True:
                try:
                    with client.stream("POST", _STREAM, json=body) as answer:
                        if answer.status_code == 400 and body["max_tokens"] == _LONG:
                            # longer than the window of a small model
                            body["max_tokens"] = _SHORT
                            continue
                        if answer.status_code != 200:
                            return f"the next request was refused with status {answer.status_code}"
                        for _ in answer.iter_lines():
                            self._begun.set()
                except httpx2.HTTPError as exc:
                    return f"broke off ({type(exc).__name__})"


class _Exercise:
    """The server of an exercise, and what its steps do."""

    def __init__(self, access: Path, where: Path, server: "_ServerProcess") -> None:
        self._access, self._where, self._server = access, where, server
        store = KeyStore.open(access)
        self._key, self._secret = _make_key(store, "suspect")
        self._other = _make_key(store, "other client")[1]
        self._case: IncidentCase | None = None
        self._stream: _OpenStream | None = None
        self._certified: CertifiedModel | None = None
        self.verbs: Mapping[str, Callable[[], str]] = {
            "open_incident": self._open_incident,
            "open_stream": self._open_stream,
            "quarantine_key": lambda: _name_key(self._open_case().quarantine_key(self._key).key_id),
            "release_key": lambda: _name_key(self._open_case().release_key(self._key).key_id),
            "revoke_key": lambda: _name_key(KeyStore.open(access).revoke_key(self._key).key_id),
            "quarantine_model": lambda: _name_model(self._open_case().quarantine_model(_MODEL).model),
            "release_model": lambda: _name_model(self._open_case().release_model(_MODEL).model),
            "roll_back": self._roll_back,
            "expect_stream_ends": self._expect_stream_ends,
            "expect_key_refused": lambda: self._expect_status(self._secret, 401),
            "expect_model_refused": lambda: self._expect_status(self._secret, 503, "model_quarantined"),
            "expect_answer": lambda: self._expect_status(self._secret, 200),
            "expect_others_served": lambda: self._expect_status(self._other, 200),
            "expect_certified_model": self._expect_certified_model,
            "write_report": self._write_report,
        }

    def _open_case(self) -> IncidentCase:
        if self._case is None:
            self._case = IncidentCase.begin(self._access, "exercise")
        return self._case

    def _open_incident(self) -> str:
        return f"incident {self._open_case().incident}"

    def _open_stream(self) -> str:
        self._stream = _OpenStream(self._server.url, self._secret)
        self._stream.wait_begun()
        return "text comes"

    def _expect_stream_ends(self) -> str:
        if self._stream is None:
            raise _StepFailedError("no stream was opened: the playbook lacks open_stream")
        return self._stream.wait_end()

    def _ask(self, secret: str) -> httpx2.Response:
        body = {"model": _MODEL, "prompt": "the", "max_tokens": 2}
        with self._server.client(secret) as client:
            return client.post(_STREAM, json=body)

    def _expect_status(self, secret: str, status: int, code: str = "") -> str:
        answer = self._ask(secret)
        if answer.status_code != status or code not in answer.text:
            raise _StepFailedError(f"status {answer.status_code}, expected {status} {code}".rstrip())
        return f"status {status} {code}".rstrip()

    def _roll_back(self) -> str:
        place = checkpoint_place(self._where)
        run_dir = self._where if place is None else place[0]
        if not is_run(run_dir):
            raise _NotExercisedError("a model directory has no checkpoints; exercise it with a run")
        self._certified = find_certified(run_dir)
        self._open_case().roll_back(_MODEL, self._certified)
        return f"step {self._certified.step}, digest {self._certified.digests[0][:12]}"

    def _expect_certified_model(self) -> str:
        if self._certified is None:
            raise _NotExercisedError("there was no rollback")
        end = time.monotonic() + _PATIENCE_S
        while self._ask(self._other).status_code != 200:
            if time.monotonic() > end:
                raise _StepFailedError("the model is still out of service")
            time.sleep(0.1)
        with self._server.client(self._other) as client:
            digest = client.get(f"/v1/models/{_MODEL}").json()["digest"]
        if digest not in self._certified.digests:
            raise _StepFailedError(f"digest {digest[:12]}, expected {self._certified.digests[0][:12]}")
        return f"digest {digest[:12]}"

    def _write_report(self) -> str:
        case = self._open_case()
        write_report(case)
        statement = verify_report(case.directory / REPORT_FILE, operator_of(self._access))
        return f"signed, {len(statement['time_line'])} entries"


class _ServerProcess:
    """``phalanx serve`` as a process, from its ready line on."""

    def __init__(self, where: Path, access: Path, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "phalanx", "serve", str(where), "--access", str(access), "--name", _MODEL]
        self._log = (access / "exercise.log").open("wb")
        self._process = subprocess.Popen(  # noqa: S603  -- this program's own command
            [*command, "--port", "0", "--json", *options], stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        try:
            self.url = str(json.loads(line)["url"])
        except (ValueError, KeyError) as exc:
            self.close()
            reason = (access / "exercise.log").read_text(errors="replace").strip().splitlines()[-1:]
            raise TransportError(f"the server of the exercise did not start: {''.join(reason)[:300]}") from exc

    def client(self, secret: str) -> httpx2.Client:
        headers = {"authorization": f"Bearer {secret}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=_PATIENCE_S, trust_env=False)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


def exercise_playbook(playbook: Playbook, where: Path, *, options: Sequence[str] = ()) -> Iterator[ExerciseResult]:
    """Run a playbook against a server process of its own, and yield what became of each step.

    Args:
        where: A run, a checkpoint in one, or a model directory; nothing in it is changed.
        options: Further options of ``phalanx serve``.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-exercise-") as folder:
        access = Path(folder) / "access"
        KeyStore.create(access)
        server = _ServerProcess(where, access, options)
        with contextlib.closing(server):
            exercise = _Exercise(access, where, server)
            for step in playbook.steps:
                yield _do_step(exercise, step)


def _do_step(exercise: _Exercise, step: PlaybookStep) -> ExerciseResult:
    start = time.monotonic()
    outcome: Outcome = "for people"
    detail = ""
    if step.do:
        try:
            detail, outcome = exercise.verbs[step.do](), "worked"
        except _NotExercisedError as exc:
            detail, outcome = str(exc), "not exercised"
        except (_StepFailedError, PhalanxError, httpx2.HTTPError) as exc:
            detail, outcome = f"{type(exc).__name__.removeprefix('_')}: {exc}"[:300], "failed"
    return ExerciseResult(step.say, step.do, outcome, detail, round(time.monotonic() - start, 3))


def _make_key(store: KeyStore, owner: str) -> tuple[str, str]:
    expires = int(steady_now().timestamp()) + 86_400
    return store.create_key(KeyTerms(owner=owner, expires=expires, limits=_WIDE))


def _name_key(key: str) -> str:
    return f"key {key}"


def _name_model(model: str) -> str:
    return f"model {model}"

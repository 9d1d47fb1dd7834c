"""Stacks of parties on other machines: asked for when one is late or given up or the run fails, for the card."""

import json
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from phalanx.closing import Closeable
from phalanx.config import printable_text
from phalanx.errors import DiskError, PhalanxError
from phalanx.security.crypto import Identity, replace_file
from phalanx.telemetry import STACKS_FILE
from phalanx.transport import TransportConfig, ask_peer_stacks

# the end outlasts a question that began with it: that a worker said nothing is written down too
_ANSWER_S, _CLOSE_S = 5.0, 10.0


class RemoteStacks(Closeable):
    """Asks remote parties for the stacks of their threads, beside the run and its frames.

    Args:
        addresses: Address at which each party is asked; read then.
        through: Party at these addresses that asks in place of the owner; None where each answers itself.

    Guarantees:
        A run waits for no answer; its end waits until those under way are written, `_CLOSE_S` at most. An answer is a
        claim, and decides nothing.
    """

    def __init__(
        self,
        identity: Identity,
        transport: TransportConfig,
        run_dir: Path,
        addresses: Mapping[str, str],
        through: str | None = None,
    ) -> None:
        self._identity, self._transport, self._addresses, self._through = identity, transport, addresses, through
        self._path = run_dir / STACKS_FILE
        self._path.unlink(missing_ok=True)
        self._answers: dict[str, dict[str, object]] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()

    def ask_in_background(self, name: str) -> None:
        """Ask one party in a thread, unless an earlier question still waits or the party has no address."""
        before = self._threads.get(name)
        if name in self._addresses and (before is None or not before.is_alive()):
            thread = threading.Thread(target=self._ask_party, args=(name,), name=f"stacks-{name}", daemon=True)
            self._threads[name] = thread
            thread.start()

    def ask_after_failure(self, kind: type[BaseException] | None, names: Collection[str]) -> None:
        """Ask parties where the run ends with an error; nobody is asked where a person has ended it."""
        if kind is not None and issubclass(kind, Exception):
            for name in names:
                self.ask_in_background(name)

    def _ask_party(self, name: str) -> None:
        answer: dict[str, object]
        try:
            answering, of = (name, "") if self._through is None else (self._through, name)
            stacks = ask_peer_stacks(self._identity, answering, self._addresses[name], self._transport, _ANSWER_S, of)
            answer = stacks.model_dump(mode="json")
        except PhalanxError as exc:
            answer = {"error": printable_text(str(exc), 200)}
        with self._lock:
            # where it stood when it was late says more than that it is gone
            if "error" not in answer or name not in self._answers:
                self._answers[name] = answer
            try:
                replace_file(self._path, json.dumps(self._answers).encode(), 0o600)
            except DiskError:
                # the run may fail because the disk is full: the card then has no stacks
                return

    def close(self) -> None:
        """Wait for the answers that are under way."""
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

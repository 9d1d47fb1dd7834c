"""A real worker process that carries out its part of one schedule of the exhaustive adversary over the real wire.

    python insider_worker.py WORKER_FILE NAME_OF_SCHEDULE

The schedules are those of `test_adversary_cases.py`, and its part is that of the worker of its certificate. Each act is
printed once it is carried out; a crash is SIGKILL.
"""

import os
import signal
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "pipeline" / each) for each in ("", "adversary")]

from acts import Schedule
from companies import COMPANIES
from liar import Liar
from neighbours import Seen
from test_adversary_cases import FOUND

from phalanx.config import load_config
from phalanx.errors import PhalanxError
from phalanx.pipeline import WorkerConfig, run_worker
from phalanx.security.crypto import load_identity
from phalanx.testing import Actor, RewritingEndpoint, WorkerCrash
from phalanx.transport import CheckedFrame, Endpoint


class NotingEndpoint(Endpoint):
    """Notes what it sends, and goes on where a message cannot even be sent."""

    host_view: Seen

    def send_frame(self, receiver, kind, body, payload=()):
        try:
            header = super().send_frame(receiver, kind, body, payload)
        except PhalanxError as exc:
            sys.stderr.write(f"not sent: {exc}\n")
            return None
        self.host_view.headers.append((header, b"".join(payload)))
        return header


class InsiderEndpoint(RewritingEndpoint, NotingEndpoint):
    """Carries out acts on what it sends and on what it gets."""

    def __init__(self, identity, peers, run, wire, limits, *, liar):
        self._liar, self.host_view = liar, liar.host_view
        self.host_view.identity = identity
        super().__init__(identity, peers, run, wire, limits, actor=Actor(rewrite=self._acted(liar.rewrite)))

    def receive_item(self, timeout_s):
        item = super().receive_item(timeout_s)
        while isinstance(item, CheckedFrame):
            self.host_view.headers.append((item.header, bytes(item.payload)))
            is_read, messages = self._acted(self._liar.hear)(item)
            for outgoing in messages:
                message = outgoing.message
                super(RewritingEndpoint, self).send_frame(
                    outgoing.receiver, message.kind, message.body, (outgoing.payload,)
                )
            if is_read:
                break
            item = super().receive_item(0.0)
        return item

    def _acted(self, deed):
        """Have acts printed, and a crash end this process as the kernel ends one."""

        def act(about):
            before, result = set(self._liar.fired), None
            try:
                result = deed(about)
            except WorkerCrash:
                is_over = True
            else:
                is_over = False
            for number in sorted(self._liar.fired - before):
                sys.stdout.write(f"act {number} is carried out\n")
            sys.stdout.flush()
            if is_over:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return act


def main(worker_file: Path, schedule: Schedule) -> None:
    """Run one worker."""
    config = load_config(worker_file, WorkerConfig)
    name = load_identity(Path(config.identity)).name
    company = COMPANIES[schedule.company]
    liar = Liar(name, schedule.acts[int(name.rpartition("-")[2])], Seen(None, company.names, company.stages))

    def open_endpoint(identity, peers, run, wire, limits):
        return InsiderEndpoint(identity, peers, run, wire, limits, liar=liar)

    run_worker(config, open_endpoint=open_endpoint, wrap_copy=liar.wrap)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), FOUND[sys.argv[2]])
    except PhalanxError as exc:
        sys.exit(f"error: {exc}")

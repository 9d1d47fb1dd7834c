"""NVFlare's side of the bridge: its server and its clients forward frames, and look at none.

The job's folder has this file and `shim.py`, as a package of its own: phalanx need not be installed where NVFlare is.
"""

import contextlib
import os
import threading

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, SendOrder, Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

# the job's folder has both files beside each other, under another package's name
from .shim import END, OwnerConnection, SocketLostError, ask_site

_TASK, _FRAME, _LOST, _NUMBER = "phalanx_frame", "frame", "lost", "number"
_LOOK_EVERY_S = 0.5


class FrameController(Controller):  # type: ignore[misc]
    """The server's part of the job: it ends when the owner ends the run, or is gone."""

    def __init__(self, owner_socket: str) -> None:
        super().__init__()
        self.owner_socket = owner_socket
        self._line: OwnerConnection | None = None
        self._near: frozenset[str] = frozenset()

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Call the owner."""
        try:
            self._line = OwnerConnection(self.owner_socket)
        except SocketLostError as exc:
            self.system_panic(f"phalanx: {exc}; start `phalanx train` first", fl_ctx)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Part from the owner."""
        if self._line is not None:
            self._line.close()

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Forward frames until the owner ends the run."""
        owner = self._line
        try:
            while owner is not None and not abort_signal.triggered:
                self._tell_sites(owner, fl_ctx)
                order = owner.next_frame(_LOOK_EVERY_S)
                if order is None:
                    continue
                if order.kind == END:
                    return
                data = Shareable({_FRAME: order.data})
                task = Task(_TASK, data, {_NUMBER: order.number}, result_received_cb=self._send_answer)
                self.send(task, fl_ctx, [order.name], SendOrder.SEQUENTIAL)
        except SocketLostError as exc:
            self.log_warning(fl_ctx, f"phalanx: lost the owner: {exc}")

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """A result that no task waits for is no answer."""

    def _send_answer(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        number, site, result = client_task.task.get_prop(_NUMBER), client_task.client.name, client_task.result
        frame = None if result is None else result.get(_FRAME)
        with contextlib.suppress(SocketLostError):
            # an owner that is gone is noticed by the one loop that reads
            if self._line is not None and isinstance(frame, bytes):
                self._line.send_answer(number, site, frame)
            elif self._line is not None:
                reason = "" if result is None else result.get(_LOST) or result.get_return_code()
                self._line.report_loss(number, site, str(reason))
        client_task.result = None

    def _tell_sites(self, line: OwnerConnection, fl_ctx: FLContext) -> None:
        names = [client.name for client in fl_ctx.get_engine().get_clients()]
        near = frozenset(name for name in names if self.get_client_disconnect_time(name) is None)
        if near != self._near:
            self._near = near
            line.tell_sites(near)


class FrameExecutor(Executor):  # type: ignore[misc]
    """A client's part of the job: each task is a frame for the site's process on this machine.

    Args:
        site_socket: Path of its socket; ``{site}`` stands for the client's name, ``~`` for the home directory.
    """

    def __init__(self, site_socket: str) -> None:
        super().__init__()
        self.site_socket = site_socket

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Deliver one frame and bring back its answer; a job that is aborted waits for none."""
        path = os.path.expanduser(self.site_socket.replace("{site}", fl_ctx.get_identity_name()))
        answers: list[Shareable] = []
        asking = threading.Thread(target=_ask_site, args=(path, shareable[_FRAME], answers), daemon=True)
        asking.start()
        while asking.is_alive() and not abort_signal.triggered:
            asking.join(_LOOK_EVERY_S)
        return answers[0] if answers else Shareable({_LOST: "the job was aborted"})


def _ask_site(path: str, frame: bytes, answers: list[Shareable]) -> None:
    try:
        answers.append(Shareable({_FRAME: ask_site(path, frame)}))
    except SocketLostError as exc:
        answers.append(Shareable({_LOST: str(exc)}))

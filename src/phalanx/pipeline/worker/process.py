"""One worker process: join an owner, take the roles that it gives, work until it says that the run is over."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from phalanx.checkpoint.state_files import StateFiles
from phalanx.child import die_with_parent
from phalanx.config import code_key, open_own_code
from phalanx.engine import check_device
from phalanx.errors import ConfigError, CutLogError, FrameError, PeerLostError, PeerRefusedError, PhalanxError
from phalanx.models.families import ADOPTED, adopt_family
from phalanx.pipeline.assignment.budget import EventSampler, allowance_of
from phalanx.pipeline.config import WorkerConfig
from phalanx.pipeline.plan import StepPlan, parse_plan
from phalanx.pipeline.processes.fork_server import FORK_SERVER, await_request
from phalanx.pipeline.processes.own_memory import keep_freed_memory, measure_own_memory
from phalanx.pipeline.protocol.greetings import Challenge, ChallengeReply, Hello, Leave, NotLetIn, PreparedNotice, Setup
from phalanx.pipeline.protocol.log_memory import LogMemory
from phalanx.pipeline.protocol.mailbox import Mailbox
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import Apply, Assign, Detour, Fault, FetchBulk, ProgressReport, Shutdown
from phalanx.pipeline.stage.kernel_fingerprint import fingerprint_kernels
from phalanx.pipeline.stage.stage_copy import WrapCopy, leave_unwrapped
from phalanx.pipeline.tolerance.numeric_class import local_numeric_class, settle_numerics
from phalanx.pipeline.worker.console import WorkerConsole, WorkerOutcome
from phalanx.pipeline.worker.kept_states import send_kept
from phalanx.pipeline.worker.party import Party, RunningCosts
from phalanx.pipeline.worker.roles import PartyContext
from phalanx.security.crypto import Identity, Peer, certified_name, load_identity, peer_from_certificate
from phalanx.telemetry import PhaseTimer
from phalanx.transport import Endpoint, GrpcWire, LinkFault, TransportConfig, Wire, ask_peer_run

_SETUP_TIMEOUT_S = 120.0


OpenEndpoint = Callable[[Identity, Mapping[str, Peer], str, Wire, TransportConfig], Endpoint]
"""What opens this worker's end of its links, called as `Endpoint` is."""


def run_worker(
    config: WorkerConfig,
    kernels: WrapCopy = leave_unwrapped,
    open_endpoint: OpenEndpoint = Endpoint,
    *,
    wrap_copy: WrapCopy = leave_unwrapped,
    worker_console: WorkerConsole | None = None,
) -> WorkerOutcome:
    """Serve until the owner ends the run or is gone.

    Args:
        kernels: Puts what computes in the place of a plain copy, such as a group of ranks; its class is measured.
        open_endpoint: Opens this worker's end of its links; another than the default is for drills only.
        wrap_copy: Puts an attacker in the place of each copy that has a role; for drills only.

    Returns:
        How it ended, where that was well.

    Raises:
        PeerLostError: The owner cannot be reached, or went silent.
        PeerRefusedError: The owner does not let this worker in, and says why.
    """
    check_device(config.device, "device")
    settle_numerics(config.threads)
    keep_freed_memory()
    load_code(config)
    identity = load_identity(Path(config.identity))
    wire = GrpcWire(identity, config.transport, stacks_for=config.owner_name)
    try:
        address = wire.address
        if config.advertise is not None:
            address = f"{config.advertise}:{address.rpartition(':')[2]}"
        patience_s = config.join_timeout_s
        worker_console = WorkerConsole() if worker_console is None else worker_console
        worker_console.print_looking(config.owner, address)
        met = ask_peer_run(
            identity, config.owner_name, config.owner, address, config.transport, patience_s, begins=True
        )
        # a process that comes back is another party, with the same certificate
        identity = identity.with_session_name(met.calls_us)
        worker_console.print_connected(config.owner, identity.name, met.run)
        with open_endpoint(identity, {}, met.run, wire, config.transport) as endpoint:
            endpoint.add_peer(met.peer, config.owner)
            worker = Worker(config, identity, endpoint, wrap_copy, kernels, worker_console)
            worker_console.watch_links(endpoint)
            with _leaving_on_signals(worker.request_leave):
                return worker.serve_owner(address)
    finally:
        wire.close()


class Worker:
    """The loop of a worker: handle received messages, do the most urgent work, else wait."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: Identity,
        endpoint: Endpoint,
        wrap_copy: WrapCopy = leave_unwrapped,
        kernels: WrapCopy = leave_unwrapped,
        worker_console: WorkerConsole | None = None,
    ) -> None:
        self._worker_console = WorkerConsole() if worker_console is None else worker_console
        self._config = config
        self._identity = identity
        self._endpoint = endpoint
        self._kernels = kernels
        self._wrap_copy: WrapCopy = lambda copy, held: wrap_copy(kernels(copy, held), held)
        # what another worker sends must fit into the report that proves it wrong
        endpoint.allowances.show_headers_to(config.owner_name)
        self._mail = Mailbox(endpoint, seals_own=True)
        self._timer = PhaseTimer(cpu_clock=time.thread_time)
        self._party: Party | None = None
        self._plan: StepPlan | None = None
        self._wants_to_leave = self._has_asked = False
        self._counted_attempt: tuple[int, int] | None = None
        self._event_sampler = EventSampler()
        self._journal = Path(config.journal) if config.journal else None
        name = certified_name(identity.name)
        self._state_files = None if self._journal is None else StateFiles(self._journal, name, _print_journal_failure)
        heads = Path(config.identity) / "log_heads" if config.log_heads is None else Path(config.log_heads)
        self._log_memory = LogMemory(heads, self._mail.statement_reader, self._mail.find_peer(config.owner_name))

    def request_leave(self) -> None:
        """Ask the owner to be let go, once this party's step is done; before it is set up, end at once."""
        self._wants_to_leave = True

    def serve_owner(self, address: str) -> WorkerOutcome:
        """Say hello, then work until the owner says that the run is over.

        Raises:
            CutLogError: The owner's audit log lacks lines that this worker knows.
        """
        config = self._config
        described = local_numeric_class(config.device, config.parallel)
        rooms = measure_own_memory(self._endpoint.session_name, config.device, config.memory_mib)
        log_head = self._log_memory.known_head
        hello = Hello(epoch=0, address=address, numeric_class=described, memory=rooms, log_head=log_head)
        self._mail.post_message(config.owner_name, hello)
        try:
            return self._serve_messages(address)
        except PeerLostError as exc:
            if not (self._wants_to_leave or self._has_asked):
                raise
            # the owner that was to let it go is gone, and what this worker wanted still holds
            self._worker_console.print_end(WorkerOutcome.LEFT, str(exc))
            return WorkerOutcome.LEFT
        finally:
            self._log_memory.write_head()

    def _serve_messages(self, address: str) -> WorkerOutcome:
        config = self._config
        last_mail = time.monotonic()
        deadline = last_mail + _SETUP_TIMEOUT_S
        while True:
            for item in self._mail.drain_messages():
                if isinstance(item, LinkFault):
                    self._handle_link_fault(item)
                elif isinstance(item.message, Shutdown) and item.sender == config.owner_name:
                    self._remember_log_head(item)
                    if self._state_files is not None:
                        # nothing will be gone on from
                        with contextlib.suppress(OSError):
                            self._state_files.remove_files()
                    ending = WorkerOutcome.LEFT if self._has_asked else WorkerOutcome.COMPLETE
                    self._worker_console.print_end(ending, item.message.reason)
                    return ending
                elif isinstance(item.message, NotLetIn) and item.sender == config.owner_name:
                    raise PeerRefusedError(f"{config.owner}: {item.message.reason}")
                else:
                    self._handle_message(item)
            if self._wants_to_leave:
                self._wants_to_leave = False
                if self._party is None:
                    self._worker_console.print_end(WorkerOutcome.LEFT)
                    return WorkerOutcome.LEFT
                self._has_asked = True
                self._mail.post_message(self._config.owner_name, Leave(epoch=0))
            if self._party is None and time.monotonic() > deadline:
                raise PeerLostError(f"{self._config.owner}: no setup from the owner within {_SETUP_TIMEOUT_S:.0f} s")
            if self._party is None or not self._party.do_next_work():
                self._log_memory.write_head()
                with self._timer.time_phase("wait"):
                    arrived = self._mail.wait_for_mail(1.0)
                last_mail = time.monotonic() if arrived else last_mail
                if time.monotonic() - last_mail > self._config.transport.timeout_s:
                    self._check_owner(address)
                    last_mail = time.monotonic()

    def _handle_message(self, item: ReceivedMessage) -> None:
        try:
            if isinstance(item.message, Setup) and item.sender == self._config.owner_name:
                if self._party is None:
                    self._log_memory.compare_head(item.message.log_head)
                self._set_up(parse_plan(item.message.plan))
                if item.message.certificates is not None:
                    self._add_parties(item.message.certificates, {})
                    self._mail.post_message(self._config.owner_name, PreparedNotice(epoch=0))
            elif isinstance(item.message, Fault) and item.sender == self._identity.name:
                # what another party sent could not even be read
                self._tell_owner(item.message)
            elif isinstance(item.message, Detour) and item.sender == self._config.owner_name:
                self._mail.leave_link(item.message.receiver)
            elif isinstance(item.message, Challenge) and item.sender == self._config.owner_name:
                self._show_kernels(item.message)
            elif self._party is not None:
                if isinstance(item.message, Assign) and item.sender == self._config.owner_name:
                    self._update_parties(item.message)
                if isinstance(item.message, FetchBulk) and item.message.purpose == "kept":
                    self._send_kept(item.sender, item.message)
                else:
                    self._party.handle_message(item)
                self._remember_log_head(item)
        except (ConfigError, CutLogError):
            raise
        except PhalanxError as exc:
            self._mail.count_refused(item)
            self._tell_owner(_make_fault(item.sender, exc))
        self._reset_counts()

    def _remember_log_head(self, item: ReceivedMessage) -> None:
        """Remember the audit log's head in the owner's other messages."""
        if isinstance(item.message, Apply | Assign | Shutdown) and item.sender == self._config.owner_name:
            self._log_memory.take_head(item.message.log_head)

    def _reset_counts(self) -> None:
        """Reset, for one attempt at a step, the allowances of others and the reports about them to the owner."""
        place = None if self._party is None else (self._party.roles.epoch, self._party.roles.step)
        if place != self._counted_attempt:
            self._counted_attempt = place
            self._mail.renew_allowances()
            self._event_sampler = EventSampler()
            if self._party is not None:
                roles = self._party.roles
                self._worker_console.print_roles(roles.hosted, roles.shadows, roles.step)
                self._worker_console.note_assignment(roles.assignment, roles.step)
                self._worker_console.print_step(roles.step)

    def _show_kernels(self, challenge: Challenge) -> None:
        """Send the owner the results of this worker's kernels on inputs that it has just drawn."""
        if self._plan is None:
            raise FrameError(f"{self._identity.name}: got a request for its kernel fingerprint before its setup")
        results = fingerprint_kernels(self._plan, challenge.nonce, self._kernels)
        self._mail.post_message(self._config.owner_name, ChallengeReply(epoch=0, nonce=challenge.nonce, found=results))

    def _set_up(self, plan: StepPlan) -> None:
        pinned = self._config.run_digest
        if pinned is not None and pinned != plan.run_digest:
            raise ConfigError(
                f"run_digest: the owner runs {plan.run_digest}, but {pinned} is pinned; ask the owner or change the pin"
            ).with_facts(code="PHX-C017", key="run_digest", found=str(plan.run_digest), expected=str(pinned))
        check_code(plan, self._config)
        if self._party is None:
            plan = self._plan = plan.model_copy(update={"device": self._config.device})
            context = PartyContext(
                self._identity.name,
                plan,
                self._mail.post_message,
                self._mail.statement_reader,
                self._timer,
                self._wrap_copy,
                RunningCosts(self._timer, self._endpoint, has_walls=True),
                self._state_files,
            )
            self._party = Party(context)
            self._worker_console.print_admitted(len(plan.stages))
            self._endpoint.allowances.limit_peers(allowance_of(plan))
            self._endpoint.allowances.exempt_peer(self._config.owner_name)

    def _send_kept(self, sender: str, about: FetchBulk) -> None:
        if sender != self._config.owner_name:
            raise FrameError(f"{self._identity.name}: {sender!r} asked for a kept state; only the owner may")
        send_kept(self._mail.post_message, sender, about, self._journal, certified_name(self._identity.name))

    def _update_parties(self, assign: Assign) -> None:
        """Get to know the other parties, with certificates of the common authority only; refuse excluded ones."""
        for name in set(self._endpoint.known_peers) - assign.addresses.keys() - {self._config.owner_name}:
            self._endpoint.evict_party(name)
        self._add_parties(assign.certificates, assign.addresses)

    def _add_parties(self, certificates: Mapping[str, str], addresses: Mapping[str, str]) -> None:
        for name, certificate in certificates.items():
            if name in (self._identity.name, self._config.owner_name):
                continue
            peer = peer_from_certificate(certificate.encode(), self._identity.authority_pem)
            self._endpoint.add_peer(peer.with_session_name(name), addresses.get(name, ""))

    def _check_owner(self, address: str) -> None:
        """End this worker when nothing has come for long and the owner is gone, or serves another run by now."""
        config = self._config
        try:
            met = ask_peer_run(self._identity, config.owner_name, config.owner, address, config.transport)
        except PeerLostError as exc:
            raise self._owner_gone_error(exc) from exc
        if met.run != self._endpoint.session_name:
            raise PeerLostError(f"the owner at {config.owner} now serves another session; restart this worker")
        if met.calls_us != self._identity.name:
            raise PeerRefusedError(
                f"{config.owner}: another process with this worker's certificate has joined and replaces this one; "
                "give each worker a certificate of its own"
            )
        # an owner that goes on without this worker refuses its word, and that ends the link
        epoch = 0 if self._party is None else max(self._party.roles.epoch, 0)
        self._mail.post_message(config.owner_name, ProgressReport(epoch=epoch, step=0, stages={}, gradients=()))

    def _owner_gone_error(self, reason: Exception) -> PeerLostError:
        if isinstance(reason, PeerRefusedError) and self._party is None:
            return PeerLostError(f"the owner at {self._config.owner} refuses this worker: {reason}")
        if isinstance(reason, PeerRefusedError):
            return PeerLostError(
                f"the owner at {self._config.owner} continues without this worker ({reason}); unless convicted, it "
                "may come back when the run is resumed"
            )
        return PeerLostError(f"the owner at {self._config.owner} is lost ({reason}); this worker ends")

    def _handle_link_fault(self, fault: LinkFault) -> None:
        if fault.peer == self._config.owner_name:
            raise self._owner_gone_error(fault.error)
        self._tell_owner(_make_fault(fault.peer, fault.error))

    def _tell_owner(self, fault: Fault) -> None:
        # others must not have this party use up what it may send itself
        if self._event_sampler.number_event("fault", fault.about) is None:
            return
        epoch = 0 if self._party is None else max(self._party.roles.epoch, 0)
        self._mail.post_message(self._config.owner_name, fault.model_copy(update={"epoch": epoch}))


def _make_fault(about: str, error: PhalanxError) -> Fault:
    return Fault(epoch=0, about=about, error=type(error).__name__, reason=str(error), evidence=None)


def _print_journal_failure(reason: str) -> None:
    # the log may lie on the same full disk
    with contextlib.suppress(OSError):
        sys.stderr.write(f"states are no longer saved to disk: {reason}\n")


@contextlib.contextmanager
def _leaving_on_signals(leave: Callable[[], None]) -> Iterator[None]:
    """Hand over this worker's stages at the first SIGTERM or Ctrl-C; end it at the second one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def give_back() -> None:
        for number, handler in old.items():
            signal.signal(number, handler)

    def hand_over(signum: int, frame: object) -> None:
        give_back()
        if signum == signal.SIGINT:
            sys.stderr.write("handing over the stages of this worker; a second Ctrl-C ends it at once\n")
        leave()

    for number in old:
        signal.signal(number, hand_over)
    try:
        yield
    finally:
        give_back()


def requested_file(file: Path) -> Path | None:
    """Return the worker file of this process: the given one, or in a process of the fork server the requested one.

    Returns:
        None in the fork server itself, when its owner needs it no more.
    """
    if str(file) != FORK_SERVER:
        return file
    forked = await_request([name for name in os.environ.get("PHALANX_PRELOAD", "").split(",") if name])
    if forked is not None:
        # a child of the fork server has that for its parent, and the kernel forgets over a fork what was asked of it
        die_with_parent()
    return forked


def load_code(config: WorkerConfig) -> None:
    """Load the families that a worker's own file names."""
    for own in config.code:
        open_own_code(own.kind, Path(config.code_home or ""))
        adopt_family(own.kind)


def check_code(plan: StepPlan, config: WorkerConfig) -> None:
    """Return where a worker runs a plan's model by the very code that the owner does.

    Args:
        plan: The owner's; what it names is a claim, and loads nothing.

    Raises:
        ConfigError: The plan has a family of the owner's own that the file does not name, or another; or the file has
            one for this model and the plan none.
    """
    wanted = () if plan.family is None else (code_key(plan.family),)
    mine = {code_key(own.kind): own.kind for own in config.code}
    own_type = plan.hub_config.get("model_type") in ADOPTED
    if all(key in mine for key in wanted) and (wanted or not own_type):
        return
    named = ", ".join(mine.values()) or "none"
    raise ConfigError(
        f"code: the owner's model family is {plan.family or 'a family of the package'}, but this worker's file "
        f"names {named}; if you trust that code, copy the same file beside the worker file and name it in [[code]]"
    )

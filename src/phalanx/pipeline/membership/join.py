"""The owner's side of joining: wait until every named worker has said hello, send it the plan, measure its class."""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from phalanx.errors import ConfigError, CutLogError, FrameError, PeerLostError, TransportError
from phalanx.pipeline.assignment.memory import Rooms
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.membership.admission import Admission, ClassMeasurement
from phalanx.pipeline.membership.members import Incarnations, Members
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.processes.own_memory import measure_own_memory
from phalanx.pipeline.protocol.greetings import LONGEST_REASON, Challenge, ChallengeReply, Hello, NotLetIn, Setup
from phalanx.pipeline.protocol.log_memory import LogHeadExchange, Observe
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import PassedOnHeader, parse_message
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.security.crypto import peer_from_certificate
from phalanx.transport import CheckedFrame, Endpoint, LinkFault

_SECONDS_TO_TELL = 2.0


@dataclass(frozen=True)
class ExpectedWorkers:
    """The workers that the owner waits for, and how it finds out that one has ended.

    Attributes:
        certificates: PEM by worker name; no other worker is let in.
        late: PEM by name of those that may join at any time and are not waited for.
        timeout_s: Longest time to wait for all.
        may_be_absent: Whether to go on, after that time, without the missing workers, which may come later.
        incarnations: Told which have come: a second process of a certificate waits until the first is given up.
        report_missing: Called, again and again while it waits, with the missing workers.
    """

    certificates: Mapping[str, str]
    late: Mapping[str, str]
    is_alive: Callable[[str], bool]
    last_output: Callable[[str], str]
    timeout_s: float
    may_be_absent: bool = False
    incarnations: Incarnations | None = None
    witnesses: LogHeadExchange = field(default_factory=LogHeadExchange)
    report_missing: Callable[[Collection[str]], None] = lambda names: None

    @property
    def known_certificates(self) -> dict[str, str]:
        """Certificates of all expected workers, in the order of the run file."""
        return {**self.certificates, **self.late}


def admit_workers(
    endpoint: Endpoint,
    plan: StepPlan,
    expected: ExpectedWorkers,
    authority_pem: bytes,
    observe: Observe = lambda kind, body: None,
) -> Members:
    """Let the named workers in, set them up and measure their numeric classes.

    What one of them does or leaves undone stops none of the others, but for a class that the run does not allow.

    Args:
        authority_pem: Certificate of the authority that issued theirs.

    Raises:
        PeerLostError: A worker ended or did not come, and may not be absent, or none has come.
        ConfigError: A worker computes other bits than the run allows.
        CutLogError: A worker knows lines that the audit log lacks.
    """
    for certificate in expected.known_certificates.values():
        endpoint.add_peer(peer_from_certificate(certificate.encode(), authority_pem))
    joining = _JoinState(endpoint, plan, expected, observe)
    joining.await_all(lambda: set(expected.certificates) - joining.hellos.keys(), "did not join")
    admission = Admission(plan)
    if admission.is_needed and joining.hellos:
        joining.measure_classes(admission)
    addresses = {name: hello.address for name, hello in joining.hellos.items()}
    rooms: dict[str, Rooms] = {name: hello.memory for name, hello in joining.hellos.items()}
    names = [name for name in expected.known_certificates if name in addresses]
    for name in names:
        admission.admit_by_law(name)
    # last of all: what the others on this machine took for themselves is no longer free
    rooms[OWNER] = measure_own_memory(endpoint.session_name, plan.device)
    authority = authority_pem.decode("ascii")
    members = Members(names, admission, addresses, expected.known_certificates, rooms, authority)
    members.unreachable, members.incarnations, members.witnesses = (
        joining.unreachable,
        expected.incarnations,
        expected.witnesses,
    )
    return members


class _JoinState:
    """The workers that have said hello and have no role yet."""

    def __init__(self, endpoint: Endpoint, plan: StepPlan, expected: ExpectedWorkers, observe: Observe) -> None:
        self.hellos: dict[str, Hello] = {}
        self.unreachable: list[LinkFault] = []
        self._endpoint = endpoint
        head = expected.witnesses.current_head()
        self._setup = Setup(epoch=0, plan=plan.model_dump(mode="json"), log_head=head)
        self._expected = expected
        self._observe = observe
        self._measurement: ClassMeasurement | None = None
        self._signed_headers: dict[str, dict[str, PassedOnHeader]] = {}
        self._deadline = time.monotonic() + expected.timeout_s

    def await_all(self, missing: Callable[[], set[str]], what: str, owed: str = "") -> None:
        """Take messages until no worker is missing.

        Args:
            owed: What a worker that has joined still has to send, such as "'s measurement".
        """
        expected = self._expected
        while missing():
            names = sorted(missing())
            expected.report_missing([f"{name}{owed}" for name in names])
            dead = [name for name in names if not expected.is_alive(name)]
            if dead:
                raise PeerLostError(f"{dead[0]} ended before it joined: {expected.last_output(dead[0])}").with_facts(
                    code="PHX-T053", found=dead[0]
                )
            if time.monotonic() > self._deadline and expected.may_be_absent and self.hellos.keys() - set(names):
                for name in names:
                    self.hellos.pop(name, None)
                return
            if time.monotonic() > self._deadline:
                do = (
                    "start them with `phalanx worker`"
                    if expected.may_be_absent
                    else "their processes are alive; check the load of this machine and workers/*.log of the run"
                )
                raise PeerLostError(f"{', '.join(names)} {what} within {expected.timeout_s:.0f} s; {do}").with_facts(
                    code="PHX-T052", found=", ".join(names), do=do
                )
            frame = self._endpoint.receive_item(0.2)
            if isinstance(frame, LinkFault):
                # wait no more for a worker that cannot be reached; the engine hears of it
                self.unreachable.append(frame)
                if self._measurement is not None and self._expected.may_be_absent:
                    self.hellos.pop(frame.peer, None)
            elif frame is not None:
                with contextlib.suppress(FrameError):
                    self._take_message(frame, parse_message(frame.kind, frame.body))

    def _take_message(self, frame: CheckedFrame, message: Message) -> None:
        name = frame.sender
        if isinstance(message, Hello) and self._measurement is None and name not in self.hellos:
            # a worker that has said hello has no second address and gets no second plan
            if self._expected.incarnations is not None:
                self._expected.incarnations.note_arrival(name)
            self.hellos[name] = message
            self._check_log_head(name, message)
            self._signed_headers[name] = {"hello": to_signed(frame.header)}
            self._endpoint.add_peer(self._endpoint.known_peers[name], message.address)
            self._send_message(name, self._setup)
        elif isinstance(message, ChallengeReply) and name in self.hellos and self._measurement is not None:
            is_new = self._measurement.add_answer(name, message)
            self._signed_headers[name] |= {"measured": to_signed(frame.header)} if is_new else {}

    def _check_log_head(self, name: str, hello: Hello) -> None:
        try:
            self._expected.witnesses.check_remembered_head(
                name, hello.log_head, self._endpoint.session_name, self._observe
            )
        except CutLogError as exc:
            self._tell_refusals({}, str(exc))
            raise

    def measure_classes(self, admission: Admission) -> None:
        """Send the same fresh nonce to all workers at once, and find their classes."""
        measurement = self._measurement = ClassMeasurement()
        for name in self.hellos:
            self._send_message(name, Challenge(epoch=0, nonce=measurement.nonce))
        admission.answer_as_owner(measurement)
        self.await_all(
            lambda: self.hellos.keys() - measurement.answers.keys(),
            "did not prove their numeric class",
            "'s measurement",
        )
        refused = {}
        for name in [name for name in self._expected.known_certificates if name in self.hellos]:
            reason = admission.refusal_reason(name, self.hellos[name].numeric_class, measurement)
            if reason is None:
                admission.assign_class(name, measurement)
            else:
                refused[name] = reason
                evidence = {what: signed.model_dump() for what, signed in self._signed_headers[name].items()}
                self._observe("not_let_in", {"party": name, "reason": reason, "evidence": evidence})
        if refused:
            everything = ". ".join(refused.values())
            self._tell_refusals(refused, everything)
            raise ConfigError(everything)

    def _tell_refusals(self, refused: Mapping[str, str], everything: str) -> None:
        for name in self.hellos:
            reason = refused.get(name, f"the run cannot begin: {everything}")
            self._send_message(name, NotLetIn(epoch=0, reason=reason[:LONGEST_REASON]))
        with contextlib.suppress(TransportError):
            self._endpoint.flush_frames(_SECONDS_TO_TELL)

    def _send_message(self, name: str, message: Message) -> None:
        # a link that has failed already is in the mail
        with contextlib.suppress(PeerLostError):
            self._endpoint.send_frame(name, message.kind, message.model_dump(mode="json"))

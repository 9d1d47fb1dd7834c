"""Workers that come while the run is under way: set up beside it, and given roles between two steps."""

from collections.abc import Collection
from dataclasses import dataclass

from phalanx.errors import CutLogError, FrameError
from phalanx.pipeline.membership.admission import ClassMeasurement
from phalanx.pipeline.membership.members import Incarnations, Members
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.greetings import LONGEST_REASON, Challenge, ChallengeReply, Hello, NotLetIn, Setup
from phalanx.pipeline.protocol.log_memory import Observe
from phalanx.pipeline.protocol.mailbox import Mailbox
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import PassedOnHeader
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.transport import Endpoint


@dataclass
class _Newcomer:
    """A party that has said hello and has no role yet."""

    hello: Hello
    measurement: ClassMeasurement
    signed_headers: dict[str, PassedOnHeader]
    knows_others: bool = False


class LateJoins:
    """The owner's side of late joins: newcomers are answered and measured until they can be given roles.

    Attributes:
        prepared: Workers that can take a role, in the order in which they got so far.
    """

    def __init__(
        self,
        members: Members,
        plan: StepPlan,
        mail: Mailbox,
        endpoint: Endpoint,
        observe: Observe,
        incarnations: Incarnations,
    ) -> None:
        self.prepared: list[str] = []
        self._incarnations = incarnations
        self._members = members
        self._plan = plan
        self._mail = mail
        self._endpoint = endpoint
        self._observe = observe
        self._newcomers: dict[str, _Newcomer] = {}
        self._turned_away: set[str] = set()

    def receive_message(self, received: ReceivedMessage, present: Collection[str]) -> None:
        """Take a message of a newcomer, or of a member that was measured beside it.

        Args:
            received: A `Hello`, what its sender's kernels give, or that it knows the others.
            present: Workers that take part already; a newcomer must know them before they send to it.

        Raises:
            FrameError: Its sender takes part already, or it comes twice or out of turn.
            CutLogError: It knows lines that the audit log lacks.
        """
        name, message = received.sender, received.message
        newcomer = self._newcomers.get(name)
        if isinstance(message, ChallengeReply):
            if not any([newcomer.measurement.add_answer(name, message) for newcomer in self._newcomers.values()]):
                raise FrameError(f"{name!r} sent an answer that was not due")
            if newcomer is not None and received.header is not None:
                newcomer.signed_headers["measured"] = to_signed(received.header)
        elif name in present or name in self._turned_away or (newcomer is not None) == isinstance(message, Hello):
            raise FrameError(f"{name!r} sent {message.kind!r} although it is not joining")
        elif isinstance(message, Hello):
            self._receive_hello(received, message, present)
        elif newcomer is not None:
            if newcomer.knows_others:
                raise FrameError(f"{name!r} sent {message.kind!r} twice")
            newcomer.knows_others = True
        self._judge_newcomer(name)

    def _receive_hello(self, received: ReceivedMessage, hello: Hello, present: Collection[str]) -> None:
        name = received.sender
        self._check_log_head(name, hello)
        for earlier in self._turned_away:
            # by now it has been told why
            self._endpoint.evict_party(earlier)
        self._endpoint.add_peer(self._endpoint.known_peers[name], hello.address)
        self._incarnations.note_arrival(name)
        self._members.add_incarnation(name)
        headers = {} if received.header is None else {"hello": to_signed(received.header)}
        newcomer = self._newcomers[name] = _Newcomer(hello, ClassMeasurement(), headers)
        certificates = {other: self._members.certificates[other] for other in present}
        head = self._members.witnesses.current_head()
        setup = Setup(epoch=0, plan=self._plan.model_dump(mode="json"), certificates=certificates, log_head=head)
        self._mail.post_message(name, setup, ())
        admission = self._members.admission
        if not admission.is_needed:
            return
        # a newcomer that computes unlike the owner may be of the class of another member
        for party in (name, *admission.foreign_class_parties(present)):
            self._mail.post_message(party, Challenge(epoch=0, nonce=newcomer.measurement.nonce), ())
        admission.answer_as_owner(newcomer.measurement)

    def _check_log_head(self, name: str, hello: Hello) -> None:
        try:
            self._members.witnesses.check_remembered_head(
                name, hello.log_head, self._endpoint.session_name, self._observe
            )
        except CutLogError as exc:
            self._endpoint.add_peer(self._endpoint.known_peers[name], hello.address)
            self._mail.post_message(name, NotLetIn(epoch=0, reason=str(exc)[:LONGEST_REASON]), ())
            raise

    def _judge_newcomer(self, name: str) -> None:
        """Turn a newcomer away, or count it among the prepared, as soon as it has said enough."""
        newcomer, admission = self._newcomers.get(name), self._members.admission
        if newcomer is None or name in self.prepared:
            return
        if admission.is_needed:
            if name not in newcomer.measurement.answers:
                return
            reason = admission.refusal_reason(name, newcomer.hello.numeric_class, newcomer.measurement)
            if reason is not None:
                self._turn_away(name, reason)
                return
        if newcomer.knows_others:
            self.prepared.append(name)

    def _turn_away(self, name: str, reason: str) -> None:
        evidence = {what: signed.model_dump() for what, signed in self._newcomers.pop(name).signed_headers.items()}
        self._observe("not_let_in", {"party": name, "reason": reason, "evidence": evidence})
        self._mail.post_message(name, NotLetIn(epoch=0, reason=reason[:LONGEST_REASON]), ())
        self._turned_away.add(name)
        # it may come again with other settings, as often as `pipeline.returns` allows
        self._incarnations.note_end(name, for_good=False)

    def drop_newcomer(self, name: str) -> None:
        """Take nothing more from a newcomer that ended before it was let in."""
        self.prepared = [other for other in self.prepared if other != name]
        self._newcomers.pop(name, None)
        self._endpoint.evict_party(name)
        self._incarnations.note_end(name, for_good=False)

    def admit_prepared(self) -> list[str]:
        """Make members of the prepared newcomers."""
        names, self.prepared = self.prepared, []
        for name in names:
            newcomer, members = self._newcomers.pop(name), self._members
            if members.admission.is_needed:
                members.admission.assign_class(name, newcomer.measurement)
            members.admission.admit_by_law(name)
            members.addresses[name], members.memory_by_party[name] = newcomer.hello.address, newcomer.hello.memory
        return names

"""An insider at work: carries out the acts of its schedule with real frames, signed with its own key."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from copy import copy as shallow
from dataclasses import dataclass
from typing import Any

from acts import Act, Alter, At, Crash, Lie, Say, Send, Withhold
from neighbours import Seen, altered, template
from turns import TurnCompany, TurnEndpoint, TurnOwnersEndpoint

from phalanx.errors import FrameError
from phalanx.pipeline.protocol.messages import parse_message
from phalanx.security.crypto import certified_name
from phalanx.testing import Actor, OutgoingMessage, RewritingEndpoint, TamperedRunner, WorkerCrash
from phalanx.transport import CheckedFrame

NEGATE, NAN = bytes(0x80 if n % 4 == 3 else 0 for n in range(4)), b"\x00\x00\xc0\x7f"

PAYLOADS = {
    "": lambda raw: raw,
    "negated": lambda raw: bytes(byte ^ NEGATE[n % 4] for n, byte in enumerate(raw)),
    "nan": lambda raw: NAN + raw[4:] if len(raw) >= 4 else raw,
    "short": lambda raw: raw[:-4],
    "empty": lambda raw: b"",
    "one bit": lambda raw: bytes([raw[0] ^ 1]) + raw[1:] if raw else raw,
}
"""Other bytes for the same message, which its sender signs."""

_PLACE = ("stage", "source", "target", "direction", "microbatch")


@dataclass(frozen=True)
class Raw:
    """A body as it goes over the wire, well-formed or not; stands where a parsed message would."""

    kind: str
    body: dict[str, Any]

    def model_dump(self, mode):
        return self.body


@dataclass(frozen=True)
class Point:
    """A point that a party came by.

    Attributes:
        at: What an act names it by.
        sort: Of its message: points of one sort differ in the microbatch alone.
        said: Kinds that the party had sent in this attempt before.
    """

    at: At
    sort: tuple[Any, ...]
    said: frozenset[str] = frozenset()

    @property
    def context(self) -> tuple[Any, ...]:
        """What tells it from the points of another run."""
        return (self.at.event, self.at.kind, self.at.step, self.sort, self.said)


class Liar:
    """One party with acts.

    Attributes:
        host_view: What it knows.
        fired: Numbers of the acts that were carried out.
        goes_on: Whether it takes errors of its own for nothing, as only an insider does.
        has_lied: Whether it has sent a tensor that is not what it computed.
        points: Every point that it came by, in order: what can be acted on in another run.
    """

    def __init__(self, name: str, acts: Sequence[Act], seen: Seen) -> None:
        self.name = name
        self.host_view = seen
        self.goes_on = any(not isinstance(act.deed, Crash) for act in acts)
        self.fired: set[int] = set()
        self.has_lied = False
        self.points: list[Point] = []
        self._acts = acts
        self._counts = [0] * len(acts)
        self._said_kinds: set[str] = set()
        self._passed: dict[tuple[str, str, int | None], int] = {}
        self._late: list[OutgoingMessage] = []
        self._lies: dict[str, range] = {}
        self._now: dict[str, Any] = {"epoch": 0, "step": 0, "microbatch": 0, "direction": "forward"}
        self._now |= {"about": "worker-2" if name == "worker-1" else "worker-1", "states": {}}
        self._about: dict[str, Any] = {}

    # --- acts on messages -------------------------------------------------------------------------

    @property
    def num_sent_bytes(self) -> int:
        """Bytes of the headers that it has sent."""
        mine = (header for header, _ in self.host_view.headers if certified_name(header.fields.sender) == self.name)
        return sum(len(header.header_bytes) for header in mine)

    def rewrite(self, outgoing: OutgoingMessage) -> list[OutgoingMessage]:
        """Return what leaves instead of one message of the honest party."""
        kind, body = outgoing.message.kind, outgoing.message.model_dump(mode="json")
        self._note(kind, body)
        plain = OutgoingMessage(outgoing.receiver, Raw(kind, body), outgoing.payload)
        before, instead, behind = [], [plain], self._late
        self._late = []
        for deed in self._due("sends", outgoing.receiver, kind, body):
            if isinstance(deed, Withhold):
                instead = []
            elif isinstance(deed, Send):
                sent = self._changed(plain, deed)
                # what it says of its own accord from now on is about the message that it has changed
                self._about = {name: body[name] for name in _PLACE if name in body}
                if deed.when == "instead":
                    instead = [sent]
                elif deed.when == "late":
                    instead = []
                    self._late = [*self._late, sent]
                else:
                    (before if deed.when == "before" else behind).append(sent)
            else:
                before += self._do(deed)
        return [*before, *instead, *behind]

    def hear(self, frame: CheckedFrame) -> tuple[bool, list[OutgoingMessage]]:
        """Return whether the party gets a message, and what it sends before it reads it."""
        self._note(frame.kind, frame.body)
        is_read, said = True, []
        for deed in self._due("gets", frame.sender, frame.kind, frame.body):
            if isinstance(deed, Withhold):
                is_read = False
            else:
                said += self._do(deed)
        return is_read, said

    def _due(self, event: str, peer: str, kind: str, body: dict[str, Any]) -> list[Any]:
        step, stage = body.get("step"), body.get("stage", body.get("source"))
        place = (event, kind, step)
        sort = (body.get("purpose", body.get("direction")), body.get("urgent"), body.get("claim"))
        at = At(kind, step, self._passed.get(place, 0), event)
        self.points.append(Point(at, (stage, peer, *sort), frozenset(self._said_kinds)))
        if event == "sends":
            self._said_kinds.add(kind)
        elif kind in ("assign", "apply"):
            self._said_kinds.clear()
        self._passed[place] = self._passed.get(place, 0) + 1
        due = []
        for number, act in enumerate(self._acts):
            at = act.at
            wanted = (at.event, at.kind, at.step, at.stage, at.peer)
            found = (event, kind, step, stage, peer)
            if any(one not in (None, other) for one, other in zip(wanted, found, strict=True)):
                continue
            nth, self._counts[number] = self._counts[number], self._counts[number] + 1
            if nth == at.nth or (at.lasting and nth > at.nth):
                self.fired.add(number)
                due.append(act.deed)
        return due

    def _note(self, kind: str, body: dict[str, Any]) -> None:
        self._now |= {name: body[name] for name in ("epoch", "step") if name in body and kind != "bulk"}
        for role in body.get("roles", ()) if kind == "assign" else ():
            if certified_name(role["holder"]) == self.name and "stage" not in self._now:
                stage = role["stage"]
                self._now |= {"stage": stage, "source": stage, "target": stage + 1}

    def _do(self, deed: Any) -> list[OutgoingMessage]:
        match deed:
            case Say():
                return [self._said(deed, number) for number in range(deed.num)]
            case Lie(what, steps):
                self._lies[what] = range(self._now["step"], self._now["step"] + steps)
            case Crash():
                raise WorkerCrash("as its schedule says")
        return []

    def _changed(self, plain: OutgoingMessage, deed: Send) -> OutgoingMessage:
        body = altered(plain.message.kind, plain.message.body, deed.alters, self.host_view)
        return OutgoingMessage(
            deed.to or plain.receiver, Raw(plain.message.kind, body), PAYLOADS[deed.payload](plain.payload)
        )

    def _said(self, deed: Say, number: int) -> OutgoingMessage:
        mine = [
            (header.fields.body, payload)
            for header, payload in reversed(self.host_view.headers)
            if (header.fields.kind, certified_name(header.fields.sender)) == (deed.kind, self.name)
        ]
        now = {name: value for name, value in self._now.items() if name in ("epoch", "step")}
        body, payload = mine[0] if mine else (template(deed.kind, self._now | self._about), bytes(64))
        if mine:
            body = {**body, **{name: value for name, value in now.items() if name in body}}
        body = altered(deed.kind, body, deed.alters, self.host_view)
        return OutgoingMessage(deed.to, Raw(deed.kind, _later(body, number)), PAYLOADS[deed.payload](payload))

    # --- lies in computations ---------------------------------------------------------------------

    def wrap(self, copy, held):
        """Put a copy that lies in the place of an honest one."""
        mine = shallow(copy)
        if not held:
            mine.runner = _LyingAuditor(copy.runner, self)
            return mine
        mine.runner = TamperedRunner(copy.runner, self._tamper, self._twist)

        def apply(step, gradients, clip):
            copy.apply_update(step, gradients, clip)
            if step in self._lies.pop("weights", ()):
                state = copy.optimizer.state_tensors()
                lie = {name: -each if name.startswith("weight/") else each.clone() for name, each in state.items()}
                copy.optimizer.load_state(lie, copy.optimizer.num_steps)

        mine.apply_update = apply
        return mine

    def lies_about(self, what: str, step: int) -> bool:
        """Whether it computes something else of this kind in a step."""
        return step in self._lies.get(what, ())

    def _tamper(self, direction, step, microbatch, tensor):
        if not self.lies_about(direction, step):
            return tensor
        self.has_lied = True
        return -tensor

    def _twist(self, gradients):
        if not self.lies_about("gradient", self._now["step"]):
            return gradients
        return {name: -gradient for name, gradient in gradients.items()}


class Forecast(Liar):
    """An honest party that notes what each act would make of the points that it comes by.

    Attributes:
        effects: Of each act that was due, what leaves or is read at its point. Two acts with one effect are one act:
            up to there the run is the honest one. Of an act that lasts, only whether it changes anything.
    """

    def __init__(self, name: str, acts: Iterable[Act], seen: Seen) -> None:
        super().__init__(name, (), seen)
        self.goes_on = True
        self.effects: dict[Act, Any] = {}
        self._by_place: dict[tuple[str, str, int | None], list[Act]] = {}
        for act in acts:
            self._by_place.setdefault((act.at.event, act.at.kind, act.at.step), []).append(act)

    def rewrite(self, outgoing: OutgoingMessage) -> list[OutgoingMessage]:
        """Note what acts would send instead, and send what the honest party says."""
        honest = super().rewrite(outgoing)
        self._note_effects(outgoing.receiver, honest)
        return honest

    def hear(self, frame: CheckedFrame) -> tuple[bool, list[OutgoingMessage]]:
        """Note what acts would say, and say nothing."""
        heard = super().hear(frame)
        self._note_effects(frame.sender, [])
        return heard

    def _note_effects(self, peer: str, honest: list[OutgoingMessage]) -> None:
        at = self.points[-1].at
        plain = [_described(each, ()) for each in honest]
        for act in self._by_place.get((at.event, at.kind, at.step), ()):
            if act.at.lasting and act.at.peer in (None, peer) and at.nth >= act.at.nth:
                effect = self._effect_of(act.deed, honest)
                if effect != plain:
                    self.effects[act] = repr(act)
            elif not act.at.lasting and act.at.nth == at.nth:
                effect = self._effect_of(act.deed, honest)
                if effect != plain:
                    self.effects[act] = (at, repr(effect))

    def _effect_of(self, deed: Any, honest: list[OutgoingMessage]) -> list[Any]:
        plain = [_described(each, ()) for each in honest]
        if getattr(deed, "num", 1) > 1 or any(alter.value == "flood" for alter in getattr(deed, "alters", ())):
            # large, and each like no other
            return [repr(deed)]
        match deed:
            case Withhold():
                return [] if honest else ["unread"]
            case Send(alters=alters, when=when):
                sent = _described(self._changed(honest[0], deed), alters)
                return {
                    "instead": [sent],
                    "before": [sent, *plain],
                    "behind": [*plain, sent],
                    "late": ["late", sent],
                }[when]
            case Say(alters=alters, num=num):
                return [_described(self._said(deed, number), alters) for number in range(num)]
        return [repr(deed)]


def _described(outgoing: OutgoingMessage, alters: Sequence[Alter]) -> tuple[Any, ...]:
    """What tells a message from others; where no party reads a body, only which field of it is wrong, and its size."""
    kind, body = outgoing.message.kind, outgoing.message.model_dump(mode="json")
    text = json.dumps(body, sort_keys=True)
    try:
        parse_message(kind, body)
    except FrameError as exc:
        text = f"{type(exc).__name__} {[alter.path[0] for alter in alters]} {len(text) // 2**14}"
    return (outgoing.receiver, kind, text, hashlib.blake2b(outgoing.payload).hexdigest())


def _later(body: Any, number: int) -> Any:
    """A body about so many steps later, wherever it names a step; the first one is as it was."""
    if not number:
        return body
    if isinstance(body, list):
        return [_later(each, number) for each in body]
    if not isinstance(body, dict):
        return body
    return {
        name: value + number if name == "step" and isinstance(value, int) else _later(value, number)
        for name, value in body.items()
    }


def _compared(one: Any, other: int) -> int | None:
    return (one > other) - (one < other) if isinstance(one, int) else None


class _LyingAuditor(TamperedRunner):
    """What an auditor recomputes passes through a lie."""

    def __init__(self, honest, liar):
        super().__init__(honest, lambda direction, step, microbatch, tensor: tensor, lambda gradients: gradients)
        self._liar = liar

    def recompute_microbatch(self, step, microbatch, x, gradient):
        y, x_gradient = self._honest.recompute_microbatch(step, microbatch, x, gradient)
        if not self._liar.lies_about("claims", step):
            return y, x_gradient
        return -y, None if x_gradient is None else -x_gradient

    def redo_microbatch(self, step, microbatch, x, gradient, names=None):
        return self._honest.redo_microbatch(step, microbatch, x, gradient, names)


class LyingEndpoint(TurnEndpoint):
    """A worker's end that carries out its acts on what it gets as well."""

    liar: Liar | None = None

    def receive_item(self, timeout_s):
        item = super().receive_item(timeout_s)
        while self.liar is not None and isinstance(item, CheckedFrame) and not self.turns.is_over:
            is_read, said = self.liar.hear(item)
            for outgoing in said:
                # as it is: acts are not done to acts
                message = outgoing.message
                super(RewritingEndpoint, self).send_frame(
                    outgoing.receiver, message.kind, message.body, (outgoing.payload,)
                )
            if is_read:
                break
            item = super().receive_item(0.0)
        return item

    def put_aside(self, receiver, kind, body, payload=()):
        """What the owner is to carry is altered as well; without its own bytes it would not be carried."""
        if self.liar is not None and not self.turns.is_over:
            told = self.liar.rewrite(OutgoingMessage(receiver, parse_message(kind, body), b"".join(payload)))
            kept = [each for each in told if each.receiver == receiver and each.message.kind == kind]
            body = kept[-1].message.body if kept else body
        return super().put_aside(receiver, kind, body, payload)


class WatchedOwnersEndpoint(TurnOwnersEndpoint):
    """The owner's end; its mail tells how far a run has come."""

    company: "LyingCompany | None" = None

    def send_frame(self, receiver, kind, body, payload=()):
        if self.company is not None:
            self.company.owner_says(kind, body)
        return super().send_frame(receiver, kind, body, payload)

    def receive_item(self, timeout_s):
        item = super().receive_item(timeout_s)
        if self.company is not None and isinstance(item, CheckedFrame):
            self.company.owner_hears(item)
        return item


class LyingCompany(TurnCompany):
    """A company in which parties carry out acts.

    Attributes:
        coverage: (state of the owner, statement or event) that were reached.
        trace: Digest of everything that the owner said, heard and noted, in order, by kind and party.
        heard_headers: Bytes of the headers of what the owner has heard.
    """

    _endpoint_class = LyingEndpoint
    _owners_class = WatchedOwnersEndpoint

    def __init__(self, run, directory, liars, **kwargs):
        self._liars = liars
        self.coverage: set[tuple[Any, ...]] = set()
        self.trace = hashlib.sha256()
        self.heard_headers: set[bytes] = set()
        self._said: set[str] = set()
        self._place = (0, 0)
        # a party that comes back is the same one under another name
        lives = {life: liar for name, liar in liars.items() for life in (name, *(f"{name}.{n}" for n in (2, 3, 4)))}
        actors = {name: Actor(wrap_copy=liar.wrap, rewrite=liar.rewrite) for name, liar in lives.items()}
        noted = {name: liar.host_view.headers for name, liar in lives.items() if liar.goes_on}
        super().__init__(run, directory, actors, noted=noted, **kwargs)

    def _owners_endpoint(self):
        owner = super()._owners_endpoint()
        owner.company = self
        return owner

    def _is_liar(self, name):
        liar = self._liars.get(certified_name(name))
        return liar is not None and liar.goes_on

    def owner_says(self, kind, body):
        """The owner sends something: another state, as far as others can tell."""
        if kind in ("assign", "apply"):
            self._said = set()
            self._place = (body["epoch"], body["step"] + (kind == "apply"))
        self._said.add(kind)
        self.trace.update(f"says {kind}\n".encode())

    def owner_hears(self, frame):
        """Note a statement in the owner's present state."""
        self.heard_headers.add(bytes(frame.header.header_bytes))
        epoch, step = (frame.body.get(name) for name in ("epoch", "step"))
        relative = tuple(_compared(one, other) for one, other in zip((epoch, step), self._place, strict=True))
        self.coverage.add((frozenset(self._said), frame.kind, self._is_liar(frame.sender), relative))
        self.trace.update(f"hears {frame.kind} {frame.sender} {relative}\n".encode())

    def _note_event(self, kind, body):
        super()._note_event(kind, body)
        party = str(body.get("party", ""))
        what = str(body.get("offence", body.get("error", "")))
        self.coverage.add((frozenset(self._said), "event", kind, what, self._is_liar(party)))
        self.trace.update(f"notes {kind} {party} {what}\n".encode())

    def _make_endpoint(self, name):
        endpoint = super()._make_endpoint(name)
        endpoint.liar = self._liars.get(certified_name(name))
        return endpoint

"""An insider at work: real frames, signed with its own key, that say what its schedule wants."""

from collections.abc import Sequence
from copy import deepcopy

from changes import PAYLOADS, Known, Raw
from kinds import template
from schedule import Act, Again, Alter, Crash, Drop, Hold, Path, Payload, Redirect, Repeat, Say

from phalanx.testing import OutgoingMessage, WorkerCrash

_ALLIES_HEAR = ("commit", "step_audited", "audit_report")


class Insider:
    """Carries out acts on the messages of one party.

    Attributes:
        known: What it has seen.
        fired: Which of its acts ever fitted a message.
    """

    def __init__(self, acts: Sequence[Act], known: Known, parties: Sequence[str]) -> None:
        self.known = known
        self.fired: set[int] = set()
        self._acts = acts
        self._seen = [0] * len(acts)
        self._parties = parties
        self._held: list[tuple[int, OutgoingMessage]] = []
        self._now = {"epoch": 0, "step": 0}

    def rewrite(self, outgoing: OutgoingMessage) -> list[OutgoingMessage]:
        """What leaves instead of one message of the honest party."""
        kind, body = outgoing.message.kind, outgoing.message.model_dump(mode="json")
        self._now |= {name: body[name] for name in self._now if name in body}
        messages = [OutgoingMessage(outgoing.receiver, Raw(kind, body), outgoing.payload)]
        for number, act in enumerate(self._acts):
            if act.on.kind in ("", kind) and act.on.step in (None, body.get("step")):
                nth, self._seen[number] = self._seen[number], self._seen[number] + 1
                if nth == act.on.nth or (act.on.lasting and nth > act.on.nth):
                    self.fired.add(number)
                    messages = self._do(act.deed, messages)
        if kind in _ALLIES_HEAR:
            self.known.allies[kind, body.get("stage")] = messages[0].message.body if messages else body
        self._held = [(messages_left - 1, held) for messages_left, held in self._held]
        due = [held for messages_left, held in self._held if messages_left < 0]
        self._held = [entry for entry in self._held if entry[0] >= 0]
        return messages + due

    def _do(self, deed, messages: list[OutgoingMessage]) -> list[OutgoingMessage]:
        match deed:
            case Alter():
                return [_altered(one, deed, self.known) for one in messages]
            case Drop():
                return []
            case Repeat(times):
                return messages * (times + 1)
            case Hold(behind):
                self._held += [(behind, one) for one in messages]
                return []
            case Redirect(to):
                return [OutgoingMessage(to, one.message, one.payload) for one in messages]
            case Payload(how):
                return [OutgoingMessage(one.receiver, one.message, PAYLOADS[how](one.payload)) for one in messages]
            case Again(kind, nth, earlier):
                choice = self.known.of_kind(kind, earlier=earlier)
                return [*messages, _again(*choice[nth % len(choice)], messages)] if choice else messages
            case Say():
                return [*messages, self._said(deed)]
            case Crash():
                raise WorkerCrash("as its schedule says")
        raise TypeError(deed)

    def _said(self, deed: Say) -> OutgoingMessage:
        known = [header.fields.body for header, _ in self.known.of_kind(deed.kind) if header.fields.kind == deed.kind]
        body = {**(known[0] if known else template(deed.kind)), **{"epoch": self._now["epoch"]}}
        body |= {"step": self._now["step"]} if "step" in body else {}
        outgoing = OutgoingMessage(deed.to, Raw(deed.kind, body), bytes(deed.payload))
        for change in deed.changes:
            outgoing = _altered(outgoing, change, self.known)
        return outgoing


def _altered(outgoing: OutgoingMessage, deed: Alter, known: Known) -> OutgoingMessage:
    body = deepcopy(outgoing.message.body)
    if not _alter(body, deed.path, deed.change, known):
        return outgoing
    return OutgoingMessage(outgoing.receiver, Raw(outgoing.message.kind, body), outgoing.payload)


def _alter(body, path: Path, change, known: Known) -> bool:
    """Change one place, if there is such a place."""
    here, rest = _key(body, path[0]), path[1:]
    if here is None:
        return False
    if rest:
        return _alter(body[here], rest, change, known)
    body[here] = change(body[here], known)
    return True


def _key(body, name):
    """The key of a place in a list or an object; a number stands for any, counted round and round."""
    if isinstance(name, str) or not body:
        return name if isinstance(body, dict) and name in body else None
    if isinstance(body, dict):
        return sorted(body)[name % len(body)]
    return name % len(body) if isinstance(body, list) else None


def _again(header, payload, messages) -> OutgoingMessage:
    receiver = header.fields.receiver if header.fields.receiver != header.fields.sender else "owner"
    return OutgoingMessage(
        messages[0].receiver if messages else receiver, Raw(header.fields.kind, header.fields.body), payload
    )

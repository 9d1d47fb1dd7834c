"""An insider at work: real frames, signed with its own key, that say what its schedule wants."""

from collections.abc import Sequence
from copy import deepcopy

from changes import PAYLOADS, Known, Raw
from kinds import template
from schedule import Act, Again, Alter, Crash, Drop, Hold, Path, Payload, Redirect, Repeat, Say

from phalanx.testing import Letter, WorkerCrash

_ALLIES_HEAR = ("commit", "step_audited", "audit_report")


class Insider:
    """Carries out acts on the letters of one party.

    Attributes:
        known: What it has seen.
        fired: Which of its acts ever fitted a letter.
    """

    def __init__(self, acts: Sequence[Act], known: Known, parties: Sequence[str]) -> None:
        self.known = known
        self.fired: set[int] = set()
        self._acts = acts
        self._seen = [0] * len(acts)
        self._parties = parties
        self._held: list[tuple[int, Letter]] = []
        self._now = {"epoch": 0, "step": 0}

    def rewrite(self, letter: Letter) -> list[Letter]:
        """What leaves instead of one letter of the honest party."""
        kind, body = letter.message.kind, letter.message.model_dump(mode="json")
        self._now |= {name: body[name] for name in self._now if name in body}
        letters = [Letter(letter.receiver, Raw(kind, body), letter.payload)]
        for number, act in enumerate(self._acts):
            if act.on.kind in ("", kind) and act.on.step in (None, body.get("step")):
                nth, self._seen[number] = self._seen[number], self._seen[number] + 1
                if nth == act.on.nth or (act.on.lasting and nth > act.on.nth):
                    self.fired.add(number)
                    letters = self._do(act.deed, letters)
        if kind in _ALLIES_HEAR:
            self.known.allies[kind, body.get("stage")] = letters[0].message.body if letters else body
        self._held = [(letters_left - 1, held) for letters_left, held in self._held]
        due = [held for letters_left, held in self._held if letters_left < 0]
        self._held = [entry for entry in self._held if entry[0] >= 0]
        return letters + due

    def _do(self, deed, letters: list[Letter]) -> list[Letter]:
        match deed:
            case Alter():
                return [_altered(one, deed, self.known) for one in letters]
            case Drop():
                return []
            case Repeat(times):
                return letters * (times + 1)
            case Hold(behind):
                self._held += [(behind, one) for one in letters]
                return []
            case Redirect(to):
                return [Letter(to, one.message, one.payload) for one in letters]
            case Payload(how):
                return [Letter(one.receiver, one.message, PAYLOADS[how](one.payload)) for one in letters]
            case Again(kind, nth, earlier):
                choice = self.known.of_kind(kind, earlier=earlier)
                return [*letters, _again(*choice[nth % len(choice)], letters)] if choice else letters
            case Say():
                return [*letters, self._said(deed)]
            case Crash():
                raise WorkerCrash("as its schedule says")
        raise TypeError(deed)

    def _said(self, deed: Say) -> Letter:
        known = [header.fields.body for header, _ in self.known.of_kind(deed.kind) if header.fields.kind == deed.kind]
        body = {**(known[0] if known else template(deed.kind)), **{"epoch": self._now["epoch"]}}
        body |= {"step": self._now["step"]} if "step" in body else {}
        letter = Letter(deed.to, Raw(deed.kind, body), bytes(deed.payload))
        for change in deed.changes:
            letter = _altered(letter, change, self.known)
        return letter


def _altered(letter: Letter, deed: Alter, known: Known) -> Letter:
    body = deepcopy(letter.message.body)
    if not _alter(body, deed.path, deed.change, known):
        return letter
    return Letter(letter.receiver, Raw(letter.message.kind, body), letter.payload)


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


def _again(header, payload, letters) -> Letter:
    receiver = header.fields.receiver if header.fields.receiver != header.fields.sender else "owner"
    return Letter(letters[0].receiver if letters else receiver, Raw(header.fields.kind, header.fields.body), payload)

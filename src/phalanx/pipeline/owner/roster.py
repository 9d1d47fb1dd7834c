"""The workers that a run counts on: which take part, are lost, want to leave, and how one is shut out."""

import contextlib
from collections import deque
from collections.abc import Collection

from phalanx.errors import TransportError
from phalanx.pipeline.membership.members import revocation_facts
from phalanx.pipeline.owner.context import OwnerContext
from phalanx.pipeline.protocol.messages import Ask, Shutdown
from phalanx.security.crypto import Revocation, certified_name


class Roster:
    """The workers that the owner counts on.

    Attributes:
        alive: Workers that take part, in the order in which they came.
        lost: Those among them that are known to be gone and are still to be replaced.
        reasons: Why each party that was ever lost was lost.
        leaving: Those among them that hand over at the end of the step.
        revoked: Names in the certificates that the owner has taken back in this session.
        distrusted: Parties that are to be replaced for their acts, and are not convicted.
    """

    def __init__(self, context: OwnerContext) -> None:
        self.alive = list(context.members.names)
        self.lost, self.reasons = deque[str](), dict[str, str]()
        self.leaving, self.revoked, self.distrusted = set[str](), set[str](), set[str]()
        self._context = context

    def suspect(self, name: str, reason: str, cause: str = "") -> None:
        """Note that a party is gone, or given up for a cause in one word; it is replaced at the next recovery.

        What it did is undone like a convict's where it was found wrong ("refused") or kept back a state that it had
        signed ("withheld").
        """
        facts = self._context.facts
        if name in self.alive and cause in ("refused", "withheld"):
            self.distrusted.add(name)
        if name in self.alive and name not in self.lost:
            facts.observe("link_broken", {"party": name, "reason": reason})
            if cause:
                place = {"party": name, "step": facts.ledger.step, "cause": cause}
                facts.observe("replaced", {**place, "reason": reason})
            self.lost.append(name)
            self.reasons[name] = reason
            # while its process may still answer: it ends when it hears that it was given up
            self._context.members.ask_stacks(name)

    def suspect_the_dead(self) -> None:
        """Note every party with a process that has ended, and replace workers that ended before they joined."""
        members = self._context.members
        for name in self.alive:
            if not members.is_alive(name):
                self.suspect(name, "its process has ended")
        members.look_after()

    def revoke(self, entry: Revocation, step: int) -> str | None:
        """Bar a revoked party; one that takes part joins those in `lost`, the name of one about to join is returned."""
        self._context.facts.observe("revoked", {**revocation_facts(entry), "step": step})
        self.revoked.add(entry.party)
        if (name := self._context.incarnations.bar_certificate(entry.party)) in self.alive:
            self.lost.append(name)
            self.reasons[name], name = "its certificate was revoked", None
        return name

    def probe(self) -> None:
        """Send every party a message: a link with a dead other end is found when something is to go over it."""
        ledger = self._context.facts.ledger
        self._context.tell(self.alive, Ask(epoch=ledger.epoch, step=ledger.step))

    def add_newcomers(self, newcomers: Collection[str], step: int) -> None:
        """Count on workers that are members by now."""
        members = self._context.members
        self.alive += newcomers
        for name in newcomers:
            place = {"address": members.addresses[name], "class": members.class_of(name)}
            self._context.facts.observe("party_joined", {"party": name, **place, "step": step})

    def strike_off(self, gone: str) -> None:
        """Count on a worker no more; it may still be sent to."""
        self.alive = [name for name in self.alive if name != gone]
        self.leaving.discard(gone)
        self.lost = deque(name for name in self.lost if name != gone)

    def let_go(self, name: str, step: int) -> None:
        """Say good-bye to a party that has handed over everything."""
        context, facts = self._context, self._context.facts
        self.strike_off(name)
        with contextlib.suppress(TransportError):
            context.tell([name], Shutdown(epoch=facts.ledger.epoch, reason="it asked to leave"))
        context.incarnations.note_end(name, for_good=False)
        facts.observe("left", {"party": name, "step": step})

    def shut_out(self, gone: str, stages: Collection[int], *, convicted: bool) -> None:
        """Refuse a worker's messages and end its process, if it is a local one.

        Args:
            stages: Stages that it held, for the audit log.
        """
        context, facts = self._context, self._context.facts
        self.strike_off(gone)
        context.endpoint.evict_party(gone)
        context.incarnations.note_end(gone, for_good=convicted or certified_name(gone) in self.revoked)
        context.members.dismiss(gone)
        context.files.gone.append(gone)
        place = {"party": gone, "stages": stages, "step": facts.ledger.step}
        facts.observe("evicted" if convicted else "lost", place)
        context.members.replace(gone)

"""Workers that come while the run is under way: set up beside it, and given roles between two steps."""

from collections.abc import Collection

from phalanx.errors import ConfigError, FrameError
from phalanx.pipeline.desk import Received
from phalanx.pipeline.docket import Observe
from phalanx.pipeline.inbox import Loopback
from phalanx.pipeline.lives import Lives
from phalanx.pipeline.members import Members
from phalanx.pipeline.messages import Hello, Prepared, Setup
from phalanx.pipeline.plan import StepPlan
from phalanx.transport import Endpoint


class Newcomers:
    """Answers whoever may join later, until it can be counted on.

    Attributes:
        prepared: Who can take a role, in the order in which they got so far.
    """

    def __init__(
        self, members: Members, plan: StepPlan, mail: Loopback, endpoint: Endpoint, observe: Observe, lives: Lives
    ) -> None:
        self.prepared: list[str] = []
        self._lives = lives
        self._members = members
        self._plan = plan
        self._mail = mail
        self._endpoint = endpoint
        self._observe = observe
        self._greeted: dict[str, Hello] = {}

    def hear(self, received: Received, present: Collection[str]) -> None:
        """Take a word of somebody who wants to join.

        Args:
            received: A `Hello`, or that its sender is prepared.
            present: Workers that take part already; a newcomer must know them before they send to it.

        Raises:
            FrameError: It is from somebody who takes part already, or comes twice or out of turn.
        """
        name, message = received.sender, received.message
        if name in present or name in self.prepared or (name in self._greeted) == isinstance(message, Hello):
            raise FrameError(f"{name!r} sent {message.kind!r} and is no newcomer who has yet to say it")
        if isinstance(message, Hello):
            self._endpoint.add_peer(self._endpoint.peers[name], message.address)
            self._lives.came(name)
            self._members.know_life(name)
            self._greeted[name] = message
            certificates = {other: self._members.certificates[other] for other in present}
            setup = Setup(epoch=0, plan=self._plan.model_dump(mode="json"), certificates=certificates)
            self._mail.post(name, setup, ())
        elif isinstance(message, Prepared):
            self.prepared.append(name)

    def drop(self, name: str) -> None:
        """Somebody ended before it was let in: nothing more is taken from it."""
        self.prepared = [other for other in self.prepared if other != name]
        self._shut_out(name, for_good=False)

    def admit(self) -> list[str]:
        """Make members of those who are prepared.

        Returns:
            Their names; without those whose numeric class does not go with the run's shadows.
        """
        names, self.prepared = self.prepared, []
        return [name for name in names if self._is_let_in(name)]

    def _is_let_in(self, name: str) -> bool:
        try:
            self._members.admit(name, self._greeted[name], self._plan.guard)
        except ConfigError as exc:
            self._observe("not_let_in", {"party": name, "reason": str(exc)})
            # it could ask before every step, and each answer costs the whole company a stop
            self._shut_out(name, for_good=True)
            return False
        return True

    def _shut_out(self, name: str, *, for_good: bool) -> None:
        self._endpoint.refuse(name)
        self._lives.ended(name, for_good=for_good)

"""An attempt at a step: the wait until it is decided, a party is guilty or gone, or time is up."""

from collections.abc import Callable

from phalanx.errors import PeerLostError
from phalanx.pipeline.owner.coordinator import Coordinator
from phalanx.pipeline.owner.failover import Failover
from phalanx.pipeline.protocol.needs import Turn, task
from phalanx.pipeline.verify.facts import Judgement, StepFacts


class Attempts:
    """The attempts at steps: they wait for a decision, and look for the reason where nothing comes.

    Attributes:
        silence: How long nothing has happened.
    """

    def __init__(self, facts: StepFacts, coordinator: Coordinator, succession: Failover) -> None:
        self.silence = succession.links.silence
        self._facts = facts
        self._coordinator = coordinator
        self._succession = succession

    @task
    async def run(self, is_finite: Callable[[], bool]) -> Judgement | None:
        """Wait until the step may be applied.

        Args:
            is_finite: Whether the loss and the gradient's norm are numbers so far. Where they are not, audits
                tell first which party made them; the owner's own audit of every stage is among them.

        Returns:
            The first judgement; None when the step is decided, or a party is lost.

        Raises:
            PeerLostError: It did not end in time.
        """
        deadline = self.silence.clock.wall() + self._succession.timeout_s
        self.silence.begin()
        while not self._coordinator.decided(may_lag=is_finite()) or (
            not is_finite() and self._coordinator.doubt_step()
        ):
            judgement = await self.go_on()
            if judgement is not None or self._succession.lost:
                return judgement
            if self.silence.clock.wall() > deadline:
                raise PeerLostError(
                    f"step {self._facts.ledger.step} did not end within {self._succession.timeout_s:.0f} s; still "
                    f"waiting for {self._coordinator.waiting_for()}; raise pipeline.step_timeout_s or look at the "
                    "workers' logs"
                )
        self.silence.end()
        return None

    async def go_on(self) -> Judgement | None:
        """Handle what has come and draw the conclusions; look for the reason where nothing comes."""
        await Turn()
        judgement = await self._coordinator.advance()
        while judgement is None and self._coordinator.has_news:
            # to look for mail first would be to wait for some
            judgement = await self._coordinator.advance()
        if judgement is None and not self._succession.lost:
            await self._break_silence()
        return judgement

    async def _break_silence(self) -> None:
        """Look for the reason why nothing has come for longer than is honest, and replace a silent party."""
        if self.silence.is_time_to_probe():
            self._succession.probe()
        if not self._facts.plan.guard.enabled or not self.silence.too_long:
            return
        name = await self._coordinator.find_silent()
        self.silence.broken()
        if name is not None:
            self._succession.suspect(name, f"silent while the step waited for {self._coordinator.waiting_for()}")

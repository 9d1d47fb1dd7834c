"""From a judgement to a verdict: what the offline judge does not read out of the evidence convicts nobody."""

import shutil
from collections import Counter
from pathlib import Path

from phalanx.errors import EvidenceError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.checked import Pins
from phalanx.pipeline.evidence.explain import judge_evidence
from phalanx.pipeline.evidence.files import record_verdict
from phalanx.pipeline.evidence.verdict import Verdict
from phalanx.pipeline.membership.members import Files, Members
from phalanx.pipeline.verify.facts import Docket, Judgement
from phalanx.pipeline.verify.signed_history import Testimony

_DIRECTORY, _REFUSED = "evidence", "refused"


class Verdicts:
    """Writes evidence and lets it be judged as an outsider would, before anybody is evicted.

    Guarantees:
        A verdict names a worker, never the owner, and its evidence holds for `phalanx audit explain` with this run's
        authority and this session. What does not is set aside and logged as `verdict_refused`; nobody is evicted.

    Attributes:
        passed: All so far.
    """

    def __init__(self, docket: Docket, members: Members, files: Files) -> None:
        self.passed: list[Verdict] = []
        self._docket = docket
        self._members = members
        self._files = files
        self._refused: Counter[str] = Counter()

    def judge(self, judgement: Judgement, testimony: Testimony, *, excludes: bool) -> Verdict | None:
        """Write a judgement down and have it judged again from what was written.

        Args:
            judgement: What the run found.
            testimony: What parties have signed.
            excludes: Whether whoever is guilty leaves the run; for the log.

        Returns:
            The verdict; None when it names the owner, or its evidence does not hold.
        """
        if judgement.verdict.party == OWNER:
            self._refuse(judgement, "it names the owner, who is trusted", None)
            return None
        case = testimony.case(judgement, self._docket, self._members.certificates, self._members.authority)
        verdict = record_verdict(self._files.run_dir / _DIRECTORY, case)
        path = self._files.run_dir / str(verdict.evidence)
        pins = Pins(case.authority.encode(), case.session, in_run=True)
        try:
            judge_evidence(path, pins)
        except EvidenceError as exc:
            self._refuse(judgement, str(exc).removeprefix(f"{path}: "), path)
            return None
        self.passed.append(verdict)
        about = {"excludes": excludes, "referee": judgement.work.model_dump()}
        self._files.observe("verdict", verdict.model_dump(mode="json") | about)
        return verdict

    def to_replace(self, judgement: Judgement) -> str | None:
        """After a refusal: who is to be replaced without blame, if anybody.

        The first time nobody: the step is done again, and whoever lies leaves better evidence or none. The second time
        the accuser, whose word did not hold; or, where the owner itself found it, the party that it is about.
        """
        verdict, assignment = judgement.verdict, self._docket.assignment
        copies = (assignment.holders.get(verdict.stage), assignment.shadows.get(verdict.stage))
        doubtful = (verdict.accuser, verdict.party, *copies)
        party = next((name for name in doubtful if name is not None and name != OWNER), None)
        if party is None:
            return None
        self._refused[party] += 1
        return party if self._refused[party] > 1 else None

    def _refuse(self, judgement: Judgement, why: str, path: Path | None) -> None:
        verdict = judgement.verdict
        about = verdict.model_dump(mode="json", include={"step", "stage", "party", "offence", "accuser", "reason"})
        kept = None
        if path is not None:
            directory = path.parent / _REFUSED
            directory.mkdir(exist_ok=True)
            for each in (path, path.with_suffix(".safetensors")):
                shutil.move(each, directory / each.name)
            kept = f"{_DIRECTORY}/{_REFUSED}/{path.name}"
        self._files.observe("verdict_refused", {**about, "why": why[:500], "evidence": kept})

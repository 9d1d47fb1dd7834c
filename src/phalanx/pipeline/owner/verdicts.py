"""The verdicts of a run, from judgements: what cannot be read out of the evidence offline convicts no party."""

import shutil
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from phalanx.engine import Verdict
from phalanx.errors import EvidenceError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.checked import Pins
from phalanx.pipeline.evidence.explain import UNPROVED, judge_evidence
from phalanx.pipeline.evidence.files import VerdictBasis, record_verdict
from phalanx.pipeline.membership.members import Files, Members
from phalanx.pipeline.verify.facts import Judgement, StepFacts

_DIRECTORY, _REFUSED = "evidence", "refused"


class Verdicts:
    """The verdicts of a run: evidence is written and judged as an outsider would, before a party is evicted.

    Guarantees:
        A verdict names a worker, never the owner, and its evidence holds for `phalanx audit explain` with this run's
        authority and this session. What does not is set aside and logged as `verdict_refused`; no party is evicted. Nor
        is a party that has not answered, where nothing that it signed proves its guilt: silence is no lie.

    Attributes:
        num_refused: Judgements that did not hold.
    """

    def __init__(self, facts: StepFacts, members: Members, files: Files) -> None:
        self.confirmed_verdicts: list[Verdict] = []
        self.num_refused = 0
        self._facts = facts
        self._members = members
        self._files = files
        self._refused: Counter[str] = Counter()

    def confirm_judgement(self, judgement: Judgement, silent: Collection[str] = ()) -> Verdict | None:
        """Write a judgement down and have it judged again from the written evidence.

        Args:
            silent: Parties that have left a request of this attempt unanswered.

        Returns:
            The verdict; None when it names the owner, or its evidence does not hold.
        """
        if judgement.verdict.party == OWNER:
            self._refuse_judgement(judgement, "the judgement accuses the owner, which is trusted", None)
            return None
        if judgement.verdict.offence == "transfer":
            self._refuse_judgement(judgement, "it did not send its signed data, which does not prove a lie", None)
            return None
        case = VerdictBasis(
            judgement.verdict,
            judgement.compared,
            judgement.headers,
            self._members.certificates,
            self._members.authority,
            self._facts.plan,
            self._facts.statements.session,
        )
        verdict = record_verdict(self._files.run_dir / _DIRECTORY, case)
        path = self._files.run_dir / str(verdict.evidence)
        pins = Pins(case.authority.encode(), case.session, in_run=True)
        try:
            facts = judge_evidence(path, pins)
        except EvidenceError as exc:
            self._refuse_judgement(judgement, str(exc).removeprefix(f"{path}: "), path)
            return None
        if verdict.party in silent and facts["conclusion"] == UNPROVED:
            self._refuse_judgement(judgement, "it did not answer, which does not prove a lie", path)
            return None
        self.confirmed_verdicts.append(verdict)
        details: dict[str, object] = {"referee": judgement.work.model_dump()}
        details |= {"undone": True} if judgement.is_undone else {}
        self._files.observe("verdict", verdict.model_dump(mode="json") | details)
        return verdict

    def party_to_replace(self, judgement: Judgement, silent: Collection[str] = ()) -> tuple[str, str] | None:
        """The party that is to be replaced without a verdict after a refusal, and why; None when none is.

        A silent party is replaced at once. Else the first refusal replaces none: the step is done again, and a liar
        leaves better evidence or none. The second refusal replaces the accused: the owner itself has recomputed or read
        its signed statement. An accuser never pays for a report that the owner bore out.
        """
        verdict = judgement.verdict
        if verdict.party != OWNER and (verdict.party in silent or verdict.offence == "transfer"):
            return verdict.party, "it did not send its signed data"
        roles = self._facts.assignment
        doubtful = (verdict.party, verdict.accuser, roles.holders.get(verdict.stage), roles.shadows.get(verdict.stage))
        party = next((name for name in doubtful if name not in (None, OWNER)), None)
        if party is None:
            return None
        self._refused[party] += 1
        reason = "it was wrong twice, without evidence that others could check"
        return (party, reason) if self._refused[party] > 1 else None

    def _refuse_judgement(self, judgement: Judgement, why: str, path: Path | None) -> None:
        verdict = judgement.verdict
        details = verdict.model_dump(mode="json", include={"step", "stage", "party", "offence", "accuser", "reason"})
        self.num_refused += 1
        kept_path = None
        if path is not None:
            # the record names the tensors beside it, so both keep their names: each refusal has a folder
            parent = path.parent / _REFUSED
            parent.mkdir(mode=0o700, exist_ok=True)
            number = 1 + max((int(folder.name) for folder in parent.iterdir() if folder.name.isdecimal()), default=0)
            folder = parent / str(number)
            folder.mkdir(mode=0o700)
            for file in (path, path.with_suffix(".safetensors")):
                shutil.move(file, folder / file.name)
            kept_path = f"{_DIRECTORY}/{_REFUSED}/{folder.name}/{path.name}"
        self._files.observe("verdict_refused", {**details, "why": why[:500], "evidence": kept_path})

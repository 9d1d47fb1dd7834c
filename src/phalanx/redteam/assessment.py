"""One assessment: the attacks that a target allows, each beside its positive control, and gates on their scores."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from phalanx.errors import ConfigError, PhalanxError
from phalanx.redteam.control import PROMPT_CONTROLS, chat_control, text_control, trigger_of
from phalanx.redteam.finding import AttackFinding, Score
from phalanx.redteam.table import ATTACKS_ON_MODELS, ControlKind, ModelAttackEntry
from phalanx.redteam.target import Target

Progress = Callable[[str], None]


def choose_attacks(names: Sequence[str]) -> list[str]:
    """Return the attacks of a list; all that are not slow where none is named."""
    stray = [name for name in names if name not in ATTACKS_ON_MODELS]
    if stray:
        raise ConfigError(f"attack {stray[0]!r}: there is none of that name; choices: {', '.join(ATTACKS_ON_MODELS)}")
    return list(dict.fromkeys(names)) or [name for name, entry in ATTACKS_ON_MODELS.items() if not entry.is_slow]


class Controls:
    """Undefended models, each trained when the first attack asks for it."""

    def __init__(self, home: Path, seed: int = 0) -> None:
        self._home, self._seed = home, seed
        self._targets: dict[ControlKind, Target] = {"prompts": PROMPT_CONTROLS["obedient"]}

    def score_control(self, entry: ModelAttackEntry) -> Score | None:
        """Return the score of an attack on the undefended model of its kind; None where none is made here."""
        target = self._find_target(entry.control)
        return None if target is None else entry.attack.run(target).score

    def _find_target(self, kind: ControlKind) -> Target | None:
        if kind == "rounded":
            # planting it takes the libraries of an export; the tests do
            return None
        if kind not in self._targets:
            if kind in ("text", "skewed"):
                is_skewed = kind == "skewed"
                # rates of words need more texts than the words themselves
                num_texts = 64 if is_skewed else 32
                out = self._home / kind
                self._targets[kind] = text_control(out, self._seed, is_skewed=is_skewed, num_texts=num_texts)
            else:
                self._targets[kind] = chat_control(self._home / "chat", self._seed, trigger=trigger_of(self._seed))
        return self._targets[kind]


@contextlib.contextmanager
def open_controls(is_wanted: bool, seed: int = 0) -> Iterator[Controls | None]:
    """Yield the controls; their models are removed at the end."""
    if not is_wanted:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="phalanx-controls-") as home:
        yield Controls(Path(home), seed)


def attack_model(
    target: Target, names: Sequence[str], controls: Controls | None, progress: Progress = lambda _name: None
) -> list[AttackFinding]:
    """Run attacks one after the other.

    An attack that the target lacks something for, or that fails, is not judged; it never counts as passed.
    """
    findings = []
    for name in choose_attacks(names):
        progress(name)
        entry = ATTACKS_ON_MODELS[name]
        missing = target.missing_needs(entry.attack.needs)
        if missing:
            findings.append(AttackFinding(name, reason=f"needs {missing}"))
            continue
        try:
            finding = entry.attack.run(target)
        except PhalanxError as exc:
            findings.append(AttackFinding(name, reason=str(exc)))
            continue
        control = None if controls is None or finding.score is None else controls.score_control(entry)
        findings.append(replace(finding, control=control))
    return findings


def failed_gates(findings: Sequence[AttackFinding], limits: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Return sentences on gates that a score is above, and on gates whose attack was not judged."""
    by_name = {finding.attack: finding for finding in findings}
    above, unjudged = [], []
    for name, limit in limits.items():
        finding = by_name.get(name)
        if finding is None or finding.score is None or finding.outcome == "not judged":
            unjudged.append(f"{name}: was not judged ({'not run' if finding is None else finding.why_not})")
        elif not finding.score.value <= limit:
            above.append(f"{name}: {finding.score.value:.3g} is above {limit:g}")
    return above, unjudged

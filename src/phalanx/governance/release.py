"""Whether a run's model may leave: the facts of its end against the policy that it was begun with."""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.access_gate import require_approvals
from phalanx.checkpoint import manifest_digest, step_directory
from phalanx.config import canonical_json
from phalanx.config.text import parse_strict_json
from phalanx.errors import InputError, PolicyError
from phalanx.evaluate import read_result
from phalanx.evaluate.evaluation import SuiteResult
from phalanx.evaluate.suite import digest_header, list_suites, open_suite
from phalanx.policy import (
    POLICY_FILE,
    Approval,
    Breach,
    EndFacts,
    PolicyReference,
    Project,
    SuiteIdentity,
    TrainingPolicy,
    approve_release,
    check_release,
    check_start,
    count_approvals,
    find_projects,
    person_of_key,
    raise_breaches,
    read_policy,
)
from phalanx.security.audit import PersonSigner
from phalanx.serve import TextModel
from phalanx.serve.place import checkpoint_place, is_run
from phalanx.train import PastRun, export_run
from phalanx.train.records.policy_facts import facts_of_run
from phalanx.train.records.proof import verify_run
from phalanx.train.records.run_directory import cache_beside
from phalanx.verifier.statement import hash_file


def require_release(
    where: Path, certificate: Path | None = None, *, step: int | None = None, best: bool = False
) -> None:
    """Return when a place is no run, or a run without a policy, or a run whose policy lets its model out.

    Args:
        where: A run, a checkpoint in one, or a directory of a model.
        step: Checkpoint that is to leave; None: the newest.
        best: The one with the best validation is to leave.

    Raises:
        PolicyError: A clause is broken, the policy is not as its owner signed it, or other weights than
            the final ones are asked for.
    """
    place = checkpoint_place(where)
    if place is not None and step is None and not best:
        where, step = place
    require_approvals("release", lambda: release_target(where, certificate, step=step, best=best), where)
    if not is_run(where):
        return
    past = PastRun(where, certificate)
    if past.config.policy is None:
        return
    policy, breaches = check_run(past)
    chosen = past.best_step if best else step
    if chosen is not None and chosen != past.certified_steps[0]:
        raise PolicyError(f"{where}: policy {policy.name} speaks of the run's end, not of step {chosen}; leave it out")
    raise_breaches(policy, breaches, f"the release of {where}")


def release_target(where: Path, certificate: Path | None = None, *, step: int | None = None, best: bool = False) -> str:
    """Name the target of an approval of a release: a run with one certified checkpoint, or the files of a model.

    Raises:
        PolicyError: The run has no certified checkpoint.
    """
    place = checkpoint_place(where)
    if place is not None and step is None and not best:
        where, step = place
    if not is_run(where):
        return _digest_files(where)
    past = PastRun(where, certificate)
    if not past.certified_steps:
        raise PolicyError(f"{where}: has no certified checkpoint that could be released")
    chosen = past.best_step if best else past.certified_steps[0] if step is None else step
    return f"{past.run_id}:{manifest_digest(past.checkpoints / step_directory(chosen))}"


def _digest_files(directory: Path) -> str:
    """Return SHA-256 over paths and contents of all files of a directory: a file of another name is another model.

    Raises:
        PolicyError: A link leads to a directory, whose files could be exchanged afterwards.
    """
    digests = {}
    for path in directory.rglob("*"):
        if path.is_symlink() and path.is_dir():
            raise PolicyError(f"{path}: is a link to a directory; copy the model, so that all of it can be approved")
        if path.is_file():
            digests[path.relative_to(directory).as_posix()] = hash_file(path)
    return hashlib.sha256(canonical_json(digests)).hexdigest()


def check_run(
    past: PastRun, policy: TrainingPolicy | None = None, evaluations: Sequence[Path] = ()
) -> tuple[TrainingPolicy, list[Breach]]:
    """Compare a run with its policy, or with another one.

    Args:
        policy: A policy of the reader's own; None takes the run's, signed by the key that its config names.
        evaluations: Results of ``phalanx eval --out``; none: the files ``evaluation*.json`` of the run directory.

    Returns:
        The policy, and every clause that is broken, at the start or at the release.

    Raises:
        PolicyError: The run has no policy, or its signature does not hold.
    """
    if policy is None:
        reference = past.config.policy
        if reference is None:
            raise PolicyError(f"{past.path}: the run file names no policy; give one with --policy and --signer")
        policy = _read_own_policy(past, reference)
    facts = _facts_of_end(past, policy, evaluations)
    start = facts_of_run(past.config, cache_beside(past.path))
    return policy, [*check_start(policy, start), *check_release(policy, facts)]


def approve_run(past: PastRun, signer: PersonSigner) -> str:
    """Approve the release of a run's final weights, by the run's own policy; return the person's name.

    Raises:
        PolicyError: The policy names nobody with this key, the run has not ended, or it has no policy.
    """
    reference = past.config.policy
    if reference is None:
        raise PolicyError(f"{past.path}: the run file names no policy, so nobody needs to approve")
    policy = _read_own_policy(past, reference)
    return approve_release(past.path, policy, _approval_of(past), signer, _releasers_of(past, policy))


def _read_own_policy(past: PastRun, reference: PolicyReference) -> TrainingPolicy:
    """Read the policy in a run directory, under which every session in the log must have begun."""
    policy = read_policy(past.path / POLICY_FILE, reference.signer).policy
    if past.policies != {policy.digest}:
        raise PolicyError(
            f"{past.path / POLICY_FILE}: is another policy than the one that the run's log names; restore it"
        )
    return policy


def _releasers_of(past: PastRun, policy: TrainingPolicy) -> Mapping[str, Sequence[str]]:
    """Return who may approve: whom the policy names, or the releasers of all files of roles above the run directory."""
    if policy.release.releasers:
        return policy.release.releasers
    # whoever writes the run directory could put people of their own there, or between it and the project
    teams = [
        Project.open(home).roles.people_with(("releaser",)) for home in find_projects((past.path.resolve().parent,))
    ]
    outermost = teams[-1] if teams else {}
    return {
        name: tuple(key for key in keys if all(person_of_key(team, key) is not None for team in teams))
        for name, keys in outermost.items()
    }


def _approval_of(past: PastRun) -> Approval:
    return Approval(past.run_id, past.final_weights_digest or "")


def _facts_of_end(past: PastRun, policy: TrainingPolicy, evaluations: Sequence[Path]) -> EndFacts:
    if past.final_weights_digest is None:
        # who interrupts a run before a measurement is due must not let out what it had until then
        raise PolicyError(f"{past.path}: has not ended, and policy {policy.name} speaks of the run's end")
    summary = read_summary(past)
    leak = summary.get("leak")
    exposure = leak.get("exposure_bits") if isinstance(leak, dict) else None
    is_number = isinstance(exposure, int | float) and not isinstance(exposure, bool)
    limited_names = {*policy.release.min_figures, *policy.release.max_figures}
    paths = [*evaluations] or sorted(past.path.glob("evaluation*.json"))
    return EndFacts(
        is_in_doubt=_find_doubt(past, summary.get("in_doubt")) if policy.release.undoubted else None,
        exposure_bits=float(exposure or 0.0) if is_number else None,
        figures=_read_figures(past, policy, paths) if limited_names and paths else {},
        approvals=count_approvals(past.path, policy, _approval_of(past), _releasers_of(past, policy)),
    )


def _find_doubt(past: PastRun, stated: bool | None) -> bool | None:
    """Return whether a step is in doubt; None where no audited step says so.

    Args:
        stated: Of the summary, which is not signed: it can add a doubt to the log's, and take none away.
    """
    proof = verify_run(past.path)
    if proof.own_log:
        proof = verify_run(Path(proof.own_log))
    if proof.in_doubt:
        return True
    return stated if proof.proven else None


def read_summary(past: PastRun) -> dict[str, Any]:
    """Read a run's summary, which speaks of the end that the signed log knows."""
    path = past.path / "summary.json"
    try:
        summary = parse_strict_json(path.read_bytes())
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({exc.strerror}); a run that has not ended cannot leave") from exc
    except (ValueError, RecursionError) as exc:
        raise InputError(f"{path}: is no summary ({exc})") from exc
    if not isinstance(summary, dict) or summary.get("final_weights_digest") != past.final_weights_digest:
        raise PolicyError(f"{path}: speaks of other weights than the signed log of the run")
    return summary


def _read_figures(past: PastRun, policy: TrainingPolicy, paths: Sequence[Path]) -> dict[str, float]:
    """Return the figures that were measured on the final weights; results of other models count for nothing.

    Of several results with one figure the worst counts, or who measures often enough passes. A result of other rows
    under the name of a suite counts for nothing either.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-release-") as scratch:
        directory = Path(scratch) / "model"
        export_run(past, directory, merge=past.config.model.adapter is not None)
        digest = TextModel(directory).model_digest
    values: dict[str, list[float]] = {}
    results = [result for result in map(read_result, paths) if result.model.get("model_digest") == digest]
    for suite in (suite for result in results for suite in result.suites):
        expected = policy.release.suites.get(suite.name) or _packaged_identity(suite.name)
        for figure in suite.figures if expected is None or _is_suite(suite, expected) else ():
            if figure.value is not None:
                values.setdefault(f"{suite.name}.{figure.metric}", []).append(figure.value)
    min_figures, max_figures = policy.release.min_figures, policy.release.max_figures
    # a figure with both limits has no one worst value: it counts where its results agree
    return {
        name: (max if name in max_figures else min)(rows)
        for name, rows in values.items()
        if len(set(rows)) == 1 or not (name in min_figures and name in max_figures)
    }


def _packaged_identity(name: str) -> SuiteIdentity | None:
    """Return the identity of a suite of this package; None of another name, under which any rows may be expected."""
    header = list_suites().get(name)
    if header is None:
        return None
    if header.task is not None:
        # the data is its user's
        return SuiteIdentity(digest=digest_header(name))
    suite = open_suite(name)
    return SuiteIdentity(digest=suite.digest, rows=len(suite.rows))


def _is_suite(suite: SuiteResult, expected: SuiteIdentity) -> bool:
    """Whether figures are of the rows that are meant, and not of others by the same name."""
    return (
        suite.suite_digest == expected.digest
        and expected.rows in (None, suite.num_rows)
        and expected.data in (None, suite.data_digest)
    )

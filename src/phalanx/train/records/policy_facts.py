"""What a policy is asked about a run, from its run file and the manifest of its dataset."""

from pathlib import Path

from phalanx.data.run_dataset import local_dataset
from phalanx.data.shards import open_dataset
from phalanx.policy import RunFacts, SignedPolicy, SourceShare, check_start, raise_breaches
from phalanx.train.config import RunConfig, SplitRun
from phalanx.train.runs.mixed import MixedBase


def open_policy(run: RunConfig, cache: Path) -> SignedPolicy | None:
    """Read the policy of a run, and refuse a run that breaks it before it starts; None where it has none."""
    if run.policy is None:
        return None
    signed = run.policy.read_policy()
    raise_breaches(signed.policy, check_start(signed.policy, facts_of_run(run, cache)), f"the run {run.name}")
    return signed


def facts_of_run(run: RunConfig, cache: Path) -> RunFacts:
    """Return the facts about a run that are known before it starts."""
    guard, privacy = run.stage_guard, getattr(run, "privacy", None)
    # what [[objectives]] learn from has neither manifest nor signer
    dataset = None if isinstance(run, MixedBase) and run.objectives else run.data.dataset
    sources = None
    if dataset is not None:
        manifest = open_dataset(local_dataset(dataset, cache / "data"), dataset.signer).manifest
        sources = tuple(SourceShare(source.name, source.licence, source.tokens) for source in manifest.sources)
    return RunFacts(
        engine=type(run).engine,
        preset=guard.preset_in_force if guard is not None and guard.is_enabled else None,
        tier=run.split.tier if isinstance(run, SplitRun) else None,
        own_code=run.own_code,
        encrypts=run.checkpoint.encrypt,
        signer=None if dataset is None else dataset.signer,
        sources=sources,
        epsilon=None if privacy is None else privacy.epsilon,
        delta=None if privacy is None else privacy.delta,
        measures_leak=getattr(run, "leak_meter", None) is not None,
    )

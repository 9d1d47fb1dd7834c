"""What a policy is asked about a run, from its run file and the manifest of its dataset."""

from pathlib import Path

from phalanx.data.dataset_corpus import open_shards
from phalanx.data.phases import DatasetConfig
from phalanx.data.run_dataset import TRAIN, local_dataset
from phalanx.errors import DataError
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
    return RunFacts(
        engine=type(run).engine,
        preset=guard.preset_in_force if guard is not None and guard.is_enabled else None,
        tier=run.split.tier if isinstance(run, SplitRun) else None,
        own_code=run.own_code,
        encrypts=run.checkpoint.encrypt,
        signer=None if dataset is None else dataset.signer,
        sources=None if dataset is None else _count_drawn_tokens(run, dataset, cache),
        epsilon=None if privacy is None else privacy.epsilon,
        delta=None if privacy is None else privacy.delta,
        measures_leak=getattr(run, "leak_meter", None) is not None,
    )


def _count_drawn_tokens(run: RunConfig, dataset: DatasetConfig, cache: Path) -> tuple[SourceShare, ...]:
    """Return the sources of a run's dataset, each with the tokens of it that the run draws, by groups and weights."""
    corpus = open_shards(run.data, dataset, local_dataset(dataset, cache / "data"))
    if corpus.dataset is None:
        raise DataError(f"{dataset.path}: has no manifest; build it with phalanx data build")
    order = corpus.sample_order(run.train.seed, run.main_draws)
    # before its epochs are settled a run has no steps
    samples = run.train.steps * run.batches_a_step * run.main_draws or corpus.num_train_sequences
    drawn = order.consumed_by_group(min(samples, order.schedule.num_samples or samples))
    sources = corpus.dataset.manifest.sources
    tokens = [0.0] * len(sources)
    for group, count in drawn.items():
        in_group = corpus.dataset.source_tokens(group, TRAIN)
        for number, size in enumerate(in_group):
            tokens[number] += count * run.data.sequence_length * size / sum(in_group)
    return tuple(SourceShare(source.name, source.licence, size) for source, size in zip(sources, tokens, strict=True))

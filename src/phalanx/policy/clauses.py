"""Facts of a run against the clauses of a policy: each difference is a breach that names its clause."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.config import printable_text
from phalanx.errors import PolicyError
from phalanx.policy.policy_file import TrainingPolicy


@dataclass(frozen=True)
class Breach:
    """One clause that does not hold.

    Attributes:
        clause: Key of the policy file, such as ``privacy.max_epsilon``.
        value: Value of the run, as text.
        allowed: Values that the clause would let pass, as text.
    """

    clause: str
    value: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.clause}: found {printable_text(self.value)}, allowed {printable_text(self.allowed)}"


@dataclass(frozen=True)
class SourceShare:
    """One source of a dataset, as its manifest states it.

    Attributes:
        tokens: Tokens of it that the run draws; of a group that it draws from, all texts count alike.
    """

    name: str
    licence: str
    tokens: float


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run before it starts.

    Attributes:
        engine: Section of the run file that does the work.
        preset: Preset of the guard that is in force; None without a guard, or with other values.
        tier: Tier of the enclave of a split run; None for other runs.
        own_code: Names of code of the user's own.
        signer: Key that the dataset was verified with; None where the run file names none, or no dataset.
        sources: Sources of the dataset; None where the run has no dataset with a manifest.
        epsilon: Budget of differential privacy; None without.
    """

    engine: str
    preset: str | None
    tier: str | None
    own_code: Sequence[str]
    encrypts: bool
    signer: str | None
    sources: Sequence[SourceShare] | None
    epsilon: float | None
    delta: float | None
    measures_leak: bool


@dataclass(frozen=True)
class EndFacts:
    """What is known of a run after its end.

    Attributes:
        is_in_doubt: Whether a step is in doubt; None where no guard says so.
        exposure_bits: Exposure of the most exposed canary at the last measurement; None where none was made.
        figures: Figures of evaluations of these very weights, by ``suite.metric``.
        approvals: Names of people who approved these weights.
    """

    is_in_doubt: bool | None
    exposure_bits: float | None
    figures: Mapping[str, float]
    approvals: Sequence[str]


def check_start(policy: TrainingPolicy, facts: RunFacts) -> list[Breach]:
    """Return the clauses that a run breaks before it starts."""
    return [*_train_breaches(policy, facts), *_data_breaches(policy, facts), *_privacy_breaches(policy, facts)]


def _train_breaches(policy: TrainingPolicy, facts: RunFacts) -> Iterator[Breach]:
    train = policy.train
    if train.engines and facts.engine not in train.engines:
        yield Breach("train.engines", facts.engine, ", ".join(train.engines))
    if train.presets and "pipeline" in facts.engine and facts.preset not in train.presets:
        yield Breach("train.presets", facts.preset or "no preset in force", ", ".join(train.presets))
    if train.tiers and facts.tier is not None and facts.tier not in train.tiers:
        yield Breach("train.tiers", facts.tier, ", ".join(train.tiers))
    if not train.own_code and facts.own_code:
        yield Breach("train.own_code", ", ".join(facts.own_code), "no code of the user's own")
    if train.encrypted_checkpoints and not facts.encrypts:
        yield Breach("train.encrypted_checkpoints", "checkpoint.encrypt = false", "true, with checkpoint.key")


def _data_breaches(policy: TrainingPolicy, facts: RunFacts) -> Iterator[Breach]:
    data = policy.data
    if data.signers and facts.signer not in data.signers:
        yield Breach("data.signers", facts.signer or "no dataset with a named signer", ", ".join(data.signers))
    if not data.needs_manifest:
        return
    if facts.sources is None:
        yield Breach("data", "text without a manifest", "data.dataset, built by phalanx data build")
        return
    total = max(sum(source.tokens for source in facts.sources), 1)
    # a share that is as large as allowed may be larger by rounding
    total_of_limits = total * (1 + 1e-9)
    tokens_of_licence: dict[str, float] = {}
    for source in facts.sources:
        tokens_of_licence[source.licence] = tokens_of_licence.get(source.licence, 0) + source.tokens
        if data.licences and source.licence not in data.licences:
            yield Breach("data.licences", f"{source.licence} of source {source.name}", ", ".join(data.licences))
        if data.max_source_share is not None and source.tokens > data.max_source_share * total_of_limits:
            share = source.tokens / total
            yield Breach("data.max_source_share", f"{share:.3f} of {source.name}", f"{data.max_source_share:g}")
    for licence, max_share in data.max_shares.items():
        if tokens_of_licence.get(licence, 0) > max_share * total_of_limits:
            share = tokens_of_licence[licence] / total
            yield Breach(
                f"data.max_shares.{licence}", f"{share:.3f} of the tokens that the run draws", f"{max_share:g}"
            )


def _privacy_breaches(policy: TrainingPolicy, facts: RunFacts) -> Iterator[Breach]:
    privacy = policy.privacy
    for clause, value, limit in (
        ("privacy.max_epsilon", facts.epsilon, privacy.max_epsilon),
        ("privacy.max_delta", facts.delta, privacy.max_delta),
    ):
        # written so that a value that is no number breaks the clause
        if limit is not None and not (value is not None and value <= limit):
            yield Breach(clause, "no [privacy]" if value is None else f"{value:g}", f"{limit:g}")
    if privacy.max_exposure_bits is not None and not facts.measures_leak:
        yield Breach("privacy.max_exposure_bits", "no [leak_meter]", f"{privacy.max_exposure_bits:g} bits, measured")


def check_exposure(policy: TrainingPolicy, exposure_bits: float | None) -> list[Breach]:
    """Return the clause that a measured exposure breaks; None is no measurement, and breaks it too."""
    limit = policy.privacy.max_exposure_bits
    if limit is None or (exposure_bits is not None and exposure_bits <= limit):
        return []
    value = "not measured" if exposure_bits is None else f"{exposure_bits:.1f}"
    return [Breach("privacy.max_exposure_bits", value, f"{limit:g}")]


def check_release(policy: TrainingPolicy, facts: EndFacts) -> list[Breach]:
    """Return the clauses that a model breaks when it is to leave."""
    release = policy.release
    breaches = check_exposure(policy, facts.exposure_bits)
    if release.undoubted and facts.is_in_doubt is not False:
        doubt = "no guard says so" if facts.is_in_doubt is None else "steps in doubt"
        breaches.append(Breach("release.undoubted", doubt, "no step in doubt"))
    for figure, limit in release.min_figures.items():
        value = facts.figures.get(figure)
        if value is None or not value >= limit:
            breaches.append(Breach(f"release.min_figures.{figure}", _shown(value), f"at least {limit:g}"))
    for figure, limit in release.max_figures.items():
        value = facts.figures.get(figure)
        if value is None or not value <= limit:
            breaches.append(Breach(f"release.max_figures.{figure}", _shown(value), f"at most {limit:g}"))
    if len(set(facts.approvals)) < release.approvals:
        people = ", ".join(sorted(set(facts.approvals))) or "nobody"
        of = ", ".join(sorted(release.releasers))
        breaches.append(Breach("release.approvals", f"approved by {people}", f"{release.approvals} of {of}"))
    return breaches


def _shown(value: float | None) -> str:
    return "not measured on these weights" if value is None else f"{value:g}"


def raise_breaches(policy: TrainingPolicy, breaches: Iterable[Breach], what: str) -> None:
    """Refuse what breaks a clause.

    Raises:
        PolicyError: Names every broken clause.
    """
    broken = [str(breach) for breach in breaches]
    if broken:
        raise PolicyError(f"policy {policy.name} forbids {what}: {'; '.join(broken)}")

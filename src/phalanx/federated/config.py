"""The section ``[federated]`` of a run file; frozen, and free of torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from phalanx.config import RENAMED_KEYS, StrictModel
from phalanx.config.strict import later_key
from phalanx.federated.mixing import min_mixed
from phalanx.split.config import DEFAULT_TPM, HARDWARE_TIERS, HardwareTier
from phalanx.transport import TransportConfig

OWNER = "owner"
"""Party name of the process that keeps the model and asks for rounds."""
_MIN_KEEPERS = 2
MIN_SUMMED = 3
"""Sites of a secure sum: of two, each would learn what the other one sent."""

Rate = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class FedAvgConfig(StrictModel):
    """The model moves by the mean of the sites' updates."""

    kind: Literal["fedavg"] = "fedavg"
    rate: Rate = 1.0
    """Factor of the mean."""


class FedAvgMConfig(StrictModel):
    """The mean of the updates goes into a momentum."""

    kind: Literal["fedavgm"]
    rate: Rate = 1.0
    momentum: Decay = 0.9


class FedAdamConfig(StrictModel):
    """The mean of the updates is a gradient for Adam."""

    kind: Literal["fedadam"]
    rate: Rate = 1e-2
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    tau: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-3
    """Added to the root of the second moment: how adaptive it is."""


class FedProxConfig(StrictModel):
    """Sites are held back from going far: ``mu / 2`` times the squared way is part of their loss."""

    kind: Literal["fedprox"]
    rate: Rate = 1.0
    mu: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 0.01


class ScaffoldConfig(StrictModel):
    """Each site corrects its gradients by how its own differ from all sites'; its control variate is its state."""

    kind: Literal["scaffold"]
    rate: Rate = 1.0


class FedBuffConfig(StrictModel):
    """A round ends with its first updates, and slower sites' updates count for less in a later one."""

    model_config = RENAMED_KEYS

    kind: Literal["fedbuff"]
    rate: Rate = 1.0
    buffer: Annotated[int, Field(ge=1)]
    """Updates of a round."""
    max_stale: Annotated[int, Field(ge=0, le=1000)] = Field(default=10, alias="most_stale")
    """Rounds that an update may be behind; an older one is refused."""


AlgorithmConfig = Annotated[
    FedAvgConfig | FedAvgMConfig | FedAdamConfig | FedProxConfig | ScaffoldConfig | FedBuffConfig,
    Field(discriminator="kind"),
]


class SitePrivacyConfig(StrictModel):
    """Differential privacy of whole sites: each adds its share of the noise of a sum before its masks.

    Attributes:
        epsilon: Budget of each site for all rounds together; the run ends before a sum that would exceed it.
        delta: The chance that the bound does not hold; below one over the number of sites.
        noise_multiplier: Standard deviation of the noise that honest sites bring together, in units of `max_norm`; left
            out, the least one with which `train.steps` sums stay within `epsilon`.
    """

    epsilon: Annotated[float, Field(gt=0.0, le=1000.0)]
    delta: Annotated[float, Field(ge=1e-12, lt=0.1)]
    noise_multiplier: Annotated[float, Field(ge=0.1, le=1000.0)] | None = None


class EnclaveSumsConfig(StrictModel):
    """The enclave of an aggregator that opens single updates, so that the owner does not.

    Attributes:
        tier: Backing of its evidence: hardware, as in `split.tier`, a sandboxed process, or nothing ("sim").
        tpm: Address of the TPM, as in `split.tpm`.
        endorsements: Files that go along with its evidence, as in `split.endorsements`.
        policy: Policy file of the attestation at each site; left out, sites accept this release's own code at the tier.
        allow_insecure_sim: Whether evidence that proves nothing is accepted.
    """

    tier: HardwareTier | Literal["sim", "process"] = "process"
    tpm: str = DEFAULT_TPM
    endorsements: dict[str, str] = later_key({}, max_length=32)
    policy: str | None = None
    allow_insecure_sim: bool = False

    @model_validator(mode="after")
    def _check_enclave(self) -> Self:
        if (self.tier == "sim") is not self.allow_insecure_sim:
            raise ValueError(
                'tier = "sim" is a simulation that proves nothing: NOT SECURE; set allow_insecure_sim = true to '
                "use it anyway; no other tier has this key"
            )
        if self.tier in HARDWARE_TIERS and self.policy is None:
            raise ValueError(f'tier = "{self.tier}": set policy, the values of its evidence that sites accept')
        if self.endorsements and self.tier not in HARDWARE_TIERS:
            raise ValueError(
                f'endorsements: accompany evidence of hardware, but the tier is "{self.tier}"; remove them'
            )
        return self


def simulated_names(number: int | None) -> tuple[str, ...]:
    """Return the names of so many simulated sites."""
    return tuple(f"site-{site}" for site in range(1, (number or 0) + 1))


class FederatedConfig(StrictModel):
    """Sites that train on their own data; one step of the run is one round of them.

    Attributes:
        sites: Party names. Each has a process, keys and a share of the data of its own.
        simulated: Number of sites that the owner's process plays itself, for experiments with many; in the place of
            `sites`. NOT PRIVATE: that process has all keys, texts and updates.
        min_cohort: Updates that a round needs; one with fewer is done again. With `secure` the least sites of a sum.
        fraction: Share of the sites that a round asks, drawn by the run's seed.
        local_steps: Optimizer steps of a site in a round, with ``[optimizer]`` begun anew; its learning rate is that of
            the round.
        algorithm: Use of the updates, and local training of sites.
        aggregator: Aggregate of many updates: "mean", or a rule that withstands lying sites.
        byzantine: Sites that may lie; the rule must stand so many.
        secure: Whether the owner learns the updates' sum and none of them.
        sums: Method of secure sums: "masked", by masks that sites agree on; "homomorphic", by ciphertexts whose sum
            `keepers` open, where sites cannot talk to each other in a round; or "enclave", by an aggregator that opens
            updates where the owner cannot look, and may apply a rule to them.
        keepers: Sites with keys of their own, for "homomorphic": all of them together could read one site's update,
            and one less nothing.
        enclave: Settings of the aggregator, for "enclave".
        privacy: Privacy of a site in sums; None promises nothing.
        bucket: Sites of a sum, where a rule looks at the means of several sums; one sum of all when left out.
        weights: Sites count the same, or by their training sequences, up to `max_samples`.
        exchange: Trained and sent parts of LoRA adapters: both "factors", though their mean differs from the mean of
            the products; B alone, with "frozen_a" the same A for all, which is exact; or both, of which the owner takes
            the mean "product" and cuts it to the rank.
        personal: Patterns of the names of weights that each site trains for itself and never sends.
        max_norm: Bound of the Euclidean norm of an update; sites scale theirs down to it, and a larger one is refused.
            Beside `privacy` it must be given, for noise is measured in it.
        deadline_s: Seconds that sites may take for an answer; the round goes on without late ones.
        respawns: Number of restarts of a site's process after its end.
        carrier: Transport of orders to sites: "loopback", to processes of this machine that the run starts; or
            "bridge", an engine that forwards frames to sites of others (`phalanx site`): NVFlare, Flower.
        pki: Directory with the authority's certificate, the owner's keys and the sites' certificates, for "bridge".
    """

    model_config = RENAMED_KEYS

    simulated: Annotated[int, Field(ge=2, le=10_000)] | None = later_key(None)
    sites: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")], ...],
        Field(min_length=2, default_factory=lambda keys: simulated_names(keys.get("simulated"))),
    ]
    min_cohort: Annotated[int, Field(ge=1)] = 2
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    local_steps: Annotated[int, Field(ge=1)] = 1
    algorithm: AlgorithmConfig = FedAvgConfig()
    aggregator: Literal[
        "mean",
        "median",
        "trimmed_mean",
        "krum",
        "multi_krum",
        "geometric_median",
        "centered_clipping",
        "mda",
        "caf",
    ] = "mean"
    byzantine: Annotated[int, Field(ge=0)] = 0
    before: tuple[Literal["nnm", "bucketing"], ...] = ()
    secure: bool = False
    sums: Literal["masked", "homomorphic", "enclave"] = later_key("masked")
    keepers: tuple[str, ...] = later_key(())
    enclave: EnclaveSumsConfig = EnclaveSumsConfig()
    privacy: SitePrivacyConfig | None = later_key(None)
    bucket: Annotated[int, Field(ge=MIN_SUMMED)] | None = None
    weights: Literal["equal", "samples"] = "equal"
    max_samples: Annotated[int, Field(ge=1, le=2**20)] = Field(default=1000, alias="most_samples")
    exchange: Literal["factors", "frozen_a", "product"] = "factors"
    personal: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = later_key(())
    max_norm: Annotated[float, Field(gt=0.0, lt=1e30)] = 10.0
    deadline_s: Annotated[float, Field(gt=0.0, le=86400.0)] = 600.0
    respawns: Annotated[int, Field(ge=0)] = 2
    carrier: Literal["loopback", "bridge"] = "loopback"
    pki: str | None = later_key(None)
    transport: TransportConfig = TransportConfig()

    @model_validator(mode="after")
    def _check_federated(self) -> Self:
        self._check_simulation()
        if len(set(self.sites)) < len(self.sites) or OWNER in self.sites:
            raise ValueError(f'sites: {", ".join(self.sites)}: expected distinct names other than "{OWNER}"')
        if not self.min_cohort <= self.num_asked:
            raise ValueError(
                f"min_cohort = {self.min_cohort}: a round asks {self.num_asked} of {len(self.sites)} sites; lower it, "
                "or raise fraction"
            )
        if (self.carrier == "bridge") != (self.pki is not None):
            raise ValueError(
                f'carrier = "{self.carrier}": pki = DIR, made by `phalanx pki`, is required with "bridge" and not '
                "allowed otherwise; a run makes the keys of local sites"
            )
        self._check_rule()
        self._check_kind_of_sums()
        self._check_sums()
        self._check_privacy()
        if self.algorithm.kind == "fedbuff" and self.algorithm.buffer > self.num_asked:
            raise ValueError(f"algorithm.buffer = {self.algorithm.buffer}: {self.num_asked} sites are asked; lower it")
        if self.exchange == "product" and self.personal:
            raise ValueError(
                'personal: excludes exchange = "product", which needs both factors of every adapter; remove one'
            )
        if self.exchange == "product" and (self.secure or self.aggregator != "mean" or self.algorithm.kind != "fedavg"):
            raise ValueError(
                'exchange = "product" needs the factors of each site, not a sum, a robust rule or a moment; set '
                'secure = false, aggregator = "mean" and kind = "fedavg", or exchange = "frozen_a"'
            )
        return self

    def _check_simulation(self) -> None:
        if self.simulated is None:
            return
        if self.sites != simulated_names(self.simulated):
            raise ValueError("simulated: names its sites itself; remove sites, or simulated")
        lacking = {
            'carrier = "bridge"': self.carrier == "bridge",
            'sums = "enclave"': self.sums == "enclave",
            "[federated.privacy]": self.privacy is not None,
        }
        for name, is_there in lacking.items():
            if is_there:
                raise ValueError(
                    f"simulated: excludes {name}, which protects sites from the owner, whose process plays them here; "
                    "remove one"
                )

    def _check_rule(self) -> None:
        if self.aggregator == "mean" and (self.byzantine or self.before):
            raise ValueError('aggregator = "mean" tolerates no lying site; remove byzantine and before, or choose')
        if self.aggregator != "mean" and self.weights != "equal":
            raise ValueError(f'aggregator = "{self.aggregator}" gives all sites the same weight; set weights = "equal"')
        if self.aggregator != "mean" and self.algorithm.kind in ("scaffold", "fedbuff"):
            raise ValueError(f'algorithm.kind = "{self.algorithm.kind}" takes means; set aggregator = "mean"')

    def _check_kind_of_sums(self) -> None:
        """Return where the kind of sums goes with the rest, and with nothing that masked sums alone have."""
        if self.keepers and self.sums != "homomorphic":
            raise ValueError('keepers open homomorphic sums; set sums = "homomorphic", or remove them')
        if self.enclave != EnclaveSumsConfig() and self.sums != "enclave":
            raise ValueError('enclave configures the aggregator; set sums = "enclave", or remove it')
        if self.sums == "masked":
            return
        if not self.secure:
            raise ValueError(f'sums = "{self.sums}" hides single updates from the owner; set secure = true')
        plain: dict[str, object] = {"privacy": None, "bucket": None}
        if self.sums == "homomorphic":
            plain |= {"weights": "equal", "aggregator": "mean"}
            self._check_keepers()
        for name, only in plain.items():
            if getattr(self, name) != only:
                raise ValueError(f'{name}: excludes sums = "{self.sums}"; remove one of them')

    def _check_keepers(self) -> None:
        named = set(self.keepers)
        if len(named) < max(_MIN_KEEPERS, len(self.keepers)) or not named <= set(self.sites):
            raise ValueError(
                f"keepers: {', '.join(self.keepers) or 'none'}: expected {_MIN_KEEPERS} distinct sites or more; a "
                "single keeper could read every site"
            )

    def _check_sums(self) -> None:
        if not self.secure:
            if self.bucket is not None:
                raise ValueError("bucket needs sums; set secure = true, or remove it")
            return
        if self.algorithm.kind in ("scaffold", "fedbuff"):
            raise ValueError(
                f'secure = true excludes algorithm.kind = "{self.algorithm.kind}": a sum needs updates of one size '
                "and one round; choose another kind"
            )
        if self.aggregator != "mean" and self.bucket is None and self.sums != "enclave":
            raise ValueError(
                f'aggregator = "{self.aggregator}" needs single updates, which secure = true hides; set bucket, the '
                'number of sites of each sum, or set sums = "enclave"'
            )
        summed = self.bucket or self.num_asked
        max_summed = min_sites_left(summed) if self.sums == "masked" else summed
        if not MIN_SUMMED <= self.min_cohort <= max_summed:
            raise ValueError(
                f"min_cohort = {self.min_cohort}: a sum needs at least {MIN_SUMMED} sites to hide one, and one of "
                f"{summed} may end with {max_summed} of them; choose from {MIN_SUMMED} to {max_summed}, or ask more "
                "sites"
            )
        if self.sums == "enclave":
            self._check_mixed()

    def _check_mixed(self) -> None:
        mixed = min_mixed(self.aggregator, self.byzantine, self.before, self.min_cohort)
        if mixed < MIN_SUMMED:
            raise ValueError(
                f'aggregator = "{self.aggregator}" beside sums = "enclave": of {self.min_cohort} sites, of which '
                f"{self.byzantine} may lie, it may return numbers that {mixed} of them sent, and the owner has those; "
                f'expected {MIN_SUMMED} at least: raise min_cohort, put before = ["nnm"], or take "multi_krum" or '
                '"trimmed_mean"'
            )

    def _check_privacy(self) -> None:
        if self.privacy is None:
            return
        if not self.secure:
            raise ValueError(
                "privacy: each site adds only a share of the noise of a sum; set secure = true, so that the owner "
                "sees no single update"
            )
        if self.weights != "equal":
            raise ValueError(
                f'weights = "{self.weights}": a weight would raise the influence of a site above the noise; set '
                'weights = "equal" beside privacy'
            )
        if "max_norm" not in self.model_fields_set:
            raise ValueError(
                "max_norm: missing; the noise is scaled by it, so there is no default: set it near the update_norm "
                "of a run without privacy (metrics.jsonl); `phalanx train RUN.toml --dry-run` judges it"
            )
        if self.privacy.delta * len(self.sites) >= 1:
            raise ValueError(
                f"privacy.delta = {self.privacy.delta} with {len(self.sites)} sites: to publish all of a site drawn at "
                f"random keeps within it; expected less than {1 / len(self.sites):.1e}"
            )
        colluding = (self.cohort_sizes[-1] - 1) // 3
        if self.min_cohort <= colluding:
            raise ValueError(
                f"min_cohort = {self.min_cohort}: in a sum of {self.cohort_sizes[-1]} sites, {colluding} may "
                "collude and know their own shares of the noise; raise it"
            )

    @model_serializer(mode="wrap")
    def _serialize_federated(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an unused aggregator, for the digests of older run files, and the names of simulated sites."""
        is_left_out = {"enclave": self.sums != "enclave", "sites": self.simulated is not None}
        return {key: value for key, value in write(self).items() if not is_left_out.get(key, False)}

    @property
    def cohort_sizes(self) -> range:
        """Numbers of sites that a secure sum may begin with."""
        max_clients = self.num_asked if self.bucket is None else min(self.num_asked, 2 * self.bucket - 1)
        fewest = self.min_cohort if self.bucket is None else max(self.min_cohort, self.bucket)
        return range(fewest, max_clients + 1)

    @property
    def num_asked(self) -> int:
        """Sites that a round asks."""
        return max(1, round(self.fraction * len(self.sites)))


def min_sites_left(sites: int) -> int:
    """Return with how many of so many sites a secure sum may end."""
    return 2 * sites // 3 + 1

"""The policy file: strict TOML, and beside it the signature of the person who answers for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel, digest_config, load_config
from phalanx.config.strict import later_key
from phalanx.errors import PolicyError
from phalanx.policy.signers import PersonKey, open_signature, write_signature
from phalanx.security.audit import PersonSigner
from phalanx.security.crypto import in_domain

POLICY_FILE = "policy.toml"
"""Its name in a run directory."""
_DOMAIN = "policy/1"

Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}\z")]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
GateName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+\.[A-Za-z0-9_.-]+\z", max_length=200)]


class TrainClauses(StrictModel):
    """What a run must be like before it starts.

    Attributes:
        engines: Sections of a run file that may do the work, such as ``pipeline``; empty: all.
        presets: Presets of the guard that a pipeline may have; empty: all, and none.
        tiers: Tiers of the enclave that a split run may have; empty: all.
        own_code: Whether code of the user's own may run.
        encrypted_checkpoints: Whether checkpoints must be encrypted.
    """

    engines: tuple[str, ...] = ()
    presets: tuple[Literal["economy", "light", "standard", "strict"], ...] = ()
    tiers: tuple[str, ...] = ()
    own_code: bool = True
    encrypted_checkpoints: bool = False


class DataClauses(StrictModel):
    """Where text may come from.

    Attributes:
        signers: Keys of whom a dataset must be signed by one, verified by fingerprint; empty: anybody's, or none.
        licences: Licences that sources may have, as the manifest of the dataset states them; empty: all.
        max_shares: Largest share of the tokens that a run draws, by licence; 0 forbids it.
        max_source_share: Largest share of one source in them.
    """

    signers: tuple[Fingerprint, ...] = ()
    licences: tuple[str, ...] = ()
    max_shares: dict[str, Share] = Field(default={})
    max_source_share: Share | None = None

    @property
    def needs_manifest(self) -> bool:
        """Whether the clauses speak of facts that only the manifest of a dataset has."""
        return bool(self.signers or self.licences or self.max_shares or self.max_source_share is not None)


class PrivacyClauses(StrictModel):
    """How private a run must be.

    Attributes:
        max_epsilon: Largest budget of differential privacy; a run without ``[privacy]`` breaks it.
        max_delta: Largest delta of such a budget.
        max_exposure_bits: Largest exposure of a planted canary; a run without ``[leak_meter]`` breaks it.
    """

    max_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    max_exposure_bits: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class SuiteIdentity(StrictModel):
    """The rows that a figure must be of, as the result of ``phalanx eval`` names them.

    Attributes:
        digest: ``suite_digest``.
        rows: ``num_rows``; None accepts a part of the suite.
        data: ``data_digest`` of labelled texts; None accepts any.
    """

    digest: Fingerprint
    rows: Annotated[int, Field(ge=1)] | None = None
    data: Fingerprint | None = None


class ReleaseClauses(StrictModel):
    """What a model must be like before it leaves: to an export, or to a server.

    Attributes:
        min_figures: Least value of a figure of ``phalanx eval``, by ``suite.metric``.
        max_figures: Largest value of such a figure.
        suites: What suites must be, by name; one of this package without an entry must be that one, as a whole.
        undoubted: Whether no step may be in doubt.
        approvals: Number of people who must approve these weights.
        releasers: Fingerprints of the keys of each person who may; two keys of one person are one approval. Empty:
            the people with the role releaser in the file of roles that governs the run.
    """

    min_figures: dict[GateName, Number] = Field(default={})
    max_figures: dict[GateName, Number] = Field(default={})
    suites: dict[Name, SuiteIdentity] = later_key({})
    undoubted: bool = False
    approvals: int = Field(default=0, ge=0, le=100)
    releasers: dict[Name, tuple[PersonKey, ...]] = Field(default={})

    @model_validator(mode="after")
    def _check(self) -> Self:
        keys = [key for keys in self.releasers.values() for key in keys]
        if len(keys) != len(set(keys)):
            raise ValueError("releasers: a key belongs to two people; give each person keys of their own")
        # without releasers they are those of the file of roles that governs the run
        if self.releasers and self.approvals > len(self.releasers):
            raise ValueError(
                f"approvals = {self.approvals}, but there are {len(self.releasers)} releasers; name more people"
            )
        return self


class TrainingPolicy(StrictModel):
    """All clauses of an organisation.

    Attributes:
        name: Name of the policy; a breach tells it.
    """

    name: Name
    train: TrainClauses = TrainClauses()
    data: DataClauses = DataClauses()
    privacy: PrivacyClauses = PrivacyClauses()
    release: ReleaseClauses = ReleaseClauses()

    @property
    def digest(self) -> str:
        """SHA-256 over all clauses; comments and order of the file do not enter it."""
        return digest_config(self)


class PolicyReference(StrictModel):
    """``[policy]`` of a run file.

    Attributes:
        file: The policy; its signature lies beside it.
        signer: Fingerprint of the key that must have signed it.
    """

    file: Path
    signer: PersonKey

    def read_policy(self) -> "SignedPolicy":
        """Read it, as `read_policy`."""
        return read_policy(self.file, self.signer)


@dataclass(frozen=True)
class SignedPolicy:
    """A policy whose signature holds.

    Attributes:
        text: The file, as it was read.
        signature: The signature file, as it was read.
        signer: Fingerprint of the key that signed it.
    """

    policy: TrainingPolicy
    text: bytes
    signature: bytes
    signer: str

    def keep_copy(self, run_dir: Path, *, is_new: bool) -> None:
        """Put the policy and its signature into the directory of a new run, or compare it with the copy of an old one.

        Raises:
            PolicyError: The run was begun under another policy, or its copy is gone.
        """
        path = run_dir / POLICY_FILE
        if not is_new:
            if not path.is_file() or read_policy(path, self.signer).policy != self.policy:
                raise PolicyError(
                    f"{run_dir}: was begun under another policy than {self.policy.name} is now, or its copy is gone"
                )
            return
        path.write_bytes(self.text)
        signature_file(path).write_bytes(self.signature)


def signature_file(path: Path) -> Path:
    """Return where the signature of a policy file lies."""
    return path.with_name(f"{path.name}.sig")


def sign_policy(path: Path, signer: PersonSigner) -> TrainingPolicy:
    """Sign a policy file; its signature is written beside it.

    Raises:
        ConfigError: The file is no policy.
        PolicyError: The signature cannot be written.
    """
    policy = load_config(path, TrainingPolicy)
    write_signature(signature_file(path), signer, in_domain(_DOMAIN, bytes.fromhex(policy.digest)))
    return policy


def read_policy(path: Path, signer: str) -> SignedPolicy:
    """Read a policy that one key must have signed.

    Args:
        signer: Fingerprint of that key; the file itself never says whom to believe.

    Raises:
        ConfigError: The file is no policy.
        PolicyError: Its signature is missing, or another key's, or of another text.
    """
    beside = signature_file(path)
    try:
        text, signature = path.read_bytes(), beside.read_bytes()
    except OSError as exc:
        raise PolicyError(
            f"{exc.filename}: cannot be read ({exc.strerror}); sign the policy with phalanx policy sign"
        ) from exc
    policy = load_config(path, TrainingPolicy)
    open_signature(signature, beside, signer, in_domain(_DOMAIN, bytes.fromhex(policy.digest)))
    return SignedPolicy(policy, text, signature, signer)

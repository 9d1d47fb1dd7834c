"""The file of a client: its own keys, texts and policy, and the run file that it agrees to."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel, load_config
from phalanx.data.chat.settings import PreferenceSource
from phalanx.data.tasks import Columns, load_own
from phalanx.errors import ConfigError
from phalanx.security.crypto import Identity, load_identity
from phalanx.security.tee import (
    Binding,
    Policy,
    PolicyConfig,
    SimAttester,
    load_policy,
    open_attester,
    read_endorsements,
)
from phalanx.split import SplitConfig
from phalanx.split.config import DEFAULT_TPM
from phalanx.split.hardware.measure import measure_code, policy_of
from phalanx.train.config import RunConfig, SplitRun, load_run
from phalanx.train.parties.client_conversations import look_at_conversations
from phalanx.train.parties.client_preferences import look_at_preferences
from phalanx.transport import TransportConfig

_WITHOUT_PROOF = ("sim", "process")
ClientEvidenceKind = Literal["sim", "snp", "tdx", "sgx", "nitro", "az-snp-vtpm", "tpm", "nv-gpu"]
"""Kinds of evidence that a client can bring: all that this program can ask hardware for, and the simulation."""


class ClientFile(StrictModel):
    """The config of one client of another owner; relative paths count from where it is started."""

    run: str
    """The run file, as the owner has given it: this client trains under these terms and no others."""
    identity: str
    """Directory with this client's keys and certificate, as `phalanx pki request` makes it."""
    train: str
    """Training texts: CSV, TSV or JSON lines; of conversations and preferences JSON lines. They are read here and go
    nowhere."""
    test: str
    """Held-out texts, none of which is a training text."""
    text: str | None = Field(default=None, min_length=1)
    """Column, or field, of the text; left out, as the run file says."""
    label: str | None = Field(default=None, min_length=1)
    """Column, or field, of the class; left out, as the run file says."""
    shape: Literal["pairs", "hh"] = "pairs"
    """Shape of preferences, as in `data.preferences.sources`."""
    policy: str | None = None
    """Policy file of this client: which enclave it trusts. Read again at every step. Left out, this release's own code,
    which tiers that prove nothing need `allow_insecure_sim` for, and tier "tpm" cannot do without."""
    allow_insecure_sim: bool = False
    """Whether evidence that proves nothing is accepted: an enclave of tier "sim" or "process"."""
    attester: ClientEvidenceKind | None = None
    """What gives evidence of this machine, which the enclave asks for where the run file has a policy for this client;
    "sim" gives evidence that proves nothing."""
    tpm: str = DEFAULT_TPM
    """Where the TPM of `attester = "tpm"` is, as `split.tpm`."""
    endorsements: dict[str, str] = Field(default={}, max_length=32)
    """Files that go along with the evidence, by name: certificates that this machine's hardware does not hand out."""
    directory: str | None = None
    """This client's own: epochs, the secret of its commitment, transcript; left out, `state` beside its keys."""
    advertise: str | None = None
    """Host under which the enclave calls this machine back; left out, it calls nobody: this client dials out, and what
    the enclave sends comes on that connection, through routers that translate addresses."""
    join_timeout_s: float = Field(default=3600.0, gt=0, le=86400, allow_inf_nan=False)
    """How long to look for an enclave that does not answer, seconds."""
    threads: int = Field(default=1, ge=1)
    """Threads of tensor kernels."""
    transport: TransportConfig = TransportConfig()

    @model_validator(mode="after")
    def _check_trust(self) -> Self:
        if self.policy is not None and self.allow_insecure_sim:
            raise ValueError("allow_insecure_sim: not allowed with a policy file, which has its own rules; remove it")
        if self.endorsements and self.attester in (None, "sim"):
            raise ValueError("endorsements: they accompany evidence of hardware; set attester, or remove them")
        return self

    @property
    def state_directory(self) -> Path:
        """This client's directory."""
        return Path(self.identity) / "state" if self.directory is None else Path(self.directory)

    def text_columns(self, run: RunConfig) -> Columns:
        """Return where text and label are, and the run's classes."""
        task = None if run.data.labelled is None else run.data.labelled.own_task
        if task is None:
            raise ConfigError(f"{self.run}: data.labelled.task has no classes, so the run has no clients of this kind")
        return Columns(self.text or task.text, self.label or task.label, task.classes)

    @property
    def preference_files(self) -> tuple[PreferenceSource, PreferenceSource]:
        """Return the files of preferences, learned ones and held-out ones."""
        learned, held_out = (PreferenceSource(path=Path(path), shape=self.shape) for path in (self.train, self.test))
        return learned, held_out

    def sign_evidence(self, binding: Binding, identity: Identity) -> bytes:
        """Have this machine's attester sign a binding; it is opened for this and closed again."""
        if self.attester is None:
            raise ConfigError(
                "attester: missing; set the source of the evidence that the enclave requires from this client"
            )
        if self.attester == "sim":
            return SimAttester(identity, measure_code()).make_evidence(binding).to_bytes()
        with open_attester(self.attester, read_endorsements(self.endorsements), tpm=self.tpm) as attester:
            return attester.make_evidence(binding).to_bytes()

    def check_attester(self, policy: PolicyConfig | None, name: str) -> None:
        """Check that this client can bring the evidence that the run file asks for."""
        if policy is not None and self.attester not in policy.evidence_kinds:
            kinds = " or ".join(f'"{kind}"' for kind in policy.evidence_kinds)
            given_attester = "missing" if self.attester is None else f'"{self.attester}"'
            raise ConfigError(
                f"attester: {given_attester}; the run file has a policy for {name}, so the enclave requires its "
                f"evidence: set attester = {kinds}"
            )

    def policy_now(self, split: SplitConfig) -> Policy:
        """Return the policy that this client accepts, by its file as it is now; the owner has no say in it."""
        if self.policy is not None:
            return load_policy(Path(self.policy))[0]
        if split.tier not in _WITHOUT_PROOF:
            raise ConfigError(f'policy: missing; tier = "{split.tier}" needs the policy of an enclave that you trust')
        if not self.allow_insecure_sim:
            raise ConfigError(
                f'tier = "{split.tier}" proves nothing to this client: the machine of the enclave could read its '
                "texts; set allow_insecure_sim = true to continue anyway, or set policy"
            )
        return policy_of(split.model_copy(update={"policy": None}))


def read_client(path: Path) -> tuple[ClientFile, SplitRun, str]:
    """Read a client's file and its run file, and look at keys and texts; torch is not needed.

    Returns:
        The file, the run, and the client's name in it.
    """
    client = load_config(path, ClientFile)
    run = load_run(client.run)
    if not isinstance(run, SplitRun) or not run.split.remote_clients:
        raise ConfigError(f"{client.run}: split.remote_clients is missing; ask the owner for the right run file")
    split, name = run.split, load_identity(Path(client.identity)).name
    if name not in split.remote_clients:
        raise ConfigError(
            f"{client.identity}: belongs to {name!r}, which is not a client of {client.run}; its clients are "
            f"{', '.join(split.remote_clients)}"
        )
    try:
        client.policy_now(split)
        client.check_attester(split.client_policies.get(name), name)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc}").with_facts(**exc.error_facts | {"file": str(path)}) from exc
    if run.data.preferences is not None:
        look_at_preferences(run.data.preferences, *client.preference_files)
    elif run.data.conversations is None:
        load_own(Path(client.train), Path(client.test), client.text_columns(run))
    else:
        look_at_conversations(run.data.conversations, Path(client.train), Path(client.test))
    return client, run, name

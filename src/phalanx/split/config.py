"""The configuration of a run's split; frozen, and free of torch."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, SerializationInfo, SerializerFunctionWrapHandler, model_serializer, model_validator

from phalanx.config import RefusedKeyError, StrictModel
from phalanx.config.strict import later_key
from phalanx.security.crypto import LOCAL_HOSTS
from phalanx.security.seal import DEFAULT_CHUNK_BYTES, MAX_CHUNK_BYTES, ReleasePolicy
from phalanx.security.tee import PolicyConfig, policy_files
from phalanx.split.admission.config import ClientAdmissionConfig
from phalanx.split.masked.config import HOST_AND_PORT, MaskedConfig
from phalanx.transport import TransportConfig

ENCLAVE = "enclave"
"""Party name of the process that has the back part."""
OWNER = "owner"
"""Party name of the owner, which keeps sealed states and asks for the release; it sees no tensor but released ones."""
_REMOTE_KEYS = ("remote_clients", "remote_enclave", "pki")
_PARTY = r"^[a-z0-9][a-z0-9-]{0,62}$"
_MAY_BE_SIMULATED = ("sim", "auto")
HardwareTier = Literal["snp", "tdx", "nitro", "az-snp-vtpm", "tpm"]
"""Tiers that rest on a machine's hardware, each named like its evidence, the strongest first."""
HARDWARE_TIERS: tuple[HardwareTier, ...] = get_args(HardwareTier)
DEFAULT_TPM = "device:/dev/tpmrm0"


class SplitConfig(StrictModel):
    """A client's frozen front, and a back part with adapters in an enclave."""

    mode: Literal["sealed", "plaintext", "masked"] = "sealed"
    """How tensors cross: sealed for the enclave alone, or readable for its host, which `insecure` must allow. "masked":
    sealed, and the enclave gives its frozen linear layers, masked, to a worker that is not trusted."""
    cut: int = Field(ge=1)
    """Layers at the client."""
    clients: int = Field(default=1, ge=1, le=64)
    """Number of clients that train one set of adapters, each on its own share of the sequences."""
    remote_clients: tuple[Annotated[str, Field(pattern=_PARTY)], ...] = ()
    """Names of clients that are processes of others, in the order of their turns: each has its own files, keys and
    policy (`phalanx client`), and no text of theirs reaches the owner. Left out, the run plays all clients itself."""
    remote_enclave: Annotated[str, Field(pattern=HOST_AND_PORT)] | None = None
    """`host:port` of the enclave that `phalanx enclave serve` is, which owner and remote clients call."""
    pki: str | None = None
    """Directory with the authority's certificate, the owner's keys and the enclave's certificate, for such a run."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """Precision in which activations cross; fp32 loses nothing."""
    tier: HardwareTier | Literal["sim", "process", "auto"] = "sim"
    """What stands behind the enclave's evidence. "auto": hardware of this machine that `policy` has a section for, else
    a sandboxed process where this machine can confine one, else a simulation, which `allow_insecure_sim` must allow."""
    tpm: str = DEFAULT_TPM
    """Where the TPM of the tiers "tpm" and "az-snp-vtpm" is: ``device:PATH``, ``swtpm:path=PATH`` or
    ``swtpm:host=NAME,port=NUMBER``."""
    endorsements: dict[str, str] = later_key({}, max_length=32)
    """Files that go along with the enclave's evidence, by name: what its hardware does not hand out itself."""
    allow_insecure_sim: bool = False
    """Whether evidence that proves nothing is accepted."""
    workers_see_hidden_states: bool = False
    """Whether untrusted workers may serve the middle stages of the enclave's part, as ``[pipeline]`` and ``[guard]``
    say. They see hidden states, gradients and the adapters of these stages in the clear: text can be rebuilt from
    these, and is not secret from the workers nor from the machines that they run on."""
    insecure: bool = False
    """Whether the host may read and alter what crosses; needed for "plaintext"."""
    policy: str | None = None
    """Policy file of the attestation; when left out, clients accept this release's own code at the tier. It is read
    again at every step, so that a measurement that is revoked in it ends the run."""
    client_policies: dict[Annotated[str, Field(pattern=_PARTY)], PolicyConfig] = Field(default={}, max_length=64)
    """What the evidence of a remote client must pass before the enclave takes its tensors: a policy by client, of which
    the digest of the run is made like of the rest. A client that is not in here is asked for no evidence."""
    reattest_every: int = Field(default=0, ge=0)
    """Steps after which every client asks for new evidence, and brings its own where there is a policy; 0: never."""
    reattest_s: float = Field(default=0.0, ge=0.0)
    """Seconds after which every client does the same; 0: never."""
    chunk_bytes: int = Field(default=DEFAULT_CHUNK_BYTES, ge=1, le=MAX_CHUNK_BYTES)
    """Plain bytes under one authentication tag."""
    release: ReleasePolicy | None = None
    """When adapters may leave the enclave; without it they stay sealed."""
    admission: ClientAdmissionConfig | None = None
    """Admission of clients' updates, and the rule that withstands liars; left out, all clients count alike."""
    masked: MaskedConfig = MaskedConfig()
    """How frozen layers are masked, and how many workers there are; for "masked" alone."""
    step_timeout_s: float = Field(default=600.0, gt=0)
    """How long the enclave may take for an answer, a whole step at most."""
    transport: TransportConfig = TransportConfig()

    @model_validator(mode="after")
    def _check_split(self) -> Self:
        if self.mode == "plaintext" and not self.insecure:
            raise ValueError(
                'mode = "plaintext" lets the enclave\'s host read and alter text, labels and gradients; set mode '
                '= "sealed", or insecure = true to measure its cost'
            )
        if self.mode != "plaintext" and self.insecure:
            raise ValueError(f'insecure = true is for mode = "plaintext", the mode is "{self.mode}"; remove it')
        if self.mode != "plaintext" and self.tier == "sim" and not self.allow_insecure_sim:
            raise ValueError(
                'tier = "sim" is a simulation that proves nothing: NOT SECURE; set allow_insecure_sim = true to '
                "use it anyway"
            )
        if self.allow_insecure_sim and self.tier not in _MAY_BE_SIMULATED:
            raise ValueError(f'allow_insecure_sim is for tier = "sim" or "auto", the tier is "{self.tier}"; remove it')
        if self.endorsements and self.tier not in HARDWARE_TIERS:
            raise ValueError(
                f'endorsements: accompany evidence of hardware, but the tier is "{self.tier}"; remove them'
            )
        if self.tier in _MAY_BE_SIMULATED and self.transport.bind not in LOCAL_HOSTS:
            raise ValueError(
                f'transport.bind = "{self.transport.bind}": a simulated enclave listens on this machine only; remove it'
            )
        if self.mode != "masked" and "masked" in self.model_fields_set and not self._repeats_every_default:
            raise RefusedKeyError(
                f'[split.masked] is for mode = "masked", the mode is "{self.mode}"; remove it',
                key="split.masked",
                found=f'mode = "{self.mode}"',
                expected='mode = "masked"',
                do="remove it",
            )
        self._check_remote()
        self._check_masked_address()
        self._check_client_policies()
        if self.admission is not None and self.workers_see_hidden_states:
            raise ValueError(
                "[split.admission] needs the gradients of the whole back part, but workers have its middle; remove "
                "one of them"
            )
        if self.release is not None and self.release.min_clients > self.clients:
            raise ValueError(
                f"release.min_clients = {self.release.min_clients}: more than clients = {self.clients}, so nothing "
                "could be released; lower it, or remove [split.release]"
            )
        if self.release is not None and self.admission is not None and self.admission.rule == "krum":
            raise ValueError(
                'admission.rule = "krum" learns from one client in each step, so what is released could be one '
                'client\'s alone; take "multi_krum", or remove [split.release]'
            )
        return self

    def _check_remote(self) -> None:
        """Remote clients and a remote enclave come together: an owner that started the enclave would be its host."""
        names = self.remote_clients
        remote_keys = [key for key in _REMOTE_KEYS if getattr(self, key)]
        if not remote_keys:
            return
        if len(remote_keys) < len(_REMOTE_KEYS):
            lacking = ", ".join(key for key in _REMOTE_KEYS if key not in remote_keys)
            raise ValueError(
                f"{', '.join(remote_keys)}: needed for remote clients, but {lacking} is missing; set all three"
            )
        if len(names) != self.clients or len(set(names)) != len(names) or {ENCLAVE, OWNER} & set(names):
            raise ValueError(
                f"remote_clients names {', '.join(names)}; expected as many different names as clients = "
                f"{self.clients}, and neither {OWNER} nor {ENCLAVE}"
            )
        if self.mode == "plaintext":
            raise ValueError('remote_clients: others\' texts cross sealed; set mode = "sealed" or "masked"')
        if self.workers_see_hidden_states:
            raise ValueError(
                "remote_clients: workers of middle stages read hidden states, from which text can be rebuilt, and no "
                "client appraises them; remove workers_see_hidden_states and [pipeline]"
            )
        if self.tier == "auto":
            raise ValueError('tier = "auto" is for an enclave of this machine; name the tier of the remote one')
        if self.tier == "sim" and self.enclave_host not in LOCAL_HOSTS:
            raise ValueError(
                f"remote_enclave = {self.remote_enclave!r}: a simulated enclave is reachable on this machine only; "
                'set the tier of its hardware, or "process"'
            )

    def _check_masked_address(self) -> None:
        """Masked workers that are processes of others come with clients that are, and to an enclave on a network."""
        address = self.masked.address
        if (address is not None) != bool(self.remote_clients and self.mode == "masked"):
            raise ValueError(
                'masked.address: is where an enclave of remote clients awaits the workers of mode = "masked"; '
                + ("remove it" if address else "set it")
            )
        if address is not None and self.tier == "process":
            raise ValueError(
                'masked.address: an enclave of tier = "process" reaches no network and no worker of others; set the '
                'tier of its hardware, or mode = "sealed"'
            )
        if address is not None and self.tier == "sim" and host_of(address) not in LOCAL_HOSTS:
            raise ValueError(
                f"masked.address = {address!r}: a simulated enclave is reachable on this machine only; set the tier of "
                "its hardware"
            )

    def _check_client_policies(self) -> None:
        """Clients that this run plays itself have no machine of their own that evidence could be about."""
        for name, policy in self.client_policies.items():
            place = f"client_policies.{name}"
            if name not in self.remote_clients:
                clients = ", ".join(self.remote_clients) or "none"
                raise ValueError(f"{place}: is for a client that is a process of another owner; those here: {clients}")
            if files := policy_files(policy):
                raise ValueError(
                    f"{place}: names the file {files[0]!r}, and a file is no part of the run's digest; put roots in "
                    "as PEM text, and leave crls out"
                )
            kinds = policy.evidence_kinds
            if policy.expect is not None or not kinds:
                raise ValueError(f"{place}: needs reference values of a kind, such as [tpm], and no [expect]")
            if kinds == ("sim",) and not policy.allow_insecure_sim:
                raise ValueError(f"{place}: simulated evidence proves nothing and needs allow_insecure_sim = true")

    def reattests_at(self, step: int) -> bool:
        """Whether evidence is due again before this step is trained."""
        return bool(self.reattest_every and step and step % self.reattest_every == 0)

    @property
    def _repeats_every_default(self) -> bool:
        """Whether ``[split.masked]`` is as earlier versions wrote it into the resolved file of every split."""
        return (
            self.masked == MaskedConfig()
            and self.masked.model_fields_set >= MaskedConfig().model_dump(exclude_none=True).keys()
        )

    @model_serializer(mode="wrap")
    def _serialize_split(self, write: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Leave out keys that are not acknowledged, so that the digest of a split without workers stays the same.

        A file, which has no nulls, leaves out [split.masked] as well where nothing is masked; the digest knows it.
        """
        newer = ("workers_see_hidden_states", "admission", "client_policies", *_REMOTE_KEYS)
        left_out = {key for key in newer if not getattr(self, key)}
        if info.exclude_none and self.mode != "masked":
            left_out.add("masked")
        return {name: value for name, value in write(self).items() if name not in left_out}

    @property
    def masked_workers(self) -> tuple[str, ...]:
        """Party names of the workers that multiply masked numbers; the second one makes pads' products."""
        if self.mode != "masked":
            return ()
        return ("masked-0", "masked-1") if self.masked.second_worker else ("masked-0",)

    @property
    def client_names(self) -> tuple[str, ...]:
        """Party names of the clients, in the order in which they take turns."""
        return self.remote_clients or tuple(f"client-{number}" for number in range(self.clients))

    @property
    def enclave_host(self) -> str:
        """The host of a remote enclave; empty where the run starts its own."""
        return host_of(self.remote_enclave or ":")


def host_of(address: str) -> str:
    """Return the host of a ``host:port``."""
    return address.rpartition(":")[0].strip("[]")

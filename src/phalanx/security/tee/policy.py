"""The verifier's policy: reference values, roots and revocation, from one TOML file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from pathlib import Path

from phalanx.config import StrictModel, digest_config, load_config
from phalanx.errors import ConfigError, RefusedEvidenceError
from phalanx.security.tee.amd.snp import SnpReference
from phalanx.security.tee.aws.nitro import NitroReference
from phalanx.security.tee.azure.vtpm import AzSnpVtpmReference
from phalanx.security.tee.backends import BACKENDS
from phalanx.security.tee.binding import Binding, Expected, RawReportData
from phalanx.security.tee.claims import Reference
from phalanx.security.tee.formats.chain import Trust
from phalanx.security.tee.formats.x509 import Certificate, RevocationList, parse_crl, read_certificates
from phalanx.security.tee.intel.sgx import SgxReference
from phalanx.security.tee.intel.tdx import TdxReference
from phalanx.security.tee.nvidia.gpu import NvGpuReference
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason
from phalanx.security.tee.sim import SimReference
from phalanx.security.tee.tpm.key import TpmReference

_PEM = "-----BEGIN CERTIFICATE-----"


class ExpectedConfig(StrictModel):
    """The binding that this one appraisal expects: a nonce with key, run and role, or plain report data.

    Attributes:
        nonce: 32 bytes in hex, drawn by the verifier.
        tls_key: SHA-256 of the attester's TLS key (its SubjectPublicKeyInfo), in hex.
        run: Digest of the run's config, in hex.
        report_data: The whole field in hex, for evidence that was made without a binding.
    """

    nonce: str | None = None
    tls_key: str | None = None
    run: str | None = None
    role: str = "server"
    report_data: str | None = None

    def build_expected(self) -> Expected:
        """Build the expected values for a comparison with the evidence."""
        bound = (self.nonce, self.tls_key, self.run)
        try:
            if self.report_data is not None and bound == (None, None, None):
                return RawReportData(bytes.fromhex(self.report_data))
            if self.report_data is None and all(value is not None for value in bound):
                nonce, tls_key, run = (bytes.fromhex(text or "") for text in bound)
                return Binding(nonce, tls_key, run, self.role)
        except ValueError as exc:
            raise ConfigError(f"expect: {exc}") from exc
        raise ConfigError("expect: give nonce, tls_key and run, or report_data alone")


class PolicyConfig(StrictModel):
    """The policy file.

    Attributes:
        expect: Expected values for `phalanx enclave appraise`; a run draws its own nonce instead.
        revoked_measurements: Values, in hex, that are refused wherever they appear.
        revoked_certificates: SHA-256 fingerprints, in hex.
        allow_insecure_sim: Whether simulated evidence, which proves nothing, is accepted.
        tpm: TPM 2.0.
        nv_gpu: NVIDIA GPUs in confidential mode.
        az_snp_vtpm: Azure's confidential VMs with SEV-SNP.
        sim: Reference of the simulation; NOT SECURE.
    """

    expect: ExpectedConfig | None = None
    revoked_measurements: tuple[str, ...] = ()
    revoked_certificates: tuple[str, ...] = ()
    allow_insecure_sim: bool = False
    snp: SnpReference | None = None
    tdx: TdxReference | None = None
    sgx: SgxReference | None = None
    nitro: NitroReference | None = None
    tpm: TpmReference | None = None
    nv_gpu: NvGpuReference | None = None
    az_snp_vtpm: AzSnpVtpmReference | None = None
    sim: SimReference | None = None

    @property
    def evidence_kinds(self) -> tuple[str, ...]:
        """Names in `BACKENDS` of the kinds that it has reference values of."""
        return tuple(kind for kind in BACKENDS if getattr(self, kind.replace("-", "_")) is not None)


@dataclass(frozen=True)
class Policy:
    """A policy with its files read.

    Attributes:
        references: Reference values by kind; a kind that is absent is refused.
        manifest_roots: Pinned roots of the authorities that sign the vendor's reference values, by kind.
        digest: SHA-256 over the config, in hex; empty for one that was built in code.
    """

    references: Mapping[str, Reference]
    roots: Mapping[str, tuple[Certificate, ...]] = field(default_factory=dict)
    crls: Mapping[str, tuple[RevocationList, ...]] = field(default_factory=dict)
    revoked_measurements: frozenset[str] = frozenset()
    revoked_certificates: frozenset[str] = frozenset()
    allow_insecure_sim: bool = False
    manifest_roots: Mapping[str, tuple[Certificate, ...]] = field(default_factory=dict)
    digest: str = ""

    def reference_for(self, kind: str) -> Reference:
        """Return the reference values of a kind."""
        reference = self.references.get(kind)
        if reference is None:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.NO_REFERENCE,
                f"{kind}: the policy has no reference values, so nothing of it is accepted",
            )
        return reference

    def trust_for(self, kind: str, now: datetime) -> Trust:
        """Return roots, clock and revocation for a kind; its packaged roots where the policy pins none."""
        roots = self.roots.get(kind) or packaged_roots(kind)
        manifests = self.manifest_roots.get(kind) or _read_packaged(BACKENDS[kind].manifest_roots)
        return Trust(roots, now, self.crls.get(kind, ()), self.revoked_certificates, manifest_roots=manifests)


def packaged_roots(kind: str) -> tuple[Certificate, ...]:
    """Return the vendor's roots that come with Phalanx; none for some kinds and generations."""
    return _read_packaged(BACKENDS[kind].packaged_roots)


def _read_packaged(names: tuple[str, ...]) -> tuple[Certificate, ...]:
    folder = resources.files("phalanx.security.tee") / "roots"
    return tuple(
        root for name in names for root in read_certificates((folder / name).read_bytes(), f"packaged root {name}")
    )


def load_policy(path: Path) -> tuple[Policy, PolicyConfig]:
    """Read a policy file and the files that it names, which are relative to it."""
    config = load_config(path, PolicyConfig)
    return build_policy(config, path.parent), config


def build_policy(config: PolicyConfig, directory: Path) -> Policy:
    """Build a policy from its config; file names are relative to the directory."""
    references: dict[str, Reference] = {kind: getattr(config, kind.replace("-", "_")) for kind in config.evidence_kinds}
    return Policy(
        references=references,
        roots={
            kind: tuple(root for name in reference.roots for root in _read_roots(directory, name))
            for kind, reference in references.items()
        },
        manifest_roots={
            "nv-gpu": tuple(root for name in config.nv_gpu.manifest_roots for root in _read_roots(directory, name))
        }
        if config.nv_gpu is not None
        else {},
        crls={
            kind: tuple(_read_crl(directory / name) for name in reference.crls)
            for kind, reference in references.items()
        },
        revoked_measurements=frozenset(config.revoked_measurements),
        revoked_certificates=frozenset(config.revoked_certificates),
        allow_insecure_sim=config.allow_insecure_sim,
        digest=digest_config(config),
    )


def policy_files(config: PolicyConfig) -> tuple[str, ...]:
    """Return the names of the files that a policy needs beside it; roots that stand in the policy itself are none."""
    files: list[str] = []
    for kind in config.evidence_kinds:
        reference = getattr(config, kind.replace("-", "_"))
        roots = (*reference.roots, *getattr(reference, "manifest_roots", ()))
        files += [root for root in roots if not root.startswith(_PEM)]
        files += reference.crls
    return tuple(files)


def _read_roots(directory: Path, given: str) -> tuple[Certificate, ...]:
    """Read roots from a file, or from the PEM text that stands in its place."""
    place = "roots" if given.startswith(_PEM) else str(directory / given)
    try:
        return read_certificates(given.encode() if given.startswith(_PEM) else _read_file(directory / given), place)
    except RefusedEvidenceError as exc:
        raise ConfigError(f"{place}: {exc.detail}; expected the vendor's root certificates") from exc


def _read_crl(path: Path) -> RevocationList:
    try:
        return parse_crl(_read_file(path), str(path))
    except RefusedEvidenceError as exc:
        raise ConfigError(f"{path}: {exc.detail}; expected a revocation list in DER") from exc


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read ({exc.strerror})") from exc

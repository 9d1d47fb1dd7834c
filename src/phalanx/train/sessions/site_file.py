"""The file of a site of federated rounds: the run that it agrees to, its own keys, and where the owner is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel, digest_config, load_config
from phalanx.data import DataConfig
from phalanx.data.chat.settings import ConversationSource, PreferenceSource
from phalanx.data.config import BpeConfig
from phalanx.data.sources import SourceConfig
from phalanx.errors import CertificateError, ConfigError
from phalanx.federated.config import OWNER
from phalanx.federated.rounds.terms import RunTerms
from phalanx.security.crypto import Identity, Peer, load_identity, peer_from_certificate
from phalanx.train.config import FederatedRun, RunConfig, load_run
from phalanx.transport import TransportConfig

MessageKey = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class SiteFile(StrictModel):
    """The config of one site's process; relative paths count from where it is started."""

    run: str
    """The run file, as the owner has given it: the site trains under these terms and no others."""
    identity: str
    """Directory with its keys and certificate, as `phalanx pki request` makes it."""
    certificates: str
    """Directory with NAME/certificate.pem of the owner and of every site, as the owner's pki directory has them."""
    keys: dict[str, MessageKey] = Field(default={}, max_length=1000)
    """Message keys by name, as the other sites have told them and not the owner: all other sites are named then."""
    owner: str | None = None
    """`host:port` of an owner that the site calls: only in files that an owner writes for its own processes."""
    socket: str | None = None
    """Path where an engine's client delivers frames, in a directory of this user's alone; carrier = "bridge"."""
    sources: tuple[SourceConfig, ...] = ()
    """The site's own text, as `data.sources` of a run file has it; left out, its share of the run's text."""
    conversations: tuple[ConversationSource, ...] = ()
    """The site's own conversations, where the run has `data.conversations`."""
    preferences: tuple[PreferenceSource, ...] = ()
    """The site's own preferences, where the run has `data.preferences`."""
    directory: str | None = None
    """Directory for the log of sums that it has entered, and control variates; left out, `state` beside its keys."""
    cache: str | None = None
    """Where prepared text and converted models are kept; left out, `.cache` in `directory`."""
    join_timeout_s: Annotated[float, Field(gt=0.0, le=86400.0)] = 120.0
    """How long to look for an owner that does not answer, seconds."""
    transport: TransportConfig = TransportConfig()
    """Bounds of frames; with `owner` where the site listens, and deadlines."""

    @model_validator(mode="after")
    def _check_connection(self) -> Self:
        if (self.owner is None) == (self.socket is None):
            raise ValueError("socket: missing; set the path where the engine's client delivers frames")
        return self

    def own_data(self, data: DataConfig) -> DataConfig | None:
        """Return a run's section ``[data]`` with the site's own files in it; None where the site names none."""
        if self.sources:
            return data.model_copy(update={"sources": self.sources})
        for name, files in self._own_records.items():
            section = getattr(data, name)
            if files and section is not None:
                return data.model_copy(update={name: section.model_copy(update={"sources": files})})
        return None

    @property
    def _own_records(self) -> dict[str, tuple[ConversationSource | PreferenceSource, ...]]:
        return {"conversations": self.conversations, "preferences": self.preferences}

    def check_own_data(self, path: Path, data: DataConfig) -> None:
        """Refuse files of another kind than the run reads, and a tokenizer that other sites would not have."""
        given = {"sources": self.sources, **self._own_records}
        for name in (name for name, files in given.items() if files):
            if not getattr(data, name) or isinstance(data.tokenizer, BpeConfig):
                raise ConfigError(
                    f"{path}: {name} need a run with data.{name} and with a tokenizer that all sites have; but "
                    f'{self.run} has data.tokenizer.kind = "{data.tokenizer.kind}"'
                    f"{'' if getattr(data, name) else f' and no data.{name}'}"
                )

    @property
    def site_directory(self) -> Path:
        """The site's directory."""
        return Path(self.identity) / "state" if self.directory is None else Path(self.directory)

    def run_directory(self, run: str) -> Path:
        """Where what is of one run alone is: personal weights, and log and keys of a pipeline.

        A site of its own owner takes part in several runs; of a site that the run's owner starts the directory is in
        that of the run, whose file may change at a resume.
        """
        return self.site_directory if self.socket is None else self.site_directory / "runs" / run

    @property
    def kept_directory(self) -> Path:
        """Where prepared text and converted models are."""
        return self.site_directory / ".cache" if self.cache is None else Path(self.cache)


def read_site(path: Path) -> tuple[SiteFile, FederatedRun, Identity]:
    """Read a site's file, its run file and its keys."""
    file = load_config(path, SiteFile)
    run, identity = load_run(file.run), load_identity(Path(file.identity))
    if not isinstance(run, FederatedRun):
        raise ConfigError("federated: the section [federated] is missing")
    section = run.federated
    if identity.name not in section.sites:
        raise ConfigError(
            f"{file.identity}: belongs to {identity.name!r}, which is not a site of {file.run}; its sites are "
            f"{', '.join(section.sites)}"
        )
    if file.socket is not None and section.carrier != "bridge":
        raise ConfigError(
            f'{file.run}: federated.carrier = "{section.carrier}" has only local sites; ask its owner for a run '
            'file with "bridge"'
        )
    file.check_own_data(path, run.data)
    _check_names(path, file, identity.name, section.sites)
    return file, run, identity


def _check_names(path: Path, file: SiteFile, own: str, sites: tuple[str, ...]) -> None:
    """Refuse a run with sites that the authority alone vouches for, if others are pinned."""
    if not file.keys:
        return
    if unpinned := [site for site in sites if site != own and site not in file.keys]:
        raise ConfigError(
            f"{path}: keys lacks {', '.join(unpinned)}, which are sites of {file.run}; ask each site, not the "
            "owner, for its message key, or do not join: invented sites of the owner would hide nothing in a sum"
        )
    if strangers := sorted(set(file.keys) - {OWNER, *sites}):
        raise ConfigError(
            f"{path}: keys has {', '.join(strangers)}, which are not sites of {file.run}; its sites are "
            f"{', '.join(sites)}"
        )


def session_prefix(run: RunConfig) -> str:
    """Return the common prefix of a run's session names."""
    return f"{digest_config(run)[:32]}-"


def terms_of(
    run: FederatedRun, identity: Identity, certificates: Path, pinned: Mapping[str, str] | None = None
) -> RunTerms:
    """Return the facts of a run, with parties that its authority has certified.

    Args:
        certificates: Directory of all parties' certificates, as in `SiteFile`.
        pinned: Message keys by name, hex, that certificates must have; of the other parties the authority is believed.

    Raises:
        CertificateError: A certificate is not of the authority, of another party than its directory says, or has
            another key than is pinned.
    """
    section = run.federated
    peers = {name: _certified_peer(name, certificates, identity) for name in (OWNER, *section.sites)}
    for name, key in (pinned or {}).items():
        _check_key(peers[name], key, str(certificates / name / "certificate.pem"))
    owner = peers.pop(OWNER)
    return RunTerms(
        digest_config(run)[:32], digest_config(run), section, run.train.seed, owner, peers, run.train.steps, run.privacy
    )


def _check_key(peer: Peer, key: str, where: str) -> None:
    if (actual_key := peer.public_key.hex()) != key:
        raise CertificateError(
            f"{where}: certifies the message key {actual_key}, but keys has {key} for {peer.name!r}; ask "
            f"{peer.name!r} for its key: the issuer of certificates can substitute a key and read the hidden values"
        ).with_facts(code="PHX-V014", file=where, found=actual_key, expected=key, do=f"ask {peer.name!r} for its key")


def _certified_peer(name: str, certificates: Path, identity: Identity) -> Peer:
    path = certificates / name / "certificate.pem"
    if not path.exists():
        raise ConfigError(f"{path}: missing; the owner gives each site the certificates of all, and of itself")
    peer = peer_from_certificate(path.read_bytes(), identity.authority_pem, where=str(path))
    if peer.name != name:
        raise CertificateError(f"{path}: is the certificate of {peer.name!r}, expected {name!r}")
    return peer

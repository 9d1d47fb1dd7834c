"""A hosted model whose middle layers are at other parties, from its files to the engine."""

import contextlib
import hashlib
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError, ModelError, PhalanxError
from phalanx.models import ModelSource
from phalanx.models.directory import read_config
from phalanx.rollouts.evidence import EvidenceDirectory
from phalanx.security.crypto import RevokedParties, load_identity
from phalanx.serve.engine import EngineSettings, HostedModel
from phalanx.serve.engine.row_cache import RowCache
from phalanx.serve.place import check_place, checkpoint_place, is_run
from phalanx.serve.stages.config import StagesConfig, StageWorkerConfig
from phalanx.serve.stages.ends import RemoteLayers, load_ends
from phalanx.serve.stages.evidence import list_convictions
from phalanx.serve.stages.examiner import StageExaminer
from phalanx.serve.stages.relay import StageRelay
from phalanx.serve.text_model import TextModel
from phalanx.train import PastRun, export_run
from phalanx.transport import LocalWorkerProcesses, joined_workers

EVIDENCE_FOLDER, WORKERS_FOLDER = "evidence", "stage_workers"
_COMMAND = ("phalanx", "stage-worker")
_RUN = "serve"


class StagedTextModel(TextModel):
    """The owner's layers with the tokenizer.

    Args:
        directory: Hub layout with a tokenizer.
        module: The owner's layers as a causal model.
    """

    def __init__(self, directory: Path, module: Any, files_digest: str) -> None:
        self._module, self._files_digest = module, files_digest
        super().__init__(directory)

    def _load_model(self, directory: Path, device: str, kind: Any = None) -> Any:  # type: ignore[override]
        return self._module

    @cached_property
    def model_digest(self) -> str:
        """SHA-256 over the model's files and `companions`; weights are not in one memory to be digested."""
        parts = ["in stages, float32", self._files_digest, self.companions]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass
class StagedModel(HostedModel):
    """A hosted model that asks stages.

    Raises:
        ModelError: Adapters or int8 weights are asked for, or what `HostedModel` refuses.
    """

    relay: StageRelay = field(kw_only=True)
    remote: RemoteLayers = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.adapters or self.weights != "float":
            raise ModelError("a model in stages is served in float32 and without adapters; merge the adapter first")
        super().__post_init__()
        self.remote.run_stages = self.relay.run_stages

    @property
    def forks_texts(self) -> bool:
        """False: keys and values are at the parties."""
        return False

    def find_text_number(self, cache: RowCache) -> int | None:
        return self.relay.find_number(cache)

    def find_text_fault(self, cache: RowCache) -> PhalanxError | None:
        """Return why a text must not go on: a party that lied had a part in it."""
        return self.relay.find_fault(cache)

    def end_text(self, cache: RowCache) -> None:
        """Close a text at all parties, and draw whether it is redone."""
        self.relay.end_text(cache)


def cut_layers(num_layers: int, config: StagesConfig) -> list[tuple[int, int]]:
    """Share the layers between the owner's ends among the stages, as evenly as they go; larger shares come first."""
    begin, num_stages = config.front_layers, len(config.holders)
    num_middle = num_layers - begin - config.back_layers
    if num_middle < num_stages:
        raise ConfigError(
            f"stages: the model has {num_layers} layers, {max(0, num_middle)} of them between the owner's; "
            f"{num_stages} stages need one each"
        )
    layers = []
    for index in range(num_stages):
        stop = begin + num_middle // num_stages + (index < num_middle % num_stages)
        layers.append((begin, stop))
        begin = stop
    return layers


def check_convictions(directory: Path, parties: Sequence[str]) -> None:
    """Refuse parties that an earlier session of this server has convicted."""
    for party, path in list_convictions(directory).items():
        if party in parties:
            raise ConfigError(f"stages: {party} was convicted, see {path}; take it out of holders, or the file away")


def check_stageable(directory: Path, engine: EngineSettings) -> None:
    """Refuse models and settings that are not served in stages."""
    config = read_config(directory)
    if config.get("is_encoder_decoder"):
        raise ModelError(f"{directory}: {config.get('model_type')} has an encoder; stages serve decoders alone")
    if config.get("quantization_config") is not None:
        raise ModelError(f"{directory}: has quantised weights; stages compute in float32")
    if engine.max_owner_prefix_tokens:
        raise ConfigError("stages: prefixes are not used again; set max_owner_prefix_tokens to 0")


@contextlib.contextmanager
def open_staged_model(
    name: str,
    where: Path,
    config: StagesConfig,
    engine: EngineSettings,
    home: Path,
    announce: Callable[[str], None] = lambda address: None,
) -> Iterator[StagedModel]:
    """Open a model whose middle layers are at other parties; they are started or awaited, and ended at the end.

    Args:
        name: Id by which clients name it.
        where: A run, a checkpoint in one, or a model directory.
        home: Directory of evidence, and of the files of local processes.
        announce: Told the address at which parties are awaited.

    Raises:
        ConfigError: It has fewer layers than stages, or a party was convicted before, or revoked.
        PeerLostError: A party did not come, refuses, or has not loaded its stage in time.
    """
    check_convictions(home / EVIDENCE_FOLDER, config.parties)
    identity = load_identity(Path(config.identity))
    # where the owner's directory is beside its authority's list, as `phalanx pki` and `phalanx invite` make both
    revoked = RevokedParties(Path(config.identity).resolve().parent).read_revocations
    if parties := sorted(revoked().keys() & set(config.parties)):
        raise ConfigError(f"stages: the certificate of {', '.join(parties)} was revoked; take it out of holders")
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(_model_directory(where))
        check_stageable(directory, engine)
        source = ModelSource(directory)
        layers = cut_layers(source.num_layers, config)
        module, remote = load_ends(directory, source, config.front_layers, config.back_layers)
        text_model = StagedTextModel(directory, module, source.files_digest())
        processes = None
        if config.workers_here is not None:
            transport = config.transport.model_copy(update={"port": 0})
            template = StageWorkerConfig(identity="", owner="", tolerance=config.tolerance, transport=transport)
            processes = LocalWorkerProcesses(home / WORKERS_FOLDER, Path(config.workers_here), template, _COMMAND)
        joined = stack.enter_context(
            joined_workers(
                identity,
                config.parties,
                _RUN,
                config.transport,
                processes,
                announce=announce,
                patience_s=config.join_timeout_s,
            )
        )
        desk = EvidenceDirectory(
            home / EVIDENCE_FOLDER, joined.session, identity.authority_pem.decode(), joined.certificates
        )
        examiner = StageExaminer(desk, source, config.kept_stages)
        is_alive = (lambda party: True) if processes is None else processes.is_running
        relay = StageRelay(joined.endpoint, config, source, examiner, secrets.token_bytes(32), is_alive)
        relay.read_revocations = revoked
        stack.callback(relay.close)
        relay.load_stages(layers, engine.max_rows + 1, engine.max_cache_tokens + text_model.context_length)
        yield StagedModel(name, text_model, int(time.time()), relay=relay, remote=remote)


@contextlib.contextmanager
def _model_directory(where: Path) -> Iterator[Path]:
    """Give the model of a path as a directory that lasts as long as the server: checks read weights again."""
    place = checkpoint_place(where)
    run, step = (where, None) if place is None else place
    if not is_run(run):
        check_place(where)
        yield where
        return
    with tempfile.TemporaryDirectory(prefix="phalanx-model-") as spare:
        directory = Path(spare) / "model"
        export_run(PastRun(run, None), directory, step=step, best=False, merge=True, own_code=False)
        yield directory

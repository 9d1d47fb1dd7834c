"""The back part of an enclave: cut from the model, with what trains it and what it takes."""

from dataclasses import dataclass

from phalanx.errors import FrameError
from phalanx.models import ModelSource
from phalanx.split.channel.tensor_kinds import TensorKinds
from phalanx.split.processes.local_enclave import EnclaveConfig
from phalanx.split.processes.offload import Prepare
from phalanx.split.training.admitting_trainer import AdmittingTrainer
from phalanx.split.training.parts import build_back
from phalanx.split.training.task import task_of
from phalanx.split.training.trainer import BackTrainer


@dataclass(frozen=True)
class BackPart:
    """The back part of one session.

    Attributes:
        whole: Trains it in this process.
        admitting: The same, where admission decides which clients count; None where all do.
        kinds: What it takes of clients.
    """

    whole: BackTrainer
    admitting: AdmittingTrainer | None
    kinds: TensorKinds


def open_back(config: EnclaveConfig, source: ModelSource, prepare: Prepare) -> BackPart:
    """Cut the back part from a model.

    Args:
        config: What the enclave was started with.
        source: The model.
        prepare: Changes what is frozen before it is trained.

    Raises:
        FrameError: The run trains no adapter.
        PhalanxError: The model is unusable.
    """
    split = config.split
    if config.model.adapter is None:
        raise FrameError("model.adapter: missing; the back part of a split trains adapters")
    back = build_back(
        source,
        split.cut,
        adapter=config.model.adapter,
        attention=config.model.attention,
        seed=config.seed,
        activation_checkpointing=config.model.activation_checkpointing,
        document_attention=config.document_attention,
    )
    task = task_of(config.objective, config.classes)
    whole = BackTrainer(back, task, config.optimizer, config.steps, config.seed)
    # after the head is there: a masked split has no use for one that is replaced
    prepare(back)
    wanted = split.admission
    admitting = None if wanted is None else AdmittingTrainer(whole, split.client_names, wanted)
    width = source.hidden_size + config.document_attention
    kinds = TensorKinds(config.rows, config.seq, width, split.wire, task.label_shape, task.num_answers, task.extras)
    return BackPart(whole, admitting, kinds)

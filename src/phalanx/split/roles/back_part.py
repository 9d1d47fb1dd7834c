"""The back part of an enclave: its modules, its trainer and the tensors that it takes."""

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
        kinds: Tensors that it takes from clients.
    """

    whole: BackTrainer
    admitting: AdmittingTrainer | None
    kinds: TensorKinds


def open_back(config: EnclaveConfig, source: ModelSource, prepare: Prepare) -> BackPart:
    """Cut the back part from a model.

    Args:
        prepare: Changes frozen weights before training.

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
    trainer = BackTrainer(back, task, config.optimizer, config.steps, config.seed)
    # after the head is there: a masked split has no use for one that is replaced
    prepare(back)
    admission = split.admission
    admitting = None if admission is None else AdmittingTrainer(trainer, split.client_names, admission)
    width = source.hidden_size + config.document_attention
    kinds = TensorKinds(
        config.rows, config.seq, width, split.wire, task.label_shape, task.num_answers, task.extra_kinds
    )
    return BackPart(trainer, admitting, kinds)

"""Secure split fine-tuning: a client's frozen front, and an enclave with the back part, adapters, head and optimizer.

The config is there at once; what needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.split.config import ENCLAVE, SplitConfig

if TYPE_CHECKING:
    from phalanx.split.channel.client_order import client_of, microbatches_of
    from phalanx.split.channel.link import FrameLink, PlainLink, SealedLink
    from phalanx.split.channel.tensor_kinds import TensorKinds
    from phalanx.split.handshake.meeting import ClientHandshake, EnclaveHandshake, HandshakeTerms, attested_keys
    from phalanx.split.roles.client import SplitClient
    from phalanx.split.roles.driver import SplitDriver, SplitStep
    from phalanx.split.roles.enclave import Enclave
    from phalanx.split.roles.simulator import (
        FrameInTransit,
        Host,
        SimulatedStep,
        SplitScenario,
        SplitSimulator,
        honest_host,
    )
    from phalanx.split.training.classification import Classification, HeldOutScores
    from phalanx.split.training.parts import Front, FrontPart, build_back, cut_model
    from phalanx.split.training.task import TASKS, NextToken, SplitTask, task_of
    from phalanx.split.training.trainer import BackTrainer


__all__ = [
    "ENCLAVE",
    "TASKS",
    "BackTrainer",
    "Classification",
    "ClientHandshake",
    "Enclave",
    "EnclaveHandshake",
    "FrameInTransit",
    "FrameLink",
    "Front",
    "FrontPart",
    "HandshakeTerms",
    "HeldOutScores",
    "Host",
    "NextToken",
    "PlainLink",
    "SealedLink",
    "SimulatedStep",
    "SplitClient",
    "SplitConfig",
    "SplitDriver",
    "SplitScenario",
    "SplitSimulator",
    "SplitStep",
    "SplitTask",
    "TensorKinds",
    "attested_keys",
    "build_back",
    "client_of",
    "cut_model",
    "honest_host",
    "microbatches_of",
    "task_of",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)

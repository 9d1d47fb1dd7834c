"""A small policy with sharp opinions, and a company that writes by it."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.errors import TransportError
from phalanx.rollouts import CheckedShare, Rollout, RolloutCheck, RolloutPolicy, RolloutWriter
from phalanx.rollouts.company import RolloutCompany
from phalanx.rollouts.evidence import EvidenceDirectory
from phalanx.rollouts.worker import RolloutService
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.testing.endpoint import MemoryNetwork
from phalanx.transport import CheckedFrame, Endpoint, TransportConfig

VOCAB_SIZE = 256
END = 5


def policy_of_seed(seed: int) -> RolloutPolicy:
    """Random weights, larger than usual, so that logits are not all alike."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=96,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return RolloutPolicy.from_model(model)


class Writers:
    """An owner with workers as threads of this process, over a network in memory; evidence is written as in a run.

    Args:
        home: For identities and evidence.
        writers: What each worker computes, by name.
        check: What is read again.
        reward: What a text earns.
    """

    def __init__(
        self,
        home: Path,
        writers: Mapping[str, RolloutWriter],
        check: RolloutCheck,
        reward: Callable[[Rollout], float] | None = None,
    ) -> None:
        self.pki = home / "pki"
        create_authority(self.pki)
        names = ("owner", *writers)
        identities = {name: load_identity(issue_certificate(self.pki, name)) for name in names}
        network, limits = MemoryNetwork(), TransportConfig()
        peers = {name: one.public for name, one in identities.items()}
        self._ends = {
            name: Endpoint(one, peers, "run-1", network.wire_for(name), limits) for name, one in identities.items()
        }
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, args=(name, one), name=name) for name, one in writers.items()
        ]
        certificates = {name: one.certificate_pem.decode() for name, one in identities.items()}
        authority = identities["owner"].authority_pem.decode()
        self.evidence = home / "evidence"
        desk = EvidenceDirectory(self.evidence, "run-1", authority, certificates)
        share = CheckedShare(b"k" * 32, check.rate)
        self.owner = RolloutCompany(self._ends["owner"], tuple(writers), check, share, desk, reward)

    def __enter__(self) -> RolloutCompany:
        for thread in self._threads:
            thread.start()
        return self.owner

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for end in self._ends.values():
            end.close()
        for thread in self._threads:
            thread.join(10.0)

    def _serve(self, name: str, writer: RolloutWriter) -> None:
        service = RolloutService(self._ends[name], "owner", writer)
        # a worker that is shut out cannot send any more
        with contextlib.suppress(TransportError):
            while not self._over.is_set():
                item = self._ends[name].receive_item(0.05)
                if isinstance(item, CheckedFrame) and not service.handle_frame(item):
                    return


def after_a_step(policy: RolloutPolicy, seed: int = 1, lr: float = 0.01) -> RolloutPolicy:
    """The policy after a step of AdamW with this learning rate: every weight moved by about that."""
    generator = torch.Generator().manual_seed(seed)
    moved = {
        name: one + lr * torch.randn(one.shape, generator=generator).sign() for name, one in policy.tensors.items()
    }
    return RolloutPolicy(policy.config, moved)

"""Facts for one judge, made by hand: one stage, what was signed about it, and answers to what the judge asks for."""

from dataclasses import dataclass, field

import torch

from phalanx.errors import PeerRefusedError
from phalanx.models import open_model
from phalanx.pipeline import GuardConfig
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.owner.event_loop import EventLoop
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import AuditReport, Bulk, Commit, FetchReply, ProgressReport, SentDigest
from phalanx.pipeline.protocol.needs import Delivery, MessageNeed, ProgressNeed, TensorsDelivery, TensorsNeed
from phalanx.pipeline.protocol.signed import StatementReader, to_signed
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.stage.runner import finite_norm_squared
from phalanx.pipeline.verify.facts import CommittedMessage, StepFacts, StepLedger
from phalanx.security.crypto import Identity, digest_hex
from phalanx.testing import tiny_run
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary
from phalanx.transport import HeaderFields, sign_header
from phalanx.transport.tensors import tensor_buffers

SESSION, EPOCH, STEP, STAGE = "run-1", 2, 0, 1
HOLDER, SHADOW, OWNER = "worker-1", "worker-2", "owner"
TENSOR = "tensor"
IDENTITIES = {name: Identity.without_certificate(name) for name in (OWNER, HOLDER, SHADOW, "worker-9")}
ASSIGNMENT = Assignment({0: OWNER, 1: HOLDER, 2: SHADOW, 3: OWNER}, {1: SHADOW, 2: HOLDER})


def peer(name):
    if name not in IDENTITIES:
        raise PeerRefusedError(f"{name}: is not a party")
    return IDENTITIES[name].public


def digest_of(tensor):
    return digest_hex(tensor_buffers(tensor.contiguous()))


def bytes_of(tensor):
    return tensor_buffers(tensor.contiguous())


class HandMadeLoop(EventLoop):
    """The owner's loop, with answers to needs that a test gives."""

    def __init__(self, answer):
        self.serve_need = answer


def run_task(task, answer):
    """Carry a task out."""
    return HandMadeLoop(answer).run_task(task)


@dataclass
class World:
    """Stage 1 of `worker-1`, shadowed by `worker-2`, in the first step; all of it honest until a test changes it.

    Attributes:
        tensors: What a party brings of a message, by (party, source stage, direction, microbatch, is a claim).
        bulks: What a party brings of a stage, by (party, purpose), with the optimizer steps it has taken.
        standings: What parties say about how far they are.
        asked: Every need, in order.
        sent: What the judge had sent, as (party, kind).
    """

    plan: object
    build: object
    tensors: dict = field(default_factory=dict)
    evidence: dict = field(default_factory=dict)
    bulks: dict = field(default_factory=dict)
    standings: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)
    sent: list = field(default_factory=list)
    events: list = field(default_factory=list)

    def __post_init__(self):
        self.facts = StepFacts(
            self.plan, StatementReader(SESSION, peer), lambda kind, body: self.events.append((kind, body)), ASSIGNMENT
        )
        self.facts.classes = dict.fromkeys((OWNER, HOLDER, SHADOW), "one class")
        self.copy = self.build()
        self.state = self.copy.compute_digest()
        self.facts.ledger = StepLedger(STEP, EPOCH, agreed={1: self.state})
        self.gradients = self._honest_step()

    def _honest_step(self):
        """One step of the stage, as every honest party computes it; its messages go into the ledger."""
        generator = torch.Generator().manual_seed(1)
        shape = self.plan.hidden_shape
        messages = self.facts.ledger.messages
        for m in range(self.plan.microbatches):
            x, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
            y = self.copy.runner.forward(STEP, m, x)
            found = {
                (0, "forward"): (x, OWNER, HOLDER),
                (2, "backward"): (gradient, SHADOW, HOLDER),
                (1, "forward"): (y, HOLDER, SHADOW),
                (1, "backward"): (self.copy.runner.backward(STEP, m, gradient), HOLDER, OWNER),
            }
            for (source, direction), (tensor, sender, receiver) in found.items():
                key = (source, direction, m)
                messages[key] = CommittedMessage(
                    digest_of(tensor), self.header(key, tensor, sender, receiver), receiver
                )
                for party in (sender, receiver):
                    self.tensors[(party, *key, False)] = tensor
        gradients = self.copy.runner.take_gradients()
        self.facts.ledger.commits[STAGE] = Commit(
            epoch=EPOCH,
            step=STEP,
            stage=STAGE,
            received=(),
            sent=(),
            norm_squared=finite_norm_squared(gradients, "float"),
            gradient=transfer_digest(gradients),
        )
        for party in (HOLDER, SHADOW):
            self.bulks |= {
                (party, "weights"): (self.copy.weight_tensors(), STEP),
                (party, "state"): (self.copy.state_tensors(), STEP),
                (party, "undo"): (self.copy.optimizer.state_tensors(), STEP),
                (party, "gradient"): (gradients, STEP),
            }
        return gradients

    def header(self, key, tensor, sender, receiver, /, **changes):
        """What a sender has signed about a tensor."""
        source, direction, m = key
        body = {
            "epoch": EPOCH,
            "step": STEP,
            "microbatch": m,
            "direction": direction,
            "source": source,
            "target": source + (1 if direction == "forward" else -1),
            "dtype": "float32",
            "shape": list(tensor.shape),
        }
        said = body | {name: changes.pop(name) for name in list(changes) if name in body}
        return to_signed(sign(TENSOR, said, (sender, receiver), bytes_of(tensor), **changes))

    def truth(self, direction, microbatch=0):
        """What the stage's message is."""
        return self.tensors[(HOLDER, STAGE, direction, microbatch, False)]

    def lie(self, tensor, direction="forward", microbatch=0):
        """Let the stage have sent another tensor than it computed."""
        key, receiver = (STAGE, direction, microbatch), SHADOW if direction == "forward" else OWNER
        header = self.header(key, tensor, HOLDER, receiver)
        self.facts.ledger.messages[key] = CommittedMessage(digest_of(tensor), header, receiver)
        for party in (HOLDER, receiver):
            self.tensors[(party, *key, False)] = tensor

    def report(self, microbatch=0, inputs=None, **claims):
        """What the shadow reports of one microbatch: the truth, but for what is claimed of a direction."""
        told = {direction: claims.get(direction, self.truth(direction, microbatch)) for direction in claims}
        honest = {direction: self.honest(direction, microbatch) for direction in ("forward", "backward")}
        digests = {direction: digest_of(tensor) for direction, tensor in (honest | told).items()}
        for direction, tensor in (honest | told).items():
            self.tensors[(SHADOW, STAGE, direction, microbatch, True)] = tensor
        messages = self.facts.ledger.messages
        seen = (messages[(0, "forward", microbatch)].header, messages[(2, "backward", microbatch)].header)
        return AuditReport(
            epoch=EPOCH,
            step=STEP,
            stage=STAGE,
            microbatch=microbatch,
            inputs=seen if inputs is None else inputs,
            digests=digests,
            order=1,
        )

    def honest(self, direction, microbatch=0):
        """The stage's message as it comes out of a fresh copy of the stage."""
        copy = self.build()
        x = self.tensors[(HOLDER, 0, "forward", microbatch, False)]
        gradient = self.tensors[(HOLDER, 2, "backward", microbatch, False)]
        y, x_gradient = copy.runner.recompute_microbatch(STEP, microbatch, x, gradient)
        return y if direction == "forward" else x_gradient

    def answer(self, need):
        """See to a need as the owner's loop would, from what parties bring in this world."""
        self.asked.append(need)
        match need:
            case MessageNeed():
                request = need.request
                key = (request.source, request.direction, request.microbatch)
                tensor = self.tensors.get((need.party, *key, request.claim))
                if tensor is None:
                    return None
                place = request.model_dump()
                known = self.facts.ledger.messages.get(key)
                shown = self.evidence.get((need.party, *key), None if known is None else known.header)
                message = FetchReply(**place, evidence=None if request.claim else shown)
                payload = tensor if isinstance(tensor, memoryview) else bytes_of(tensor)
                return ReceivedMessage(need.party, message, payload, None)
            case TensorsNeed():
                return self.bulks.get((need.party, need.request.purpose))
            case ProgressNeed():
                return {party: self.standings[party] for party in need.parties if party in self.standings}
            case Delivery():
                self.sent.append((need.party, need.message))
            case TensorsDelivery():
                self.sent.append((need.party, need.request))
            case _:
                raise TypeError(need)
        return None

    def judge_page(self, task):
        """Let a judge find its verdict."""
        return run_task(task, self.answer)

    def bulk_header(self, tensors, *, purpose="gradient", step=STEP, **changes):
        """What the stage has signed about sending its gradient, or other tensors, in one part."""
        data = b"".join(bytes_of(tensors[name]) for name in sorted(tensors))
        about = Bulk(epoch=EPOCH, step=step, stage=STAGE, purpose=purpose, offset=0, total=len(data))
        return to_signed(sign(about.kind, about.model_dump(mode="json"), (HOLDER, SHADOW), data, **changes))

    def whole_step(self):
        """Let every stage have committed, and every message have been shown by its receiver; returns the keys."""
        ledger, assignment = self.facts.ledger, self.facts.assignment
        keys = []
        for source, direction, target in STEPS_OF_A_MICROBATCH:
            for m in range(self.plan.microbatches):
                key = (source, direction, m)
                sender, receiver = assignment.holders[source], assignment.holders[target]
                keys.append(key)
                if key not in ledger.messages:
                    tensor = torch.full(self.plan.hidden_shape, float(source))
                    header = self.header(key, tensor, sender, receiver)
                    ledger.messages[key] = CommittedMessage(digest_of(tensor), header, receiver)
        for stage in range(len(self.plan.stages)):
            sent = [
                SentDigest(direction=direction, microbatch=m, digest=ledger.messages[(source, direction, m)].digest)
                for source, direction, m in keys
                if source == stage
            ]
            known = ledger.commits.get(stage, ledger.commits[STAGE])
            ledger.commits[stage] = known.model_copy(update={"stage": stage, "sent": tuple(sent)})
        return keys


STEPS_OF_A_MICROBATCH = (
    *((stage, "forward", stage + 1) for stage in range(3)),
    *((stage, "backward", stage - 1) for stage in range(3, 0, -1)),
)
"""(source, direction, target) of every message of a microbatch."""


def sign(kind, body, link, payload=b"", **changes):
    """A header as its sender signs it; `changes` are to its fields."""
    fields = {
        "run": SESSION,
        "kind": kind,
        "sender": link[0],
        "receiver": link[1],
        "sequence": 7,
        "previous": "aa" * 32,
        "payload_size": len(payload),
        "payload_digest": digest_hex(payload),
        "body": body,
    }
    # whoever a test names as the sender, the first of the link is the one that signs
    return sign_header(IDENTITIES[link[0]], HeaderFields(**fields | changes))


def received(message, sender, receiver=OWNER, **changes):
    """A message as it comes to the owner, in the frame that its sender has signed."""
    header = sign(message.kind, message.model_dump(mode="json"), (sender, receiver), **changes)
    return ReceivedMessage(sender, message, memoryview(b""), header)


def make_world(model_cache, **guard):
    """A world; `guard` changes what is checked."""
    run = tiny_run(guard=GuardConfig(**guard))
    source = open_model(run.model, model_cache, run.train.seed)
    plan = make_plan(run, source)
    return World(plan, lambda: StageLibrary(source, plan, None)(STAGE))


def standing(stages=None, gradients=()):
    """How far a party says that it is."""
    return ProgressReport(epoch=EPOCH, step=STEP, stages=stages or {}, gradients=gradients)

"""Records shown otherwise than they were signed, stages that are loaded twice, and checks that cannot go on."""

import asyncio
import json
import threading
from dataclasses import replace

import pytest
import torch
from liars import AfterTokens
from safetensors.torch import load_file, save_file
from stage_scene import GREEDY, Scene, texts_of, worker_file

from phalanx.errors import DiskError, EvidenceError, FrameError, ModelError
from phalanx.models import ModelSource, weights_digest
from phalanx.pipeline.evidence.files import file_digest
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.serve.engine import GenerationRequest, TextPiece
from phalanx.serve.stages import StageHolder, explain_served_evidence
from phalanx.serve.stages.blocks import StageBlocks
from phalanx.serve.stages.judgement import PieceRecord, StageBundle, judge_stage_bundle
from phalanx.serve.stages.messages import StageOffer, StageStep, TokenPiece, states_digest
from phalanx.testing.endpoint import MemoryNetwork
from phalanx.transport import Endpoint, TransportConfig
from phalanx.transport.tensors import tensor_buffers, tensor_from

PROMPTS = ["the end", "in a day"]
ONE_STAGE = (("liar", "honest"),)


class Court:
    """An owner and one party whose headers are signed as in a session; what they sign can be shown to the judge."""

    def __init__(self, home, directory, **changes):
        source = ModelSource(directory)
        self.width = source.hidden_size
        self.weights = StageBlocks.read(source, (1, 3)).weights
        self.offer = StageOffer(
            config=json.dumps(source.hub_config_dict),
            first_layer=1,
            end_layer=3,
            weights=weights_digest(self.weights.items()),
            size_bytes=1,
            tolerance=2e-5,
            max_texts=2,
            max_tokens=64,
        )
        create_authority(home / "pki")
        identities = {name: load_identity(issue_certificate(home / "pki", name)) for name in ("owner", "party")}
        self.peers = {name: one.public for name, one in identities.items()}
        network, limits = MemoryNetwork(), TransportConfig(timeout_s=5.0)
        self.ends = {
            name: Endpoint(one, self.peers, "serve-1", network.wire_for(name), limits)
            for name, one in identities.items()
        }
        self.offer_header = self.sign("owner", "party", self.offer)
        self.holder = StageHolder(worker_file(**changes))
        self.holder.load_stage(self.offer, self.weights)
        self.order = 0

    def close(self):
        for end in self.ends.values():
            end.close()

    def sign(self, sender, receiver, body, *payload):
        return self.ends[sender].send_frame(receiver, body.kind, body.model_dump(mode="json"), payload)

    def ask(self, states, *, text=0, start=0, closed=()):
        """The step's header, what was sent, the answer's header, and what came."""
        piece = TokenPiece(text=text, start=start, length=len(states))
        step = StageStep(offer=self.offer.digest, order=self.order, pieces=(piece,), closed=closed)
        self.order += 1
        sent = bytes(tensor_buffers(states))
        header = self.sign("owner", "party", step, sent)
        ((answer, received),) = self.holder.answer_step(step, header.header_digest, memoryview(sent))
        return header, sent, self.sign("party", "owner", answer, received), received

    def judge(self, bundle):
        return judge_stage_bundle(bundle, "serve-1", self.peers.__getitem__)


@pytest.fixture
def court(tmp_path, directory):
    court = Court(tmp_path, directory, max_texts=2, max_tokens=64)
    yield court
    court.close()


def test_records_of_another_session_or_place_convict_nobody(court, directory, tmp_path_factory):
    """Attacker: an owner that shows what a party has signed elsewhere, or for a later step."""
    step, sent, answer, received = court.ask(states_of(court, 4))
    later_step, later_sent, later, later_received = court.ask(states_of(court, 1), start=4)
    form = StageBundle("party", court.offer_header, answer, step, sent=sent, received=received)
    assert court.judge(form) is None
    shown = {
        "a later answer": replace(form, answer=later),
        "a later answer with its bytes": replace(form, answer=later, received=later_received),
        "a later step": replace(form, step=later_step, sent=later_sent),
        "other bytes": replace(form, received=bytes(len(received))),
        "other bytes in": replace(form, sent=bytes(len(sent))),
        "an answer as the offer": replace(form, offer=answer),
        "a step as the answer": replace(form, answer=step),
        "the owner's own": replace(form, party="owner"),
        "a later answer as the earlier one": replace(
            form, answer=later, step=later_step, sent=later_sent, received=later_received, previous=(later,)
        ),
        "no earlier answer": replace(form, answer=later, step=later_step, sent=later_sent, received=later_received),
    }
    for name, bundle in shown.items():
        with pytest.raises(EvidenceError):
            pytest.fail(f"{name}: {court.judge(bundle)}")
    for session in ("serve-2", "serve-1\0", ""):
        with pytest.raises(EvidenceError):
            judge_stage_bundle(form, session, court.peers.__getitem__)


def states_of(court, num_tokens, seed=0):
    return torch.randn(num_tokens, court.width, generator=torch.Generator().manual_seed(seed))


SHOWN_OTHERWISE = {
    "output as integers": lambda b: replace(b, output=b.output.view(torch.int32)),
    "output as doubles": lambda b: replace(b, output=b.output.view(torch.float64)),
    "output as halves": lambda b: replace(b, output=b.output.view(torch.bfloat16)),
    "output folded": lambda b: replace(b, output=b.output.reshape(-1, b.output.shape[1] // 2)),
    "output with a further axis": lambda b: replace(b, output=b.output[None]),
    "inputs as integers": lambda b: replace(b, inputs=b.inputs.view(torch.int32)),
    "inputs as doubles": lambda b: replace(b, inputs=b.inputs.view(torch.float64)),
    "inputs with a further axis": lambda b: replace(b, inputs=b.inputs[:, None]),
}


@pytest.mark.parametrize("kind", sorted(SHOWN_OTHERWISE))
def test_signed_bytes_that_are_shown_in_another_form_convict_nobody(kind, court):
    states = states_of(court, 4)
    _, _, answer, received = court.ask(states)
    output = tensor_from(received, torch.float32, (4, court.width)).clone()
    piece = PieceRecord(start=0, length=4, outputs=states_digest(output))
    bundle = StageBundle(
        "party",
        court.offer_header,
        answer,
        text=0,
        pieces=[piece],
        inputs=states,
        output=output,
        weights=court.weights,
    )
    assert court.judge(bundle) is None

    with pytest.raises(EvidenceError):
        court.judge(SHOWN_OTHERWISE[kind](bundle))


@pytest.mark.parametrize("name", ["inputs", "output", "sent"])
def test_a_reader_of_evidence_in_another_form_is_told_so(name, directory, tmp_path):
    with Scene(tmp_path, directory, {"liar": AfterTokens()}, stages=ONE_STAGE) as scene:
        scene.texts(PROMPTS[:1])
        scene.rechecks()
    path = tmp_path / scene.relay.verdicts[0].evidence
    record = json.loads(path.read_text())
    tensors = load_file(path.with_suffix(".safetensors"))
    tensors[name] = tensors.get(name, torch.zeros(4, 4)).view(torch.bfloat16)
    save_file(tensors, path.with_suffix(".safetensors"))
    record["tensors"]["sha256"] = file_digest(path.with_suffix(".safetensors"))
    path.write_text(json.dumps(record))

    with pytest.raises(EvidenceError):
        explain_served_evidence(path, scene.pki / "authority.pem", "serve-1")


def test_a_stage_that_is_loaded_again_gives_no_text_number_twice(court):
    """An owner that lies could show the link of the earlier text before an answer of the later one."""
    first = court.ask(states_of(court, 4))
    court.holder.load_stage(court.offer, court.weights)

    with pytest.raises(FrameError, match="text 0 goes on, and is closed"):
        court.ask(states_of(court, 4, seed=1))

    court.ask(states_of(court, 4, seed=1), text=1)
    step, sent, answer, received = court.ask(states_of(court, 1, seed=2), text=1, start=4)
    bundle = StageBundle("party", court.offer_header, answer, step, previous=(first[2],), sent=sent, received=received)
    with pytest.raises(EvidenceError, match="an earlier answer is missing"):
        court.judge(bundle)


def test_a_step_that_is_refused_leaves_no_text_behind(court):
    court.ask(states_of(court, 2))
    for text in (1, 3):
        pieces = tuple(TokenPiece(text=number, start=0, length=1) for number in (text, text + 1))
        step = StageStep(offer=court.offer.digest, order=court.order, pieces=pieces)
        court.order += 1
        with pytest.raises(ModelError, match="3 texts"):
            court.holder.answer_step(step, "0" * 64, memoryview(bytes(tensor_buffers(states_of(court, 2)))))

    court.ask(states_of(court, 1), start=2)
    court.ask(states_of(court, 1), text=5)


def refuse_disk(*_):
    raise DiskError("no space left")


def occupy_evidence(scene, monkeypatch):
    (scene.home / "evidence").write_text("")


def fill_disk(scene, monkeypatch):
    monkeypatch.setattr("phalanx.serve.stages.evidence.write_record", refuse_disk)


@pytest.mark.parametrize("spoil", [occupy_evidence, fill_disk])
def test_a_liar_is_taken_out_where_the_disk_takes_no_evidence(spoil, directory, one_process, tmp_path, monkeypatch):
    with Scene(tmp_path, directory, {"liar": AfterTokens()}, stages=ONE_STAGE) as scene:
        spoil(scene, monkeypatch)
        scene.texts(PROMPTS)
        assert scene.relay._checker.is_alive()
        rechecks = scene.rechecks()
        after = scene.texts(PROMPTS)

    assert set(rechecks) == {"refuted"}
    assert after == texts_of(one_process, PROMPTS)
    assert scene.relay.departures == {"liar": "convicted"}
    (told,) = scene.told("stage_convicted")
    assert (told["evidence"], told["party"]) == ("", "liar")
    assert "no evidence could be written" in told["reason"]


def test_no_request_waits_while_a_text_that_is_over_waits_for_its_check(directory, tmp_path):
    """A client with a key could stop the whole server by leaving in the middle of texts."""
    held, is_over = [], threading.Event()
    with Scene(tmp_path, directory) as scene:
        end_text = scene.engine.served.end_text

        def look_at_lock(cache):
            def try_lock():
                held.append(not scene.engine._change.acquire(blocking=False))
                if not held[-1]:
                    scene.engine._change.release()

            thread = threading.Thread(target=try_lock)
            thread.start()
            thread.join()
            end_text(cache)
            is_over.set()

        scene.engine.served.end_text = look_at_lock
        leave_in_mid_text(scene)
        assert is_over.wait(120.0)

    assert held
    assert not any(held)


def leave_in_mid_text(scene):
    async def leave():
        request = GenerationRequest(model="tiny", text="the", sampling=GREEDY, max_tokens=200, owner="alice")
        ids = scene.engine.served.encode_prompt(request)
        stream = await scene.engine.open_events(request, ids, "")
        async for event in stream:
            if isinstance(event, TextPiece):
                await stream.aclose()
                return

    asyncio.run(leave())

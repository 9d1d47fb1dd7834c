"""A tiny model in two stages at parties that are threads of this process, and an engine that writes by it."""

import asyncio
import contextlib
import threading

from phalanx.errors import TransportError
from phalanx.models import ModelSource
from phalanx.rollouts.evidence import EvidenceDirectory
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.serve.engine import BatchingEngine, EngineSettings, GenerationRequest, SamplingSettings, TextPiece
from phalanx.serve.engine.jobs import collect_events
from phalanx.serve.stages import StageHolder, StageRelay, StagesConfig, StageService, StageWorkerConfig
from phalanx.serve.stages.ends import load_ends
from phalanx.serve.stages.examiner import StageExaminer
from phalanx.serve.stages.staged_model import StagedModel, StagedTextModel, cut_layers
from phalanx.testing.endpoint import MemoryNetwork
from phalanx.transport import CheckedFrame, Endpoint, TransportConfig
from tiny_served import UNMARKED

LAYERS = 5
HOLDERS = (("front-1", "front-2"), ("back-1", "back-2"))
GREEDY = SamplingSettings(temperature=0.0)
ENGINE = EngineSettings(max_owner_prefix_tokens=0, max_cache_tokens=1 << 14)


def worker_file(**changes):
    return StageWorkerConfig(identity="", owner="", **changes)


class Scene:
    """The owner with its parties over a network in memory; evidence is written as in a run.

    Args:
        holders: What a party computes with, by name, where it is not the honest one.
    """

    def __init__(
        self, home, directory, holders=None, *, stages=HOLDERS, alive=None, engine=ENGINE, revoked=tuple, **changes
    ):
        self.directory, self.engine_settings = directory, engine
        settings = {"answer_timeout_s": 20.0, "check_rate": 1.0, **changes}
        self.config = StagesConfig(identity="", holders=stages, **settings)
        self.pki = home / "pki"
        create_authority(self.pki)
        names = ("owner", *self.config.parties)
        identities = {name: load_identity(issue_certificate(self.pki, name)) for name in names}
        network, peers = MemoryNetwork(), {name: one.public for name, one in identities.items()}
        self.ends = {
            name: Endpoint(one, peers, "serve-1", network.wire_for(name), TransportConfig(timeout_s=5.0))
            for name, one in identities.items()
        }
        certificates = {name: one.certificate_pem.decode() for name, one in identities.items()}
        self.home = home
        desk = EvidenceDirectory(home / "evidence", "serve-1", identities["owner"].authority_pem.decode(), certificates)
        self.source = ModelSource(directory)
        self.examiner = StageExaminer(desk, self.source, 2)
        is_alive = alive or (lambda name: True)
        self.relay = StageRelay(self.ends["owner"], self.config, self.source, self.examiner, b"k" * 32, is_alive)
        self.relay.read_revocations = revoked
        self.news = []
        self.relay.listen(lambda kind, facts: self.news.append((kind, dict(facts))))
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, args=(name, (holders or {}).get(name) or StageHolder(worker_file())))
            for name in self.config.parties
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        try:
            layers = cut_layers(self.source.num_layers, self.config)
            self.relay.load_stages(layers, self.engine_settings.max_rows + 1, 1 << 15)
            module, remote = load_ends(self.directory, self.source, 1, 1)
            text_model = StagedTextModel(self.directory, module, self.source.files_digest())
            model = StagedModel("tiny", text_model, 0, relay=self.relay, remote=remote)
            self.engine = BatchingEngine(model, self.engine_settings, UNMARKED)
        except BaseException:
            self._end_threads()
            raise
        return self

    def __exit__(self, *exc):
        self.engine.close()
        self.relay.close()
        self._end_threads()

    def _end_threads(self):
        self._over.set()
        for end in self.ends.values():
            end.close()
        for thread in self._threads:
            thread.join(20)

    def _serve(self, name, holder):
        holder.endpoint = self.ends[name]
        service = StageService(self.ends[name], "owner", holder)
        # a party that is shut out cannot send any more
        with contextlib.suppress(TransportError):
            while not self._over.is_set():
                item = self.ends[name].receive_item(0.05)
                if isinstance(item, CheckedFrame) and not service.take_frame(item):
                    return

    def texts(self, prompts, max_tokens=12, **changes):
        """The texts, or the errors that ended them, all asked for at once."""
        return texts_of(self.engine, prompts, max_tokens, **changes)

    def told(self, kind):
        return [facts for name, facts in self.news if name == kind]

    def rechecks(self):
        """What the log says of each text."""
        self.relay.finish_checks()
        return [facts["re-checked"] for facts in self.told("text_checked")]


def texts_of(engine, prompts, max_tokens=12, **changes):
    async def answer(prompt):
        settings = {"sampling": GREEDY, "max_tokens": max_tokens, "owner": "alice", **changes}
        request = GenerationRequest(model="tiny", text=prompt, **settings)
        ids = engine.served.encode_prompt(request)
        events = await collect_events(await engine.open_events(request, ids, ""))
        return "".join(event.text for event in events if isinstance(event, TextPiece))

    async def run():
        return await asyncio.gather(*(answer(prompt) for prompt in prompts), return_exceptions=True)

    return asyncio.run(run())

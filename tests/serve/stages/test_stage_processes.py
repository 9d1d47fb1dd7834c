"""Parties behind mutual TLS: processes of their own, one of which is killed; a liar; the command from end to end."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from liars import AfterTokens
from stage_scene import ENGINE, texts_of, worker_file

from late_imports import LateModule
from phalanx.cli import run_command
from phalanx.config import dump_toml, load_config
from phalanx.errors import PhalanxError
from phalanx.security.crypto import create_authority, issue_certificate
from phalanx.security.invite import EnrolmentServer, Invitations
from phalanx.serve.engine import BatchingEngine
from phalanx.serve.stages import StagesConfig, StageWorkerConfig, open_staged_model, run_stage_worker
from phalanx.train.parties.invited import invited_to
from tiny_served import UNMARKED, add_key, running_server

openai = LateModule("openai")

pytestmark = pytest.mark.slow
HOLDERS = (("front-1", "front-2"), ("back-1", "back-2"))
PARTIES = [name for names in HOLDERS for name in names]


@pytest.fixture
def pki(tmp_path):
    create_authority(tmp_path / "pki")
    for name in ("owner", *PARTIES):
        issue_certificate(tmp_path / "pki", name)
    return tmp_path / "pki"


def stages(pki, **changes):
    return StagesConfig(**{"identity": str(pki / "owner"), "holders": HOLDERS, "check_rate": 1.0, **changes})


def read_log(access):
    paths = sorted((access / "log").glob("*.jsonl"))
    return [json.loads(row) for path in paths for row in path.read_text().splitlines()]


def bodies(access, kind):
    return [row["body"] for row in read_log(access) if row["kind"] == kind]


def test_a_process_that_is_killed_in_mid_text_is_replaced_without_a_wrong_token(directory, one_process, tmp_path, pki):
    prompts, num_steps = ["the end of", "in a day", "and the"], []
    config = stages(pki, workers_here=str(pki), answer_timeout_s=120.0)

    with open_staged_model("tiny", directory, config, ENGINE, tmp_path / "access") as model:
        engine, inner = BatchingEngine(model, ENGINE, UNMARKED), model.remote.run_stages

        def kill_in_the_ninth(segments, hidden):
            num_steps.append(1)
            if len(num_steps) == 9:
                os.kill(model.relay._is_alive.__self__.process_id("back-1"), signal.SIGKILL)
            return inner(segments, hidden)

        model.remote.run_stages = kill_in_the_ninth
        texts = texts_of(engine, prompts, 16)
        model.relay.finish_checks()
        engine.close()

    assert texts == texts_of(one_process, prompts, 16)
    assert (model.relay.departures, model.relay.verdicts) == ({"back-1": "lost"}, [])


def test_a_liar_behind_tls_is_named_while_a_server_answers(directory, one_process, tmp_path, pki):
    addresses, access = queue.Queue(), tmp_path / "access"
    secret = add_key(access)[1]

    def work(name, owner):
        terms = {"identity": str(pki / name), "owner": owner, "owner_name": "owner"}
        # a party that is shut out ends with an error
        with contextlib.suppress(PhalanxError):
            run_stage_worker(worker_file().model_copy(update=terms), AfterTokens() if name == "back-1" else None)

    def start(owner):
        for name in PARTIES:
            thread = threading.Thread(target=work, args=(name, owner))
            thread.start()
            addresses.put(thread)

    with contextlib.ExitStack() as stack:
        model = stack.enter_context(open_staged_model("tiny", directory, stages(pki), ENGINE, access, start))
        url, _ = stack.enter_context(running_server([model], access, engine=ENGINE))
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0)

        def ask():
            reply = client.completions.create(model="tiny", prompt="in the end", max_tokens=16, temperature=0)
            return reply.choices[0].text

        wrong = ask()
        model.relay.finish_checks()
        later = ask()
    while not addresses.empty():
        addresses.get().join(60)

    (right,) = texts_of(one_process, ["in the end"], 16)
    assert (wrong != right, later) == (True, right)
    assert [verdict.party for verdict in model.relay.verdicts] == ["back-1"]
    assert [request["verdicts"][0] for request in bodies(access, "request")] == ["stages:text-0", "stages:text-1"]


def test_the_command_serves_in_stages_and_its_log_says_which_texts_were_redone(directory, one_process, tmp_path, pki):
    access, file = tmp_path / "access", tmp_path / "stages.toml"
    secret = add_key(access)[1]
    file.write_text(dump_toml(stages(pki, workers_here=str(pki))))
    # the server's filters end a text at a control character
    right = {prompt: texts_of(one_process, [prompt], 8)[0] for prompt in ("in the end", *map(str, range(20)))}
    prompt = next(prompt for prompt, text in right.items() if text and text.isprintable())
    command = [sys.executable, "-m", "phalanx", "serve", directory, "--name", "tiny", "--access", access]
    command += ["--stages", file, "--port", "0", "--json"]

    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True) as server:
        try:
            ready = json.loads(server.stdout.readline())
            with openai.OpenAI(base_url=f"{ready['url']}/v1", api_key=secret, max_retries=0) as client:
                reply = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
            server.send_signal(signal.SIGTERM)
            assert server.wait(120) == 0
        finally:
            server.kill()

    assert reply.choices[0].text == right[prompt]
    assert [facts["re-checked"] for facts in bodies(access, "text_checked")] == ["yes"]
    assert bodies(access, "request")[0]["verdicts"] == ["stages:text-0"]


def test_invited_parties_make_their_own_keys_and_serve(directory, one_process, tmp_path):
    """A stage's party joins by one line; its file is one for `phalanx stage-worker`."""
    pki = tmp_path / "pki"
    create_authority(pki)
    issue_certificate(pki, "owner")
    folder, _, terms = invited_to(pki, [], None, lambda run: pytest.fail("a directory is no run"))
    invitations = Invitations(pki)
    with EnrolmentServer(folder, invitations, terms).start_listening("127.0.0.1", 0) as server:
        for name in ("alice", "bob"):
            token = invitations.invite_party(name, f"127.0.0.1:{server.port}", timedelta(hours=1)).to_text()
            home = tmp_path / name
            command = ["join", token, "--stage", "--no-serve", "--dir", str(home), "--port", "0"]
            assert run_command(command) == 0
            assert run_command(command) == 0, "the command can be repeated"
    files = {name: load_config(tmp_path / name / "stage.toml", StageWorkerConfig) for name in ("alice", "bob")}
    threads = []

    def start(owner):
        for file in files.values():
            joined = file.model_copy(update={"owner": owner, "advertise": None})
            threads.append(threading.Thread(target=run_stage_worker, args=(joined,)))
            threads[-1].start()

    config = stages(pki, holders=(("alice", "bob"),))
    with open_staged_model("tiny", directory, config, ENGINE, tmp_path / "access", start) as model:
        engine = BatchingEngine(model, ENGINE, UNMARKED)
        texts = texts_of(engine, ["in the end"], 8)
        engine.close()
    for thread in threads:
        thread.join(60)

    assert not (pki / "alice" / "key.pem").exists()
    assert texts == texts_of(one_process, ["in the end"], 8)
    assert (model.relay.departures, model.relay.verdicts) == ({}, [])


@pytest.mark.parametrize("option", ["--int8", "--model", "--adapter"])
def test_what_goes_not_together_with_stages_is_refused_by_name(option, directory, tmp_path, pki):
    access, file = tmp_path / "access", tmp_path / "stages.toml"
    add_key(access)
    file.write_text(dump_toml(stages(pki, workers_here=str(pki))))
    command = [sys.executable, "-m", "phalanx", "serve", directory, "--access", access, "--stages", file, option]
    command += [] if option == "--int8" else [f"other={directory}"]

    result = subprocess.run([*map(str, command)], check=False, capture_output=True, text=True)

    assert result.returncode == 2
    assert f"{option}: is not served together with --stages" in result.stderr

"""``phalanx serve`` as a process: keys first, a ready line, TLS, adapters, and a drain that loses nothing."""

import json
import os
import signal
import ssl
import subprocess
import sys
import threading

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM

from late_imports import LateModule
from tiny_served import add_key, write_model

openai = LateModule("openai")
peft = LateModule("peft")

pytestmark = pytest.mark.slow
LONG = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "the"}],
    "max_tokens": 600,
    "temperature": 0,
    "logit_bias": {"65": 100},
    "stream": True,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models"))


class ServeProcess:
    """A server with its ready line."""

    def __init__(self, *arguments):
        command = [sys.executable, "-m", "phalanx", "serve", *map(str, arguments), "--port", "0", "--json"]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        line = self.popen.stdout.readline()
        assert line, self.popen.stderr.read()
        self.ready = json.loads(line)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.popen.kill()
        self.popen.communicate()


def test_without_a_key_it_names_the_cure(directory, tmp_path):
    command = [sys.executable, "-m", "phalanx", "serve", str(directory), "--access", str(tmp_path / "access")]
    result = subprocess.run(command, check=False, capture_output=True, text=True)

    assert result.returncode == 2
    assert f"phalanx keys create --owner NAME --access {tmp_path / 'access'}" in result.stderr


def test_it_binds_no_other_address_without_tls(directory, tmp_path):
    add_key(tmp_path / "access")
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "serve",
        directory,
        "--access",
        tmp_path / "access",
        "--host",
        "0.0.0.0",
    ]
    result = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True)

    assert result.returncode == 2
    assert "certificate" in result.stderr


def test_sigterm_lets_streams_end_and_takes_no_further_ones(directory, tmp_path):
    _, secret = add_key(tmp_path / "access")
    headers = {"authorization": f"Bearer {secret}"}

    with ServeProcess(directory, "--access", tmp_path / "access", "--name", "tiny") as server:
        url = server.ready["url"]
        with (
            httpx2.Client(base_url=url, headers=headers, trust_env=False, timeout=250) as http,
            http.stream("POST", "/v1/chat/completions", json=LONG) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            server.popen.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert server.popen.wait(60) == 0
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(url, trust_env=False)
    log = (tmp_path / "access" / "log" / "requests-000001.jsonl").read_text()
    assert "server_stopped" in log.splitlines()[-1]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_several_models_and_an_adapter_by_name(directory, tmp_path):
    _, secret = add_key(tmp_path / "access")
    other = write_model(tmp_path / "cache", seed=2)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(directory), config).save_pretrained(tmp_path / "adapter")

    arguments = ["--model", f"second={other}", "--adapter", f"notes={tmp_path / 'adapter'}", "--name", "first"]
    with (
        ServeProcess(directory, "--access", tmp_path / "access", *arguments) as server,
        openai.OpenAI(base_url=server.ready["url"] + "/v1", api_key=secret, max_retries=0) as client,
    ):
        names = [model.id for model in client.models.list()]
        texts = {
            client.completions.create(model=name, prompt="the end", temperature=0, max_tokens=20).choices[0].text
            for name in names
        }

    assert names == ["first", "notes", "second"]
    assert len(texts) == 3
    assert server.ready["models"].keys() == set(names)


def test_tls_is_served_and_clients_may_have_to_show_a_certificate(directory, tmp_path):
    _, secret = add_key(tmp_path / "access")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    for name in ("server", "client"):
        request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        files = ["-keyout", str(tmp_path / f"{name}.key"), "-out", str(tmp_path / f"{name}.pem"), "-days", "2"]
        subprocess.run([*request, *files, *subject], check=True, capture_output=True)
    arguments = ["--certificate", tmp_path / "server.pem", "--private-key", tmp_path / "server.key"]
    trust = ssl.create_default_context(cafile=str(tmp_path / "server.pem"))
    headers = {"x-api-key": secret}

    with ServeProcess(
        directory, "--access", tmp_path / "access", *arguments, "--client-authority", tmp_path / "client.pem"
    ) as server:
        url = server.ready["url"] + "/health/ready"
        assert url.startswith("https://")
        with httpx2.Client(verify=trust, trust_env=False) as stranger, pytest.raises(httpx2.TransportError):
            stranger.get(url, headers=headers)
        trust.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")
        with httpx2.Client(verify=trust, trust_env=False) as partner:
            assert partner.get(url, headers=headers).status_code == 200


def test_a_killed_server_loses_no_count(directory, tmp_path):
    key_id, secret = add_key(tmp_path / "access")
    headers = {"authorization": f"Bearer {secret}"}
    with ServeProcess(directory, "--access", tmp_path / "access", "--name", "tiny") as server:

        def read_stream():
            try:
                with httpx2.stream(
                    "POST", server.ready["url"] + "/v1/chat/completions", json=LONG, headers=headers, trust_env=False
                ) as answer:
                    for _ in answer.iter_lines():
                        has_begun.set()
            except httpx2.TransportError:
                return

        has_begun = threading.Event()
        reader = threading.Thread(target=read_stream)
        reader.start()
        assert has_begun.wait(60)
        os.kill(server.popen.pid, signal.SIGKILL)
        reader.join()
    usage = subprocess.run(
        [sys.executable, "-m", "phalanx", "keys", "usage", "--access", str(tmp_path / "access"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    # a request that a crash cut off counts with all that it might have used
    assert f'"{key_id}"' in usage.stdout
    assert "600" in usage.stdout

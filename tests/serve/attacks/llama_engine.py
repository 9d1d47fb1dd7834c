"""llama.cpp's own server (xllamacpp) with a tiny model, as a process: ``python llama_engine.py FILE KEY LIKENESS``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx2

ROUTES = (
    "/completion",
    "/slots",
    "/props",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/infill",
    "/embedding",
    "/lora-adapters",
    "/rerank",
    "/v1/rerank",
)
"""Routes of llama.cpp beside those that a gateway has."""
_SLOTS, _WINDOW = 4, 1024


class LlamaEngine:
    """The process, and what it has read and written.

    It runs as docs/serving_keys.md asks; with ``has_defaults`` as llama.cpp does where its operator asks for nothing.
    """

    def __init__(self, file: Path, *, has_defaults: bool = False) -> None:
        self.key = "k" * 32
        command = [sys.executable, __file__, str(file), self.key, "0.1" if has_defaults else "0"]
        environment = os.environ if has_defaults else {**os.environ, "LLAMA_GRAPH_REUSE_DISABLE": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.url = next(line.split()[1] for line in self.process.stdout if line.startswith("listening "))
        self.http = httpx2.Client(
            base_url=self.url, headers={"authorization": f"Bearer {self.key}"}, trust_env=False, timeout=60
        )

    def __enter__(self) -> "LlamaEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()

    def count_tokens(self) -> int:
        """Return how many tokens of prompts it has read so far, reused ones included."""
        text = self.http.get("/metrics").text
        return sum(
            int(float(re.search(rf"^llamacpp:{name} ([\d.e+]+)$", text, re.MULTILINE)[1]))
            for name in ("prompt_tokens_total", "prompt_tokens_cached_total")
        )

    def list_slots(self) -> list[int]:
        """Return for each slot the number of the last request that it worked on, -1 of none."""
        return [slot.get("id_task", -1) for slot in self.http.get("/slots").json()]


def write_file(folder: Path) -> Path:
    """Write a tiny model as GGUF and return its path."""
    from phalanx.edge import export_edge
    from tiny_edge_models import write_model

    export_edge(
        write_model(folder / "model", max_position_embeddings=_WINDOW), folder / "gguf", "gguf", "f32", sizes=None
    )
    return folder / "gguf" / "model.gguf"


def main(file: str, key: str, likeness: str) -> None:
    """Serve until the standard input ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.api_keys = file, [key]
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_ctx, params.n_parallel = _WINDOW * _SLOTS, _SLOTS
    params.warmup = params.ui = params.fit_params = False
    params.endpoint_slots = params.endpoint_metrics = params.use_jinja = True
    params.slot_prompt_similarity = float(likeness)
    params.enable_reasoning = params.verbosity = params.cache_ram_mib = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    sys.stdout.write(f"listening {server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

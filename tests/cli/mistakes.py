"""The mistakes that users make most, each as a command line in a directory of its own: a test and a page read them."""

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from phalanx.security.crypto import create_authority, issue_certificate
from tiny_run_file import tiny_run_file

TWO_STAGES = "[pipeline]\nstages = 2\n"
GPT2 = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 4}
FROM_SCRATCH = tiny_run_file(TWO_STAGES)
FROM_A_DIRECTORY = "[model]\npath = 'model'\n" + FROM_SCRATCH[FROM_SCRATCH.index("[data]") :]
OWN_TEXT = FROM_SCRATCH.replace('{ kind = "python_manual" }', '{ kind = "jsonl", path = "text" }')
LINES = '{"text": "a shield covers the neighbour"}\n'


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        name: What was done.
        command: The words after ``phalanx``.
        code: The exit code.
        words: What the message must hold: where, what was found, what is expected, what to do.
        files: What lies in the directory, by name; text or bytes, None for a directory.
        made: What else is there: keys, or a port that is taken; it returns what must stay open meanwhile.
    """

    name: str
    command: str
    code: int
    words: tuple[str, ...]
    files: dict[str, str | bytes | None]
    made: Callable[[Path], socket.socket | None] = lambda home: None

    def lay(self, home: Path) -> socket.socket | None:
        """Write the files; what is returned is to be closed afterwards."""
        for name, content in self.files.items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.mkdir(exist_ok=True)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return self.made(home)


def of_run(name: str, text: str, *words: str, code: int = 2, more: str = "", **files: str | bytes | None) -> Mistake:
    """A mistake of ``phalanx train run.toml``."""
    named = {key.replace("__", "/").replace("_dot_", "."): content for key, content in files.items()}
    return Mistake(name, f"train run.toml {more}".strip(), code, words, {"run.toml": text, **named})


def of_text(name: str, content: str | bytes, *words: str, text: str = OWN_TEXT) -> Mistake:
    """A mistake in a JSON lines file."""
    return of_run(name, text, "data.sources.0: ", *words, code=3, text__a_dot_jsonl=content)


def of_model(name: str, *words: str, **files: str | bytes | None) -> Mistake:
    """A mistake in a model's directory."""
    return of_run(name, FROM_A_DIRECTORY, *words, code=3, **files)


def of_worker(name: str, text: str, *words: str, code: int = 2) -> Mistake:
    """A mistake of ``phalanx worker worker.toml``."""
    return Mistake(name, "worker worker.toml", code, words, {"worker.toml": text})


def of_keys(name: str, text: str, made: Callable[[Path], socket.socket | None], *words: str, code: int) -> Mistake:
    """A mistake of ``phalanx worker worker.toml`` with keys."""
    return Mistake(name, "worker worker.toml", code, words, {"worker.toml": text}, made)


def with_keys(home: Path) -> None:
    """Make an authority and a worker's keys."""
    create_authority(home / "keys")
    issue_certificate(home / "keys", "alice")


def with_a_foreign_authority(home: Path) -> None:
    """Lay the certificate of another authority beside a worker's keys."""
    with_keys(home)
    create_authority(home / "others")
    (home / "keys" / "alice" / "authority.pem").write_bytes((home / "others" / "authority.pem").read_bytes())


def with_an_expired_certificate(home: Path) -> None:
    """Make a worker's keys of two years ago."""
    before = datetime.now(UTC) - timedelta(days=730)
    create_authority(home / "keys", 1000, before)
    issue_certificate(home / "keys", "alice", days=30, now=before)


def with_a_taken_port(home: Path) -> socket.socket:
    """Listen where the worker is told to."""
    with_keys(home)
    taken = socket.create_server(("127.0.0.1", 0))
    file = home / "worker.toml"
    file.write_text(file.read_text() + f"[transport]\nport = {taken.getsockname()[1]}\n")
    return taken


OF_ALICE = "identity = 'keys/alice'\nowner = 'head:7070'\n"
CONFIG = json.dumps(GPT2)
MISTAKES = (
    # the run file
    Mistake("no run file", "train run.toml", 2, ("run.toml: cannot be read", "give the path of a TOML file"), {}),
    of_run("TOML syntax", "[train]\nsteps = = 4\n", "run.toml: is not valid TOML", "line 2, column 9"),
    of_run(
        "wrong key",
        FROM_SCRATCH.replace("seed =", "sede ="),
        "run.toml: train.sede: unknown key",
        "did you mean 'seed'?",
    ),
    of_run("wrong section", FROM_SCRATCH + "[gard]\n", "run.toml: gard: unknown key; did you mean 'guard'?"),
    of_run(
        "wrong type",
        FROM_SCRATCH.replace("steps = 6", "steps = 'six'"),
        "run.toml: train.steps: found 'six'",
        "valid integer",
    ),
    of_run(
        "wrong choice",
        FROM_SCRATCH.replace("seed = 3", "precision = 'fp8'"),
        "train.precision: found 'fp8'",
        "'fp32', 'bf16', 'fp16' or 'bf16_weights'",
    ),
    of_run(
        "number out of range",
        FROM_SCRATCH.replace("lr = 1e-2", "lr = -1"),
        "run.toml: optimizer.lr: found -1",
        "greater than 0",
    ),
    of_run(
        "missing key", FROM_SCRATCH.replace("steps = 6\n", ""), "run.toml: train: expected train.steps or train.epochs"
    ),
    of_run(
        "typo in --set", FROM_SCRATCH, "train.stepps: unknown key; did you mean 'steps'?", more="--set train.stepps=4"
    ),
    of_run(
        "--set without a value",
        FROM_SCRATCH,
        "--set 'train.steps': expected section.key=value",
        more="--set train.steps",
    ),
    of_run(
        "--unset of what is not there",
        FROM_SCRATCH,
        "--unset guard.mode: run.toml does not write it",
        "remove the option",
        more="--unset guard.mode",
    ),
    of_run(
        "batch that cannot be cut",
        FROM_SCRATCH.replace("batch_size = 8", "batch_size = 7"),
        "batch_size = 7",
        "microbatches = 4",
        "make one a multiple of the other",
    ),
    of_run(
        "[parallel] beside [pipeline]",
        FROM_SCRATCH + "[parallel]\ndp = 2\n",
        "[parallel] and [pipeline] exclude each other",
        "remove one",
    ),
    of_run(
        "a key that was removed",
        FROM_SCRATCH + "[guard]\nkeep_steps = 64\n",
        "keep_steps = 64 was removed",
        "set guard.keep_states",
    ),
    of_run(
        "attack on the owner's stage",
        FROM_SCRATCH.replace("stages = 2", "stages = 4") + "[attack]\nkind = 'zero'\nstages = [0]\n",
        "attack.stages has [0]",
        "they hold the middle stages [1, 2]",
    ),
    of_run(
        "warm-up longer than the run",
        FROM_SCRATCH.replace("lr = 1e-2", "lr = 1e-2\nwarmup_steps = 9"),
        "optimizer.warmup_steps = 9",
        "train.steps = 6",
        "lower it",
    ),
    of_run(
        "remote workers without keys",
        FROM_SCRATCH + "remote_workers = ['alice']\n",
        "remote_workers need pki = DIR",
        "phalanx pki",
    ),
    of_run(
        "more stages than layers",
        FROM_SCRATCH.replace("stages = 2", "stages = 9"),
        "pipeline.stages: 9 stages need at least 9 layers, the model has 4",
        "lower stages to 4",
    ),
    of_run(
        "sequences longer than the model's",
        FROM_SCRATCH.replace("sequence_length = 16", "sequence_length = 99"),
        "data.sequence_length = 99",
        "positions for 16",
        "lower it",
    ),
    of_run(
        "unknown key of an architecture",
        FROM_SCRATCH.replace("n_layer = 4", "n_layers = 4"),
        "model.architecture: unknown key 'n_layers' for gpt2",
        "choices: ",
        code=3,
    ),
    of_run(
        "a GPU where there is none",
        FROM_SCRATCH.replace("seed = 3", "device = 'cuda'"),
        'train.device = "cuda": torch ',
        'set train.device = "cpu"',
    ),
    # the data
    of_run("no such data", OWN_TEXT, "data.sources.0: text: not found; give the path of a file or a directory", code=3),
    of_run(
        "a folder of other files",
        OWN_TEXT,
        "data.sources.0: text: no file of this source's kind found; expected .jsonl",
        code=3,
        text__a_dot_csv="a,b\n",
    ),
    of_text("an empty file", "", "is empty", "give it another path"),
    of_text("a broken line", LINES + '{"text": \n', "a.jsonl, line 2: is not JSON", "expected one object a line"),
    of_text(
        "other fields",
        '{"instruction": "hold", "output": "held"}\n',
        "no field 'text'; its fields are: instruction, output",
        "set `field`",
    ),
    of_text(
        "a chat",
        '{"messages": [{"role": "user", "content": "hold"}]}\n',
        "field 'messages' holds a JSON list, expected text",
        'use kind = "dialogue"',
        text=OWN_TEXT.replace('"text" }', '"text", field = "messages" }'),
    ),
    of_text(
        "text that is not UTF-8",
        b'{"text": "caf\xe9"}\n',
        "a.jsonl, line 1: byte 13 (0xe9) is not utf-8",
        "convert the file",
    ),
    of_run(
        "no such tokenizer",
        FROM_SCRATCH.replace('kind = "bpe", vocab_size = 300', 'kind = "file", path = "tok.json"'),
        "data.tokenizer.path: tok.json: not a file",
        "give the path of a tokenizer.json",
        code=3,
    ),
    of_run(
        "a file that is no tokenizer",
        FROM_SCRATCH.replace('kind = "bpe", vocab_size = 300', 'kind = "file", path = "tok.json"'),
        "tok.json: is not a tokenizer.json",
        "save it again from its model",
        code=3,
        tok_dot_json="{}",
    ),
    of_run(
        "a tokenizer of another model",
        FROM_SCRATCH.replace("vocab_size = 300 }", "vocab_size = 400 }"),
        "data.tokenizer has 400 tokens, the model 300",
        "lower it in data.tokenizer",
    ),
    of_run(
        "[split.masked] where nothing is masked",
        FROM_SCRATCH[: FROM_SCRATCH.index("[pipeline]")] + "[split]\ncut = 2\nallow_insecure_sim = true\n"
        "[split.masked]\npads = 'aes'\n",
        '[split.masked] is for mode = "masked"',
        "remove it",
    ),
    of_run(
        "a vocabulary too large for the text",
        OWN_TEXT,
        "data.tokenizer.vocab_size=300: the training text supports",
        "lower vocab_size",
        code=3,
        text__a_dot_jsonl="".join(f'{{"text": "{number} shields"}}\n' for number in range(9)),
    ),
    # the model
    of_run(
        "a name of the hub",
        FROM_A_DIRECTORY.replace("'model'", "'acme/tiny'"),
        "model.path: acme/tiny: is no directory",
        "hf download acme/tiny --local-dir models/tiny",
        code=3,
    ),
    of_model(
        "an empty model directory",
        "model/config.json: cannot be read",
        "expected a directory in the hub's layout",
        model=None,
    ),
    of_model("a broken config.json", "model/config.json: is not valid JSON", model__config_dot_json="{"),
    of_model(
        "a family that is not known",
        "model/config.json: model_type: found 'mamba'",
        "expected one of ",
        model__config_dot_json='{"model_type": "mamba"}',
        model__model_dot_safetensors="",
    ),
    of_model(
        "pickled weights",
        "model/pytorch_model.bin: pickled weights can run code",
        "phalanx model convert DIR OUT",
        model__config_dot_json=CONFIG,
        model__pytorch_model_dot_bin=b"\x80",
    ),
    of_model(
        "truncated weights",
        "model/model.safetensors: cannot be read as safetensors",
        model__config_dot_json=CONFIG,
        model__model_dot_safetensors=b"\x99",
    ),
    of_run(
        "a model without tokenizer.json",
        FROM_A_DIRECTORY.replace('kind = "bpe", vocab_size = 300', 'kind = "model"'),
        "model/tokenizer.json: is missing",
        "phalanx model import",
        code=3,
        model__config_dot_json=CONFIG,
        model__model_dot_safetensors="",
    ),
    # the run directory
    of_run(
        "a run that is there already",
        FROM_SCRATCH,
        "old: already has a run; add --resume",
        "another --run-dir",
        more="--run-dir old",
        old__run_dot_json="{}",
        old__metrics_dot_jsonl='{"step": 0}\n',
    ),
    of_run(
        "nothing to resume",
        FROM_SCRATCH,
        "new: no run to resume; start it without --resume",
        code=3,
        more="--run-dir new --resume",
    ),
    of_run(
        "a file as run directory",
        FROM_SCRATCH,
        "run.toml: cannot be used as a run directory",
        "choose another --run-dir",
        more="--run-dir run.toml",
    ),
    of_run(
        "--from what is no run",
        FROM_SCRATCH,
        "old/run.json: cannot be read; expected the directory of a run",
        code=3,
        more="--from old",
        old=None,
    ),
    # other parties
    Mistake(
        "no worker file", "worker worker.toml", 2, ("worker.toml: cannot be read", "give the path of a TOML file"), {}
    ),
    of_worker(
        "wrong key of a worker",
        "identity = 'alice'\nowners = 'a:1'\n",
        "worker.toml: owners: unknown key; did you mean 'owner'?",
    ),
    of_worker(
        "an owner without a port",
        "identity = 'alice'\nowner = 'head'\n",
        "worker.toml: owner: found 'head', expected host:port",
        "owner.example.org:7070",
    ),
    of_worker(
        "a worker without keys",
        "identity = 'alice'\nowner = 'head:7070'\n",
        "alice/certificate.pem: cannot be read",
        "`phalanx invite` or `phalanx pki` makes it",
        code=5,
    ),
    of_worker(
        "a worker's GPU where there is none",
        "identity = 'alice'\nowner = 'head:7070'\ndevice = 'cuda'\n",
        'device = "cuda": torch ',
        'set device = "cpu"',
    ),
    of_keys(
        "a certificate of another authority",
        OF_ALICE,
        with_a_foreign_authority,
        "keys/alice/certificate.pem: not signed by",
        "let that authority issue one",
        code=5,
    ),
    of_keys(
        "an expired certificate",
        OF_ALICE,
        with_an_expired_certificate,
        "expired at",
        "have a new one made with phalanx pki sign, or issue",
        code=5,
    ),
    of_keys(
        "a port that is taken",
        OF_ALICE,
        with_a_taken_port,
        "127.0.0.1:",
        "cannot listen (Address already in use)",
        "change transport.port",
        code=4,
    ),
    # before there is a run
    Mistake(
        "init with an empty file",
        "init new.toml --kind scratch --data notes.txt",
        3,
        ("notes.txt: is empty", "give a file or a directory of text"),
        {"notes.txt": ""},
    ),
    Mistake(
        "init with a name of the hub",
        "init new.toml --kind finetune --model acme/tiny",
        3,
        ("--model: acme/tiny: is no directory", "`hf download acme/tiny --local-dir models/tiny`"),
        {},
    ),
    of_run(
        "nothing held out of preferences",
        FROM_SCRATCH[: FROM_SCRATCH.index("[data]")]
        + '[data]\npreferences = { sources = [{ path = "pairs.jsonl" }] }\n'
        + "sequence_length = 16\nvalidation_share = 0.0\n"
        + 'tokenizer = { kind = "bpe", vocab_size = 257 }\n\n'
        + FROM_SCRATCH[FROM_SCRATCH.index("[train]") :].replace("[train]\n", '[train]\nobjective = "dpo"\n'),
        "data.validation_share: found 0",
        "set data.validation_share above 0",
        pairs_dot_jsonl='{"prompt": "who?", "chosen": "a shield", "rejected": "a spear"}\n',
    ),
    Mistake(
        "a vocabulary of an empty file",
        "tokenizer train out --text notes.txt --vocab-size 300",
        3,
        ("notes.txt: is empty",),
        {"notes.txt": ""},
    ),
    # other verbs
    Mistake(
        "a full disk",
        "init /dev/full --kind scratch --force",
        3,
        ("/dev/full: cannot be written (No space left on device)", "free space, or give another path"),
        {},
    ),
    Mistake(
        "a token that was not copied whole",
        "join phx1-AAAA",
        2,
        ("token: is cut or altered", "copy the whole line again"),
        {},
    ),
    Mistake(
        "an invitation of a party that the run file lacks",
        "invite run.toml --name carol",
        2,
        ("run.toml: does not have carol in pipeline.remote_workers or pipeline.may_join", "add it"),
        {"run.toml": FROM_SCRATCH + "remote_workers = ['alice']\npki = 'keys'\n[pipeline.transport]\nport = 7070\n"},
    ),
    Mistake(
        "an adapter in the place of a model",
        "generate adapter --prompt who",
        3,
        ("adapter: is an adapter without its model", "give the run that trained it", "phalanx model merge"),
        {"adapter/adapter_config.json": "{}"},
    ),
    Mistake("a command without its argument", "train", 2, ("Missing argument 'RUN.toml'",), {}),
    Mistake("a verb that is none", "trian run.toml", 2, ("No such command 'trian'", "train"), {}),
    Mistake("a report of no run", "report old", 3, ("old", "run directory"), {}),
    Mistake("a report of an empty directory", "report old", 3, ("old: holds no run", "run directory"), {"old": None}),
    Mistake(
        "an audit of no run",
        "audit verify old",
        5,
        ("old/owner.pem: cannot be read", "give --certificate FILE"),
        {"old": None},
    ),
    Mistake("a plan of nothing", "plan", 2, ("plan: expected either a run file or --model",), {}),
    Mistake("a plan for an unknown cluster", "plan --model llama-2-7b --cluster moon", 2, ("moon", "choices"), {}),
)

"""Starters: commented run files for the usual beginnings, filled in from the data and the model that are there.

A starter only writes text. The same checks as of any run file say whether it may run; loads no torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phalanx.data.tasks import TASKS
from phalanx.errors import ConfigError, DataError
from phalanx.models.directory import model_directory
from phalanx.train.labelled_starter import own_texts
from phalanx.train.starter_sources import StarterRows, dataset_section, quoted, source_line, starter_rows

_BYTES_PER_TOKEN = 3
"""Of a small vocabulary on English prose; a guess that only the suggested number of steps rests on."""


@dataclass(frozen=True)
class Answers:
    """What a beginner says; everything else has a default that is written out where it can be changed.

    Attributes:
        data: Files or directories of text, in a split labelled ones, one for each client; none is Python's own
            documentation.
        model: Directory in the hub's layout; none is a small GPT from scratch.
        workers: Names of the remote parties.
        ranks: Processes of a trusted cluster.
        task: Classification task of a private split, where there are no labelled texts of one's own.
        made: Folder for files that are made of others: one file of labelled texts is divided into two.
    """

    data: Sequence[Path] = ()
    model: Path | None = None
    workers: Sequence[str] = ("alice", "bob")
    ranks: int = 2
    task: str = "icd10"
    made: Path = Path("texts")


def run_file(way: str, answers: Answers) -> str:
    """Return the text of a run file.

    Args:
        way: One of `STARTERS`.

    Raises:
        ConfigError: The way is unknown, or an answer does not fit it.
        DataError: A path holds no text that a source can read, or a model directory lacks its config.
        ModelError: The model directory is none.
    """
    if way not in STARTERS:
        raise ConfigError(f"kind: found {way!r}; expected one of {', '.join(STARTERS)}")
    return STARTERS[way].write(answers)


def _scratch(answers: Answers) -> str:
    return _text_run("A small GPT from scratch in four stages, each checked.", answers, _LOCAL_PIPELINE)


def _finetune(answers: Answers) -> str:
    _require_model(answers)
    return _text_run("Low-rank adapters on a pre-trained model, in checked stages.", answers, _LOCAL_PIPELINE)


def _chat(answers: Answers) -> str:
    _require_model(answers)
    rows = starter_rows(answers.data)
    if rows is None or rows.layout != "chat":
        raise ConfigError(f"data: {_found(answers, rows)}; {_CHAT_ROWS}: give them with --data")
    return _text_run("What the assistant says in conversations, learned by adapters.", answers, _LOCAL_PIPELINE)


def _preferences(answers: Answers) -> str:
    shape, rows = _pretrained(_require_model(answers)), starter_rows(answers.data)
    if rows is None or rows.layout == "chat":
        raise ConfigError(f"data: {_found(answers, rows)}; {_PREFERENCE_ROWS}: give them with --data")
    tokens = min(_ROW_TOKENS, shape.positions)
    data = _PREFERENCES.format(sources=rows.sources, share=_row_share(rows), template=_template_of(answers.model))
    objective = f'objective = {{ kind = "{"kto" if rows.layout == "labelled" else "dpo"}", beta = 0.1 }}\n'
    values = {"what": "Which of two answers is better, learned by adapters.", "model": shape.section, "text": data}
    return _filled(values, tokens, _steps(rows.size_bytes, tokens), "5e-5", objective) + _LOCAL_PIPELINE.replace(
        "STAGES", str(shape.stages)
    )


def _federated(answers: Answers) -> str:
    model = _SPLIT_MODEL if answers.model is None else f"path = {quoted(answers.model)}"
    if not answers.data:
        if answers.task not in TASKS:
            raise ConfigError(f"task: found {answers.task!r}; expected one of {', '.join(TASKS)}")
        sites: tuple[str, ...] = ("north", "south", "east", "west")
        labelled = _TASK.format(task=answers.task)
    else:
        if len(answers.data) < _FEWEST_SITES:
            raise ConfigError(
                f"data: found {len(answers.data)} path, but each site needs its own labelled texts; give --data once "
                "for each of at least two sites"
            )
        sites = tuple(f"site-{number}" for number in range(1, len(answers.data) + 1))
        labelled = own_texts(answers.data, answers.made).section()
    # one site of many may be late; a sum of two would hide neither
    cohort = max(min(_SUMMED_SITES, len(sites)), len(sites) - 1)
    is_summed = len(sites) >= _SUMMED_SITES
    sums = _SUMS if is_summed else _NO_SUMS
    return _FEDERATED.format(model=model, labelled=labelled, sites=json.dumps(sites), cohort=cohort, sums=sums)


def _require_model(answers: Answers) -> Path:
    if answers.model is None:
        raise ConfigError("model: a fine-tuning needs a model; give its directory with --model")
    return answers.model


def _found(answers: Answers, rows: StarterRows | None) -> str:
    if not answers.data:
        return "found none"
    what = "text" if rows is None else "conversations" if rows.layout == "chat" else "preferences"
    return f"{answers.data[0]} holds {what}"


def _remote(answers: Answers) -> str:
    if not answers.workers:
        raise ConfigError("workers: none given; name at least one, whose stage the owner then checks")
    names = ", ".join(f'"{name}"' for name in answers.workers)
    engine = _REMOTE_PIPELINE.format(stages=len(answers.workers) + 2, names=names)
    return _text_run("A model in stages; machines of other people serve the middle ones.", answers, engine)


def _cluster(answers: Answers) -> str:
    return _text_run("Data-parallel training on machines of one owner.", answers, _PARALLEL.format(dp=answers.ranks))


def _split(answers: Answers) -> str:
    model = _SPLIT_MODEL if answers.model is None else f"path = {quoted(answers.model)}"
    if answers.data:
        starter_texts = own_texts(answers.data, answers.made)
        steps, clients = max(20, _PASSES * starter_texts.num_rows // _SPLIT_BATCH), len(answers.data)
        release = _RELEASE.format(min_clients=clients) if clients > 1 else ""
        return _SPLIT.format(
            model=model, labelled=starter_texts.section(), steps=steps, clients=clients, release=release
        )
    if answers.task not in TASKS:
        raise ConfigError(f"task: found {answers.task!r}; expected one of {', '.join(TASKS)}")
    labelled, release = _TASK.format(task=answers.task), _RELEASE.format(min_clients=4)
    return _SPLIT.format(model=model, labelled=labelled, steps=60, clients=4, release=release)


def _text_run(what: str, answers: Answers, engine: str) -> str:
    shape = _SCRATCH_MODEL if answers.model is None else _pretrained(answers.model)
    rows = None if answers.model is None else starter_rows(answers.data)
    if rows is not None and rows.layout != "chat":
        raise ConfigError(f"data: {_found(answers, rows)}, which need --kind preferences")
    if rows is not None:
        tokens = min(_ROW_TOKENS, shape.positions)
        template = _template_of(answers.model)
        text = _CHAT.format(sources=rows.sources, share=_row_share(rows), template=template)
        vocabulary = 0
        what = f"{what}\n# It reads conversations: what the assistant says is learned, by the model's chat template."
    else:
        tokens = shape.tokens
        text, size_bytes, vocabulary = _text_of(answers.data, shape)
    values = {"what": what, "model": shape.section.replace("VOCABULARY", str(vocabulary)), "text": text}
    num_bytes = size_bytes if rows is None else rows.size_bytes
    return _filled(values, tokens, _steps(num_bytes, tokens), shape.learning_rate) + engine.replace(
        "STAGES", str(shape.stages)
    )


def _filled(values: dict[str, str], tokens: int, steps: int, learning_rate: str, objective: str = "") -> str:
    """Fill the run file of a pipeline or of ranks; it validates and saves several times, however short it is."""
    often = max(1, min(50, steps // 5))
    return _TEXT_RUN.format(
        **values,
        tokens=tokens,
        steps=steps,
        objective=objective,
        lr=learning_rate,
        often=often,
        kept=max(1, often // 2),
    )


def _template_of(directory: Path | None) -> str:
    """Return the key for messages of a model that has no chat template, nor the tokens of the one in its place."""
    if directory is None or (directory / "chat_template.jinja").is_file():
        return ""
    texts = []
    for name in ("tokenizer_config.json", "tokenizer.json"):
        path = directory / name
        texts.append(path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "")
    return "" if "chat_template" in texts[0] or "<|im_end|>" in "".join(texts) else ', template = "plain"'


def _row_share(rows: StarterRows) -> str:
    is_small = rows.size_bytes < _SMALL_BYTES
    return "validation_share = 0.25          # of the rows: there are few\n" if is_small else ""


def _text_of(paths: Sequence[Path], shape: "_ModelShape") -> tuple[str, int | None, int]:
    """Return what ``[data]`` reads, its bytes where they are known, and the size of the vocabulary."""
    built = [section for path in paths if (section := dataset_section(path)) is not None]
    if built:
        if len(paths) > 1:
            raise ConfigError("data: a dataset of shards must be the only source of a run; give it alone")
        return built[0][0], None, built[0][1]
    sources = [source_line(path) for path in paths]
    lines = [f"    {{ {source_line} }}," for source_line, _ in sources] or [
        '    { kind = "python_manual" },',
        '    { kind = "python_docstrings" },',
    ]
    size_bytes = sum(size for _, size in sources) if sources else None
    is_small = size_bytes is not None and size_bytes < _SMALL_BYTES
    vocabulary = _SMALL_VOCABULARY if is_small else _VOCABULARY
    tokenizer = shape.tokenizer.replace("VOCABULARY", str(vocabulary))
    # of a few documents the usual share is often none at all, and a run validates
    share = ["validation_share = 0.25          # of the documents: there are few"] if is_small else []
    return "\n".join([f"tokenizer = {tokenizer}", "sources = [", *lines, "]", *share]), size_bytes, vocabulary


@dataclass(frozen=True)
class _ModelShape:
    section: str
    tokenizer: str
    tokens: int
    positions: int
    stages: int
    learning_rate: str


def _pretrained(directory: Path) -> _ModelShape:
    """Look at a model directory: its number of blocks and positions; weights are not read."""
    path = model_directory(str(directory), "--model") / "config.json"
    try:
        hub_config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise DataError(
            f"{path}: cannot be read ({type(exc).__name__}); --model takes a directory in the hub's layout: "
            "config.json, model.safetensors, tokenizer.json"
        ) from exc
    layers = _number(hub_config, ("num_hidden_layers", "n_layer"), 4)
    positions = _number(hub_config, ("max_position_embeddings", "n_positions"), _TOKENS)
    section = _PRETRAINED_MODEL.format(path=quoted(directory))
    stages = max(1, min(4, layers))
    return _ModelShape(section, '{ kind = "model" }', min(_TOKENS, positions), positions, stages, "1e-3")


def _number(found: Any, names: Sequence[str], default: int) -> int:
    numbers = [found[name] for name in names if isinstance(found, dict) and isinstance(found.get(name), int)]
    return int(numbers[0]) if numbers else default


def _steps(size_bytes: int | None, tokens: int) -> int:
    """Suggest about one pass over the text, at least 50 steps and at most 2,000."""
    if size_bytes is None:
        return 320
    return max(50, min(2000, size_bytes // (_BYTES_PER_TOKEN * tokens * _BATCH)))


_BATCH = 8
_TOKENS = 128
_ROW_TOKENS = 512
"""Of a conversation or a preference, where the model has so many positions."""
_FEWEST_SITES, _SUMMED_SITES = 2, 3
_SUMS = "secure = true                    # the owner learns the sum of the updates and none of them"
_NO_SUMS = "secure = false                   # the owner sees each update: a sum of two sites would hide neither"
_CHAT_ROWS = (
    "--kind chat reads JSON lines with messages, conversations, instruction and output, or prompt and completion"
)
_PREFERENCE_ROWS = "--kind preferences reads JSON lines with chosen and rejected, or with prompt, completion and label"
_SPLIT_BATCH, _PASSES = 16, 3
_VOCABULARY, _SMALL_VOCABULARY, _SMALL_BYTES = 2048, 512, 200_000

_SCRATCH_MODEL = _ModelShape(
    """\
from_scratch = true

[model.architecture]             # any config of a family in docs/model_families.md
model_type = "gpt2"
vocab_size = VOCABULARY
n_positions = 128
n_embd = 256
n_layer = 6
n_head = 8
bos_token_id = 0
eos_token_id = 0
resid_pdrop = 0.0
embd_pdrop = 0.0
attn_pdrop = 0.0
""",
    '{ kind = "bpe", vocab_size = VOCABULARY }     # trained on the text below',
    _TOKENS,
    _TOKENS,
    4,
    "1e-3",
)

_PRETRAINED_MODEL = """\
path = {path}

[model.adapter]                  # leave this section out to train every weight
kind = "lora"
rank = 8
"""

_TEXT_RUN = """\
# {what}
#
#   phalanx train THIS_FILE --dry-run     what it will do, what it needs, what the guard finds
#   phalanx train THIS_FILE               train; the report is runs/NAME/report.html
#   phalanx train THIS_FILE --resume      go on after an interruption
#
# Every key and its default: docs/configuration.md

[model]
{model}
[data]
{text}
sequence_length = {tokens}            # tokens of one sequence
max_validation_sequences = 48

[train]
steps = {steps}                      # with --resume it may be raised
batch_size = 8                   # sequences a step
microbatches = 4                 # parts of a batch that follow each other through the stages
validate_every = {often}
seed = 1
{objective}
[optimizer]
lr = {lr}
warmup_share = 0.05              # of the steps: fewer steps have a shorter warm-up
clip_norm = 1.0

[checkpoint]
every = {kept}                       # a killed run goes on at the step where it died, without one too, on CPUs
keep = 2
"""

_CHAT = """\
conversations = {{ sources = [{sources}], too_long = "cut"{template} }}
tokenizer = {{ kind = "model" }}
attention = "document"           # several conversations a row, none of which sees another
{share}"""

_PREFERENCES = """\
preferences = {{ sources = [{sources}], too_long = "drop"{template} }}
tokenizer = {{ kind = "model" }}
{share}"""

_FEDERATED = """\
# Sites that keep their texts: each trains on its own, and the owner learns the sum of their updates alone.
#
#   phalanx train THIS_FILE --dry-run
#   phalanx train THIS_FILE              a process of this machine for each site, for a trial
#
# Sites on machines of others: docs/hospitals.md

[model]
{model}

[model.adapter]
kind = "lora"
rank = 8

[data]
tokenizer = {{ kind = "model" }}
sequence_length = 16

{labelled}
[train]
objective = "classification"
steps = 20                       # rounds
batch_size = 16
microbatches = 2
validate_every = 5
seed = 1

[optimizer]
lr = 4e-3
weight_decay = 0.0
schedule = "constant"

[federated]
sites = {sites}
min_cohort = {cohort}                   # updates that a round needs; one site may be late or gone
local_steps = 4                  # of a site in a round
{sums}
exchange = "frozen_a"
max_norm = 4.0                   # bound of a site's update

[checkpoint]
every = 5
"""

_GUARD = """
[guard]
mode = "phalanx"
preset = "standard"              # light, standard or strict: what each costs and finds, --dry-run prints
"""

_LOCAL_PIPELINE = (
    """
[pipeline]                       # each middle stage is a process of its own, as on machines of others
stages = STAGES
"""
    + _GUARD
)

_REMOTE_PIPELINE = (
    """
[pipeline]                       # first and last stage are the owner's, one stage for each worker
stages = {stages}
remote_workers = [{names}]
pki = "pki"                      # docs/remote_workers.md: the authority and the workers' certificates

[pipeline.transport]
bind = "0.0.0.0"
port = 7070                      # workers must reach it
"""
    + _GUARD
)

_PARALLEL = """
[parallel]                       # machines that trust each other: no guard
dp = {dp}
zero = 2                         # 0 to 3: what is sharded among the ranks
"""

_SPLIT_MODEL = """\
name = "smollm2-135m"            # comes with Phalanx
layers = 6                       # of 30: leave it out for all of them"""

_SPLIT = """\
# Clients keep their texts and the first layers; an enclave trains the rest on what they seal.
#
#   phalanx train THIS_FILE --dry-run
#   phalanx train THIS_FILE
#
# What holds on which hardware: docs/sealed_split.md

[model]
{model}

[model.adapter]
kind = "lora"
rank = 8

[data]
tokenizer = {{ kind = "model" }}
sequence_length = 16

{labelled}
[train]
objective = "classification"
steps = {steps}
batch_size = 16
microbatches = 4
validate_every = 20
seed = 1

[optimizer]
lr = 2e-3
weight_decay = 0.0

[split]
mode = "sealed"
cut = 5                          # layers that stay with the clients
clients = {clients}
wire = "bf16"
tier = "auto"                    # the strongest attestation that this machine has; the console says which
allow_insecure_sim = true        # false refuses to run where no hardware keeps the enclave's memory secret
{release}
[checkpoint]
every = 20
"""

_TASK = """\
[data.labelled]
task = "{task}"
texts_per_client = 64
test_texts = 168
"""

_RELEASE = """
[split.release]                  # what leaves the enclave at the end
min_clients = {min_clients}
clip_norm = 100.0
"""


@dataclass(frozen=True)
class Starter:
    """One line of the table.

    Attributes:
        purpose: Purpose in one line.
    """

    purpose: str
    write: Callable[[Answers], str]


STARTERS: Mapping[str, Starter] = MappingProxyType(
    {
        "scratch": Starter("a small model from scratch on your own text, on this machine", _scratch),
        "finetune": Starter("adapters on a model directory, on this machine", _finetune),
        "chat": Starter("what the assistant says in conversations, by adapters on a model directory", _chat),
        "preferences": Starter("which of two answers is better, by adapters on a model directory", _preferences),
        "remote": Starter("stages on machines of other people, who check each other", _remote),
        "cluster": Starter("data-parallel ranks on machines of your own", _cluster),
        "split": Starter("private data: clients seal, an enclave trains", _split),
        "federated": Starter("private data: sites train on their own, and their updates are summed", _federated),
    }
)

"""Starters: commented run files for the usual beginnings, filled in from the data and the model that are there.

The texts are in ``starters/``, with ``$name`` for each value. The same checks as of any run file say whether it may
run; loads no torch.
"""

import importlib.resources
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Any

from phalanx.data.tasks import TASKS
from phalanx.errors import ConfigError, DataError
from phalanx.models.directory import model_directory
from phalanx.train.labelled_starter import own_texts
from phalanx.train.starter_sources import StarterRows, dataset_section, quote_path, source_line, starter_rows

_BYTES_PER_TOKEN = 3
"""Of a small vocabulary on English prose; a guess that only the suggested number of steps rests on."""


@dataclass(frozen=True)
class Answers:
    """What a beginner says; everything else has a default that is written out where it can be changed.

    Attributes:
        data: Files or directories of text, in a split labelled ones, one for each client; none is Python's own
            documentation.
        model: Directory in the hub's layout; none is a small GPT from scratch.
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
    """Return the text of a run file."""
    if way not in STARTERS:
        raise ConfigError(f"kind: found {way!r}; expected one of {', '.join(STARTERS)}")
    return STARTERS[way].write(answers)


def _scratch_run(answers: Answers) -> str:
    return _text_run("A small GPT from scratch in four stages, each checked.", answers)


def _finetune_run(answers: Answers) -> str:
    _require_model(answers)
    return _text_run("Low-rank adapters on a pre-trained model, in checked stages.", answers)


def _chat_run(answers: Answers) -> str:
    _require_model(answers)
    rows = starter_rows(answers.data)
    if rows is None or rows.layout != "chat":
        raise ConfigError(f"data: {_describe_data(answers, rows)}; {_CHAT_ROWS}: give them with --data")
    return _text_run("What the assistant says in conversations, learned by adapters.", answers)


def _preference_run(answers: Answers) -> str:
    shape, rows = _read_model_shape(_require_model(answers)), starter_rows(answers.data)
    if rows is None or rows.layout == "chat":
        raise ConfigError(f"data: {_describe_data(answers, rows)}; {_PREFERENCE_ROWS}: give them with --data")
    tokens = min(_ROW_TOKENS, shape.positions)
    data = _fill_template(
        "data_preferences",
        {"sources": rows.source_list, "share": _row_share(rows), "template": _template_of(answers.model)},
    )
    objective = f'objective = {{ kind = "{"kto" if rows.layout == "labelled" else "dpo"}", beta = 0.1 }}\n'
    values = {"what": "Which of two answers is better, learned by adapters.", "model": shape.section, "text": data}
    values |= {"objective": objective, "engine": _fill_template("engine_pipeline", {"stages": shape.stages})}
    return _filled(values, tokens, _suggest_steps(rows.size_bytes, tokens), "5e-5")


def _federated_run(answers: Answers) -> str:
    model = _SPLIT_MODEL if answers.model is None else f"path = {quote_path(answers.model)}"
    if not answers.data:
        if answers.task not in TASKS:
            raise ConfigError(f"task: found {answers.task!r}; expected one of {', '.join(TASKS)}")
        sites: tuple[str, ...] = ("north", "south", "east", "west")
        labelled = _fill_template("labelled_task", {"task": answers.task})
    else:
        if len(answers.data) < _FEWEST_SITES:
            raise ConfigError(
                f"data: found {len(answers.data)} path, but each site needs its own labelled texts; give --data once "
                "for each of at least two sites"
            )
        sites = tuple(f"site-{number}" for number in range(1, len(answers.data) + 1))
        labelled = own_texts(answers.data, answers.made).toml_section()
    # one site of many may be late; a sum of two would hide neither
    cohort = max(min(_SUMMED_SITES, len(sites)), len(sites) - 1)
    is_summed = len(sites) >= _SUMMED_SITES
    sums = _SUMS if is_summed else _NO_SUMS
    return _fill_template(
        "federated", {"model": model, "labelled": labelled, "sites": json.dumps(sites), "cohort": cohort, "sums": sums}
    )


def _require_model(answers: Answers) -> Path:
    if answers.model is None:
        raise ConfigError("model: a fine-tuning needs a model; give its directory with --model")
    return answers.model


def _describe_data(answers: Answers, rows: StarterRows | None) -> str:
    if not answers.data:
        return "found none"
    what = "text" if rows is None else "conversations" if rows.layout == "chat" else "preferences"
    return f"{answers.data[0]} holds {what}"


def _remote_run(answers: Answers) -> str:
    if not answers.workers:
        raise ConfigError("workers: none given; name at least one, whose stage the owner then checks")
    names = ", ".join(f'"{name}"' for name in answers.workers)
    engine = _fill_template("engine_remote", {"stages": len(answers.workers) + 2, "names": names})
    return _text_run("A model in stages; machines of other people serve the middle ones.", answers, engine)


def _cluster_run(answers: Answers) -> str:
    return _text_run(
        "Data-parallel training on machines of one owner.",
        answers,
        _fill_template("engine_ranks", {"dp": answers.ranks}),
    )


def _split_run(answers: Answers) -> str:
    model = _SPLIT_MODEL if answers.model is None else f"path = {quote_path(answers.model)}"
    steps, clients = 60, 4
    if answers.data:
        starter_texts = own_texts(answers.data, answers.made)
        steps, clients = max(20, _PASSES * starter_texts.num_rows // _SPLIT_BATCH), len(answers.data)
        labelled = starter_texts.toml_section()
    elif answers.task in TASKS:
        labelled = _fill_template("labelled_task", {"task": answers.task})
    else:
        raise ConfigError(f"task: found {answers.task!r}; expected one of {', '.join(TASKS)}")
    release = _fill_template("split_release", {"min_clients": clients}) if clients > 1 else ""
    return _fill_template(
        "split", {"model": model, "labelled": labelled, "steps": steps, "clients": clients, "release": release}
    )


def _text_run(what: str, answers: Answers, engine: str | None = None) -> str:
    shape = _SCRATCH_MODEL if answers.model is None else _read_model_shape(answers.model)
    rows = None if answers.model is None else starter_rows(answers.data)
    if rows is not None and rows.layout != "chat":
        raise ConfigError(f"data: {_describe_data(answers, rows)}, which need --kind preferences")
    if rows is not None:
        tokens = min(_ROW_TOKENS, shape.positions)
        template = _template_of(answers.model)
        text = _fill_template(
            "data_chat", {"sources": rows.source_list, "share": _row_share(rows), "template": template}
        )
        model = shape.section
        what = f"{what}\n# It reads conversations: what the assistant says is learned, by the model's chat template."
    else:
        tokens = shape.tokens
        text, size_bytes, vocabulary = _text_of(answers.data, shape)
        model = shape.section or _fill_template("model_scratch", {"vocabulary": vocabulary})
    engine = engine or _fill_template("engine_pipeline", {"stages": shape.stages})
    values = {"what": what, "model": model, "text": text, "objective": "", "engine": engine}
    num_bytes = size_bytes if rows is None else rows.size_bytes
    return _filled(values, tokens, _suggest_steps(num_bytes, tokens), shape.learning_rate)


def _filled(values: dict[str, str], tokens: int, steps: int, learning_rate: str) -> str:
    """Fill the run file of a pipeline or of ranks; it validates and saves several times, however short it is."""
    often = max(1, min(50, steps // 5))
    lengths = {"tokens": tokens, "steps": steps, "often": often, "kept": max(1, often // 2)}
    return _fill_template("text", {"lr": learning_rate, **lengths, **values})


def _fill_template(name: str, values: Mapping[str, str | int]) -> str:
    text = importlib.resources.files("phalanx.train").joinpath("starters", f"{name}.toml").read_text(encoding="utf-8")
    return Template(text).substitute(values)


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


def _read_model_shape(directory: Path) -> _ModelShape:
    """Look at a model directory: its number of blocks and positions; weights are not read."""
    path = model_directory(str(directory), "--model") / "config.json"
    try:
        hub_config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise DataError(
            f"{path}: cannot be read ({type(exc).__name__}); --model takes a directory in the hub's layout: "
            "config.json, model.safetensors, tokenizer.json"
        ) from exc
    layers = _first_number(hub_config, ("num_hidden_layers", "n_layer"), 4)
    positions = _first_number(hub_config, ("max_position_embeddings", "n_positions"), _TOKENS)
    section = _fill_template("model_pretrained", {"path": quote_path(directory)})
    stages = max(1, min(4, layers))
    return _ModelShape(section, '{ kind = "model" }', min(_TOKENS, positions), positions, stages, "1e-3")


def _first_number(answers: Any, names: Sequence[str], default: int) -> int:
    numbers = [answers[name] for name in names if isinstance(answers, dict) and isinstance(answers.get(name), int)]
    return int(numbers[0]) if numbers else default


def _suggest_steps(size_bytes: int | None, tokens: int) -> int:
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
    "",
    '{ kind = "bpe", vocab_size = VOCABULARY }     # trained on the text below',
    _TOKENS,
    _TOKENS,
    4,
    "1e-3",
)

_SPLIT_MODEL = """\
name = "smollm2-135m"            # comes with Phalanx
layers = 6                       # of 30: leave it out for all of them"""


@dataclass(frozen=True)
class Starter:
    """One line of the table."""

    purpose: str
    write: Callable[[Answers], str]


STARTERS: Mapping[str, Starter] = MappingProxyType(
    {
        "scratch": Starter("a small model from scratch on your own text, on this machine", _scratch_run),
        "finetune": Starter("adapters on a model directory, on this machine", _finetune_run),
        "chat": Starter("what the assistant says in conversations, by adapters on a model directory", _chat_run),
        "preferences": Starter("which of two answers is better, by adapters on a model directory", _preference_run),
        "remote": Starter("stages on machines of other people, who check each other", _remote_run),
        "cluster": Starter("data-parallel ranks on machines of your own", _cluster_run),
        "split": Starter("private data: clients seal, an enclave trains", _split_run),
        "federated": Starter("private data: sites train on their own, and their updates are summed", _federated_run),
    }
)

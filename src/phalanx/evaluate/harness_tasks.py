"""Tasks of lm-evaluation-harness from local files, by this package's scorers; lm-eval itself is an extra."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from phalanx.data.chat import ChatMessage
from phalanx.errors import ConfigError, DataError
from phalanx.evaluate.evaluation import FigureRecord, SampleRecord, SuiteResult, make_figures
from phalanx.evaluate.measures import METRICS, Sample
from phalanx.evaluate.scorer import EndingRow, LocalScorer, TokenScorer, WritingRule, rolling_rows

_RATIOS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
_MAX_NEW_TOKENS = 256


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A scorer as lm-eval asks models.

    Args:
        backend: The model's tokenizer with its post-processor.
        render: Puts messages into the model's chat template; None where it has none.
    """

    def __init__(self, scorer: TokenScorer, backend: tokenizers.Tokenizer, name: str, render: Any = None) -> None:
        super().__init__()
        self._scorer, self._backend, self._name, self._render = scorer, backend, name, render
        self._prefix_text = backend.decode([scorer.prefix], skip_special_tokens=False)

    @property
    def eot_token_id(self) -> int:
        return self._scorer.prefix

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at once."""
        return self._scorer.window

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return "" if self._render is not None else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if self._render is None or not add_generation_prompt:
            raise ConfigError("--apply-template: the model has no chat template, or a task begins the answer itself")
        text: str = self._render([ChatMessage(role=part["role"], content=part["content"]) for part in chat_history])  # type: ignore[arg-type]
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        adds = not string.startswith(self._prefix_text) if add_special_tokens is None else add_special_tokens
        return list(self._backend.encode(string, add_special_tokens=adds).ids)

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        rows = [EndingRow(tuple(context), tuple(ending)) for _, context, ending in requests]
        return [(score.log_prob, bool(score.is_greedy)) for score in self._scorer.score_rows(rows)]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        cut = [
            list(rolling_rows(self.tok_encode(request.args[0]), self._scorer.prefix, self._scorer.window))
            for request in requests
        ]
        scores = iter(self._scorer.score_rows([row for rows in cut for row in rows]))
        return [math.fsum(next(scores).log_prob for _ in rows) for rows in cut]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        groups: dict[WritingRule, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(_writing_rule(request.args[1]), []).append(number)
        texts: dict[int, str] = {}
        for rule, numbers in groups.items():
            written = self._write([requests[number].args[0] for number in numbers], rule)
            texts |= zip(numbers, written, strict=True)
        return [texts[number] for number in range(len(requests))]

    def _write(self, prompts: Sequence[str], rule: WritingRule) -> list[str]:
        if not isinstance(self._scorer, LocalScorer):
            written: list[str] = self._scorer.write_texts(prompts, rule)  # type: ignore[attr-defined]
            return written
        room = self._scorer.window - rule.max_new_tokens
        if room < 1:
            raise DataError(f"a task writes {rule.max_new_tokens} tokens, and the window has {self._scorer.window}")
        return self._scorer.write_ids([self.tok_encode(prompt)[-room:] for prompt in prompts], rule)


def _writing_rule(settings: Mapping[str, Any]) -> WritingRule:
    until = settings.get("until", ())
    return WritingRule(
        max_new_tokens=int(settings.get("max_gen_toks", _MAX_NEW_TOKENS)),
        temperature=float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0,
        stops=(until,) if isinstance(until, str) else tuple(until),
    )


def check_task_files(folder: Path, *, own_code: bool) -> str:
    """Return the digest of all files of a folder of tasks.

    Raises:
        ConfigError: It is no folder, or holds Python code, which lm-eval would run, without `own_code`.
    """
    if not folder.is_dir():
        raise ConfigError(f"--include {folder}: is no folder; give the one with the task files")
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        content = path.read_bytes()
        runs_code = path.suffix == ".py" or (path.suffix in (".yaml", ".yml") and b"!function" in content)
        if runs_code and not own_code:
            raise ConfigError(f"{path}: is code that lm-eval would run; read it, then add --own-code")
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def run_tasks(
    model: HarnessModel, names: Sequence[str], folder: Path, seed: int, limit: int | None, *, chat: bool = False
) -> list[SuiteResult]:
    """Run tasks of a folder; what their files call a data set is read from local files alone.

    Args:
        limit: Maximum number of documents; the first ones are taken.
        chat: Put every prompt into the model's template.
    """
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    unknown = sorted(set(names) - set(manager.all_tasks))
    if unknown:
        raise ConfigError(f"--tasks {unknown[0]}: not in {folder}; choices: {', '.join(sorted(manager.all_tasks))}")
    seeds = {f"{kind}_seed": seed for kind in ("random", "numpy_random", "torch_random", "fewshot_random")}
    results: Any = simple_evaluate(
        model=model,
        tasks=list(names),
        task_manager=manager,
        limit=limit,
        log_samples=True,
        bootstrap_iters=0,
        apply_chat_template=chat,
        **seeds,
    )
    return [_read_task(task, results, seed) for task in results["samples"]]


def _read_task(task: str, results: Mapping[str, Any], seed: int) -> SuiteResult:
    documents, version = results["samples"][task], results["versions"].get(task)
    samples = [sample for document in documents for sample in _read_samples(document)]
    figures = {figure.metric: figure for figure in make_figures(samples, seed)}
    figures_by_name = {
        _metric_name(*key.split(",")): value
        for key, value in results["results"][task].items()
        if "," in key and "_stderr" not in key and isinstance(value, int | float)
    }
    hashes = "\n".join(sorted({str(document["doc_hash"]) for document in documents}))
    return SuiteResult(
        name=task,
        kind="lm-eval",
        version=int(version) if isinstance(version, int | float) else 0,
        suite_digest=hashlib.sha256(repr(sorted(results["configs"][task].items(), key=str)).encode()).hexdigest(),
        data_digest=hashlib.sha256(hashes.encode()).hexdigest(),
        num_rows=len({document["doc_id"] for document in documents}),
        figures=tuple(
            _agree(name, value, figures.get(name), len(documents)) for name, value in figures_by_name.items()
        ),
        samples=tuple(SampleRecord(**vars(sample)) for sample in samples if sample.metric in figures_by_name),
    )


def _agree(name: str, value: float, figure: FigureRecord | None, num_documents: int) -> FigureRecord:
    """Return lm-eval's figure, with our interval where our samples give the same figure."""
    if (
        figure is not None
        and figure.value is not None
        and math.isclose(figure.value, value, rel_tol=1e-9, abs_tol=1e-9)
    ):
        return figure
    shown = value if math.isfinite(value) else None
    return FigureRecord(
        metric=name,
        value=shown,
        low=None,
        high=None,
        n=num_documents,
        clusters=num_documents,
        method="none: by lm-eval",
    )


def _metric_name(metric: str, kept_filter: str) -> str:
    return metric if kept_filter == "none" else f"{metric}/{kept_filter}"


def _read_samples(document: Mapping[str, Any]) -> list[Sample]:
    identity, kept_filter = str(document["doc_id"]), str(document.get("filter", "none"))
    texts = document.get("filtered_resps") or [""]
    shown = texts[0] if isinstance(texts[0], str) else ""
    samples = []
    for metric in document["metrics"]:
        value, name = document[metric], _metric_name(metric, kept_filter)
        if metric in _RATIOS and isinstance(value, list | tuple):
            nats = -float(value[0]) / (math.log(2) if metric == "bits_per_byte" else 1.0)
            samples.append(Sample(identity, identity, name, nats, float(value[1])))
        elif isinstance(value, bool | int | float):
            # of a perplexity by document lm-eval keeps the log-likelihood
            signed = -float(value) if metric in METRICS and METRICS[metric].form == "exp_ratio" else float(value)
            samples.append(Sample(identity, identity, name, signed, shown=shown))
    return samples

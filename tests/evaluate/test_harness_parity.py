"""Tasks of lm-eval by our scorers give the figures of its own model class, and at every batch size the same ones."""

import json

import pytest

from phalanx.errors import ConfigError
from phalanx.evaluate.scorer import LocalScorer
from phalanx.serve import TextModel
from tiny_edge_models import write_model

pytestmark = pytest.mark.slow
lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")

WORDS = ["owner", "keys", "pipeline", "1234", "anyone", "naïve", "don't tell", "3.14"]
ROWS = [
    {
        "id": number,
        "question": f"who keeps the {WORDS[number % 8]} of the {WORDS[(number + 3) % 8]}?",
        "choices": [WORDS[(number + step) % 8] for step in (1, 2, 5)],
        "label": number % 3,
        "flag": number % 2,
        "text": " ".join(WORDS[(number * step) % 8] for step in range(1, 12 + 30 * (number % 4))),
        "before": f"the {WORDS[number % 8]} of ",
        "answer": WORDS[(number + 1) % 8],
    }
    for number in range(12)
]
SHARED = {"dataset_path": "json", "test_split": "test", "output_type": "multiple_choice", "metadata": {"version": 1}}
CHOICE = {"doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_target": "label", "doc_to_choice": "{{choices}}"}
BY_CHOICE = {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
WRITTEN = {"output_type": "generate_until", "doc_to_text": "Q: {{question}}\nA:", "doc_to_target": "{{answer}}"}
STOPS = {"until": ["\n", "e"], "max_gen_toks": 12, "do_sample": False}
EXACT = {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}
FILTERS = [
    {
        "name": "first-word",
        "filter": [{"function": "regex", "regex_pattern": r"(\w+)", "fallback": "none"}, {"function": "take_first"}],
    }
]
TASKS = {
    "choices": {**CHOICE, **BY_CHOICE},
    "choices_few_shots": {**CHOICE, **BY_CHOICE, "num_fewshot": 2, "fewshot_split": "test"},
    "choices_no_delimiter": {**CHOICE, **BY_CHOICE, "target_delimiter": ""},
    "choices_brier": {**CHOICE, "metric_list": [{"metric": "brier_score", "aggregation": "brier_score"}]},
    "yes_no": {
        "doc_to_text": "{{question}} true or false?",
        "doc_to_target": "flag",
        "doc_to_choice": ["false", "true"],
        "metric_list": [{"metric": "acc"}, {"metric": "f1", "aggregation": "f1"}],
    },
    "contexts": {
        "doc_to_text": "label",
        "doc_to_choice": "{{[before ~ choices[0], before ~ choices[1], before ~ choices[2]]}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text}}",
        "doc_to_target": " {{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity"}, {"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
    "written": {**WRITTEN, **EXACT, "generation_kwargs": STOPS},
    "written_filtered": {**WRITTEN, **EXACT, "generation_kwargs": STOPS, "filter_list": FILTERS},
}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request, tmp_path_factory):
    return TextModel(write_model(tmp_path_factory.mktemp("models") / "m", request.param))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, settings in TASKS.items():
        files = {"dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
        # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **SHARED, **files, **settings}))
    return folder


def ours(model, folder, names=tuple(TASKS), batch=4, window=96, **options):
    from phalanx.evaluate.harness_tasks import HarnessModel, run_tasks

    scorer = LocalScorer(model, batch=batch, window=window)
    harness = HarnessModel(scorer, scorer.full_backend, "tiny", scorer.render_chat)
    results = run_tasks(harness, names, folder, 0, None, **options)
    return {f"{suite.name}.{figure.metric}": figure for suite in results for figure in suite.figures}


def theirs(model, folder, chat=False):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    # one row at a time: on these rows its own rolling figures differ between batch 1 and 3, by .8 %
    lm = HFLM(pretrained=model.module, tokenizer=model.tokenizer, batch_size=1, max_length=96)
    seeds = {f"{kind}_seed": 0 for kind in ("random", "numpy_random", "torch_random", "fewshot_random")}
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = simple_evaluate(
        lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, apply_chat_template=chat, **seeds
    )["results"]
    figures = {}
    for task, values in results.items():
        for key, value in values.items():
            metric, _, kept = key.partition(",")
            if kept and "_stderr" not in metric:
                figures[f"{task}.{metric}" + ("" if kept == "none" else f"/{kept}")] = value
    return figures


@pytest.mark.parametrize("chat", [False, True])
def test_figures_equal_those_of_its_own_model_class(model, folder, chat):
    expected = theirs(model, folder, chat)

    figures = ours(model, folder, chat=chat)

    assert figures.keys() == expected.keys()
    assert len({name.partition(".")[0] for name in figures}) == len(TASKS) >= 8
    for name, value in expected.items():
        assert figures[name].value == pytest.approx(value, rel=1e-6, abs=1e-6), name


def test_neither_batch_nor_template_files_change_a_figure(model, folder):
    one, three, eight = (ours(model, folder, batch=batch) for batch in (1, 3, 8))

    for name, figure in one.items():
        assert three[name].value == pytest.approx(figure.value, rel=1e-6)
        assert eight[name].value == pytest.approx(figure.value, rel=1e-6)
        assert figure.n >= len(ROWS)


def test_the_order_of_documents_changes_no_figure(model, folder, tmp_path):
    # which rows are the shots of a task depends on their order, by lm-eval's own rules
    names = [name for name in TASKS if name != "choices_few_shots"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(ROWS)))
    for name in names:
        text = (folder / f"{name}.yaml").read_text().replace(str(folder), str(tmp_path))
        (tmp_path / f"{name}.yaml").write_text(text)

    forwards, backwards = ours(model, folder, names), ours(model, tmp_path, names)

    for name, figure in forwards.items():
        assert backwards[name].value == pytest.approx(figure.value, rel=1e-6), name


def test_documents_are_longer_than_the_window(model):
    lengths = [len(model.tokenizer(row["text"])["input_ids"]) for row in ROWS]

    assert max(lengths) > 2 * 96 > min(lengths)


def test_means_have_intervals(model, folder):
    figures = ours(model, folder, ["choices", "rolling", "written"])

    for name in ("choices.acc", "rolling.word_perplexity", "rolling.bits_per_byte", "written.exact_match"):
        assert figures[name].low <= figures[name].value <= figures[name].high


def test_code_in_task_files_is_not_run_unasked(model, folder, tmp_path):
    from phalanx.evaluate.harness_tasks import check_task_files

    assert len(check_task_files(folder, own_code=False)) == 64
    (tmp_path / "task.yaml").write_text("task: t\ndoc_to_text: !function utils.steal\n")
    with pytest.raises(ConfigError, match="--own-code"):
        check_task_files(tmp_path, own_code=False)
    (tmp_path / "task.yaml").unlink()
    (tmp_path / "utils.py").write_text("")
    with pytest.raises(ConfigError, match="is code that lm-eval would run"):
        check_task_files(tmp_path, own_code=False)


def test_a_task_that_is_not_there_is_named(model, folder):
    with pytest.raises(ConfigError, match="choices: choices, "):
        ours(model, folder, ["mmlu"])

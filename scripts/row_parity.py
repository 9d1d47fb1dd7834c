"""Write TRL's rows of the awkward rows of ``tests/parity_rows.py``: ``PYTHON scripts/row_parity.py > OUT.json``.

PYTHON is an interpreter with TRL and datasets. The rows go through the trainers' own preparation, one by one, as Python
objects: in an Arrow table the fields of one message would be those of all others, as nulls. Nothing of this package is
imported.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))


class RowList(list[dict[str, Any]]):
    """Rows with what trainers ask of a data set."""

    @property
    def column_names(self) -> list[str]:
        """Names of the fields."""
        return list(self[0])

    def map(self, function: Any, fn_kwargs: dict[str, Any] | None = None, **_others: Any) -> "RowList":
        """Apply a function to each row; its fields are added."""
        return RowList({**row, **function(dict(row), **(fn_kwargs or {}))} for row in self)


def main(out: TextIO) -> None:
    """Write the digests of all rows."""
    makes, rows, readers = (importlib.import_module(name) for name in ("parity_makes", "parity_rows", "parity_readers"))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in makes.MAKES.items():
            make.write(Path(folder, name))
            trainer = TrlRows(Path(folder, name), make.marked_template)
            found[name] = {
                objective: {
                    row: readers.digest_of(trainer.rows(objective, rows.row_of(row, make.end))) for row in rows.ROWS
                }
                for objective in readers.OBJECTIVES
            }
    versions = {name: importlib.import_module(name).__version__ for name in ("trl", "transformers", "tokenizers")}
    told = importlib.import_module("provenance").provenance("row_parity.py", "row-parity-trl")
    json.dump({**told, "versions": versions, "rows": found}, out, indent=1)
    out.write("\n")


class TrlRows:
    """TRL's preparation with a tokenizer directory.

    Args:
        directory: In the hub's layout.
        marked_template: Its chat template with what the assistant writes marked.
    """

    def __init__(self, directory: Path, marked_template: str) -> None:
        self._trl = importlib.import_module("trl")
        transformers: Any = importlib.import_module("transformers")
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self._marked = marked_template
        self._messages_of = importlib.import_module("parity_readers").messages_of

    def rows(self, objective: str, row: dict[str, Any]) -> Any:
        """Return the rows of an objective, each as ids and flags of what is learned; "refused" where it fails."""
        errors = (
            importlib.import_module("jinja2.exceptions").TemplateError,
            TypeError,
            ValueError,
            IndexError,
            RuntimeError,
        )
        try:
            return getattr(self, f"_{objective}")(row)
        except errors:
            return "refused"

    def _prepared(self, kind: str, row: dict[str, Any], **settings: Any) -> dict[str, Any]:
        trainer = getattr(self._trl, f"{kind}Trainer")
        own = SimpleNamespace(_tokenizer=self._tokenizer, chat_template=None, calculate_KL=False)
        own.completion_only_loss = None
        own.__dict__.update({name: settings.pop(name) for name in ("chat_template",) if name in settings})
        base = {"dataset_num_proc": None, "max_length": None, "dataset_text_field": "text", "eos_token": None}
        args = SimpleNamespace(
            **{**base, "assistant_only_loss": False, "packing": False, "shuffle_dataset": False}, **settings
        )
        arguments = [RowList([row]), self._tokenizer, args]
        if kind == "SFT":
            args.assistant_only_loss = True
            arguments += [False, None]
        found: dict[str, Any] = trainer._prepare_dataset(own, *arguments, "rows")[0]
        return found

    def _sft(self, row: dict[str, Any]) -> Any:
        plain = {"messages": self._messages_of(row), **({"tools": row["tools"]} if "tools" in row else {})}
        found = self._prepared("SFT", plain, chat_template=self._marked)
        return [(found["input_ids"], [int(label != -100) for label in found["labels"]])]

    def _pair(self, row: dict[str, Any]) -> dict[str, Any]:
        if not row.get("whole"):
            return {name: row[name] for name in ("prompt", "chosen", "rejected", "tools") if name in row}
        return {name: [*row["prompt"], *row[name]] for name in ("chosen", "rejected")}

    def _dpo(self, row: dict[str, Any]) -> Any:
        found = self._prepared("DPO", self._pair(row))
        prompt = found["prompt_ids"]
        sides = [found["chosen_ids"], found["rejected_ids"]]
        return [([*prompt, *side], [0] * len(prompt) + [1] * len(side)) for side in sides]

    def _kto(self, row: dict[str, Any]) -> Any:
        made = []
        for side in ("chosen", "rejected"):
            single = {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            found = self._prepared("KTO", single | ({"tools": row["tools"]} if "tools" in row else {}))
            prompt, answer = found["prompt_ids"], found["completion_ids"]
            made.append(([*prompt, *answer], [0] * len(prompt) + [1] * len(answer)))
        return made

    def _reward(self, row: dict[str, Any]) -> Any:
        found = self._prepared("Reward", self._pair(row))
        return [(found[name], [1] * len(found[name])) for name in ("chosen_ids", "rejected_ids")]

    def _grpo(self, row: dict[str, Any]) -> Any:
        own = SimpleNamespace(_is_vlm=False, environment_factories=None, processing_class=self._tokenizer)
        own.__dict__.update(tools=row.get("tools"), chat_template=None, chat_template_kwargs={})
        ids = self._trl.GRPOTrainer._tokenize_prompts(own, [row["prompt"]])[0][0]
        return [(ids, [0] * len(ids))]


if __name__ == "__main__":
    main(sys.stdout)

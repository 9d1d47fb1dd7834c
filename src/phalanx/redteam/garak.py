"""garak runs from an environment of its own against a server; unjudged answers are a column of its counts."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from phalanx.errors import InputError, TransportError
from phalanx.security.privacy.leakage import wilson_interval

OFFLINE_PROBES = (
    *("promptinject", "encoding", "dan", "latentinjection", "malwaregen", "donotanswer", "goodside", "leakreplay"),
    *("suffix", "grandma", "divergence", "apikey", "glitch", "snowball", "misleading", "phrasing", "web_injection"),
    *("ansiescape", "exploitation", "continuation", "badchars", "dra", "doctor", "lmrc"),
)
"""Probes that need no download."""
_MAX_REPORT_BYTES = 1 << 28


@dataclass(frozen=True)
class GarakRow:
    """One probe under one detector.

    Attributes:
        failed: Answers that the detector holds against the model.
        unjudged: Answers that it could not judge; never counted as passed.
    """

    probe: str
    detector: str
    passed: int
    failed: int
    unjudged: int
    HEADS: ClassVar[tuple[str, ...]] = ("probe", "detector", "passed", "failed", "not judged", "failed share")

    @property
    def cells(self) -> list[str]:
        """One row of a table."""
        judged = self.passed + self.failed
        low, high = wilson_interval(self.failed, judged)
        share = f"{self.failed / judged:.2f} ({low:.2f} to {high:.2f})" if judged else "not judged"
        return [self.probe, self.detector, str(self.passed), str(self.failed), str(self.unjudged), share]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        counts = {"passed": self.passed, "failed": self.failed, "not_judged": self.unjudged}
        return {"probe": self.probe, "detector": self.detector, **counts}


def run_garak(
    environment: Path, url: str, model: str, key: str, probes: Sequence[str] = OFFLINE_PROBES, timeout_s: float = 7200.0
) -> list[GarakRow]:
    """Run garak against chat completions and read its report.

    It runs as a process of its own, by the interpreter of its own environment; of this one it is given nothing but the
    address and the key.

    Args:
        environment: Directory of its virtual environment.
        url: Base address of the server.

    Returns:
        Its evaluations; a probe without any, such as one that this garak does not have, is a row that was not judged.
    """
    python = environment / "bin" / "python"
    if not python.is_file():
        raise InputError(f"{environment}: has no bin/python; give the virtual environment that garak is installed in")
    with tempfile.TemporaryDirectory(prefix="phalanx-garak-") as scratch:
        home = Path(scratch)
        config = home / "generator.json"
        config.write_text(json.dumps(_rest_settings(url, model)))
        command = [str(python), "-m", "garak", "--target_type", "rest", "--generator_option_file", str(config)]
        command += ["--probes", ",".join(probes), "--report_prefix", str(home / "report"), "--skip_unknown"]
        environ = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(home),
            "XDG_DATA_HOME": str(home),
            "REST_API_KEY": key,
        }
        environ |= {"HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}
        try:
            ended = subprocess.run(  # noqa: S603 - the caller names the environment
                command, env=environ, cwd=home, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise TransportError(f"garak: did not end ({exc}); name fewer probes") from exc
        # its hits, where there are any, are in a file of their own beside it
        reports = sorted(home.rglob("*.report.jsonl"))
        if ended.returncode or not reports:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1][:300]
            raise TransportError(f"garak: ended with {ended.returncode} and {len(reports)} reports: {last}")
        if reports[0].stat().st_size > _MAX_REPORT_BYTES:
            raise TransportError(f"garak: its report has more than {_MAX_REPORT_BYTES} bytes")
        rows = read_garak_rows(reports[0].read_text(encoding="utf-8", errors="replace").splitlines())
        judged = {row.probe for row in rows}
        absent = (name for name in probes if not any(f"{probe}.".startswith(f"{name}.") for probe in judged))
        return [*rows, *(GarakRow(name, "", 0, 0, 0) for name in absent)]


def read_garak_rows(lines: Iterable[str]) -> list[GarakRow]:
    """Read the evaluations of a report; the other lines hold prompts and answers.

    Raises:
        TransportError: A line is no JSON, or an evaluation has no counts.
    """
    rows = []
    for number, text in enumerate(lines, start=1):
        try:
            record = json.loads(text)
            if record.get("entry_type") != "eval":
                continue
            passed, total = int(record["passed"]), int(record.get("total_evaluated", record.get("total", 0)))
            judged = int(record["fails"]) + passed if "fails" in record else total
            unjudged = int(record.get("nones", max(0, int(record.get("total_processed", total)) - judged)))
            rows.append(GarakRow(str(record["probe"]), str(record["detector"]), passed, judged - passed, unjudged))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise TransportError(f"garak: line {number} of its report is malformed: {exc!r:.80}") from exc
    return rows


def _rest_settings(url: str, model: str) -> dict[str, Any]:
    chat = {"model": model, "messages": [{"role": "user", "content": "$INPUT"}], "max_tokens": 128}
    return {
        "rest": {
            "RestGenerator": {
                "name": model,
                "uri": f"{url.rstrip('/').removesuffix('/v1')}/v1/chat/completions",
                "method": "post",
                "headers": {"Content-Type": "application/json", "Authorization": "Bearer $KEY"},
                "req_template_json_object": chat,
                "response_json": True,
                "response_json_field": "$.choices[0].message.content",
                "request_timeout": 120,
            }
        }
    }

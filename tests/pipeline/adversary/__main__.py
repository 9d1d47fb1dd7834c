"""Go on with the search of the adversary: `python tests/pipeline/adversary --cpu-minutes 30`.

The account is a file that is committed (`benchmarks/results/adversary.json`). Each run goes on where the last one
ended, setting by setting, the one with the least CPU first; SIGINT and SIGTERM end it after the present schedule.

Exit codes: 0 nothing found, 1 a finding is in the account, 2 the command line is wrong.
"""

import argparse
import gc
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
RECORD = ROOT / "benchmarks" / "results" / "adversary.json"
SLICE_S = 20.0
"""Seconds of CPU in one setting before the one that has had the least is next, and the account is written."""

sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402 - `turns` lies a folder above
from account import LISTS, Account, Part, SettingRecord, digest_sources, short_text  # noqa: E402
from lean import SharedParts  # noqa: E402
from playing import Theatre  # noqa: E402
from searching import SETTINGS, Finding, Search, Setting, describe  # noqa: E402


class Player:
    """Plays slices of a search until it is asked to end."""

    def __init__(self, account: Account, path: Path, commit: str, theatre: Theatre) -> None:
        self._account, self._path, self._commit, self._theatre = account, path, commit, theatre
        self._searches: dict[Setting, Search] = {}
        self._is_asked_to_end = False

    def end_soon(self, number: int, frame: FrameType | None) -> None:
        """End after the present schedule: a signal's handler."""
        del number, frame
        self._is_asked_to_end = True

    def play(self, cpu_s: float, only: str, lists: Sequence[str]) -> int:
        """Play these lists for so many seconds of CPU; returns the number of new findings."""
        part = Part(self._commit)
        self._account.parts.append(part)
        began, settings = time.process_time(), [setting for setting in SETTINGS if only in setting.company]
        while settings and not self._is_asked_to_end and time.process_time() - began < cpu_s:
            setting = min(settings, key=lambda each: self._record_of(each).cpu_s)
            left_s = cpu_s - (time.process_time() - began)
            if not self._play_slice(setting, part, min(SLICE_S, left_s), lists):
                settings.remove(setting)
            self._account.write(self._path)
            # what a company leaves behind hangs together in circles
            gc.collect()
        return part.findings

    def _record_of(self, setting: Setting) -> SettingRecord:
        return self._account.settings.setdefault(f"{setting.company} / {setting.insider}", SettingRecord())

    def _play_slice(self, setting: Setting, part: Part, cpu_s: float, lists: Sequence[str]) -> bool:
        record, began, counted_s = self._record_of(setting), time.process_time(), part.cpu_s
        if setting not in self._searches:
            self._searches[setting] = Search(
                self._theatre, setting, note=self._note_finding, record=record, skips_alike=True
            )
        search, has_more = self._searches[setting], True
        while has_more and not self._is_asked_to_end and time.process_time() - began < cpu_s:
            has_more = search.play_next(lists)
        passed_s, searches = time.process_time() - began, self._searches.values()
        record.cpu_s += passed_s
        part.cpu_s = counted_s + passed_s
        part.schedules = sum(search.num_played for search in searches)
        part.pairs = sum(search.num_pairs for search in searches)
        part.traces = sum(search.num_traces for search in searches)
        return has_more

    def _note_finding(self, finding: Finding) -> None:
        if finding.sign not in self._account.findings:
            self._account.parts[-1].findings += 1
        schedule = short_text(finding.schedule)
        self._account.findings.setdefault(
            finding.sign, {"fault": finding.fault, "schedule": schedule, "commit": self._commit}
        )
        sys.stdout.write(f"{describe(finding)}\n")
        sys.stdout.flush()


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Read the command line and play."""
    parser = argparse.ArgumentParser(prog="adversary", description=__doc__.splitlines()[0])
    parser.add_argument("--cpu-minutes", type=float, default=10.0, help="how long; 10")
    parser.add_argument("--record", type=Path, default=RECORD, help=f"the account; {RECORD.relative_to(ROOT)}")
    parser.add_argument("--only", default="", help="companies with this in their name; all")
    parser.add_argument("--lists", nargs="+", choices=LISTS, default=LISTS, help="what is played; all")
    parser.add_argument("--join", type=Path, metavar="FILE", help="take in the account of another --only, and end")
    arguments = parser.parse_args()
    if _git("status", "--porcelain", "--", "src", "tests/pipeline"):
        parser.error("src or tests/pipeline has changes that are in no commit; commit them first")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    account = Account.open(arguments.record, digest_sources(ROOT))
    if arguments.join is not None:
        account.join(Account.open(arguments.join, account.protocol))
        account.write(arguments.record)
        sys.stdout.write(f"{account.sums()}\n")
        return 1 if account.findings else 0
    # what was imported lives to the end: no search for garbage is to look at it
    gc.freeze()
    parts = SharedParts()
    with tempfile.TemporaryDirectory() as directory, parts.put_in_place():
        player = Player(account, arguments.record, _git("rev-parse", "HEAD"), Theatre(Path(directory), parts))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, player.end_soon)
        num_findings = player.play(60 * arguments.cpu_minutes, arguments.only, arguments.lists)
    sys.stdout.write(f"{account.sums()}\n")
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())

"""What is started for a run of one domain, when it is started again, and what is refused."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.cli import run_command
from phalanx.config import canonical_json
from phalanx.errors import ConfigError
from phalanx.launch import DomainLaunch, Nodes, find_open_return, is_supervised_here, resumes_run, supervise_domain
from phalanx.launch.domain import StartSizes
from phalanx.launch.domain_local import LeadProcess
from phalanx.launch.domain_ray import ActorMachine, RayRanks, describe_domain_ray, rank_bundles, rank_environments
from phalanx.launch.domain_torchrun import check_nodes, domain_command, ranks_per_machine

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = ROOT / "examples" / "parallel.toml"
TWO = ("parallel.dp=2", "parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "parallel.zero=0")
ELASTIC = (*TWO, "parallel.min_dp=1", "parallel.max_dp=4")
SCHEDULE = ("parallel.sequence_parallel=false", "parallel.schedule='1f1b'", "parallel.activation_checkpointing='none'")


def domain(directory, *overrides, **options):
    return DomainLaunch(RUN_FILE, (*TWO, *SCHEDULE, *overrides), directory / "run", **options)


def begun(directory):
    (directory / "run").mkdir()
    (directory / "run" / "run.json").touch()
    (directory / "run" / "metrics.jsonl").write_text('{"step": 0}\n')
    return directory


def test_on_one_machine_nothing_of_torchruns_listens(tmp_path):
    words, environment = domain_command(domain(tmp_path), Nodes(), tmp_path)

    assert words[:6] == ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "3"]
    assert "store_type=file" in words
    assert words[words.index("phalanx") + 1] == "train"
    assert environment == {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PHALANX_GO_ON": "1",
        "PHALANX_MEETINGS": str(tmp_path),
    }


def test_machines_that_come_and_go_start_as_many_ranks_each(tmp_path):
    launch = domain(tmp_path, *ELASTIC[-2:], max_restarts=7)
    nodes = Nodes("1:4", "127.0.0.1:29400")

    check_nodes(launch, nodes)
    words, environment = domain_command(launch, nodes)

    assert words[:6] == ["--nnodes", "1:4", "--nproc-per-node", "1", "--max-restarts", "7"]
    assert words[words.index("--local-addr") + 1] == "127.0.0.1"
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


@pytest.mark.parametrize(
    ("nodes", "overrides", "words"),
    [
        (Nodes("2"), (), "add --rdzv-endpoint"),
        (Nodes("2", "8.8.8.8:29400"), (), "not the address of a private network"),
        (Nodes("two", "127.0.0.1:29400"), (), "expected a number"),
        (Nodes("3", "127.0.0.1:29400"), (), "2 ranks cannot be divided equally among 3 machines"),
        (Nodes("2:3", "127.0.0.1:29400"), ("parallel.max_dp=4",), "4 ranks cannot be divided equally"),
    ],
)
def test_machines_that_could_not_train_together_are_refused(tmp_path, nodes, overrides, words):
    with pytest.raises(ConfigError, match=words):
        check_nodes(domain(tmp_path, *overrides), nodes)


def test_a_public_endpoint_can_be_allowed(tmp_path):
    launch = domain(tmp_path, "parallel.unsafe_public_network=true")

    check_nodes(launch, Nodes("2", "8.8.8.8:29400"))

    assert ranks_per_machine(launch, Nodes("2", "8.8.8.8:29400")) == 1


def test_a_run_that_is_there_already_is_not_begun_again(tmp_path):
    begun(tmp_path)

    domain(tmp_path, resume=True).check_launch()
    with pytest.raises(ConfigError, match="already has a run; add --resume"):
        domain(tmp_path).check_launch()


@pytest.mark.parametrize("start", [supervise_domain, DomainLaunch.check_launch], ids=["train", "launch"])
@pytest.mark.parametrize("name", ["a file", "n" * 300], ids=["file", "long"])
def test_what_cannot_be_a_run_directory_is_refused_before_anything_starts(tmp_path, start, name):
    (tmp_path / "a file").touch()
    launch = DomainLaunch(RUN_FILE, (*TWO, *SCHEDULE), tmp_path / name)

    with pytest.raises(ConfigError, match="cannot be used as a run directory"):
        start(launch)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"RANK": "0"}, False),
        ({"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"RANK": "0", "PHALANX_GO_ON": "1"}, True),
        ({"PHALANX_GO_ON": "1"}, False),
    ],
)
def test_only_ranks_that_an_engine_started_again_go_on_by_themselves(tmp_path, environment, expected):
    assert resumes_run(begun(tmp_path) / "run", environment) is expected
    assert resumes_run(tmp_path / "elsewhere", environment) is False


class NotedStarts(LeadProcess):
    """A lead that starts nothing, and notes what it would have started with."""

    def start_command(self, arguments, environment):
        ranks = arguments.index("--ranks")
        self.words = arguments[arguments.index("--run-dir") + 2 : ranks]


def go_back(directory, step):
    with (directory / "run" / "events.jsonl").open("ab") as log:
        log.write(canonical_json({"body": {"step": step}, "kind": "older_accepted", "sequence": 9}) + b"\n")


def test_a_rank_0_that_died_before_it_went_back_is_asked_again_to_and_then_no_more(tmp_path):
    begun(tmp_path)
    # an earlier session has gone back to the same step
    go_back(tmp_path, 4)
    lead = NotedStarts(domain(tmp_path, resume=True), from_step=4)

    for _ in range(2):
        lead.start_process()
        assert lead.words == ("--resume", "--from-step", "4")
    go_back(tmp_path, 4)
    lead.start_process()
    assert lead.words == ("--resume",)


def test_torchrun_which_repeats_the_command_line_takes_no_run_back_twice(tmp_path):
    run_dir, again = begun(tmp_path) / "run", {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}

    assert find_open_return(run_dir, 4, again) == 4
    go_back(tmp_path, 4)
    assert find_open_return(run_dir, 4, again) is None
    assert find_open_return(run_dir, 4, {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}) == 4


def test_train_keeps_its_ranks_unless_somebody_else_does(tmp_path):
    here = domain(tmp_path).run_config

    assert is_supervised_here(here, {})
    assert not is_supervised_here(here, {"RANK": "0"})
    assert not is_supervised_here(here, {"PHALANX_PARENT": "17"})
    assert not is_supervised_here(domain(tmp_path, "parallel.restarts=0").run_config, {})


def test_a_rank_that_is_lost_now_and_then_comes_back():
    sizes = StartSizes([4, 2, 1], 4)

    assert [sizes.next_size(newest) for newest in (0, 0, 10, 20, 20, 30)] == [4] * 6


def test_when_nothing_was_saved_twice_in_a_row_fewer_ranks_are_tried():
    sizes = StartSizes([4, 2, 1], 4)

    assert [sizes.next_size(newest) for newest in (5, 5, 5, 5, 5, 5, 5)] == [4, 4, 2, 2, 1, 1, 1]


def test_each_rank_is_told_its_place_and_where_all_meet():
    one, other = ActorMachine("a", "10.0.0.1"), ActorMachine("b", "10.0.0.2")

    found = rank_environments([one, other, other], 1234)

    assert [place["RANK"] for place in found] == ["0", "1", "2"]
    assert [place["LOCAL_WORLD_SIZE"] for place in found] == ["1", "2", "2"]
    assert {place["MASTER_ADDR"] for place in found} == {"10.0.0.1"}
    # Ray shows each actor one device
    assert {place["LOCAL_RANK"] for place in found} == {"0"}


def test_ranks_of_one_machine_meet_on_loopback():
    machine = ActorMachine("a", "10.0.0.1")

    assert {place["MASTER_ADDR"] for place in rank_environments([machine, machine], 1)} == {"127.0.0.1"}


def test_rank_0_is_placed_where_the_run_directory_is(tmp_path):
    launch = domain(tmp_path, "train.device='cuda'", "train.threads=3")

    first, second = rank_bundles(launch, 2, "10.0.0.1")

    assert first == {"CPU": 3.0, "GPU": 1.0, "node:10.0.0.1": 0.001}
    assert second == {"CPU": 3.0, "GPU": 1.0}
    assert "placement group PACK" in describe_domain_ray(launch, None)[0]


class Ray:
    """A cluster with actors that answer what they are told to; a question is its own answer."""

    exceptions = SimpleNamespace(RayActorError=ZeroDivisionError)

    def __init__(self, machines=1):
        self.machines = machines

    def wait(self, questions, timeout):
        return questions, []

    def get(self, question):
        return question()

    def nodes(self):
        return [{"Alive": True}] * self.machines


class Actor:
    """Answers with one code after the other, and with the last one for ever."""

    def __init__(self, *codes):
        self.codes = list(codes)
        self.asked_to_end = False
        self.poll = SimpleNamespace(remote=lambda: self.answer)
        self.ask_to_end = SimpleNamespace(remote=self.end)

    def answer(self):
        code = self.codes[0] if len(self.codes) == 1 else self.codes.pop(0)
        if code == "gone":
            raise ZeroDivisionError
        return code

    def end(self):
        self.asked_to_end = True
        self.codes = [130]


def crew(launch, ray, *actors, sizes=(2,)):
    one = RayRanks(ray, launch, list(sizes))
    one._actors, one.world = list(actors), len(actors)
    return one


def nobody():
    return SimpleNamespace(notice_count=0)


def test_a_run_is_over_when_every_rank_is(tmp_path):
    assert crew(domain(tmp_path), Ray(), Actor(None, 0), Actor(None, None, 0)).watch_ranks(nobody()) == 0


@pytest.mark.parametrize(("codes", "expected"), [((-9, 4), -9), ((None, "gone"), -9)])
def test_a_lost_rank_ends_the_others(tmp_path, codes, expected, monkeypatch):
    monkeypatch.setattr("phalanx.launch.domain_ray._LAST_WORDS_S", 0.0)

    found = crew(domain(tmp_path), Ray(), *[Actor(code) for code in codes]).watch_ranks(nobody())

    assert found == expected


def test_a_reason_that_would_come_again_counts_more_than_what_follows_from_it(tmp_path):
    found = crew(domain(tmp_path), Ray(), Actor(None, None, 2), Actor(4)).watch_ranks(nobody())

    assert found == 2


def test_after_a_notice_rank_0_is_asked_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.launch.domain_ray._LAST_WORDS_S", 0.0)
    lead, other = Actor(None), Actor(None)
    one = crew(domain(tmp_path), Ray(), lead, other)

    code = one.watch_ranks(SimpleNamespace(notice_count=1))

    assert code == 130
    assert (lead.asked_to_end, other.asked_to_end) == (True, False)


def test_a_machine_that_came_is_used_once_something_was_saved(tmp_path):
    launch, ray = domain(tmp_path, *ELASTIC[-2:]), Ray(machines=1)
    one = crew(launch, ray, Actor(None), sizes=(2, 1))
    assert not one._should_grow()

    ray.machines = 2
    assert not one._should_grow()
    (tmp_path / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)

    assert one._should_grow()
    assert one.watch_ranks(nobody()) is None


@pytest.mark.parametrize("engine", ["torchrun", "ray"])
def test_a_dry_run_prints_what_would_be_run(tmp_path, capsys, engine):
    settings = [word for one in (*TWO, *SCHEDULE) for word in ("--set", one)]
    command = ["launch", str(RUN_FILE), "--engine", engine, "--run-dir", str(tmp_path / "run"), *settings]

    assert run_command([*command, "--dry-run"]) == 0

    assert "phalanx train" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_options_for_parties_are_refused_for_a_domain(capsys):
    assert run_command(["launch", str(RUN_FILE), "--party", "alice"]) == 2

    assert "--party needs a run with [pipeline]" in capsys.readouterr().err

"""One step is one trace, whoever makes it, and a collector that hangs or refuses costs spans alone."""

import pytest
from alert_servers import hanging_server, http_receiver

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from phalanx.serve.observe.config import TraceConfig
from phalanx.watch.step_traces import StepTraces, step_trace_id
from watched_run import RUN_ID, metric_row


def send(endpoint, rows, **changes):
    lost = []
    traces = StepTraces(TraceConfig(endpoint=endpoint, **changes), RUN_ID, lost.append)
    traces.send_steps(rows)
    traces.close()
    return sum(lost)


def read_spans(posts):
    spans = []
    while not posts.empty():
        request = ExportTraceServiceRequest.FromString(posts.get()[2])
        spans += [span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans]
    return spans


def test_a_step_is_a_trace_with_a_span_for_each_phase():
    with http_receiver() as (url, posts):
        lost = send(f"{url}/v1/traces", [metric_row(3, time=1000.0), metric_row(4, time=1002.0)])
        spans = read_spans(posts)

    assert lost == 0
    roots = [span for span in spans if span.name == "phalanx.step"]
    assert [int.from_bytes(root.trace_id, "big") for root in roots] == [step_trace_id(RUN_ID, step) for step in (3, 4)]
    first = [span for span in spans if span.trace_id == roots[0].trace_id and span is not roots[0]]
    assert [span.name for span in first] == ["phalanx.phase.compute", "phalanx.phase.wait", "phalanx.phase.send"]
    assert {span.parent_span_id for span in first} == {roots[0].span_id}
    assert roots[0].end_time_unix_nano - roots[0].start_time_unix_nano == pytest.approx(1.9e9, abs=1000)
    attributes = {item.key: item.value for item in roots[0].attributes}
    assert attributes["phalanx.step"].int_value == 3
    assert attributes["phalanx.link.worker-1>worker-2"].int_value == 7_895_142


def test_another_party_finds_the_trace_of_a_step_by_itself():
    assert step_trace_id(RUN_ID, 3) == step_trace_id(RUN_ID, 3)
    assert len({step_trace_id(run, step) for run in (RUN_ID, "other") for step in range(50)}) == 100


def test_phases_of_several_parties_stand_side_by_side():
    row = metric_row(3, time=1000.0, phases={"worker-1": {"compute": 1.0}, "worker-2": {"compute": 0.5}})
    with http_receiver() as (url, posts):
        send(f"{url}/v1/traces", [row])
        spans = [span for span in read_spans(posts) if span.name == "phalanx.phase.compute"]

    parties = {item.value.string_value for span in spans for item in span.attributes if item.key == "phalanx.party"}
    assert parties == {"worker-1", "worker-2"}
    assert len({span.start_time_unix_nano for span in spans}) == 1


def reports(step, **parties):
    return {name: {"step": step, "seconds": seconds} for name, seconds in parties.items()}


def test_workers_add_their_spans_to_the_trace_of_the_step_that_they_report():
    """Workers report a step after it was applied: with the line of the next one, and the last step in the summary."""
    first = metric_row(3, time=1000.0)
    second = metric_row(4, time=1002.0, party_phases=reports(3, one={"wait": 9.0, "compute": 1.5}, two={"audit": 0.25}))
    with http_receiver() as (url, posts):
        traces = StepTraces(TraceConfig(endpoint=f"{url}/v1/traces"), RUN_ID, lambda _: None)
        traces.send_steps([first, second])
        for _ in range(2):
            traces.send_last_parties({"party_phases": reports(4, one={"compute": 1.0})})
        traces.close()
        spans = read_spans(posts)

    roots = {span.trace_id: span for span in spans if span.name == "phalanx.step"}
    parties = [span for span in spans if span.name == "phalanx.party"]
    assert len(roots) == 2
    assert {len(root.parent_span_id) for root in roots.values()} == {0}
    assert [int.from_bytes(span.trace_id, "big") for span in parties] == [step_trace_id(RUN_ID, n) for n in (3, 3, 4)]
    assert all(span.parent_span_id == roots[span.trace_id].span_id for span in parties)
    assert all(span.start_time_unix_nano == roots[span.trace_id].start_time_unix_nano for span in parties)
    phases = [span for span in spans if span.parent_span_id == parties[0].span_id]
    # waiting beyond the step's own time is that between two steps
    seconds = [(s.name, round((s.end_time_unix_nano - s.start_time_unix_nano) / 1e9, 3)) for s in phases]
    assert seconds == [("phalanx.phase.wait", 0.4), ("phalanx.phase.compute", 1.5)]
    assert {item.key for item in parties[0].attributes} == {"phalanx.party", "phalanx.step", "phalanx.claimed"}


@pytest.mark.parametrize(
    "claims",
    [
        reports(2, one={"compute": 1.0}),
        reports(3, one=[1.0]),
        {"one": 3},
        ["one"],
        reports("3", one={"compute": 1.0}),
        {"one": {"step": 3}},
    ],
)
def test_what_a_worker_claims_of_another_step_or_in_another_form_is_no_span(claims):
    with http_receiver() as (url, posts):
        send(f"{url}/v1/traces", [metric_row(3), metric_row(4, party_phases=claims)])
        assert [span.name for span in read_spans(posts)].count("phalanx.party") == 0


def test_no_name_and_no_number_of_a_worker_breaks_a_trace():
    seconds = {"compute\x1b[2J": float("nan"), "wait": -1.0, "send": True, "x" * 999: 0.5}
    rows = [metric_row(3), metric_row(4, party_phases=reports(3, **{"\x1b[2J" + "y" * 999: seconds}))]
    with http_receiver() as (url, posts):
        send(f"{url}/v1/traces", rows)
        spans = read_spans(posts)

    names = [item.value.string_value for span in spans for item in span.attributes if item.key == "phalanx.party"]
    assert names
    assert all(len(name) <= 80 and name.isprintable() for name in names)


@pytest.mark.parametrize(
    "row", [{"step": 1}, metric_row(1, time=None), metric_row(1, wall_s=-1), metric_row(1, phases=[])]
)
def test_a_row_without_a_time_sends_nothing_or_its_step_alone(row):
    with http_receiver() as (url, posts):
        send(f"{url}/v1/traces", [row])
        assert len(read_spans(posts)) <= 1


def test_a_collector_that_refuses_is_counted():
    with http_receiver(status=400) as (url, _):
        assert send(f"{url}/v1/traces", [metric_row(3)]) == 4


def test_a_collector_that_hangs_loses_what_finds_no_place():
    lost = []
    with hanging_server() as port:
        traces = StepTraces(
            TraceConfig(endpoint=f"http://127.0.0.1:{port}/v1/traces", max_waiting=4), RUN_ID, lost.append
        )
        traces.send_steps(metric_row(step) for step in range(1000))
        # the rows were all taken while nothing was answered: the sink did not wait, and has not counted a refusal
        assert lost == []
    # its end closes the connection, so that the last export fails at once
    traces.close()
    # of thousands of spans no more were kept than those on their way and those that wait
    assert 0 < sum(lost) <= 2 * 4


def test_sites_of_a_round_are_spans_in_the_trace_of_that_very_round():
    """A round's own line has its sites, which claim how much of the measured time was training."""
    sites = reports(3, north={"train": 1.0, "transfer": 0.25}, south={"train": 0.5, "transfer": 0.5})
    with http_receiver() as (url, posts):
        send(f"{url}/v1/traces", [metric_row(3, party_phases=sites), metric_row(4)])
        spans = read_spans(posts)

    parties = [span for span in spans if span.name == "phalanx.party"]
    assert [int.from_bytes(span.trace_id, "big") for span in parties] == [step_trace_id(RUN_ID, 3)] * 2
    assert all(item.value.bool_value for span in parties for item in span.attributes if item.key == "phalanx.claimed")
    phases = [span.name for span in spans if span.parent_span_id == parties[0].span_id]
    assert phases == ["phalanx.phase.train", "phalanx.phase.transfer"]


def test_clients_that_the_process_itself_measured_claim_nothing():
    clients = {"client-0": {"step": 3, "seconds": {"front": 0.5}, "measured": True}}
    with http_receiver() as (url, posts):
        send(f"{url}/v1/traces", [metric_row(3, party_phases=clients)])
        (party,) = (span for span in read_spans(posts) if span.name == "phalanx.party")

    assert [item.value.bool_value for item in party.attributes if item.key == "phalanx.claimed"] == [False]

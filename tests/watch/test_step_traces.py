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

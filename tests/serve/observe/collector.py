"""A receiver of OTLP over HTTP, and of webhooks, that keeps what it was sent."""

import gzip
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Runs in a thread of the test; answers with `status`, or never while `silent` is set."""

    def __init__(self, status=200):
        self.bodies = queue.Queue()
        self.status = status
        self.silent = threading.Event()
        self.may_end = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.bodies.put((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
                if collector.silent.is_set():
                    collector.may_end.wait(120)
                self.send_response(collector.status)
                self.send_header("location", "http://127.0.0.1:1/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.may_end.set()
        self.server.shutdown()
        self.server.server_close()

    def next_json(self):
        return json.loads(self.bodies.get(timeout=120)[2])

    def next_spans(self):
        path, headers, body = self.bodies.get(timeout=120)
        assert path == "/v1/traces"
        assert headers["content-type"] == "application/x-protobuf"
        request = ExportTraceServiceRequest.FromString(body)
        return [
            (span, {item.key: value_of(item.value) for item in span.attributes})
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def value_of(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(part) for part in value.array_value.values]
    return getattr(value, kind)

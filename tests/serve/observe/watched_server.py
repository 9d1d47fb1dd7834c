"""What tests of a watched server ask of it."""

import httpx2

from phalanx.serve.observe import Gauge, ServerWatch, WatchedServer


def watch_of(access, config, **more):
    """What makes the watch of a server."""

    def make(request_log, pool):
        running = Gauge("phalanx_running_requests", "Texts.", ("engine",), lambda: {("tiny",): 0.0})
        server = WatchedServer(
            access,
            lambda: {card.digest: card.id for card in pool.cards},
            lambda: {card.id: card.digest for card in pool.cards},
            (running,),
            **more,
        )
        return ServerWatch(config, server, request_log)

    return make


def http_of(url, secret=None):
    headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
    return httpx2.Client(base_url=url, headers=headers, timeout=250, trust_env=False, verify=False)


def read_samples(url, secret):
    """Each series with its value."""
    with http_of(url, secret) as http:
        answer = http.get("/metrics")
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

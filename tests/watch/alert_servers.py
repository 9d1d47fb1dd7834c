"""Real servers for a test: a webhook, a collector of traces, a mail server, and one that takes and never answers."""

import contextlib
import http.server
import queue
import socket
import socketserver
import threading


@contextlib.contextmanager
def _running(server):
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def http_receiver(status=200):
    """Yield the address of a server, and a queue of (path, headers, body) of what was posted."""
    posts = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            posts.put((self.path, dict(self.headers), body))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with _running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}", posts


@contextlib.contextmanager
def mail_receiver():
    """Yield the port of an SMTP server, and a queue of whole messages."""
    mails = queue.Queue()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            self.wfile.write(b"220 test\r\n")
            while line := self.rfile.readline():
                verb = line.split()[0].upper() if line.split() else b""
                if verb == b"DATA":
                    self.wfile.write(b"354 go\r\n")
                    lines = []
                    while (part := self.rfile.readline()) not in (b".\r\n", b""):
                        lines.append(part)
                    mails.put(b"".join(lines).decode())
                self.wfile.write(b"221 bye\r\n" if verb == b"QUIT" else b"250 ok\r\n")
                if verb == b"QUIT":
                    return

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with _running(server):
        yield server.server_address[1], mails


@contextlib.contextmanager
def hanging_server():
    """Yield the port of a server that takes connections and never says a word."""
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stopped = threading.Event()

        def accept():
            while not stopped.is_set():
                with contextlib.suppress(OSError):
                    connections.append(listener.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stopped.set()
            with contextlib.suppress(OSError), socket.create_connection(listener.getsockname()):
                thread.join()
            for connection in connections:
                connection.close()

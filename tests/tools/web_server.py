"""A web server on this machine that answers as a test says."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOCAL = ["127.0.0.1/32"]
HTML = "text/html; charset=utf-8"


class Site:
    """Paths and what they answer: bytes with a content type, or a function of the handler."""

    def __init__(self):
        self.pages = {}
        self.requests = Counter()
        self.headers = []
        self.port = 0

    def page(self, path, body, content_type="text/plain", status=200, **headers):
        def answer(handler):
            handler.send_response(status)
            if content_type is not None:
                handler.send_header("Content-Type", content_type)
            for name, value in headers.items():
                handler.send_header(name.replace("_", "-"), value)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)

        self.pages[path] = answer

    def url(self, path="/", host="127.0.0.1"):
        return f"http://{host}:{self.port}{path}"


def _handler(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            site.requests[self.path] += 1
            site.headers.append(dict(self.headers))
            answer: Callable | None = site.pages.get(self.path)
            if answer is None:
                self.send_error(404)
                return
            with contextlib.suppress(ConnectionError):
                answer(self)

        def log_message(self, format, *args):
            pass

    return Handler


@contextlib.contextmanager
def serving(tls=None) -> Iterator[Site]:
    """A running site; ``tls``: an ssl context to speak https."""
    site = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(site))
    server.daemon_threads = True
    server.handle_error = lambda request, client_address: None
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    site.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

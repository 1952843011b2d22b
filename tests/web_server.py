"""A local web server for tests, which stores posted data and answers as configured."""

import http.server
import ssl
import threading
from contextlib import contextmanager


@contextmanager
def web_server(answer=lambda handler: handler.send_response(204), *, certificate=None):
    """Give the server's port and the list of what is posted to it: path, headers, body.

    `answer` is called with the handler of each request, before the headers of the answer end; `certificate` makes it speak TLS.
    """
    posted = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append((self.path, dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
            answer(self)
            self.end_headers()

        def do_GET(self):
            posted.append((self.path, dict(self.headers), None))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_):
            pass  # the client did not wait

    with Server(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server.server_address[1], posted
        finally:
            server.shutdown()
            thread.join()

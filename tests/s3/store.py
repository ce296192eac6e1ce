"""A real server of S3, moto's, with a proxy before it that checks every signature by botocore and makes the faults that a test asks for."""
import base64
import contextlib
import dataclasses
import http.client
import http.server
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
import typing
import urllib.parse
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
from running import BOUND, free_port

PACKAGES = ROOT / "build/python/s3"
ID, SECRET, REGION = "AKIATESTING", "se/cr+et:of=the test", "eu-north-7"


def import_botocore():
    sys.path.append(str(PACKAGES))
    import botocore.auth
    import botocore.awsrequest
    import botocore.credentials
    return botocore


@dataclasses.dataclass
class Fault:
    """What happens to requests that match: `act` gets the handler and the body, and says whether it has answered."""
    matches: str  # a regular expression for "METHOD PATH?QUERY"
    act: typing.Callable
    times: int = 1
    after: int = 0  # how many that match pass before
    hits: int = 0


def status(number, code="InternalError"):
    return lambda request, body: request.answer(number, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>made by the test</Message></Error>".encode())


def reset(request, body):
    """The connection breaks before anything was forwarded."""
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    request.close_connection = True
    return True


def lost(request, body):
    """The store does it, but the answer does not arrive."""
    request.forward(body)
    return reset(request, body)


def cut(request, body):
    """The answer ends in its middle."""
    done, headers, text = request.forward(body)
    request.send_response_only(done)
    for name, value in headers:
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(text[:len(text) // 2])
    request.close_connection = True
    return True


class Proxy(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, store_port, credentials):
        super().__init__(("127.0.0.1", 0), Handler)
        self.store_port, self.credentials = store_port, credentials  # secrets and tokens by id
        self.faults, self.requests, self.lock = [], [], threading.Lock()
        self.compares = False  # the checksums of what comes, as Amazon's does and moto's does not
        self.botocore = import_botocore()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        pass  # connections that a test breaks

    @contextlib.contextmanager
    def fault(self, *args, **more):
        fault = Fault(*args, **more)
        self.faults.append(fault)
        try:
            yield fault
        finally:
            self.faults.remove(fault)

    def wrong_signature(self, request):
        """Why the store would refuse a request, by another implementation of signatures than the one under test."""
        signed = re.fullmatch(r"AWS4-HMAC-SHA256 Credential=([^/]+)/\d+/([^/]+)/s3/aws4_request, ?SignedHeaders=([^,]+), ?Signature=(\w+)",
                              request.headers.get("Authorization", ""))
        if not signed:
            return "there is no signature"
        identity, region, names, signature = signed.groups()
        if identity not in self.credentials:
            return "nobody has this id"
        secret, token = self.credentials[identity]
        if request.headers.get("x-amz-security-token") != token:
            return "the token is another one"
        auth = self.botocore.auth.S3SigV4Auth(self.botocore.credentials.Credentials(identity, secret), "s3", region)
        headers = {name: request.headers[name] for name in names.split(";")}
        again = self.botocore.awsrequest.AWSRequest(request.command, f"http://{request.headers['Host']}{request.path}", headers=headers)
        again.context["timestamp"] = request.headers["x-amz-date"]
        wanted = auth.signature(auth.string_to_sign(again, auth.canonical_request(again)), again)
        return None if wanted == signature else "the signature is wrong"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *args):
        pass

    def answer(self, number, text, headers=()):
        self.send_response_only(number)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers) and number != 204:
            self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)
        return True

    def forward(self, body):
        store = http.client.HTTPConnection("127.0.0.1", self.server.store_port, timeout=60)
        store.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "expect"):
                store.putheader(name, value)
        store.endheaders(body)
        got = store.getresponse()
        text = got.read()
        store.close()
        dropped = ("connection", "transfer-encoding", "server", "date")
        return got.status, [(name, value) for name, value in got.getheaders() if name.lower() not in dropped], text

    def handle_request(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        line = f"{self.command} {urllib.parse.unquote(self.path)}"
        wrong = self.server.wrong_signature(self)
        with self.server.lock:
            self.server.requests.append(line)
            acts = []
            for fault in self.server.faults:
                if not re.search(fault.matches, line):
                    continue
                if fault.after > 0:
                    fault.after -= 1
                elif fault.hits < fault.times:
                    fault.hits += 1
                    acts.append(fault.act)
        if wrong:
            return self.answer(403, f"<Error><Code>SignatureDoesNotMatch</Code><Message>{wrong}</Message></Error>".encode())
        if not any(act(self, body) for act in acts):
            self.take(body)

    def take(self, body):
        told = self.headers.get("x-amz-checksum-crc32")
        is_checked = told and self.server.compares
        if is_checked and told != base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode():
            return self.answer(400, b"<Error><Code>BadDigest</Code></Error>")
        number, headers, text = self.forward(body)
        return self.answer(number, text, headers + ([("x-amz-checksum-crc32", told)] if is_checked else []))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request


@contextlib.contextmanager
def store(bucket, python=sys.executable):
    """Yields the proxy before a store that has one bucket."""
    port = free_port()
    environment = {"PYTHONPATH": str(PACKAGES), "PATH": "/usr/bin:/bin", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "HOME": "/nowhere"}
    server = subprocess.Popen([*BOUND, python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], env=environment,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    proxy = None
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                made = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                made.request("PUT", f"/{bucket}")
                if made.getresponse().status == 200:
                    break
            except OSError:
                pass
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("moto's server does not start")
            time.sleep(0.05)
        proxy = Proxy(port, {ID: (SECRET, None)})
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
    finally:
        if proxy:
            proxy.shutdown()
            proxy.server_close()
        server.kill()
        server.wait()

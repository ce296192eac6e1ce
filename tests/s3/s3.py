"""Runs and commands on paths s3://, against moto's server: saves and resumes, faults in the middle, and where settings come from.

s3.py TESSERA MNIST PART
"""
import http.server
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import unittest

from store import ID, REGION, ROOT, SECRET, cut, lost, reset, status, store

sys.path.append(str(ROOT / "tests/recipes"))
from recipe import Recipe, losses

TESSERA, MNIST = sys.argv[1:3]
OTHERS = re.compile("AWS_|https?_proxy$|all_proxy$", re.IGNORECASE)


class OnStore(Recipe):
    @classmethod
    def setUpClass(cls):
        cls.store = cls.enterClassContext(store("bucket"))

    def setUp(self):
        super().setUp()
        self.run_at = f"s3://bucket/{self.id().rpartition('.')[2]}"
        self.environment = {name: value for name, value in os.environ.items() if not OTHERS.match(name)} | {
            "HOME": str(self.folder), "AWS_ACCESS_KEY_ID": ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": self.store.url, "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "*"}

    def run_command(self, *command, status=0, **variables):
        environment = {name: value for name, value in (self.environment | variables).items() if value is not None}
        said = self.run_program(*command, status=status, env=environment, timeout=300)
        for text in (SECRET, "hidden"):
            self.assertNotIn(text, said)
        return said

    def ckpt(self, *words, **more):
        return self.run_command(TESSERA, "ckpt", *words, **more)

    def mnist(self, *flags, ranks=2):
        return [TESSERA, "launch", "-n", str(ranks), MNIST, "--fake-data", "--batch-size", "300", "--log-steps", "1", *map(str, flags)]

    def train(self, *flags, ranks=2, **more):
        return self.run_command(*self.mnist(*flags, ranks=ranks), **more)

    def losses(self, *flags, **more):
        file = self.folder / "losses.jsonl"
        file.unlink(missing_ok=True)
        self.train("--metrics", file, "--no-ckpt-consolidation", *flags, **more)
        return losses(map(json.loads, file.read_text().splitlines()))

    def model(self, megabytes, seed=0):
        """A safetensors file of two tensors."""
        rows = megabytes << 8
        header = json.dumps({name: {"dtype": "F32", "shape": [rows, 512], "data_offsets": [i * rows * 2048, (i + 1) * rows * 2048]}
                             for i, name in enumerate("ab")}).encode()
        file = self.folder / f"model-{seed}.safetensors"
        # Normal numbers: neither NaN nor infinite.
        file.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.5 + seed) * (rows * 1024))
        return file


class Checkpoints(OnStore):
    def test_run_resumes_with_the_losses_of_one_on_disk(self):
        expected = self.losses("--num-epochs", 2)
        self.train("--num-epochs", 1, "--ckpt-prefix", self.run_at, "--no-ckpt-consolidation")
        losses = self.losses("--num-epochs", 2, "--ckpt-prefix", self.run_at, "--resume")
        self.assertEqual(losses, expected[-len(losses):])
        self.assertEqual(len(losses) * 2, len(expected))
        said = self.train("--num-epochs", 3, "--ckpt-prefix", self.run_at, "--resume", ranks=3)
        self.assertIn("consolidated in " + self.run_at + "_consolidated.safetensors", said)

    def test_commands(self):
        model = self.model(1)
        first, second = f"{self.run_at}-step-000001", f"{self.run_at}-step-000002"
        self.ckpt("convert", model, first, "--to", "tessera", "--world", 2)
        self.ckpt("convert", first, second, "--to", "tessera", "--world", 3)
        self.assertIn("is whole: 3 files, 2 tensors", self.ckpt("verify", self.run_at))
        self.assertIn("512", self.ckpt("inspect", second))
        self.ckpt("diff", model, second)
        hub, file = f"{self.run_at}-hub", f"{self.run_at}.safetensors"
        self.ckpt("convert", second, hub, "--to", "hub", "--max-shard-size", "600KB")
        self.ckpt("diff", model, hub)
        self.ckpt("convert", hub, file, "--to", "safetensors")
        self.ckpt("diff", model, file)
        self.ckpt("consolidate", self.run_at)
        self.ckpt("diff", model, self.run_at + "_consolidated.safetensors")
        self.ckpt("convert", file, self.folder / "back.safetensors", "--to", "safetensors")
        self.ckpt("diff", model, self.folder / "back.safetensors")
        self.assertIn("in an object store", self.ckpt("convert", second, self.run_at + ".pth", "--to", "torch", status=1))
        self.ckpt("prune", self.run_at, "--keep-last", 1)
        self.ckpt("verify", first, status=1)
        self.assertIn("is whole", self.ckpt("verify", second))

    def test_names_are_any_text(self):
        place = f"s3://bucket/a b/ü+c&d=<x>~(*'!)%2F;$,@"
        self.ckpt("convert", self.model(1), place, "--to", "tessera", "--world", 1)
        self.assertIn("is whole", self.ckpt("verify", place))


class Faults(OnStore):
    def test_failures_in_the_middle_are_tried_again(self):
        model = self.model(48)  # two files of two parts
        for number, act in enumerate((status(500), status(503, "SlowDown"), reset, lost, cut)):
            place = f"{self.run_at}/{number}"
            with self.store.fault("PUT .*partNumber=2", act, times=2) as part, self.store.fault("POST .*uploads=", act) as begin, \
                    self.store.fault("POST .*uploadId=", act) as end, self.store.fault("GET .*rank-1", act, times=2, after=1) as read, \
                    self.store.fault("PUT .*manifest", act) as put, self.store.fault("HEAD .*rank-0", act if act is not cut else reset) as head:
                self.ckpt("convert", model, place, "--to", "tessera", "--world", 2)
            for fault in (part, begin, end, read, put, head):
                self.assertEqual(fault.hits, fault.times, (number, fault))
            self.assertIn("is whole", self.ckpt("verify", place))

    def test_an_upload_whose_end_was_not_heard_is_complete(self):
        model = self.model(24)
        with self.store.fault("POST .*uploadId=", lost, times=1), self.store.fault("POST .*uploadId=", status(404, "NoSuchUpload"), times=2, after=1):
            self.ckpt("convert", model, f"{self.run_at}.safetensors", "--to", "safetensors")
        self.ckpt("diff", model, f"{self.run_at}.safetensors")
        # Here nothing was completed, and an object of that name is another one.
        with self.store.fault("POST .*uploadId=", status(404, "NoSuchUpload")):
            self.assertIn("NoSuchUpload", self.ckpt("convert", self.model(24, seed=1), f"{self.run_at}.safetensors", "--to", "safetensors", status=1))
        self.ckpt("diff", model, f"{self.run_at}.safetensors")

    def test_bytes_that_change_on_their_way(self):
        spoil = lambda request, body: request.take(bytes([body[0] ^ 1]) + body[1:])
        reads = {}
        for self.store.compares in (False, True):
            place = f"{self.run_at}/{self.store.compares}"
            with self.store.fault("PUT .*(partNumber=2|rank-1)", spoil, times=2):
                said = self.ckpt("convert", self.model(24), place, "--to", "tessera", "--world", 1, status=0 if self.store.compares else 1)
            if not self.store.compares:
                self.assertIn("gives other bytes back", said)
                self.ckpt("convert", self.model(24), place, "--to", "tessera", "--world", 1)
            self.assertIn("is whole", self.ckpt("verify", place))
            self.store.requests.clear()
            self.ckpt("convert", self.model(24), place + "-again", "--to", "tessera", "--world", 1)
            reads[self.store.compares] = sum(line.startswith("GET") and "rank-0" in line for line in self.store.requests)
        self.store.compares = False
        self.assertLess(reads[True], reads[False])

    def test_an_error_in_an_answer_200(self):
        with self.store.fault("POST .*uploadId=", status(200)) as passing:
            self.ckpt("convert", self.model(24), f"{self.run_at}.safetensors", "--to", "safetensors")
        self.assertEqual(passing.hits, 1)
        with self.store.fault("POST .*uploadId=", status(200, "InvalidPart"), times=9) as lasting:
            self.assertIn("InvalidPart", self.ckpt("convert", self.model(24), f"{self.run_at}-other.safetensors", "--to", "safetensors", status=1))
        self.assertEqual(lasting.hits, 1)
        self.assertIn("DELETE", self.store.requests[-1])  # its parts

    def test_a_list_of_many_pages(self):
        def pages(request, body):
            """Two names a page, as the store would with more than a thousand."""
            request.path += "&max-keys=2"
            return False
        self.ckpt("convert", self.model(1), f"{self.run_at}-step-000001", "--to", "tessera", "--world", 5)
        self.ckpt("convert", self.model(1), f"{self.run_at}-step-000002", "--to", "tessera", "--world", 5)
        with self.store.fault("GET .*list-type", pages, times=9999) as fault:
            self.ckpt("prune", self.run_at, "--keep-last", 1)
        self.assertGreater(fault.hits, 6)
        self.ckpt("verify", f"{self.run_at}-step-000001", status=1)
        self.assertIn("is whole: 5 files", self.ckpt("verify", self.run_at))


class Losses(OnStore):
    def test_what_fails_for_good_leaves_the_old(self):
        self.train("--num-epochs", 1, "--ckpt-prefix", self.run_at, "--no-ckpt-consolidation")
        for broken in ("PUT .*rank-1-of-2", "PUT .*manifest"):
            with self.store.fault(broken, status(503, "SlowDown"), times=99):
                said = self.train("--num-epochs", 2, "--ckpt-prefix", self.run_at, "--resume", status=1, AWS_MAX_ATTEMPTS="2")
            self.assertRegex(said, "could not save .*503 SlowDown.*AWS_MAX_ATTEMPTS")
        self.assertIn("step-000010 is whole", self.ckpt("verify", self.run_at))
        losses = self.losses("--num-epochs", 2, "--ckpt-prefix", self.run_at, "--resume")
        self.assertEqual(len(losses), 10)
        self.assertIn("step-000020 is whole", self.ckpt("verify", self.run_at))


class Kills(OnStore):
    def test_a_list_that_is_late_hides_nothing(self):
        empty = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        late = lambda request, body: request.answer(200, empty)
        with self.store.fault("GET .*list-type", late, times=9999) as fault:
            self.train("--num-epochs", 1, "--ckpt-prefix", self.run_at, "--no-ckpt-consolidation")
            self.assertEqual(len(self.losses("--num-epochs", 2, "--ckpt-prefix", self.run_at, "--resume")), 10)
        self.assertGreater(fault.hits, 0)

    def test_a_rank_that_is_killed_in_a_save_leaves_the_old(self):
        self.train("--num-epochs", 1, "--ckpt-prefix", self.run_at, "--no-ckpt-consolidation")
        reached = threading.Event()

        def hold(request, body):
            reached.set()
            time.sleep(3)
            return reset(request, body)
        with self.store.fault("PUT .*rank-1-of-2", hold, times=99):
            command = self.mnist("--num-epochs", 2, "--ckpt-prefix", self.run_at, "--resume", "--no-ckpt-consolidation")
            launcher = subprocess.Popen(command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.addCleanup(launcher.wait)
            self.addCleanup(launcher.kill)  # which comes first
            self.assertTrue(reached.wait(60))
            ranks = [int(pid) for task in pathlib.Path(f"/proc/{launcher.pid}/task").iterdir() for pid in (task / "children").read_text().split()]
            ranks = sorted(pid for pid in ranks if "mnist" in pathlib.Path(f"/proc/{pid}/comm").read_text())
            os.kill(ranks[1], signal.SIGKILL)
            self.assertNotEqual(launcher.wait(60), 0)
        self.assertIn("step-000010 is whole", self.ckpt("verify", self.run_at, status=1))  # because a newer one is incomplete
        self.assertEqual(len(self.losses("--num-epochs", 2, "--ckpt-prefix", self.run_at, "--resume")), 10)
        self.assertIn("step-000020 is whole", self.ckpt("verify", self.run_at))


class Service(http.server.BaseHTTPRequestHandler):
    """Gives credentials as the metadata services of EC2 and of containers do, and as STS does."""
    refusals = 0  # how many requests are told to come later

    def reply(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
        text = json.dumps({"AccessKeyId": "TEMPORARY", "SecretAccessKey": "hidden key", "Token": "hidden token", "Expiration": until})
        known = {
            ("PUT", "/latest/api/token", None): "hidden session",
            ("GET", "/latest/meta-data/iam/security-credentials/", "hidden session"): "role",
            ("GET", "/latest/meta-data/iam/security-credentials/role", "hidden session"): text,
            ("GET", "/container", "hidden authorization"): text,
            ("POST", "/", None): "<Credentials><AccessKeyId>TEMPORARY</AccessKeyId><SecretAccessKey>hidden key</SecretAccessKey>"
                                 f"<SessionToken>hidden token</SessionToken><Expiration>{until}</Expiration></Credentials>"}
        given = self.headers.get("X-aws-ec2-metadata-token") or self.headers.get("Authorization")
        answer = known.get((self.command, self.path, given))
        if self.command == "POST" and "WebIdentityToken=hidden%20web%20token&" not in body + "&":
            answer = None
        late, Service.refusals = Service.refusals > 0, max(0, Service.refusals - 1)
        if late:
            answer = None
        self.send_response_only(200 if answer else 503 if late else 403)
        self.send_header("Content-Length", str(len(answer or "")))
        self.end_headers()
        self.wfile.write((answer or "").encode())

    do_GET = do_PUT = do_POST = reply


class Settings(OnStore):
    def setUp(self):
        super().setUp()
        type(self).place = "s3://bucket/model.safetensors"
        if not any("PUT /bucket/model" in line for line in self.store.requests):
            self.ckpt("convert", self.model(1), self.place, "--to", "safetensors")
        self.store.credentials["TEMPORARY"] = ("hidden key", "hidden token")
        self.bare = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}

    def inspect(self, status=0, **variables):
        return self.ckpt("inspect", self.place, status=status, **(self.bare | variables))

    def test_files_of_profiles(self):
        folder = self.folder / ".aws"
        folder.mkdir()
        (folder / "credentials").write_text(f"# of others\n[default]\naws_access_key_id={ID}\naws_secret_access_key = {SECRET}\r\n\n"
                                            "[other]\naws_access_key_id = TEMPORARY\naws_secret_access_key = hidden key\naws_session_token = hidden token\n")
        self.inspect()
        self.inspect(AWS_CONFIG_FILE="/dev/null")
        with self.store.fault("HEAD", status(400, "ExpiredToken")) as expired:
            self.inspect(AWS_PROFILE="other")
        self.assertEqual(expired.hits, 1)
        self.assertIn("nobody", self.inspect(AWS_PROFILE="nobody", status=1))
        (folder / "config").write_text(f"[profile far]\nregion = eu-south-9\nendpoint_url = {self.store.url}/\naws_access_key_id = {ID}\n"
                                       f"aws_secret_access_key = {SECRET}\ns3 =\n  max_concurrent_requests = 20\n")
        self.inspect(AWS_PROFILE="far", AWS_REGION=None, AWS_ENDPOINT_URL=None)

    def test_services(self):
        service = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
        Service.log_message = lambda *args: None
        threading.Thread(target=service.serve_forever, daemon=True).start()
        self.addCleanup(service.server_close)
        self.addCleanup(service.shutdown)
        url = f"http://127.0.0.1:{service.server_address[1]}"
        token = self.folder / "token"
        token.write_text("hidden web token\n")
        Service.refusals = 2
        self.inspect(AWS_EC2_METADATA_DISABLED=None, AWS_EC2_METADATA_SERVICE_ENDPOINT=url)
        self.inspect(AWS_CONTAINER_CREDENTIALS_FULL_URI=url + "/container", AWS_CONTAINER_AUTHORIZATION_TOKEN="hidden authorization")
        self.inspect(AWS_WEB_IDENTITY_TOKEN_FILE=str(token), AWS_ROLE_ARN="arn:aws:iam::1:role/x", AWS_ENDPOINT_URL_STS=url)
        said = self.inspect(AWS_CONTAINER_CREDENTIALS_FULL_URI=url + "/nothing", status=1)
        self.assertIn("AWS_CONTAINER_CREDENTIALS_FULL_URI gave no credentials: status 403", said)

    def test_errors_say_what_to_do(self):
        self.assertIn("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write the profile 'default'", self.inspect(status=1))
        self.assertIn("without AWS_SECRET_ACCESS_KEY", self.inspect(AWS_ACCESS_KEY_ID=ID, status=1))
        own = {"AWS_ACCESS_KEY_ID": ID, "AWS_SECRET_ACCESS_KEY": SECRET}
        said = self.inspect(AWS_ACCESS_KEY_ID=ID, AWS_SECRET_ACCESS_KEY="hidden wrong", status=1)
        self.assertRegex(said, "says 403; check that the credentials of AWS_ACCESS_KEY_ID are right")
        self.assertIn("begins with https://", self.inspect(**own, AWS_ENDPOINT_URL="127.0.0.1:9000", status=1))
        self.assertIn("has an '@'", self.inspect(**own, AWS_ENDPOINT_URL="http://user:hidden@127.0.0.1:9000", status=1))
        self.assertRegex(self.inspect(**own, AWS_ENDPOINT_URL="http://127.0.0.1:9", AWS_MAX_ATTEMPTS="2", status=1),
                         "s3://bucket/model.safetensors.* can't be reached: .*check the network, and AWS_ENDPOINT_URL")
        moved = lambda request, body: request.answer(301, b"<Error><Code>PermanentRedirect</Code></Error>", [("x-amz-bucket-region", "eu-north-1")])
        with self.store.fault("HEAD", moved, times=9):
            self.assertIn("set AWS_REGION to eu-north-1", self.inspect(**own, status=1))
        self.assertIn("make the bucket", self.ckpt("inspect", "s3://nothing/model", status=1))
        self.assertIn("write s3://BUCKET/NAME", self.ckpt("convert", self.model(1), "s3://bucket", "--to", "safetensors", status=2))
        self.assertIn("s3://bucket names a bucket and nothing in it; write s3://bucket/NAME",
                      self.train("--ckpt-prefix", "s3://bucket", ranks=1, status=1))
        self.assertIn("'a@b' is not the name of a bucket", self.ckpt("convert", self.model(1), "s3://a@b/x.safetensors", "--to", "safetensors", status=2))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])

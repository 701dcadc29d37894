"""Files are written whole or not at all, through links, into pipes, and by several at once."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tacit import InputError
from tacit.atomic import PARTIAL, remove_partials, write_atomically


def write(path, text="new", **options):
    write_atomically(path, lambda partial: partial.write_text(text), remedy="Do it.", **options)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("old")
    (tmp_path / "link").symlink_to("elsewhere/file")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere" / "file").read_text() == "new"


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    texts = []
    reader = threading.Thread(target=lambda: texts.append((tmp_path / "pipe").read_text()))
    reader.start()
    write(tmp_path / "pipe")
    reader.join()
    assert texts == ["new"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_full_device_is_reported():
    with pytest.raises(InputError, match=r"^/dev/full cannot be written to \(No space left.*Do it"):
        write("/dev/full")
    assert os.path.exists("/dev/full")  # noqa: PTH110 # what os.stat sees


@pytest.mark.parametrize(
    "path", ["folder", "nowhere/file", "file/below", "name\0", "n" * 300, "/proc/tacit"]
)
def test_what_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    with pytest.raises(InputError, match=r"cannot be written to \(.*\)\. Do it\.$"):
        write(tmp_path / path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_write_that_fails_keeps_the_earlier_file(tmp_path):
    def fail(partial):
        partial.write_text("half")
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_text("old")
    with pytest.raises(InputError, match="No space left on device"):
        write_atomically(tmp_path / "file", fail, remedy="Do it.")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_several_write_one_file_at_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: write(tmp_path / "file", str(i) * 1000), range(8)))
    assert len({*(tmp_path / "file").read_text()}) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_has_the_permissions_of_other_new_files(tmp_path):
    write(tmp_path / "file")
    (tmp_path / "other").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / f".0123{PARTIAL}").touch()
    (tmp_path / "file").touch()
    remove_partials(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]

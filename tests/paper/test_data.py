"""MNIST's files are found where they are, and refused in words where they are wrong."""

import gzip
import sys

import pytest
import torch
from support.small_mnist import DAMAGED, NAMES, PLAIN, assert_whole, checksums, files, isolate, put
from typer.testing import CliRunner

import tacit
from tacit import cli
from tacit_paper import data


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    isolate(tmp_path, monkeypatch)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "tacit" / "mnist"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "given"


@pytest.mark.parametrize("zipped", [False, True])
def test_files_are_found_in_the_folder_given_and_left_alone(folder, zipped):
    put(folder, zipped=zipped)
    before = files(folder)
    assert_whole(data.mnist(folder=folder))
    assert files(folder) == before


@pytest.mark.parametrize("zipped", [False, True])
def test_files_are_found_in_the_cache(cache, zipped):
    put(cache, zipped=zipped)
    assert_whole(data.mnist())


def test_plain_and_zipped_files_may_lie_side_by_side(folder):
    put(folder, {name: PLAIN[name] for name in NAMES[:2]})
    put(folder, {name: PLAIN[name] for name in NAMES[2:]}, zipped=True)
    assert_whole(data.mnist(folder=folder))


def test_the_cache_is_in_the_home_folder_where_no_other_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    put(tmp_path / "home" / ".cache" / "tacit" / "mnist")
    for relative in ("", "somewhere/else"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert_whole(data.mnist())
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert_whole(data.mnist())


def test_the_directory_holds_within_its_block_and_an_argument_goes_first(folder, tmp_path):
    put(folder)
    with data.directory(folder):
        assert_whole(data.mnist())
        with pytest.raises(tacit.InputError, match="elsewhere"):
            data.mnist(folder=tmp_path / "elsewhere")
        with data.directory(None), pytest.raises(tacit.InputError, match="cache"):
            data.mnist()
        assert_whole(data.mnist())
    with pytest.raises(tacit.InputError, match="cache"):
        data.mnist()


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_wrong_file_in_a_given_folder_is_refused_and_kept(folder, kind):
    content, zipped, said = DAMAGED[kind]
    put(folder, {name: PLAIN[name] for name in NAMES[2:]})
    path = folder / (NAMES[0] + ".gz" * zipped)
    path.write_bytes(content)
    before = files(folder)
    with pytest.raises(tacit.InputError, match=said) as caught:
        data.mnist(folder=folder)
    with data.directory(folder), pytest.raises(tacit.InputError, match=said):
        data.mnist()
    assert str(path) in str(caught.value)
    assert "Delete it" in str(caught.value)
    assert files(folder) == before


def test_a_damaged_file_in_the_cache_is_named_where_it_cannot_be_replaced(cache):
    put(cache)
    (cache / NAMES[2]).write_bytes(b"damaged")
    with pytest.raises(tacit.InputError, match=f"lacks {NAMES[2]}, and") as caught:
        data.mnist()
    assert f"{cache / NAMES[2]} is not MNIST's file" in str(caught.value)


def test_a_folder_in_the_place_of_a_file_is_refused(folder):
    put(folder)
    (folder / NAMES[1]).unlink()
    (folder / NAMES[1]).mkdir()
    with pytest.raises(tacit.InputError, match=f"{NAMES[1]} cannot be read"):
        data.mnist(folder=folder)


def test_a_good_file_beside_a_damaged_one_serves(folder):
    put(folder)
    whole = (folder / NAMES[1]).read_bytes()
    (folder / f"{NAMES[1]}.gz").write_bytes(gzip.compress(whole))
    (folder / NAMES[1]).write_bytes(b"damaged")
    data.mnist(folder=folder)


HEADERS = {
    "wrong type": bytes([0, 0, 9, 1]) + (3).to_bytes(4, "big") + bytes(3),
    "wrong rank": bytes([0, 0, 8, 2]) + (3).to_bytes(4, "big") + bytes(3),
    "too short": bytes([0, 0, 8, 1]) + (4).to_bytes(4, "big") + bytes(3),
    "too long": bytes([0, 0, 8, 1]) + (2).to_bytes(4, "big") + bytes(3),
    "half a header": bytes([0, 0, 8]),
    "empty": b"",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_malformed_header_is_refused(monkeypatch, folder, kind):
    contents = {**PLAIN, NAMES[1]: HEADERS[kind]}
    put(folder, contents)
    monkeypatch.setattr(data, "FILES", checksums(contents))
    with pytest.raises(tacit.InputError, match=f"{NAMES[1]} is no idx file"):
        data.mnist(folder=folder)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(tacit.InputError, match=f"{wrong}.*--data-dir"):
            data.mnist(folder=wrong)
        with pytest.raises(tacit.InputError, match=f"{wrong}.*--data-dir"), data.directory(wrong):
            pass


def test_digits_are_scaled_and_flat():
    images, labels = data.digits()
    assert images.shape == (1797, 64)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(tacit.InputError, match=r'pip install "tacit\[experiments\]"'):
        data.digits()


def reproduce(*arguments):
    return CliRunner().invoke(cli.app, ["reproduce", "tradeoff", *map(str, arguments)])


def test_the_command_line_hands_its_folder_on(monkeypatch, folder, tmp_path):
    put(folder)
    found = []
    monkeypatch.setattr(cli, "_reproduce_one", lambda *_: found.append(data.mnist()))
    monkeypatch.setattr(cli, "_write_page", lambda _: None)
    done = reproduce("--data-dir", folder, "--out", tmp_path / "out", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert_whole(found[0])
    lacking = reproduce("--out", tmp_path / "out", "--device", "cpu")
    assert lacking.exit_code == 2
    assert len(lacking.stderr.strip().splitlines()) == 1


def test_the_command_line_refuses_a_file_before_it_runs_anything(tmp_path):
    (tmp_path / "file").write_text("")
    done = reproduce("--data-dir", tmp_path / "file", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {tmp_path}/file is not a folder")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()

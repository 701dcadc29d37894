"""MNIST's files are read from a folder or the cache, and wrong files are refused."""

import gzip
import sys

import pytest
import torch
from support.small_mnist import (
    DAMAGED,
    NAMES,
    PLAIN,
    assert_complete,
    checksums,
    isolate,
    read_files,
    write_files,
)
from typer.testing import CliRunner

import tacit
from tacit.cli import build_app
from tacit_paper import commands, data
from tacit_paper.commands import add_commands


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    isolate(tmp_path, monkeypatch)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "tacit" / "mnist"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "folder"


@pytest.mark.parametrize("zipped", [False, True])
def test_files_are_read_from_a_folder_and_not_changed(folder, zipped):
    write_files(folder, zipped=zipped)
    before = read_files(folder)
    assert_complete(data.mnist(folder=folder))
    assert read_files(folder) == before


@pytest.mark.parametrize("zipped", [False, True])
def test_files_are_read_from_the_cache(cache, zipped):
    write_files(cache, zipped=zipped)
    assert_complete(data.mnist())


def test_a_folder_may_have_plain_and_zipped_files(folder):
    write_files(folder, {name: PLAIN[name] for name in NAMES[:2]})
    write_files(folder, {name: PLAIN[name] for name in NAMES[2:]}, zipped=True)
    assert_complete(data.mnist(folder=folder))


def test_the_cache_is_in_the_home_folder_unless_another_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write_files(tmp_path / "home" / ".cache" / "tacit" / "mnist")
    for relative in ("", "somewhere/else"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert_complete(data.mnist())
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert_complete(data.mnist())


def test_use_folder_applies_inside_its_block_and_an_argument_goes_first(folder, tmp_path):
    write_files(folder)
    with data.use_folder(folder):
        assert_complete(data.mnist())
        with pytest.raises(tacit.InputError, match="elsewhere"):
            data.mnist(folder=tmp_path / "elsewhere")
        with data.use_folder(None), pytest.raises(tacit.InputError, match="cache"):
            data.mnist()
        assert_complete(data.mnist())
    with pytest.raises(tacit.InputError, match="cache"):
        data.mnist()


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_wrong_file_in_a_folder_is_refused_and_not_changed(folder, kind):
    content, zipped, message = DAMAGED[kind]
    write_files(folder, {name: PLAIN[name] for name in NAMES[2:]})
    path = folder / (NAMES[0] + ".gz" * zipped)
    path.write_bytes(content)
    before = read_files(folder)
    with pytest.raises(tacit.InputError, match=message) as caught:
        data.mnist(folder=folder)
    with data.use_folder(folder), pytest.raises(tacit.InputError, match=message):
        data.mnist()
    assert str(path) in str(caught.value)
    assert "Delete it" in str(caught.value)
    assert read_files(folder) == before


def test_a_damaged_file_in_the_cache_is_named_if_it_cannot_be_replaced(cache):
    write_files(cache)
    (cache / NAMES[2]).write_bytes(b"damaged")
    with pytest.raises(tacit.InputError, match=f"lacks {NAMES[2]}, and") as caught:
        data.mnist()
    assert f"{cache / NAMES[2]} is not MNIST's file" in str(caught.value)


def test_a_folder_with_the_name_of_a_file_is_refused(folder):
    write_files(folder)
    (folder / NAMES[1]).unlink()
    (folder / NAMES[1]).mkdir()
    with pytest.raises(tacit.InputError, match=f"{NAMES[1]} cannot be read"):
        data.mnist(folder=folder)


def test_a_good_file_beside_a_damaged_one_is_read(folder):
    write_files(folder)
    good = (folder / NAMES[1]).read_bytes()
    (folder / f"{NAMES[1]}.gz").write_bytes(gzip.compress(good))
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
    write_files(folder, contents)
    monkeypatch.setattr(data, "FILES", checksums(contents))
    with pytest.raises(tacit.InputError, match=f"{NAMES[1]} is not an idx file"):
        data.mnist(folder=folder)


def test_a_file_with_the_name_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(tacit.InputError, match=f"{wrong}.*--data-dir"):
            data.mnist(folder=wrong)
        with pytest.raises(tacit.InputError, match=f"{wrong}.*--data-dir"), data.use_folder(wrong):
            pass


def test_digits_are_scaled_and_flat():
    images, labels = data.digits()
    assert images.shape == (1797, 64)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(tacit.InputError, match=r'pip install "tacit\[paper\]"'):
        data.digits()


def reproduce(*arguments):
    return CliRunner().invoke(
        build_app([add_commands]), ["reproduce", "tradeoff", *map(str, arguments)]
    )


def test_the_command_line_passes_its_folder_on(monkeypatch, folder, tmp_path):
    write_files(folder)
    read = []
    monkeypatch.setattr(commands, "_reproduce_one", lambda *_: read.append(data.mnist()))
    monkeypatch.setattr(commands, "_write_page", lambda _: None)
    result = reproduce("--data-dir", folder, "--out", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert_complete(read[0])
    without_folder = reproduce("--out", tmp_path / "out", "--device", "cpu")
    assert without_folder.exit_code == 2
    assert len(without_folder.stderr.strip().splitlines()) == 1


def test_the_command_line_refuses_a_file_as_folder_before_it_runs_anything(tmp_path):
    (tmp_path / "file").write_text("")
    result = reproduce("--data-dir", tmp_path / "file", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path}/file is not a folder")
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()

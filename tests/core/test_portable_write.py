"""A save that fails, or whose process is killed, leaves the earlier file as it was."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import safetensors.numpy
from tests.support.portable_states import contents, parameter, state

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.core.portable.file import load, save
from penstock.core.portable.safetensors import write

ROOT = Path(__file__).resolve().parents[2]
EARLIER, LATER = state({"w": parameter((3000,), seed=1)}), state({"w": parameter((3000,), seed=2, step=4)})


def full(*arguments: Any, **settings: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


STEPS = {
    "folder": (tempfile, "mkdtemp"),
    "arrays": (safetensors.numpy, "save_file"),
    "disk": (os, "fsync"),
    "name": (os, "replace"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk_changes_nothing(step: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    if there:
        save(path, EARLIER)
    before = path.read_bytes() if there else None
    with monkeypatch.context() as disk:
        disk.setattr(*STEPS[step], full)
        with pytest.raises(RefusedError, match=r"not be written: No space left on device; what was there is as it was\.$"):
            save(path, LATER)
    assert [child.name for child in tmp_path.iterdir()] == (["file"] if there else [])
    assert not there or path.read_bytes() == before


@pytest.mark.parametrize("limit", [0, 100, 1500, 20_000])
def test_a_write_that_stops_in_the_middle_changes_nothing(limit: int, tmp_path: Path) -> None:
    """A real one: the system lets the file grow to `limit` bytes only."""
    path = tmp_path / "file"
    save(path, EARLIER)
    before = path.read_bytes()
    assert limit < len(before)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(RefusedError, match=r"could not be written: .*File too large.*; what was there is as it was\.$"):
            save(path, LATER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [child.name for child in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == before


def test_an_interrupt_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "file", LATER)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (lambda folder: folder, "it is there, and not a regular file"),
        (lambda folder: Path("/dev/null"), "it is there, and not a regular file"),
        (lambda folder: folder / "nowhere" / "file", "No such file or directory"),
        (lambda folder: folder / "file" / "below", "Not a directory"),
        (lambda folder: folder / ("long" * 100), "File name too long"),
        (lambda folder: "a\0b", "(lstat: )?embedded null"),
    ],
)
def test_a_path_that_cannot_be_written_is_one_sentence(
    target: Callable[[Path], Path | str], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RefusedError, match=f"could not be written: {sentence}"):
        save(target(tmp_path), LATER)
    assert [child.name for child in tmp_path.iterdir()] == ["file"]
    assert Path("/dev/null").is_char_device()


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'exp_avg/\\udc80'"):
        save(tmp_path / "file", state({"\udc80": parameter(), "w": parameter()}))
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    """One of more than 100 MB."""
    with pytest.raises(RefusedError, match=r"(?i)header ?too ?large"):
        write(tmp_path / "file", {}, {"rule": "a" * 100_000_000})
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "below" / "file")
    for made in (EARLIER, LATER):
        save(tmp_path / "link", made)
        assert (tmp_path / "link").is_symlink()
        assert contents(load(tmp_path / "below" / "file")) == contents(made)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_file_has_the_usual_permissions(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        save(tmp_path / "file", EARLIER)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


KILLED = """
import os, resource, signal, sys, time
from pathlib import Path
from penstock.core.portable.file import load, save
from tests.core.test_portable_write import EARLIER, LATER, STEPS

def kill(*arguments, **settings):
    os.kill(os.getpid(), signal.SIGKILL)

def grown_to(limit):
    def save_and_be_killed(path):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # from the system, in the middle of a write
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        save(path, LATER)
    return save_and_be_killed

def instead_of(step):
    def save_and_be_killed(path):
        setattr(*STEPS[step], kill)
        save(path, LATER)
    return save_and_be_killed

def behind_the_rename(path):
    replace = os.replace
    os.replace = lambda *names: (replace(*names), kill())
    save(path, LATER)

def again_and_again(path):
    while True:
        save(path, LATER)
        save(path, EARLIER)

moments = {f"{size} bytes": grown_to(size) for size in (0, 100, 1500, 20_000)}
moments |= {step: instead_of(step) for step in STEPS} | {"renamed": behind_the_rename}
moments |= {f"{delay} ms": again_and_again for delay in (1, 3, 7, 12, 20)}
for moment, save_and_be_killed in moments.items():
    folder = Path(sys.argv[1]) / moment
    folder.mkdir()
    save(folder / "file", EARLIER)
    child = os.fork()
    if child == 0:
        try:
            save_and_be_killed(folder / "file")
        finally:
            os._exit(3)  # it was not killed
    if moment.endswith(" ms"):
        time.sleep(int(moment.removesuffix(" ms")) / 1000)
        os.kill(child, signal.SIGKILL)
    print(moment, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=":")
"""


def test_a_killed_process_leaves_the_earlier_file_or_the_later_one(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    killed = dict(line.split(":") for line in done.stdout.splitlines())
    assert len(killed) == 14
    earlier, later = contents(EARLIER), contents(LATER)
    for moment, status in killed.items():
        folder = tmp_path / moment
        assert int(status) == -(signal.SIGXFSZ if moment.endswith("bytes") else signal.SIGKILL), moment
        there = contents(load(folder / "file"))
        if moment == "renamed":
            assert there == later
        elif not moment.endswith("ms"):
            assert there == earlier, moment
        assert there in (earlier, later), moment
        for child in folder.iterdir():  # what may be left behind
            assert child.name == "file" or (child.name.startswith("file.") and child.name.endswith(".tmp")), moment
        save(folder / "file", LATER)  # and is in nobody's way
        assert contents(load(folder / "file")) == later
    assert len(list((tmp_path / "name").iterdir())) == 2

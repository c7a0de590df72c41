"""Files that are replaced as a whole: links, devices, permissions, and the parts that killed processes leave."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import onlinesoftmax
from onlinesoftmax.core import whole_files
from onlinesoftmax.core.whole_files import NotRegularError, Part, check_writable, read_regular, same_file, write_whole

if sys.platform == "win32":
    pytest.skip("permissions, links and locks are those of POSIX", allow_module_level=True)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (Path.mkdir, "is a folder"),
    "a fifo": (os.mkfifo, "is a fifo"),
    "a socket": (make_socket, "is a socket"),
    "a link to a device": (lambda path: path.symlink_to("/dev/null"), "is a device"),
    "a link to a folder": (lambda path: path.symlink_to("/"), "is a folder"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_neither_replaced_nor_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path = Path("x")
    make, message = SPECIAL[kind]
    make(path)
    before = path.lstat()
    for call in (check_writable, read_regular, lambda path: write_whole(path, b"new", 0o600), Part):
        with pytest.raises(NotRegularError) as error:
            call(path)
        assert error.value.strerror == message
    assert os.path.samestat(path.lstat(), before)
    assert [*Path().iterdir()] == [path]


def test_the_null_device_stays_a_device() -> None:
    with pytest.raises(NotRegularError):
        write_whole(Path("/dev/null"), b"new")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("name", ["a\0b", "x" * 256, "nowhere/x", "file/x", "loop"])
def test_a_name_that_no_file_can_have_is_an_os_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for call in (check_writable, read_regular, lambda path: write_whole(path, b"new")):
        with pytest.raises(OSError, match=r"."):
            call(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "loop"}


def test_the_file_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "y").write_bytes(b"old")
    (tmp_path / "link").symlink_to("data/y")
    (tmp_path / "second").symlink_to(tmp_path / "link")
    (tmp_path / "dangling").symlink_to("data/z")
    write_whole(tmp_path / "second", b"new")
    write_whole(tmp_path / "dangling", b"made")
    assert (tmp_path / "data" / "y").read_bytes() == b"new"
    assert (tmp_path / "data" / "z").read_bytes() == b"made"
    for name in ("link", "second", "dangling"):
        assert (tmp_path / name).is_symlink()


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="this system has no names for descriptors")
def test_the_file_behind_a_descriptor_is_replaced_unless_it_was_deleted(tmp_path: Path) -> None:
    with (tmp_path / "y").open("w") as file:
        name = Path(f"/dev/fd/{file.fileno()}")
        write_whole(name, b"new")
        assert (tmp_path / "y").read_bytes() == b"new"
    with (tmp_path / "y").open("w") as file:
        name = Path(f"/dev/fd/{file.fileno()}")
        (tmp_path / "y").unlink()
        with pytest.raises(OSError, match="the file behind this name has no name"):
            write_whole(name, b"new")
    assert not [*tmp_path.iterdir()]


WRITES = """
import sys
from pathlib import Path
from onlinesoftmax.core.whole_files import write_whole
for i in range(200):
    write_whole(Path(sys.argv[1]), bytes([i]) * 1000, 0o600 if i % 2 else None)
"""


def test_processes_that_replace_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    source = str(Path(onlinesoftmax.__file__).parents[1])
    command = [sys.executable, "-c", WRITES, str(tmp_path / "y")]
    running = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": source}) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["y"]
    assert (tmp_path / "y").read_bytes() == bytes([199]) * 1000


def test_another_hard_link_keeps_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "y").write_bytes(b"old")
    (tmp_path / "backup").hardlink_to(tmp_path / "y")
    write_whole(tmp_path / "y", b"new")
    assert ((tmp_path / "y").read_bytes(), (tmp_path / "backup").read_bytes()) == (b"new", b"old")


@pytest.mark.parametrize("bits", [0o600, 0o640, 0o664, 0o755, 0o4755])
def test_an_existing_file_keeps_its_permissions(bits: int, umask: int, tmp_path: Path) -> None:
    path = tmp_path / "y"
    path.touch()
    path.chmod(bits)
    with Part(path) as part:
        assert mode(part.name) == 0o600, "a part of private content is private"
        part.write(b"new")
        part.take_name()
    assert mode(path) == bits & 0o777


def test_a_new_file_follows_the_umask(umask: int, tmp_path: Path) -> None:
    write_whole(tmp_path / "y", b"new")
    write_whole(tmp_path / "z", b"new", 0o640)
    assert (mode(tmp_path / "y"), mode(tmp_path / "z")) == (0o666 & ~umask, 0o640)


@as_root
def test_an_existing_file_keeps_its_owner_and_group(tmp_path: Path) -> None:
    path = tmp_path / "y"
    path.touch()
    path.chmod(0o640)
    os.chown(path, 12345, 23456)
    write_whole(path, b"new")
    status = path.stat()
    assert (status.st_uid, status.st_gid, mode(path)) == (12345, 23456, 0o640)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.ENOSYS])
def test_permissions_of_a_group_that_cannot_be_kept_are_dropped(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "y"
    path.touch()
    path.chmod(0o664)
    monkeypatch.setattr(os, "fchown", refuse)
    write_whole(path, b"new")
    assert (mode(path), path.read_bytes()) == (0o604, b"new")


PREVENTED = """
import os, sys
from pathlib import Path
from onlinesoftmax.core.whole_files import check_writable
os.setuid(12345)
for name in sys.argv[1:]:
    try:
        check_writable(Path(name))
        print("writable")
    except OSError as error:
        print(error.strerror)
"""


@as_root
def test_files_that_the_user_may_not_write_are_refused_before_the_work(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    for name, bits in (("open", 0o777), ("shared", 0o1777), ("closed", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "theirs").touch()
        (tmp_path / name / "theirs").chmod(0o666)
        (tmp_path / name).chmod(bits)
    (tmp_path / "open" / "protected").touch()
    os.chown(tmp_path / "open" / "protected", 12345, -1)
    (tmp_path / "open" / "protected").chmod(0o444)
    names = ["open/theirs", "open/protected", "shared/theirs", "closed/theirs", "closed/new", "shared/new"]
    source = str(Path(onlinesoftmax.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", PREVENTED, *(str(tmp_path / name) for name in names)],
        env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "writable",
        "Permission denied",
        "it belongs to user 0, who alone may replace it in its folder",
        "Permission denied",
        "Permission denied",
        "writable",
    ]


def test_an_error_leaves_the_old_file_and_no_part(tmp_path: Path) -> None:
    (tmp_path / "y").write_bytes(b"old")

    def interrupted() -> None:
        with Part(tmp_path / "y") as part:
            part.write(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["y"]
    assert (tmp_path / "y").read_bytes() == b"old"


KILLED = """
import sys, time
from pathlib import Path
from onlinesoftmax.core.whole_files import Part
part = Part(Path(sys.argv[1]))
part.write(b"half")
print(part.name, flush=True)
time.sleep(60)
"""


def test_the_next_run_deletes_the_part_of_a_killed_process_and_of_no_living_one(tmp_path: Path) -> None:
    source = str(Path(onlinesoftmax.__file__).parents[1])
    command = [sys.executable, "-c", KILLED, str(tmp_path / "y")]
    environment = {**os.environ, "PYTHONPATH": source}
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as living,
    ):
        assert killed.stdout is not None
        assert living.stdout is not None
        left, kept = Path(killed.stdout.readline().strip()), Path(living.stdout.readline().strip())
        killed.kill()
        killed.wait()
        assert left.read_bytes() == b"half"
        # A second part of this process is not mistaken for one that was left, either.
        with Part(tmp_path / "z") as mine:
            write_whole(tmp_path / "other", b"new")
            assert not left.exists()
            assert kept.exists()
            assert mine.name.exists()
        living.kill()
    write_whole(tmp_path / "other", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def part_of(folder: Path, host: str, age: float) -> Path:
    path = folder / f".onlinesoftmax-{host}-{'0' * 31}{len([*folder.iterdir()])}.part"
    path.write_bytes(b"half")
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_parts_of_other_hosts_and_users_and_foreign_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is free says nothing about another host, whose clock may be wrong by hours."""
    here = whole_files._host()
    left = [part_of(tmp_path, here, 0), part_of(tmp_path, "elsewhere", 48 * 3600)]
    stays = [part_of(tmp_path, "elsewhere", 12 * 3600), tmp_path / ".onlinesoftmax-notes.part", tmp_path / "mine.part"]
    for path in stays[1:]:
        path.touch()
    link, precious = tmp_path / f".onlinesoftmax-{here}-{'f' * 32}.part", tmp_path / "precious"
    precious.touch()
    link.symlink_to(precious)
    if os.geteuid() == 0:
        stays.append(part_of(tmp_path, here, 48 * 3600))
        os.chown(stays[-1], 12345, -1)
    whole_files.remove_leftovers(tmp_path)
    assert {*tmp_path.iterdir()} == {*stays, link, precious}
    assert not {*tmp_path.iterdir()} & {*left}


def test_a_part_that_was_deleted_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, found = whole_files._lock, []

    def late(descriptor: int) -> bool | None:
        found.append([*tmp_path.iterdir()])
        if len(found) == 1:
            found[0][0].unlink()  # a process that cleans up was faster, and is done
        return False if len(found) == 2 else lock(descriptor)  # another is still looking

    monkeypatch.setattr(whole_files, "_lock", late)
    with Part(tmp_path / "y") as part:
        part.write(b"new")
        part.take_name()
    assert len(found) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["y"]


def test_without_locks_only_parts_that_are_old_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(whole_files.fcntl, "flock", refuse)
    young, old = (part_of(tmp_path, whole_files._host(), age) for age in (3600, 48 * 3600))
    write_whole(tmp_path / "y", b"new")
    assert {*tmp_path.iterdir()} == {young, tmp_path / "y"}
    assert not old.exists()


def test_names_of_one_file_are_known(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "hard").hardlink_to(tmp_path / "a")
    (tmp_path / "b").touch()
    for name in ("a", "./a", "link", "hard"):
        assert same_file(tmp_path / "a", tmp_path / name)
    assert same_file(tmp_path / "new", tmp_path / "." / "new")
    assert not same_file(tmp_path / "a", tmp_path / "b")
    assert not same_file(tmp_path / "a", tmp_path / "new")

"""Fetching published files from a server that drops, truncates, lies and ignores, and unpacking hostile archives."""

from __future__ import annotations

import gzip
import io
import socket
import tarfile
from pathlib import Path
from typing import Any

import pytest
from _download_server import BIG, FOLDER, GOOD, MD5, Server, archive, publish

from crosel.data import download
from crosel.data.download import DATASETS, fetch, get, unpack
from crosel.errors import UserError
from crosel.utils.system import lock


def ranges(server: Server) -> list[str | None]:
    return [wish for _, wish in server.seen]


# --- one file -----------------------------------------------------------------------------------------------------


def test_a_good_server(server: Server, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    fetch(f"{server.url}/big", tmp_path / "big", MD5, lambda *now: told.append(now))
    assert (tmp_path / "big").read_bytes() == BIG
    assert [path.name for path in tmp_path.iterdir()] == ["big"]
    assert ranges(server) == [None]
    assert told[-1] == ("big", len(BIG), len(BIG))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


@pytest.mark.parametrize("trouble", ["drop 70000", "truncate 70000"])
def test_a_broken_connection_goes_on_where_it_was(server: Server, tmp_path: Path, trouble: str) -> None:
    server.plan = [trouble, trouble]
    fetch(f"{server.url}/big", tmp_path / "big", MD5)
    assert (tmp_path / "big").read_bytes() == BIG
    first, *later = ranges(server)
    assert first is None
    assert len(later) == 2
    assert all(wish and 0 < int(wish[6:-1]) <= 140_000 for wish in later)
    if trouble.startswith("truncate"):
        assert later == ["bytes=70000-", "bytes=140000-"]


def test_the_part_of_an_earlier_day_is_used(server: Server, tmp_path: Path) -> None:
    (tmp_path / "big.part").write_bytes(BIG[:123_456])
    fetch(f"{server.url}/big", tmp_path / "big", MD5)
    assert (tmp_path / "big").read_bytes() == BIG
    assert ranges(server) == ["bytes=123456-"]


@pytest.mark.parametrize("trouble", ["ignore range", "elsewhere"])
def test_servers_that_do_not_go_on_as_asked(server: Server, tmp_path: Path, trouble: str) -> None:
    (tmp_path / "big.part").write_bytes(BIG[:1000])
    server.plan = [trouble]
    fetch(f"{server.url}/big", tmp_path / "big", MD5)
    assert (tmp_path / "big").read_bytes() == BIG
    assert ranges(server) == (["bytes=1000-"] if trouble == "ignore range" else ["bytes=1000-", None])


@pytest.mark.parametrize("part", [b"x" * 1000, b"x" * len(BIG), BIG + b"x", BIG], ids=["other", "416", "long", "whole"])
def test_a_part_that_is_of_something_else_starts_again(server: Server, tmp_path: Path, part: bytes) -> None:
    (tmp_path / "big.part").write_bytes(part)
    fetch(f"{server.url}/big", tmp_path / "big", MD5)
    assert (tmp_path / "big").read_bytes() == BIG
    assert ranges(server) == [f"bytes={len(part)}-"] + ([] if part == BIG else [None])


def test_a_server_that_tells_no_length(server: Server, tmp_path: Path) -> None:
    server.plan = ["no length"]
    told: list[Any] = []
    fetch(f"{server.url}/big", tmp_path / "big", MD5, lambda *now: told.append(now))
    assert (tmp_path / "big").read_bytes() == BIG
    assert told[-1] == ("big", len(BIG), None)


@pytest.mark.parametrize("trouble", [["wrong"], ["truncate 70000", "wrong", "wrong"], ["drop 9", "wrong"] * 20])
def test_wrong_bytes_are_never_kept(server: Server, tmp_path: Path, trouble: list[str]) -> None:
    server.plan = list(trouble)
    with pytest.raises(UserError, match="wrong content") as caught:
        fetch(f"{server.url}/big", tmp_path / "big", MD5)
    assert "CROSEL_MIRROR" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("trouble", ["503", "429", "drop 0", "garbage"])
def test_patience_with_backoff_has_an_end(server: Server, tmp_path: Path, trouble: str) -> None:
    server.plan = [trouble] * 99
    with pytest.raises(UserError) as caught:
        fetch(f"{server.url}/big", tmp_path / "big", MD5)
    assert len(server.seen) == 5
    assert server.waits == [1, 2, 4, 8]  # type: ignore[attr-defined]
    assert f"put it at {tmp_path / 'big'}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_trouble_that_passes(server: Server, tmp_path: Path) -> None:
    server.plan = ["503", "drop 0", "500", "garbage"]
    fetch(f"{server.url}/big", tmp_path / "big", MD5)
    assert (tmp_path / "big").read_bytes() == BIG


def test_a_slow_way_on_is_not_given_up(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More breaks than attempts, but each adds something worth while; crumbs do not count."""
    monkeypatch.setattr(download, "_GETTING_ON", 30_000)
    server.plan = ["truncate 30000"] * 9
    fetch(f"{server.url}/big", tmp_path / "big", MD5)
    assert len(server.seen) == 10
    server.plan = ["truncate 29999"] * 9
    with pytest.raises(UserError, match="ended after 149,995 of 300,000 bytes"):
        fetch(f"{server.url}/big", tmp_path / "again", MD5)
    assert (tmp_path / "again.part").stat().st_size == 5 * 29_999, "what came is kept for the next time"


@pytest.mark.parametrize("code", ["404", "403", "410"])
def test_no_second_try_where_there_is_nothing(server: Server, tmp_path: Path, code: str) -> None:
    server.plan = [code]
    with pytest.raises(UserError, match=f"answers {code}.*CROSEL_MIRROR.*put it at"):
        fetch(f"{server.url}/big", tmp_path / "big", MD5)
    assert len(server.seen) == 1
    assert not list(tmp_path.iterdir())


def test_files_without_end_are_refused(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.plan = ["huge"]
    with pytest.raises(UserError, match="more than any of these files"):
        fetch(f"{server.url}/big", tmp_path / "big", MD5)
    monkeypatch.setattr(download, "_MAX_FILE", 100_000)
    server.plan = ["no length"]
    with pytest.raises(UserError, match="does not end"):
        fetch(f"{server.url}/big", tmp_path / "big", MD5)
    assert not list(tmp_path.iterdir())


def test_no_redirection_to_files_of_this_machine(server: Server, tmp_path: Path) -> None:
    server.plan = ["redirect"]
    with pytest.raises(UserError):
        fetch(f"{server.url}/big", tmp_path / "big", MD5)
    assert not list(tmp_path.iterdir())


def test_offline_says_where_to_put_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "_sleep", lambda seconds: None)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(UserError, match="cannot be reached") as caught:
        get("cifar10", tmp_path / "data", mirror=f"http://127.0.0.1:{port}")
    assert f"put it at {tmp_path / 'data' / 'cifar-10-python.tar.gz'}, and run this again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_at_once(server: Server, tmp_path: Path) -> None:
    with open(tmp_path / "big.part", "ab") as other:
        assert lock(other.fileno())
        with pytest.raises(UserError, match="another process is downloading"):
            fetch(f"{server.url}/big", tmp_path / "big", MD5)
    fetch(f"{server.url}/big", tmp_path / "big", MD5)
    assert (tmp_path / "big").read_bytes() == BIG


def test_a_folder_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="this is a file; give a folder"):
        get("cifar10", tmp_path / "file", mirror=server.url)
    with pytest.raises(UserError, match="the folder does not exist"):
        fetch(f"{server.url}/big", tmp_path / "nowhere" / "big", MD5)


# --- whole datasets -----------------------------------------------------------------------------------------------


def test_an_archive_is_fetched_checked_and_unpacked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/pub/c.tar.gz"] = GOOD
    publish(monkeypatch, "cifar10", (f"{server.url}/pub/c.tar.gz", GOOD, FOLDER))
    to = tmp_path / "new" / "data"
    assert get("cifar10", to) == to
    assert (to / FOLDER / "data_batch_1").read_bytes() == b"one"
    assert (to / FOLDER / "sub" / "meta").read_bytes() == b"two"
    assert sorted(path.name for path in to.iterdir()) == ["c.tar.gz", FOLDER]
    get("cifar10", to)
    assert len(server.seen) == 1, "what is there is not fetched again"


def test_a_file_put_there_by_hand_is_used(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, "cifar10", (f"{server.url}/c.tar.gz", GOOD, FOLDER))
    (tmp_path / "c.tar.gz").write_bytes(GOOD)
    get("cifar10", tmp_path)
    assert (tmp_path / FOLDER / "data_batch_1").read_bytes() == b"one"
    assert not server.seen


def test_a_wrong_file_put_there_by_hand_is_refused_but_not_removed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, "cifar10", (f"{server.url}/c.tar.gz", GOOD, FOLDER))
    (tmp_path / "c.tar.gz").write_bytes(GOOD + b"x")
    with pytest.raises(UserError, match=r"c.tar.gz is not the published file.*remove it"):
        get("cifar10", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["c.tar.gz"]


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_mirrors(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    one, two = b"train", b"test" * 1000
    server.files |= {"/m/train.mat": one, "/m/test.mat": two}
    nowhere = "http://127.0.0.1:9/x"  # the published address must not be asked
    publish(monkeypatch, "svhn", (f"{nowhere}/train.mat", one, None), (f"{nowhere}/test.mat", two, None))
    if way == "environment":
        monkeypatch.setenv("CROSEL_MIRROR", f"{server.url}/m/")
    get("svhn", tmp_path, mirror=f"{server.url}/m" if way == "argument" else None)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"train.mat": one, "test.mat": two}
    assert [path for path, _ in server.seen] == ["/m/train.mat", "/m/test.mat"]


@pytest.mark.parametrize("mirror", ["file:///etc", "ftp://x", "data", "/srv/mirror"])
def test_other_kinds_of_mirrors_are_refused(tmp_path: Path, mirror: str) -> None:
    with pytest.raises(UserError, match="begins with http:// or https://"):
        get("svhn", tmp_path, mirror=mirror)


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        get("cifar-10", tmp_path)
    assert not list(tmp_path.iterdir())


def test_names_and_addresses_as_published() -> None:
    """What `--data` looks for is what is made here."""
    assert {name: [p.file for p in files] for name, files in DATASETS.items()} == {
        "cifar10": ["cifar-10-python.tar.gz"],
        "cifar100": ["cifar-100-python.tar.gz"],
        "svhn": ["train_32x32.mat", "test_32x32.mat"],
    }
    assert [p.folder for files in DATASETS.values() for p in files] == [
        "cifar-10-batches-py", "cifar-100-python", None, None,
    ]  # fmt: skip
    assert all(len(p.md5) == 32 and int(p.md5, 16) for files in DATASETS.values() for p in files)


# --- archives -----------------------------------------------------------------------------------------------------


def hostile(outside: Path) -> dict[str, bytes]:
    """Archives that try to write into the folder `outside`, or are no archives at all."""
    return {
        "absolute": archive((f"{FOLDER}/a", b"1"), (f"{outside}/evil", b"x")),
        "above": archive((f"{FOLDER}/a", b"1"), (f"{FOLDER}/../../evil", b"x")),
        "above first": archive(("../evil", b"x")),
        "another folder": archive((f"{FOLDER}/a", b"1"), ("evil", b"x")),
        "dot": archive((".", "dir"), ("./evil", b"x")),
        "symlink": archive((f"{FOLDER}/a", ("symlink", "/etc/passwd"))),
        "symlink then through": archive((f"{FOLDER}/d", ("symlink", str(outside))), (f"{FOLDER}/d/evil", b"x")),
        "folder is a link": archive((FOLDER, ("symlink", str(outside))), (f"{FOLDER}/evil", b"x")),
        "hard link": archive((f"{FOLDER}/a", ("link", "/etc/passwd"))),
        "fifo": archive((f"{FOLDER}/a", "fifo")),
        "device": archive((f"{FOLDER}/a", "device")),
        "backslash": archive((f"{FOLDER}/..\\evil", b"x")),
        "many": archive(*((f"{FOLDER}/{i}", b"") for i in range(1001))),
        "file over folder": archive((f"{FOLDER}/a", b"1"), (f"{FOLDER}/a/b", b"2")),
        "cut": GOOD[: len(GOOD) // 2],
        "no gzip": b"PK\3\4 something else",
        "empty": b"",
        "nothing in it": archive(),
    }


@pytest.mark.parametrize("name", hostile(Path("/")))
def test_hostile_archives_write_nothing(tmp_path: Path, name: str) -> None:
    to = tmp_path / "inner" / "to"
    to.mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "a.tar.gz").write_bytes(hostile(outside)[name])
    with pytest.raises(UserError) as caught:
        unpack(tmp_path / "a.tar.gz", to, FOLDER)
    assert "\n" not in str(caught.value)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert left == {"a.tar.gz", "inner", "inner/to", "outside"}


def test_bombs_are_refused_before_they_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_MAX_UNPACKED", 1 << 20)
    (tmp_path / "a.tar.gz").write_bytes(archive((f"{FOLDER}/zeros", b"\0" * (1 << 20)), (f"{FOLDER}/one", b"1")))
    with pytest.raises(UserError, match="larger than the published archive"):
        unpack(tmp_path / "a.tar.gz", tmp_path, FOLDER)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def test_a_member_that_lies_about_its_size(tmp_path: Path) -> None:
    """The header says a terabyte; the archive has three bytes."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        info = tarfile.TarInfo(f"{FOLDER}/a")
        info.size = 1 << 40
        stream.write(info.tobuf())
        stream.write(b"abc".ljust(512, b"\0"))
        tar.offset = 1024
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(stream.getvalue()))
    with pytest.raises(UserError, match="larger than the published archive"):
        unpack(tmp_path / "a.tar.gz", tmp_path, FOLDER)

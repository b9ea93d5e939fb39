"""`crosel data get` from the command line, against a server of our own."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from _download_server import FOLDER, GOOD, Server, publish
from _support import CroselCli


def test_get_by_the_command_line(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crosel_cli: CroselCli
) -> None:
    """The connection breaks, the rest is fetched, and a second call fetches nothing."""
    server.files["/c.tar.gz"] = GOOD
    server.plan = ["drop 40"]
    publish(monkeypatch, "cifar10", (f"{server.url}/c.tar.gz", GOOD, FOLDER))
    to = tmp_path / "my data"
    result = crosel_cli("data", "get", "cifar10", "--to", to)
    assert result.code == 0, result.err
    assert result.out == f"cifar10 is in {to}; train on it with: crosel train cifar10 --data {to}\n"
    assert (to / FOLDER / "data_batch_1").read_bytes() == b"one"
    assert [wish for _, wish in server.seen] == [None, "bytes=40-"]
    assert crosel_cli("data", "get", "cifar10", "--to", to).code == 0
    assert len(server.seen) == 2


def test_mirror_option_and_wrong_bytes(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crosel_cli: CroselCli
) -> None:
    nowhere = "http://127.0.0.1:9"
    publish(monkeypatch, "svhn", (f"{nowhere}/train.mat", b"train", None), (f"{nowhere}/test.mat", b"test", None))
    server.files |= {"/m/train.mat": b"train", "/m/test.mat": b"other"}
    result = crosel_cli("data", "get", "svhn", "--to", tmp_path, "--mirror", f"{server.url}/m")
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert f"{server.url}/m/test.mat: wrong content" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["train.mat"], "what was wrong is not kept"
    server.files["/m/test.mat"] = b"test"
    assert crosel_cli("data", "get", "svhn", "--to", tmp_path, "--mirror", f"{server.url}/m").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.mat", "train.mat"]


@pytest.mark.usefixtures("server")  # for its environment: no proxy, no waiting
def test_offline_is_one_line_that_says_where_to_put_the_file(tmp_path: Path, crosel_cli: CroselCli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    result = crosel_cli("data", "get", "cifar100", "--to", tmp_path / "d", "--mirror", f"http://127.0.0.1:{port}")
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert f"put it at {tmp_path / 'd' / 'cifar-100-python.tar.gz'}, and run this again" in result.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["cifar11"], "unknown dataset 'cifar11' (did you mean 'cifar10'?)"),
        (["cifar10", "--mirror", "ftp://x"], "begins with http:// or https://"),
    ],
)
def test_what_cannot_be_got(tmp_path: Path, crosel_cli: CroselCli, arguments: list[str], says: str) -> None:
    result = crosel_cli("data", "get", *arguments, "--to", tmp_path)
    assert result.code == 2
    assert says in result.err
    assert not list(tmp_path.iterdir())

"""Embeddings are computed once for each content, survive a kill, and never mix with those of other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from crosel.data import embeddings
from crosel.data.embeddings import FOLDER, Embedder
from crosel.utils import files


class Doubles:
    """An encoder whose embedding of three bytes is twice their values."""

    name, takes, dimensions, size = "doubles", "images", 3, 0

    def __init__(self, digest: str = "a", fails_after: int | None = None) -> None:
        self.digest, self.fails_after, self.seen = digest, fails_after, 0

    def prepare(self, example: Any) -> Any:
        return example

    def encode(self, examples: NDArray[np.uint8]) -> NDArray[np.float32]:
        if self.fails_after is not None and self.seen >= self.fails_after:
            raise KeyboardInterrupt
        self.seen += len(examples)
        return 2 * examples.astype(np.float32)


def rows(n: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (n, 3), dtype=np.uint8)


def embed(x: NDArray[np.uint8], encoder: Doubles, folder: Path | None, **options: Any) -> Any:
    return Embedder(encoder).embed(
        len(x), lambda row: x[row].tobytes(), lambda content: np.frombuffer(content, np.uint8), folder, **options
    )


def test_each_content_passes_once(tmp_path: Path) -> None:
    x, encoder = rows(300), Doubles()
    x[200:] = x[:100]
    seen: list[tuple[int, int]] = []
    out, failed = embed(x, encoder, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert (out == 2.0 * x).all()
    assert not failed
    assert encoder.seen == 200
    assert seen[-1] == (300, 300)
    again = embed(np.concatenate([x, rows(50, seed=1)]), encoder, tmp_path)[0]
    assert (again[:300] == out).all()
    assert encoder.seen == 250


@pytest.mark.parametrize("cut", [0, 1, 5, 12, 700])
def test_a_kill_costs_at_most_what_was_under_way(cut: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = rows(500)
    with caplog.at_level("INFO"), pytest.raises(KeyboardInterrupt):
        embed(x, Doubles(fails_after=256), tmp_path)
    assert "the same command goes on from there" in caplog.text
    file = next((tmp_path / FOLDER).glob("*.f32"))
    with open(file, "r+b") as stream:  # the last row was half written
        stream.truncate(file.stat().st_size - cut)
    encoder = Doubles()
    assert (embed(x, encoder, tmp_path)[0] == 2.0 * x).all()
    lost = -(-cut // 12)
    assert encoder.seen == 500 - 256 + lost


def test_other_weights_have_a_store_of_their_own(tmp_path: Path) -> None:
    x, other = rows(70), Doubles("b")
    embed(x, Doubles("a"), tmp_path)
    embed(x, other, tmp_path)
    assert other.seen == 70


def test_a_store_in_use_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of several ranks, say: what one has computed the others need not."""
    x, encoder = rows(70), Doubles()
    embed(x, Doubles(), tmp_path)
    held = embeddings.EmbeddingStore(tmp_path / FOLDER, Doubles())
    monkeypatch.setattr(files.time, "sleep", lambda seconds: held.close())
    with caplog.at_level("INFO"):
        assert (embed(x, encoder, tmp_path)[0] == 2.0 * x).all()
    assert encoder.seen == 0
    assert "waiting for another process, which is computing embeddings for the same store" in caplog.text


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = rows(150)
    assert (embed(x, Doubles(), None)[0] == 2.0 * x).all()
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_read_has_its_row(tmp_path: Path) -> None:
    x = rows(200)

    def read(row: int) -> bytes:
        if row in (3, 130):
            raise OSError("no such file")
        return x[row].tobytes()

    def run(to_the_end: bool) -> Any:
        prepare = lambda content: np.frombuffer(content, np.uint8)  # noqa: E731
        return Embedder(Doubles()).embed(200, read, prepare, tmp_path, to_the_end=to_the_end)

    assert list(run(False)[1]) == [3]
    out, failed = run(True)
    assert list(failed) == [3, 130]
    good = np.delete(np.arange(200), [3, 130])
    assert (out[good] == 2.0 * x[good]).all()
    assert not out[[3, 130]].any()


def test_a_folder_that_is_a_link_is_not_written_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / FOLDER).symlink_to(elsewhere)
    x = rows(70)
    assert (embed(x, Doubles(), tmp_path)[0] == 2.0 * x).all()
    assert not list(elsewhere.iterdir())

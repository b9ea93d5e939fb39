"""parquet, Arrow, feather and what `datasets` saves: the same columns as in csv and jsonl, in Arrow's types."""

from __future__ import annotations

import io
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _files import refused
from PIL import Image

from crosel.data import DataSettings, load
from crosel.data.formats import InputSpec
from crosel.data.formats import arrow as arrow_module
from crosel.data.formats.arrow import Arrow
from crosel.data.images import decode
from crosel.data.sources import open_inputs, read_inputs
from crosel.errors import UserError

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")
feather: Any = pytest.importorskip("pyarrow.feather")

NAMES = ["cat", "dog", "fox"]
OWN = DataSettings(cache=False)


def class_label(**columns: bool) -> dict[bytes, bytes]:
    """The metadata that `datasets` writes; True: the column is a list of classes."""
    one = {"names": NAMES, "_type": "ClassLabel"}
    features = {name: {"feature": one, "_type": "List"} if listed else one for name, listed in columns.items()}
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


def png(colour: tuple[int, int, int], size: int = 8) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(out, "png")
    return out.getvalue()


def save(path: Path, table: Any) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    elif path.suffix == ".feather":
        feather.write_feather(table, path)
    else:
        kind = pa.ipc.new_stream if path.stem.startswith("stream") else pa.ipc.new_file
        with kind(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


def saved(folder: Path, *parts: Any) -> Path:
    """As `Dataset.save_to_disk` does, in as many files."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(parts):05}.arrow" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        with pa.ipc.new_stream(folder / name, part.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def rows(n: int = 5, **more: Any) -> Any:
    columns = {"candidates": [["cat", "dog"]] * (n - 1) + [["fox"]], "a": range(n), "b": np.arange(n) / 2}
    return pa.table({**columns, **more})


def error(read: Any) -> str:
    with pytest.raises(UserError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow", "stream.arrow", "d.feather"])
def test_columns_of_numbers(tmp_path: Path, name: str) -> None:
    data = load(str(save(tmp_path / name, rows())))
    assert data.classes == ("cat", "dog", "fox")
    assert data.columns == ("a", "b")
    np.testing.assert_array_equal(data.x, [[i, i / 2] for i in range(5)])
    assert data.candidates is not None
    assert data.candidates.tolist() == [[True, True, False]] * 4 + [[False, False, True]]


def test_sets_as_text_and_every_kind_of_number(tmp_path: Path) -> None:
    table = pa.table({
        "id": pa.array(["a", "b"]).dictionary_encode(), "candidates": ["cat|dog", "dog"],
        "label": pa.array([0, 2], pa.int8()), "f16": pa.array(np.array([1, 2], np.float16)),
        "bool": [True, False], "u8": pa.array([3, 4], pa.uint8()), "large": pa.array([5, 6], pa.int64()),
        "__index_level_0__": [7, 8],
    }).replace_schema_metadata(class_label(label=False))  # fmt: skip
    data = load(str(save(tmp_path / "d.parquet", table)))
    assert data.ids == ("a", "b")
    assert data.classes == ("cat", "dog", "fox")
    assert data.y is not None
    assert data.y.tolist() == [0, 2]
    np.testing.assert_array_equal(data.x, [[1, 1, 3, 5], [2, 0, 4, 6]])


@pytest.mark.parametrize("kind", [None, pa.list_(pa.float32()), pa.list_(pa.float64(), 3), pa.large_list(pa.int32())])
def test_one_column_of_lists_is_features(tmp_path: Path, kind: Any) -> None:
    x = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    table = pa.table({"candidates": [["u", "v"]] * 3, "embedding": pa.array(x, kind)})
    path = save(tmp_path / "d.arrow", table)
    data = load(str(path))
    assert data.columns is None
    np.testing.assert_array_equal(data.x, x)
    chunks = list(open_inputs(path, InputSpec((3,))))
    np.testing.assert_array_equal(np.concatenate([chunk.x for chunk in chunks]), x)


def test_numbers_of_classes_are_names(tmp_path: Path) -> None:
    table = pa.table({"candidates": [[0, 1], [1]], "label": [1, -1], "a": [1, 2], "coarse": [0, 1]})
    table = table.replace_schema_metadata(class_label(candidates=True, label=False, coarse=False))
    data = load(str(save(tmp_path / "d.parquet", table)))
    assert data.classes == ("cat", "dog", "fox")  # also those that are in no row
    assert data.columns == ("a",)
    assert data.y is None  # -1: unknown
    assert data.candidates is not None
    assert data.candidates.tolist() == [[True, True, False], [False, True, False]]


@pytest.mark.parametrize("group", [10, 800])
def test_images_of_a_parquet_file_are_read_when_they_are_needed(
    group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be larger than the memory, and so may a row group: only a few rows are held at once."""
    monkeypatch.setattr(arrow_module, "workers", lambda: 1)
    rng, rows = np.random.default_rng(0), 800
    pixels = rng.integers(0, 256, (rows, 24, 24, 3), dtype=np.uint8)
    cells = []
    for image in pixels:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "PNG")
        cells.append({"bytes": stream.getvalue(), "path": None})
    path = tmp_path / "d.parquet"
    table = pa.table({"image": cells, "label": [f"c{i % 2}" for i in range(rows)]})
    pages = {"data_page_size": 8000, "write_batch_size": 4, "use_dictionary": False}
    pq.write_table(table, path, row_group_size=group, **pages)
    del table
    found, _ = Arrow().table(path, DataSettings())
    before = pa.total_allocated_bytes()
    images = found.columns["path"]
    assert len({image.where for image in images}) == rows
    order = [*range(rows - 1, -1, -30), *range(rows)]
    for row in order:
        assert np.array_equal(decode(images[row], DataSettings(image_size=24)), pixels[row])
    held = pa.total_allocated_bytes() - before
    assert held < path.stat().st_size / 10
    assert before < path.stat().st_size / 10
    data = load(str(path), settings=DataSettings(image_size=24, cache=False))
    assert np.array_equal(data.x.transpose(0, 2, 3, 1), pixels)


def test_images_in_the_file(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), (0, 0, 255)).save(tmp_path / "blue.png")
    cells = [
        {"bytes": png((255, 0, 0)), "path": "r.png"}, {"bytes": png((0, 255, 0)), "path": None},
        {"bytes": None, "path": "blue.png"},
    ]  # fmt: skip
    path = save(tmp_path / "d.parquet", pa.table({"img": cells, "label": [0, 1, 2]}))
    data = load(str(path), settings=OWN)
    assert data.x[:, :, 0, 0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]
    assert data.ids is None
    chunks = list(open_inputs(path, InputSpec(data.shape)))
    np.testing.assert_array_equal(np.concatenate([chunk.x for chunk in chunks]), data.x)
    assert load(str(path)).x.tolist() == load(str(path)).x.tolist() == data.x.tolist()  # kept and taken up again


def test_an_image_that_cannot_be_read_has_its_row(tmp_path: Path) -> None:
    cells = [{"bytes": png((9, 9, 9)), "path": "a"}, {"bytes": b"no image", "path": "b.png"}]
    path = save(tmp_path / "d.parquet", pa.table({"image": cells, "label": ["x", "y"]}))
    said = error(lambda: load(str(path)))
    assert "row 1, column 'image'" in said
    assert "b.png" in said
    data = load(str(path), settings=OWN.model_copy(update={"skip_bad": True}))
    assert data.ids == ("0",)
    missing = save(tmp_path / "m.parquet", pa.table({"image": [cells[0], None], "label": ["x", "y"]}))
    assert "row 1, column 'image'" in error(lambda: load(str(missing)))


def test_votes(tmp_path: Path) -> None:
    table = pa.table({"task": [1, 1, 2], "worker": ["w", "v", "w"], "label": ["x", "y", "x"], "a": [1.0, 1.0, 2.0]})
    data = load(str(save(tmp_path / "d.parquet", table)))
    assert data.votes is not None
    assert data.votes.tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize(
    ("column", "cells", "says"),
    [
        ("candidates", [["cat"], [], ["dog"]], "row 1, column 'candidates': an empty set"),
        ("candidates", [["cat"], ["dog", None], ["dog"]], "row 1, column 'candidates': 'None' is not a label"),
        ("a", [1.0, 2.0, None], "row 2, column 'a': NaN"),
        ("a", [1e300, 2.0, 3.0], "row 0, column 'a': 1e+300 is too large"),
        ("a", ["1", "2", "3"], "column 'a': string, not numbers; drop the column"),
        ("x", [[1.0], [2.0, 3.0], [4.0]], "row 1, column 'x': 2 numbers, where the first row has 1"),
        ("x", [[], [2.0, 3.0], [4.0]], "row 0, column 'x': no numbers"),
        ("x", [[1.0], None, [4.0]], "row 1, column 'x': 0 numbers, where the first row has 1"),
        ("x", [[1.0], [None], [4.0]], "row 1, column 'x': NaN"),
        ("id", ["u", "v", "u"], "row 2, column 'id': id 'u' was already given in row 0"),
        ("file", ["a.png", "b.png", "c.png"], "column 'file': 'a.png' seems to be an image"),
    ],
)
def test_errors_name_row_and_column(tmp_path: Path, column: str, cells: list[Any], says: str) -> None:
    table = {"candidates": [["cat", "dog"]] * 3, "b": [1, 2, 3], column: cells}
    path = save(tmp_path / "d.parquet", pa.table(table))
    said = error(lambda: load(str(path)))
    assert said.startswith(str(path))
    assert says in said


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    for name in ("d.parquet", "d.arrow", "stream.arrow", "d.feather"):
        path = save(tmp_path / name, rows(200))
        content = path.read_bytes()
        for damaged in (content[: len(content) // 2], b"PAR1PAR1"):
            path.write_bytes(damaged)
            error(lambda path=path: load(str(path)))
        path.write_bytes(content[:100] + b"\xff" * 200 + content[300:])
        with suppress(UserError):  # it may hold other numbers now, but must raise nothing else
            load(str(path))


def test_a_dataset_saved_to_disk(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d", rows(3), rows(2))
    data = load(str(folder))
    assert data.x[:, 0].tolist() == [0, 1, 2, 0, 1]
    assert list(read_inputs(folder).ids) == list("01234")
    chunks = list(open_inputs(folder, InputSpec(data.shape, data.columns)))
    assert [name for chunk in chunks for name in chunk.ids] == list("01234")


def test_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "d"
    label = {"label": ["cat", "dog", "dog"]}
    for split in ("train", "test", "validation"):
        saved(folder / split, rows(3, **label))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "train", "validation"]}))
    data = load(str(folder))
    assert (data.n, data.y_test) == (3, pytest.approx([0, 1, 1]))
    assert "only train and test are used, not validation" in caplog.text
    assert "name one of them: " in error(lambda: list(open_inputs(folder, InputSpec((2,)))))
    assert load(str(folder / "validation")).n == 3


def test_a_folder_of_parquet_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "hub").mkdir()
    for part, n in (("a", 3), ("b", 2)):
        save(tmp_path / "parts" / f"part-{part}.parquet", rows(n))
    data = load(str(tmp_path / "parts"))
    assert data.x[:, 0].tolist() == [0, 1, 2, 0, 1]
    chunks = list(open_inputs(tmp_path / "parts", InputSpec(data.shape, data.columns)))
    assert [name for chunk in chunks for name in chunk.ids] == list("01234")
    label = {"label": ["cat", "dog", "dog"]}
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001", "validation-00000-of-00001"):
        save(tmp_path / "hub" / f"{name}.parquet", rows(3, **label))
    data = load(str(tmp_path / "hub"))
    assert (data.n, data.y_test) == (6, pytest.approx([0, 1, 1]))
    assert "only train and test are used, not validation" in caplog.text


def test_a_saved_dataset_that_is_not_whole(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d", rows())
    for state in ("{}", "[1]", '{"_data_files": [{"filename": "../x"}]}', '{"_data_files": []}'):
        (folder / "state.json").write_text(state)
        assert "does not name the dataset's files" in error(lambda: load(str(folder)))
    (folder / "state.json").write_text('{"_data_files": [{"filename": "no.arrow"}]}')
    assert "no.arrow: no such file" in error(lambda: load(str(folder)))
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert "state.json: no such file" in error(lambda: load(str(folder)))


def test_a_long_file_is_not_held_whole(tmp_path: Path) -> None:
    """Predicting needs memory for a part of it: nothing but the chunk is kept."""
    n = 200_000
    table = pa.table({"id": range(n), **{f"f{i}": np.full(n, float(i)) for i in range(8)}})
    path = tmp_path / "d.parquet"
    pq.write_table(table, path, row_group_size=20_000)
    del table
    before = pa.total_allocated_bytes()
    most = count = 0
    for chunk in open_inputs(path, InputSpec((8,), tuple(f"f{i}" for i in range(8)))):
        most = max(most, pa.total_allocated_bytes() - before)
        count += len(chunk.ids)
    assert count == n
    assert most < n * 8 * 9 / 4


def test_without_the_package_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "d.parquet", rows())

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("crosel.data.formats.arrow.importlib.import_module", missing)
    assert "pip install 'crosel[arrow]'" in error(lambda: load(str(path)))


def test_places_outside_a_file_are_refused(tmp_path: Path) -> None:
    """Found by changed inputs: Arrow read where the file told it to, and the process died."""
    table = pa.table({"f": [1.0, 2.0], "candidates": [["x", "y"], ["y"]]})
    path = tmp_path / "a.arrow"
    feather.write_feather(table, path, compression="uncompressed")
    content = bytearray(path.read_bytes())
    offsets = (0).to_bytes(4, "little") + (2).to_bytes(4, "little") + (3).to_bytes(4, "little")
    at = content.index(offsets)
    content[at + 4 : at + 8] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(content)
    assert "damaged" in refused(path)


def test_names_of_columns_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    feather.write_feather(pa.table({"feature": [1.0], "label": ["a"]}), path, compression="uncompressed")
    path.write_bytes(path.read_bytes().replace(b"feature", b"featu\xffe"))
    assert "damaged" in refused(path)


def test_every_type_of_a_changed_file_is_read_or_refused(tmp_path: Path) -> None:
    """Found by changed inputs: pyarrow raises a KeyError for a list of a type that it has no class for."""
    path = tmp_path / "a.arrow"
    table = pa.table({"f": [1.0, 2.0], "candidates": [["x", "y"], ["y"]]})
    feather.write_feather(table, path, compression="uncompressed")
    good, outcomes = path.read_bytes(), set()
    for at in (place for place, byte in enumerate(good) if byte == 5):  # the number of the type of texts
        path.write_bytes(good[:at] + bytes([11]) + good[at + 1 :])  # of an interval
        try:
            load(str(path))
        except UserError as error:
            outcomes.add(str(error))
    assert any("damaged (21)" in text for text in outcomes)


@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "train.parquet"])
def test_a_pipe_in_a_saved_dataset_is_refused(name: str, tmp_path: Path) -> None:
    if name.endswith(".arrow"):
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        (tmp_path / "dataset_info.json").write_text("{}")
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError):
        load(str(tmp_path if name.endswith(".arrow") else tmp_path / name))


def test_rows_that_take_no_room_in_the_file_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = pa.DictionaryArray.from_arrays(pa.array(np.zeros(300_000, np.int32)), pa.array(["a"]))
    pq.write_table(pa.table({"f": np.zeros(300_000), "label": labels}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    monkeypatch.setenv("CROSEL_MEMORY_GB", "0.005")
    assert "its rows would take" in refused(tmp_path / "a.parquet")

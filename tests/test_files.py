"""One way in and one way out: files are opened by `utils/reading.py` and `utils/files.py`, with few exceptions."""

from __future__ import annotations

import ast
from pathlib import Path

import crosel

SOURCE = Path(crosel.__file__).parent
OPEN = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "tofile", "fromfile", "fdopen"}
LIBRARIES = {"np.load", "np.loadtxt", "np.memmap", "loadmat", "whosmat", "load_file", "torch.load", "ZipFile",
             "safe_open", "ParquetFile", "memory_map"}  # fmt: skip
BUNDLED, NULL, HANDLE = "a file of crosel or scikit-learn", "/dev/null", "what `open_plain` has opened"
CHECKED = "a file that is known to be plain and of bounded size by now"
CONTENT = "not a file, but what lies in one that is open"
# Module and call: why it is right.
ALLOWED = {
    ("bench/executors.py", "open"): HANDLE,
    ("bench/suite.py", "read_text"): BUNDLED,
    ("bench/tables/paper.py", "read_text"): BUNDLED,
    ("cli/process.py", "open"): NULL,
    ("data/download.py", "open"): f"{HANDLE}; tarfile: the archive has the published checksum",
    ("data/download.py", "write_bytes"): "into a new folder, under names that `_target` has checked",
    ("data/formats/arrow.py", "ParquetFile"): CHECKED,
    ("data/formats/arrow.py", "memory_map"): CHECKED,
    ("data/formats/arrow.py", "open"): "a method of our own",
    ("data/formats/digits.py", "np.loadtxt"): BUNDLED,
    ("data/formats/mat.py", "loadmat"): CHECKED,
    ("data/formats/mat.py", "whosmat"): CHECKED,
    ("data/formats/npz.py", "ZipFile"): CHECKED,
    ("data/formats/npz.py", "np.load"): CHECKED,
    ("data/formats/npz.py", "open"): CONTENT,
    ("data/formats/rows.py", "open"): "a method of our own",
    ("data/images.py", "open"): CHECKED,
    ("estimator/model.py", "safe_open"): CHECKED,
    ("nn/backbones.py", "load_file"): CHECKED,
    ("nn/backbones.py", "torch.load"): CHECKED,
    ("presets/__init__.py", "read_text"): BUNDLED,
    ("report/page.py", "read_text"): BUNDLED,
    ("review/app.py", "open"): "the browser",
    ("review/app.py", "read_bytes"): BUNDLED,
    ("review/app.py", "write_text"): "into a new temporary folder",
    ("runs/folder.py", "open"): HANDLE,
    ("utils/system.py", "open"): "a folder, to flush it",
}  # fmt: skip


def opened(text: str) -> set[str]:
    """The calls that open a file, or may."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            whole = ast.unparse(node.func)
            last = whole.rpartition(".")[2]
            found |= {last} & (OPEN | LIBRARIES) | {whole} & LIBRARIES
    return found


def test_files_are_opened_in_one_place() -> None:
    found = {
        (str(path.relative_to(SOURCE).as_posix()), call)
        for path in SOURCE.rglob("*.py")
        if path.name not in ("reading.py", "files.py")
        for call in opened(path.read_text(encoding="utf-8"))
    }
    unknown = found - ALLOWED.keys()
    assert not unknown, f"use crosel.utils.reading or crosel.utils.files, or say here why it is right: {unknown}"
    assert found == ALLOWED.keys(), "remove what is gone"


def test_an_open_is_noticed() -> None:
    assert opened("import numpy as np\nx = np.load(path)\nwith path.open() as f: pass") == {"np.load", "open"}
    assert opened("Path('a').read_text()\npyarrow.parquet.ParquetFile(p)\ntext.load()") == {"read_text", "ParquetFile"}

"""A good file of every format, to be damaged."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import scipy.io


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def mat(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    scipy.io.savemat(stream, arrays, do_compression=True)
    return stream.getvalue()


X = np.arange(12.0).reshape(4, 3)
STUDIO = [{"id": 1, "data": {"image": "a.png"}, "annotations": [{"result": [{"value": {"choices": ["cat", "dog"]}}]}]}]
GOOD: dict[str, tuple[str, bytes]] = {
    "csv of features": ("d.csv", b"id,candidates,label,weight,split,f\na,x|y,x,1|2,,1\nb,y,y,1,,2\nc,,x,,test,3\n"),
    "csv of images": ("d.csv", b"path,candidates\na.png,x|y\n"),
    "jsonl": ("d.jsonl", b'{"id": 1, "x": [1], "candidates": ["x", "y"]}\n{"id": 2, "x": [3], "candidates": [2]}'),
    "long votes": ("d.csv", b"task,worker,label\na.png,ann,cat\na.png,bob,dog\n"),
    "wide votes": ("d.csv", b"task,annotator_1,annotator_2\na.png,cat,dog\n"),
    "scores": ("d.csv", b"path,cat,dog\na.png,0.5,0.5\n"),
    "Label Studio": ("d.json", json.dumps(STUDIO).encode()),
    "npz": ("d.npz", npz(x=X, candidates=np.ones((4, 2), bool), y=[0, 1, 1, 0], ids=list("abcd"), classes=["p", "q"])),
    "npz of votes": ("d.npz", npz(x=X, votes=np.ones((4, 2), int), weights=np.ones((4, 2)), flips=True, groups=[0, 1])),
    "PALM": ("d.mat", mat(data=X, partial_target=np.ones((2, 4)), target=np.eye(2)[[0, 1, 1, 0]].T)),
    "SVHN": ("d.mat", mat(X=np.zeros((32, 32, 3, 2), np.uint8), y=np.array([[1], [10]]))),
}  # fmt: skip

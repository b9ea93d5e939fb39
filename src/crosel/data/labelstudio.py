"""Label Studio's JSON export: tasks with the choices of one or more annotators."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from crosel.data.dataset import Dataset
from crosel.data.images import SUFFIXES
from crosel.data.inputs import join_inputs
from crosel.data.limits import shown
from crosel.data.settings import DataSettings, Progress
from crosel.data.table import Table
from crosel.data.text import read_json
from crosel.data.vocabulary import label_name
from crosel.data.votes import votes_dataset
from crosel.errors import UserError


def _image_text(value: str, root: Path) -> str:
    """Where Label Studio says an image is -> a path below the image root, where that is known."""
    if not value.startswith("/data/") or "\0" in value or len(value) > 4000:
        return value
    rest, _, query = value.removeprefix("/data/").partition("?")
    if rest.rstrip("/") == "local-files":
        try:
            return parse_qs(query).get("d", [value])[0]
        except ValueError:  # more fields than anyone writes
            return value
    below = unquote(rest)  # uploads are kept as /data/upload/PROJECT/NAME
    if "\0" in below or os.path.exists(root / below):
        return below
    return below.rpartition("/")[2]


def _find_image(data: dict[str, Any]) -> str | None:
    if isinstance(data.get("image"), str):
        return str(data["image"])
    for value in data.values():
        if isinstance(value, str) and Path(value[-10:]).suffix.lower() in SUFFIXES:
            return value
    return None


def _choices(annotation: dict[str, Any], place: str, wanted: str | None, fields: set[str]) -> list[str]:
    """The labels an annotator ticked, each once; `fields` gathers under which names of the labelling config."""
    results = annotation.get("result")
    if not isinstance(results, list):
        raise UserError(f"{place}: an annotation has no list 'result'")
    names: list[str] = []
    for result in results:
        value = result.get("value") if isinstance(result, dict) else None
        choices = value.get("choices") if isinstance(value, dict) else None
        if choices is None:  # another kind of answer, such as a rectangle or a rating
            continue
        if not isinstance(choices, list):
            raise UserError(f"{place}: 'choices' is no list")
        field = str(result.get("from_name", ""))
        fields.add(field)
        if wanted is not None and field != wanted:
            continue
        try:
            names += [label_name(choice) for choice in choices]
        except ValueError as error:
            raise UserError(f"{place}: choices: {error}") from None
    return list(dict.fromkeys(names))


def read_label_studio(path: Path, settings: DataSettings, progress: Progress | None = None) -> Dataset:
    tasks = read_json(path)
    if not isinstance(tasks, list) or not tasks:
        raise UserError(f"{path}, line 1, column 1: expected Label Studio's JSON export, a list of tasks")
    root = Path(settings.image_root) if settings.image_root else path.parent
    left_out: Counter[str] = Counter()
    names: list[str] = []
    images: list[str] = []
    places: list[str] = []
    votes: list[tuple[int, str, int, str]] = []
    seen: dict[str, int] = {}
    fields: set[str] = set()
    for number, task in enumerate(tasks, 1):
        place = f"{path}, task {number}"
        annotations = task.get("annotations", task.get("completions")) if isinstance(task, dict) else None
        data = task.get("data") if isinstance(task, dict) else None
        if not isinstance(annotations, list) or not isinstance(data, dict):
            raise UserError(f"{place}: expected an object with 'data' and 'annotations'; export as JSON, not JSON-MIN")
        try:
            name = label_name(task.get("id", number))
        except ValueError as error:
            raise UserError(f"{place}: id: {error}") from None
        if name in seen:
            raise UserError(f"{place}: id {shown(name)} was given to task {seen[name]}")
        seen[name] = number
        ticked = []
        for annotation in annotations:
            if not isinstance(annotation, dict):
                raise UserError(f"{place}: an annotation is no object")
            if annotation.get("was_cancelled") or annotation.get("skipped"):
                left_out["skipped or cancelled annotations"] += 1
                continue
            labels = _choices(annotation, place, settings.choices, fields)
            if not labels:
                left_out["annotations without a choice"] += 1
            ticked += labels
        if not ticked:
            left_out["tasks without a choice"] += 1
            continue
        image = _find_image(data)
        if image is None and settings.inputs is None:
            raise UserError(f"{place}: no image in 'data'; say where the inputs are: --set data.inputs=FILE")
        votes += [(len(names), label, len(names), "choices") for label in ticked]
        names.append(name)
        images.append(_image_text(image or "", root))
        places.append(place)
    if len(fields) > 1 and settings.choices is None:
        first, *others = sorted(fields)
        raise UserError(
            f"{path}: choices stand under the names {', '.join(map(shown, (first, *others[:4])))}; "
            f"say which of them are the labels: --set data.choices={first or others[0]}"
        )
    if not names:
        under = f" under the name {shown(settings.choices)}" if settings.choices is not None else ""
        raise UserError(f"{path}: not one of {len(tasks)} tasks has a choice{under}")
    notes = [f"{what}, left out: {count}" for what, count in left_out.items()]
    inputs = join_inputs(names, places.__getitem__, path, settings, progress, None, images)
    table = _Places(path, range(len(names)), {}, {})
    table.given = places
    return votes_dataset(inputs, votes, table, settings, None, notes)


class _Places(Table):
    """Tasks have numbers, not lines."""

    given: list[str]

    def place(self, row: int, meaning: str | None = None) -> str:
        return self.given[row]

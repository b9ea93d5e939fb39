"""Label Studio's JSON export: tasks with the choices of one or more annotators."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from crosel.data.dataset import Dataset
from crosel.data.formats.base import Format
from crosel.data.images import ends_as_image
from crosel.data.settings import DataSettings, OnImages
from crosel.data.table import Table, image_root
from crosel.data.text import read_json
from crosel.data.vocabulary import label_name
from crosel.data.votes import join_inputs, votes_dataset
from crosel.errors import UserError
from crosel.utils.text import quoted

EXPORT = "export the project as JSON, not JSON-MIN"


class LabelStudio(Format):
    title, suffixes = "Label Studio's json", (".json",)

    def read(self, path: Path, settings: DataSettings, progress: OnImages | None = None) -> Dataset:
        tasks = read_json(path)
        if not isinstance(tasks, list) or not tasks:
            raise UserError(
                f"{path}, line 1, column 1: expected Label Studio's JSON export, a list of tasks; {EXPORT}, "
                "or put votes from elsewhere in a csv: task,worker,label"
            )
        found = _read_tasks(tasks, path, settings)
        if len(found.fields) > 1 and settings.choices is None:
            first, *others = sorted(found.fields)
            raise UserError(
                f"{path}: there are choices with the names {', '.join(map(quoted, (first, *others[:4])))}; "
                f"choose the one with the labels: --set data.choices={first or others[0]}"
            )
        if not found.names:
            under = f" with the name {quoted(settings.choices)}" if settings.choices is not None else ""
            raise UserError(f"{path}: none of the {len(tasks)} tasks has a choice{under}; label some of them first")
        root = image_root(settings, path)
        images = [_image_text(image or "", root) for image in found.images]
        table = Table(path, found.numbers, {"id": found.names, "path": images}, {}, unit="task")
        inputs = join_inputs(table, found.names, settings, progress)
        votes = [(row, label, row, "choices") for row, ticked in enumerate(found.ticked) for label in ticked]
        notes = [f"{what}, left out: {count}" for what, count in found.left_out.items()]
        return votes_dataset(inputs, votes, lambda row, _: table.place(row), path, settings, None, notes)


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
        if isinstance(value, str) and ends_as_image(value):
            return value
    return None


def _choices(annotation: dict[str, Any], place: str, wanted: str | None, fields: set[str]) -> list[str]:
    """The labels an annotator ticked, each once; `fields` gathers under which names of the labelling config."""
    results = annotation.get("result")
    if not isinstance(results, list):
        raise UserError(f"{place}: an annotation has no list 'result'; {EXPORT}")
    names: list[str] = []
    for result in results:
        value = result.get("value") if isinstance(result, dict) else None
        choices = value.get("choices") if isinstance(value, dict) else None
        if choices is None:  # another kind of answer, such as a rectangle or a rating
            continue
        if not isinstance(choices, list):
            raise UserError(f"{place}: 'choices' is not a list; {EXPORT}")
        field = str(result.get("from_name", ""))
        fields.add(field)
        if wanted is not None and field != wanted:
            continue
        try:
            names += [label_name(choice) for choice in choices]
        except ValueError as error:
            raise UserError(f"{place}: choices: {error}") from None
    return list(dict.fromkeys(names))


@dataclass
class _Tasks:
    """The tasks that have a choice, one entry each, and what was met on the way to them."""

    names: list[str] = field(default_factory=list)
    images: list[str | None] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    ticked: list[list[str]] = field(default_factory=list)
    fields: set[str] = field(default_factory=set)  # names of the labelling config under which choices stand
    left_out: Counter[str] = field(default_factory=Counter)


def _read_tasks(tasks: list[Any], path: Path, settings: DataSettings) -> _Tasks:
    found = _Tasks()
    seen: dict[str, int] = {}
    for number, task in enumerate(tasks, 1):
        place = f"{path}, task {number}"
        annotations = task.get("annotations", task.get("completions")) if isinstance(task, dict) else None
        data = task.get("data") if isinstance(task, dict) else None
        if not isinstance(annotations, list) or not isinstance(data, dict):
            own = isinstance(task, dict) and not {"candidates", "label"}.isdisjoint(task)
            remedy = "put your own rows in a .jsonl file, one per line" if own else EXPORT
            raise UserError(f"{place}: expected an object with 'data' and 'annotations'; {remedy}")
        try:
            name = label_name(task.get("id", number))
        except ValueError as error:
            raise UserError(f"{place}: id: {error}") from None
        if name in seen:
            raise UserError(
                f"{place}: id {quoted(name)} was already given to task {seen[name]}; remove one of the tasks"
            )
        seen[name] = number
        ticked = _ticked(annotations, place, settings.choices, found)
        if not ticked:
            found.left_out["tasks without a choice"] += 1
            continue
        image = _find_image(data)
        if image is None and settings.inputs is None:
            raise UserError(f"{place}: no image in 'data'; give the file with the inputs: --set data.inputs=FILE")
        found.names.append(name)
        found.images.append(image)
        found.numbers.append(number)
        found.ticked.append(ticked)
    return found


def _ticked(annotations: list[Any], place: str, wanted: str | None, found: _Tasks) -> list[str]:
    """What all annotators of a task ticked; a label as often as they did."""
    out: list[str] = []
    for annotation in annotations:
        if not isinstance(annotation, dict):
            raise UserError(f"{place}: an annotation is not an object; {EXPORT}")
        if annotation.get("was_cancelled") or annotation.get("skipped"):
            found.left_out["skipped or cancelled annotations"] += 1
            continue
        labels = _choices(annotation, place, wanted, found.fields)
        if not labels:
            found.left_out["annotations without a choice"] += 1
        out += labels
    return out

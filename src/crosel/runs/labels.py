"""Labels of the training set as files: csv (also read), jsonl, npz (for cleanlab), predictions for Label Studio."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from crosel.data.images import ends_as_image
from crosel.data.text import read_json, read_lines
from crosel.errors import UserError
from crosel.utils.files import atomic_write_with
from crosel.utils.text import csv_line, join_names, quoted, split_names, unescape_formula

if TYPE_CHECKING:
    from crosel.runs.result import Result

logger = logging.getLogger(__name__)

COLUMNS = ("id", "label", "confidence", "selected", "candidates", "flag")
FLAGS = ("", "outside", "disputed", "unsure")
SELECTED = ("neither", "one", "both")  # by how many networks
WRITE_AGAIN = "write it again: crosel labels RUN --out FILE"


class LabelRow(NamedTuple):
    """One training example.

    `label` is always one of the candidates. `selected` is "both", "one" or "neither" ("" for methods that do not
    select). `outside_label` is the label that all networks are sure of, if the flag is "outside".
    """

    id: str
    label: str
    confidence: float
    selected: str
    candidates: list[str]
    flag: str
    outside_label: str | None = None


@dataclass(frozen=True)
class LabelStudioNames:
    """Names in the labelling config of a Label Studio project."""

    from_name: str | None = None  # name of <Choices>; None: as the tasks have it, or "label"
    to_name: str | None = None  # name of <Image>, <Text>, …; None: as the tasks have it, or "image"
    data_key: str = "image"  # the field of a task's data that holds the example's id or path
    tasks: Path | None = None  # the project's own JSON export: its tasks' ids and data are carried over


# --- writing ------------------------------------------------------------------------------------------------------


def check_label_suffix(path: Path, only_outside: bool = False) -> str:
    """The lower-case ending, which selects the format; a UserError if labels are not written in it."""
    suffix = path.suffix.lower()
    if only_outside and suffix != ".csv":
        raise UserError(f"{path}: labels outside the sets are written as .csv, for crosel train --corrections")
    if suffix not in (".csv", ".jsonl", ".npz", ".json"):
        raise UserError(
            f"{path}: labels are written as .csv, .jsonl or .npz, or as .json for Label Studio; "
            "use one of these endings"
        )
    return suffix


def label_rows(result: Result) -> Iterator[LabelRow]:
    examples, classes, outside = result.examples, result.examples.classes, result.outside_labels
    flags, selected = result.flag_names(), result.selected_words()
    for i in range(examples.n):
        beyond = -1 if outside is None else int(outside[i])
        yield LabelRow(
            examples.example_id(i), classes[result.labels[i]], float(result.confidence[i]), selected[i],
            [classes[j] for j in np.flatnonzero(examples.candidates[i])], flags[i],
            classes[beyond] if beyond >= 0 else None,
        )  # fmt: skip


def write_labels(result: Result, path: Path, label_studio: LabelStudioNames | None = None) -> None:
    """Write csv, jsonl, npz, or predictions for Label Studio (json), by the file's ending."""
    suffix = check_label_suffix(path)
    if suffix == ".csv":
        atomic_write_with(path, lambda stream: _write_csv(result, stream))
    elif suffix == ".jsonl":
        lines = (_json_bytes(row._asdict()) + b"\n" for row in label_rows(result))
        atomic_write_with(path, lambda stream: stream.writelines(lines))
    elif suffix == ".npz":
        arrays = label_arrays(result)
        atomic_write_with(path, lambda stream: np.savez_compressed(stream, **arrays))
    else:
        names = label_studio or LabelStudioNames()
        _check_images(result, names, path)
        atomic_write_with(path, lambda stream: _write_list(label_studio_tasks(result, names), stream))
        if names.tasks is not None:
            beside = path.with_name(f"{path.stem}.predictions.json")
            atomic_write_with(
                beside, lambda stream: _write_list(api_predictions(label_studio_tasks(result, names)), stream)
            )
            logger.info(f"for Label Studio's API, each to be posted to /api/predictions: {beside}")


def _check_images(result: Result, names: LabelStudioNames, path: Path) -> None:
    """Label Studio takes each id for the path of an image, unless another field or the project's tasks are given."""
    name = result.examples.example_id(0).partition("?")[0]
    if names.tasks is not None or names.data_key != LabelStudioNames.data_key or ends_as_image(name):
        return
    carry_over = "to keep the tasks of a project, with their ids, give its export: --tasks EXPORT.json"
    if len(result.examples.shape) != 3:
        raise UserError(
            f"{path}: the run has rows of features, not images; name the field of a task's data that holds the id "
            f"(--data-key NAME); {carry_over}"
        )
    logger.warning(f"{path}: Label Studio will look for images named {quoted(name)} and so on; {carry_over}")


def write_outside(result: Result, path: Path) -> int:
    """Write the labels that the sets seem to miss, as csv for `crosel train --corrections`; return their number."""
    check_label_suffix(path, only_outside=True)
    if result.selected is None and result.error is None:
        raise UserError(
            "the run's method keeps no history, so no label outside a set is known; leave out --only-outside, or train "
            "with --folds 5"
        )
    rows = [row for row in label_rows(result) if row.outside_label is not None]
    lines = [csv_line((row.id, str(row.outside_label), row.flag)) for row in rows]
    atomic_write_with(path, lambda stream: stream.writelines([csv_line(("id", "label", "flag")), *lines]))
    return len(rows)


def _write_csv(result: Result, stream: IO[bytes]) -> None:
    stream.write(csv_line(COLUMNS))
    for row in label_rows(result):
        cells = row.id, row.label, f"{row.confidence:.6f}", row.selected, join_names(row.candidates), row.flag
        stream.write(csv_line(cells))


def _json_bytes(value: Any) -> bytes:
    # Lone surrogates cannot be encoded as UTF-8; escaped as \udXXX they are valid JSON and are read back unchanged.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _write_list(values: Iterator[Any], stream: IO[bytes]) -> None:
    before = b"[\n"
    for value in values:
        stream.write(before + _json_bytes(value))
        before = b",\n"
    stream.write(b"\n]\n")


def label_arrays(result: Result) -> dict[str, Any]:
    """The result as arrays; cleanlab's functions take `labels` and `pred_probs` as they are."""
    arrays = {
        "ids": np.array(result.examples.ids), "labels": result.labels, "confidence": result.confidence,
        "pred_probs": result.probabilities, "flags": np.array(result.flag_names()),
        "classes": np.array(result.examples.classes), "candidates": result.examples.candidates,
        "outside_label": result.outside_labels, "selected": result.selected,
    }  # fmt: skip
    return {name: array for name, array in arrays.items() if array is not None}


def label_studio_tasks(result: Result, names: LabelStudioNames) -> Iterator[dict[str, Any]]:
    """Tasks with one prediction each, to be imported; with `names.tasks`, the project's own tasks."""
    known = None if names.tasks is None else _exported_tasks(names.tasks)
    from_name, to_name = _control_names(known or {}, names)
    for row in label_rows(result):
        task: dict[str, Any] = {"data": {names.data_key: row.id}}
        if known is not None:
            if row.id not in known:
                raise UserError(f"{names.tasks}: task {row.id!r} of the run is missing; export the project again")
            task = {key: known[row.id][key] for key in ("id", "data") if key in known[row.id]}
        choice = {
            "from_name": from_name, "to_name": to_name, "type": "choices",
            "value": {"choices": [row.label]},
        }  # fmt: skip
        prediction = {"model_version": "crosel", "score": row.confidence, "result": [choice]}
        yield task | {"predictions": [prediction]}


def api_predictions(tasks: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The predictions of tasks that a project has already, as its API takes them."""
    for task in tasks:
        if "id" in task:
            yield {"task": task["id"], **task["predictions"][0]}


def _control_names(tasks: Mapping[str, Mapping[str, Any]], names: LabelStudioNames) -> tuple[str, str]:
    """The names in the project's labelling config: as given, as its export has them, or Label Studio's usual ones."""
    found = {
        (str(answer.get("from_name", "")), str(answer.get("to_name", "")))
        for task in tasks.values()
        for given in _dicts(task.get("annotations", task.get("completions")))
        for answer in _dicts(given.get("result"))
        if isinstance(answer.get("value"), dict) and "choices" in answer["value"]
    }
    if names.from_name is not None:
        found = {pair for pair in found if pair[0] == names.from_name}
    if len({name for name, _ in found}) > 1:
        options = ", ".join(quoted(name) for name, _ in sorted(found))
        raise UserError(f"{names.tasks}: there are choices with the names {options}; say which: --from-name NAME")
    from_name, to_name = min(found, default=("", ""))
    return names.from_name or from_name or "label", names.to_name or to_name or "image"


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _exported_tasks(path: Path) -> dict[str, Mapping[str, Any]]:
    """Tasks of a Label Studio export by id, as the reader of that format names them."""
    try:
        tasks = read_json(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(tasks, list) or not all(isinstance(t, dict) and isinstance(t.get("data"), dict) for t in tasks):
        raise UserError(f"{path}: expected Label Studio's JSON export, a list of tasks with 'data'")
    return {str(task.get("id", number)).strip(): task for number, task in enumerate(tasks, 1)}


MOST_ROWS = 1 << 31


# --- reading back -------------------------------------------------------------------------------------------------


def read_labels(path: Path, n: int = MOST_ROWS) -> list[LabelRow]:
    """Read a csv that `write_labels` wrote; the apostrophes in front of formulas are removed."""
    try:
        with closing(read_lines(path, links=False)) as lines:
            reader = csv.reader(lines, strict=True)
            header = next(reader, [])
            if tuple(header) != COLUMNS:
                raise UserError(f"{path}, line 1: expected the columns {','.join(COLUMNS)}; {WRITE_AGAIN}")
            out = []
            line = reader.line_num + 1
            for cells in reader:
                out.append(_row(cells, f"{path}, line {line}"))
                if len(out) > n:
                    raise UserError(f"{path}: more than {n} labels for {n} examples; {WRITE_AGAIN}")
                line = reader.line_num + 1
            return out
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a csv file of labels ({error}); {WRITE_AGAIN}") from None


def _row(cells: list[str], place: str) -> LabelRow:
    if len(cells) != len(COLUMNS):
        raise UserError(f"{place}: {len(cells)} cells for {len(COLUMNS)} columns; {WRITE_AGAIN}")
    name, label, confidence, selected, candidates, flag = map(unescape_formula, cells)
    try:
        sure = float(confidence)
    except ValueError:
        raise UserError(f"{place}, column 'confidence': {confidence[:40]!r} is not a number; {WRITE_AGAIN}") from None
    if not 0 <= sure <= 1.001:  # written with few digits
        raise UserError(f"{place}, column 'confidence': {confidence[:40]!r} is no share; {WRITE_AGAIN}")
    if flag not in FLAGS or selected not in ("", *SELECTED):
        column, value = ("flag", flag) if flag not in FLAGS else ("selected", selected)
        raise UserError(
            f"{place}, column '{column}': {value[:40]!r} is not a value that crosel writes there; {WRITE_AGAIN}"
        )
    return LabelRow(name, label, sure, selected, split_names(candidates), flag)

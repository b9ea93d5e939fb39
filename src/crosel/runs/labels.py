"""The training set's labels, cleaned: one row per example, as csv, jsonl, npz (for cleanlab) or for Label Studio."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from crosel.data import Dataset
from crosel.data.dataset import only_rows
from crosel.data.images import ends_as_image
from crosel.data.text import read_json
from crosel.errors import UserError, some_of, tell
from crosel.methods.bank import agreed_labels, label_is_candidate
from crosel.methods.base import Method, TrainingLabels
from crosel.methods.crosel import CroSel
from crosel.training.metrics import predictions_per_class, rarely_predicted
from crosel.training.session import Session
from crosel.training.trainer import predict_chunks
from crosel.utils.csv_cells import csv_line, join_names, split_names, unescape_formula
from crosel.utils.files import atomic_write_with
from crosel.utils.limits import shown

COLUMNS = ("id", "label", "confidence", "selected", "candidates", "flag")
FLAGS = ("", "outside", "disputed", "unsure")
WRITE_AGAIN = "write it again: crosel labels RUN --out FILE"
NAMED = 3  # classes that a line about lost ones names before it counts
UNSURE_BELOW = 0.5  # for methods that do not select: a label with less confidence than this is `unsure`


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
class LabelTable:
    """Label (always inside the candidate set), confidence, how many networks selected it, and a flag, by row."""

    data: Dataset
    labels: NDArray[np.int64]
    confidence: NDArray[np.float32]
    probabilities: NDArray[np.float32]  # [n, k], unrestricted
    selected: NDArray[np.int64] | None  # number of networks that selected the example; None: method does not select
    networks: int
    flags: list[str]
    outside_labels: NDArray[np.int64]  # what the set seems to miss; -1 where the flag is not `outside`

    def selected_word(self, row: int) -> str:
        if self.selected is None:
            return ""
        count = int(self.selected[row])
        return "neither" if count == 0 else "both" if count == 2 else "one"

    @property
    def predicted(self) -> NDArray[np.int64]:
        """By class: for how many of the examples whose set holds it, it is the prediction."""
        assert self.data.candidates is not None
        return predictions_per_class(self.probabilities, self.data.candidates)

    def remarks(self) -> list[str]:
        assert self.data.candidates is not None
        return remarks_on_classes(self.predicted, self.data.candidates, self.data.classes)

    def doubtful_first(self) -> LabelTable:
        """The same examples, the least confident label on top: the order in which the review page shows them."""
        order = np.argsort(self.confidence, kind="stable")
        return replace(
            self, data=only_rows(self.data, order), labels=self.labels[order], confidence=self.confidence[order],
            probabilities=self.probabilities[order], selected=None if self.selected is None else self.selected[order],
            flags=[self.flags[row] for row in order], outside_labels=self.outside_labels[order],
        )  # fmt: skip

    def rows(self) -> Iterator[LabelRow]:
        classes, sets = self.data.classes, self.data.candidates
        assert sets is not None
        for i in range(self.data.n):
            outside = int(self.outside_labels[i])
            yield LabelRow(
                self.data.example_id(i), classes[self.labels[i]], float(self.confidence[i]), self.selected_word(i),
                [classes[j] for j in np.flatnonzero(sets[i])], self.flags[i],
                classes[outside] if outside >= 0 else None,
            )  # fmt: skip


@dataclass(frozen=True)
class LabelStudio:
    """How predictions are named for Label Studio: as in the project's labelling config."""

    from_name: str = "label"  # name of <Choices>
    to_name: str = "image"  # name of <Image>, <Text>, …
    data_key: str = "image"  # the field of a task's data that holds the example's id or path
    tasks: Path | None = None  # the project's own JSON export: its tasks' ids and data are carried over


def remarks_on_classes(predicted: NDArray[np.int64], sets: NDArray[np.bool_], classes: Sequence[str]) -> list[str]:
    """A line about the classes that are hardly predicted, where there are any."""
    found = rarely_predicted(predicted, sets)
    if not found:
        return []
    held = sets.sum(axis=0)
    names = [f"{classes[j]} ({predicted[j]:,} of {held[j]:,})" for j in found]
    names[0] = names[0].removesuffix(")") + " examples whose sets hold it)"
    lost = some_of(names, NAMED)
    return [f"hardly predicted: {lost}: lost in training, not learnt yet, or rare (docs: Lost classes)"]


# --- making the table ---------------------------------------------------------------------------------------------


def flag_rows(
    chosen: TrainingLabels | None,
    sets: NDArray[np.bool_],
    guesses: NDArray[np.int64],  # [v, n]: what each network predicts now
    confidence: NDArray[np.float32],
) -> tuple[list[str], NDArray[np.int64]]:
    """Flags, and the labels outside the sets (-1 where there is none).

    `outside`: all networks are stable and confident about one label that is not in the set. `disputed`: the
    networks predict different labels. `unsure`: no network selected the example (or the confidence is low).
    """
    disputed = (guesses != guesses[0]).any(axis=0)
    if chosen is None:
        outside, unsure = np.full(len(confidence), -1, np.int64), confidence < UNSURE_BELOW
    else:
        agreed = agreed_labels(chosen.labels, chosen.stable).long().cpu()
        outside = agreed.masked_fill(label_is_candidate(agreed, torch.from_numpy(sets)), -1).numpy()
        unsure = ~chosen.selected.any(dim=0).cpu().numpy()
    flags = [
        "outside" if o else "disputed" if d else "unsure" if u else ""
        for o, d, u in zip(outside >= 0, disputed, unsure, strict=True)
    ]
    return flags, outside


def label_table(session: Session, outside_gamma: float | None = None) -> LabelTable:
    """Label the training set in one pass; a label is the most probable one inside the candidate set.

    `outside_gamma` replaces the run's own threshold for `outside`. It needs no training: the run keeps its history.
    """
    method: Method = session.method
    sets = session.data.candidates
    assert sets is not None
    chosen = _training_labels(method, outside_gamma)
    probabilities, guesses = [], []
    for _, outputs in predict_chunks(session, session.data.x):
        probabilities.append(method.combine(outputs).cpu())
        guesses.append(outputs.argmax(dim=2).cpu())
    p = torch.cat(probabilities)
    inside = p.masked_fill(~torch.from_numpy(sets), -1.0)
    confidence, labels = inside.max(dim=1)
    flags, outside = flag_rows(chosen, sets, torch.cat(guesses, dim=1).numpy(), confidence.numpy())
    selected = None if chosen is None else chosen.selected.sum(dim=0).cpu().numpy()
    return LabelTable(
        session.data, labels.numpy(), confidence.numpy(), p.numpy(), selected, len(guesses[0]), flags, outside
    )


def _training_labels(method: Method, outside_gamma: float | None) -> TrainingLabels | None:
    if outside_gamma is None:
        return method.training_labels()
    if not isinstance(method, CroSel):
        raise UserError(
            f"{method.name} keeps no history, so it cannot find labels outside the sets; leave out --outside-gamma"
        )
    if not 0 <= outside_gamma <= 1:
        raise UserError(f"--outside-gamma must lie between 0 and 1, not {outside_gamma:g}")
    if outside_gamma > (gamma := method.settings.gamma):
        tell(f"--outside-gamma {outside_gamma:g} is above the run's method.gamma; {gamma:g} is used")
    return method.training_labels(outside_gamma)


# --- writing ------------------------------------------------------------------------------------------------------


def check_ending(path: Path, only_outside: bool = False) -> str:
    """The ending, which says what is written, in small letters; or a UserError, for all that is made of labels."""
    ending = path.suffix.lower()
    if only_outside and ending != ".csv":
        raise UserError(f"{path}: labels outside the sets are written as .csv, for crosel train --corrections")
    if ending not in (".csv", ".jsonl", ".npz", ".json"):
        raise UserError(
            f"{path}: labels are written as .csv, .jsonl or .npz, or as .json for Label Studio; "
            "use one of these endings"
        )
    return ending


def write_labels(table: LabelTable, path: Path, label_studio: LabelStudio | None = None) -> None:
    """Write csv, jsonl, npz, or predictions for Label Studio (json), by the file's ending."""
    ending = check_ending(path)
    if ending == ".csv":
        atomic_write_with(path, lambda stream: _write_csv(table, stream))
    elif ending == ".jsonl":
        atomic_write_with(path, lambda stream: stream.writelines(_json(row._asdict()) + b"\n" for row in table.rows()))
    elif ending == ".npz":
        arrays = label_arrays(table)
        atomic_write_with(path, lambda stream: np.savez_compressed(stream, **arrays))
    else:
        names = label_studio or LabelStudio()
        _check_images(table.data, names, path)
        atomic_write_with(path, lambda stream: _write_list(label_studio_tasks(table, names), stream))


def _check_images(data: Dataset, names: LabelStudio, path: Path) -> None:
    """Label Studio would look for an image under each id, unless it is told of another field, or knows the tasks."""
    name = data.example_id(0).partition("?")[0]
    if names.tasks is not None or names.data_key != LabelStudio.data_key or ends_as_image(name):
        return
    carry_over = "to keep the tasks of a project, with their ids, give its export: --tasks EXPORT.json"
    if not data.is_image:
        raise UserError(
            f"{path}: the run has rows of features, not images; name the field of a task's data that holds the id "
            f"(--data-key NAME); {carry_over}"
        )
    tell(f"{path}: Label Studio will look for images named {shown(name)} and so on; {carry_over}")


def write_outside(table: LabelTable, path: Path) -> int:
    """Write the labels that the sets seem to miss, as csv for `crosel train --corrections`; return their number."""
    check_ending(path, only_outside=True)
    if table.selected is None:
        raise UserError(
            "the run's method keeps no history, so no label outside a set is known; leave out --only-outside"
        )
    rows = [row for row in table.rows() if row.outside_label is not None]
    lines = [csv_line((row.id, str(row.outside_label), row.flag)) for row in rows]
    atomic_write_with(path, lambda stream: stream.writelines([csv_line(("id", "label", "flag")), *lines]))
    return len(rows)


def _write_csv(table: LabelTable, stream: IO[bytes]) -> None:
    stream.write(csv_line(COLUMNS))
    for row in table.rows():
        cells = row.id, row.label, f"{row.confidence:.6f}", row.selected, join_names(row.candidates), row.flag
        stream.write(csv_line(cells))


def _json(value: Any) -> bytes:
    # Half characters have no UTF-8; as \udXXX they are valid JSON, and come back as they were.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _write_list(values: Iterator[Any], stream: IO[bytes]) -> None:
    before = b"[\n"
    for value in values:
        stream.write(before + _json(value))
        before = b",\n"
    stream.write(b"\n]\n")


def label_arrays(table: LabelTable) -> dict[str, Any]:
    """All of it as arrays; cleanlab's functions take `labels` and `pred_probs` as they are."""
    arrays: dict[str, Any] = {
        "ids": np.array([table.data.example_id(i) for i in range(table.data.n)]), "labels": table.labels,
        "confidence": table.confidence, "pred_probs": table.probabilities, "flags": np.array(table.flags),
        "classes": np.array(table.data.classes), "candidates": table.data.candidates,
        "outside_label": table.outside_labels,
    }  # fmt: skip
    if table.selected is not None:
        arrays["selected"] = table.selected
    return arrays


def label_studio_tasks(table: LabelTable, names: LabelStudio) -> Iterator[dict[str, Any]]:
    """Tasks with one prediction each, to be imported; with `names.tasks`, the project's own tasks."""
    known = None if names.tasks is None else _exported_tasks(names.tasks)
    for row in table.rows():
        task: dict[str, Any] = {"data": {names.data_key: row.id}}
        if known is not None:
            if row.id not in known:
                raise UserError(f"{names.tasks}: task {row.id!r} of the run is missing; export the project again")
            task = {key: known[row.id][key] for key in ("id", "data") if key in known[row.id]}
        choice = {
            "from_name": names.from_name, "to_name": names.to_name, "type": "choices",
            "value": {"choices": [row.label]},
        }  # fmt: skip
        prediction = {"model_version": "crosel", "score": row.confidence, "result": [choice]}
        yield task | {"predictions": [prediction]}


def _exported_tasks(path: Path) -> dict[str, Mapping[str, Any]]:
    """Tasks of a Label Studio export by the ids that our reader of such files gives them."""
    try:
        tasks = read_json(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(tasks, list) or not all(isinstance(t, dict) and isinstance(t.get("data"), dict) for t in tasks):
        raise UserError(f"{path}: expected Label Studio's JSON export, a list of tasks with 'data'")
    return {str(task.get("id", number)).strip(): task for number, task in enumerate(tasks, 1)}


# --- reading back -------------------------------------------------------------------------------------------------


def read_labels(path: Path) -> list[LabelRow]:
    """Read a csv that `write_labels` wrote, without the apostrophes it puts before would-be formulas."""
    try:
        with open(path, newline="", encoding="utf-8") as stream:
            reader = csv.reader(stream, strict=True)
            header = next(reader, [])
            if tuple(header) != COLUMNS:
                raise UserError(f"{path}, line 1: expected the columns {','.join(COLUMNS)}; {WRITE_AGAIN}")
            out = []
            line = reader.line_num + 1
            for cells in reader:
                out.append(_row(cells, f"{path}, line {line}"))
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
    if flag not in FLAGS or selected not in ("", "both", "one", "neither"):
        column, value = ("flag", flag) if flag not in FLAGS else ("selected", selected)
        raise UserError(
            f"{place}, column '{column}': {value[:40]!r} is not a value that crosel writes there; {WRITE_AGAIN}"
        )
    return LabelRow(name, label, sure, selected, split_names(candidates), flag)

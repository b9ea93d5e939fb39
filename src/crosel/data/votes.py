"""Votes of several annotators, long (one vote a row) or wide (one column an annotator), and a model's scores.

The inputs are beside the votes (columns of numbers, or a `path`), or the task is itself an image path, or a file of
inputs is joined by id (`data.inputs`). True labels, where known, are a column `truth` or come with the inputs.
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from crosel.data.dataset import Array, Dataset, make_dataset, only_rows
from crosel.data.embeddings import OR_SKIP
from crosel.data.images import SUFFIXES, bad_inputs_note
from crosel.data.settings import DataSettings, OnImages
from crosel.data.store import Examples
from crosel.data.table import (
    ALL_ROWS,
    ANNOTATOR,
    NAME_THEM,
    Table,
    image_root,
    index_of,
    optional_label,
    own_ids,
    table_images,
    table_inputs,
    without_repeated,
)
from crosel.data.vocabulary import (
    EMPTY,
    NO_VOTE,
    Vocabulary,
    alike,
    check_cells,
    label_name,
    label_names,
    looks_joined,
    looks_listed,
    may_be_unknown,
)
from crosel.errors import UserError
from crosel.utils.text import did_you_mean, quoted, some_of

_MAY_BE_CLASSES = NO_VOTE - EMPTY - {"nan"}
Vote = tuple[int, str, int, str]  # example, label, and where it stands: row, column


def votes_dataset(
    inputs: Inputs,
    votes: Sequence[Vote],
    place: Callable[[int, str], str],  # how to call such a place in an error
    path: Path,
    settings: DataSettings,
    truth: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> Dataset:
    """Count votes and put them to their inputs."""
    labels = truth if truth is not None else inputs.labels
    found = {label for _, label, _, _ in votes} | set(labels or ()) | set(inputs.labels_test or ())
    vocabulary = Vocabulary(found, settings.classes)
    check_cells(len(inputs.x), len(vocabulary), 4, path)
    columns = {label: index_of(label, vocabulary, place, row, column) for _, label, row, column in votes}
    counts = np.zeros((len(inputs.x), len(vocabulary)), dtype=np.int32)
    np.add.at(counts, ([example for example, _, _, _ in votes], [columns[label] for _, label, _, _ in votes]), 1)
    image = image_root(settings, path) / inputs.ids[0]
    if inputs.beside and image.suffix.lower() in SUFFIXES and os.path.isfile(image):
        unused = "the images that ids name are not used, because there are columns of numbers"
        notes = [*notes, f"{unused}; to use the images, rename the column of ids to 'path'"]
    one_each = len({(row, column) for _, _, row, column in votes}) == len(votes)
    notes = [
        *notes,
        *alike(vocabulary.classes),
        *looks_listed(vocabulary.classes),
        # No blank among the separators: most votes are for one label, whose name may have some.
        *(looks_joined(vocabulary.classes, "vote", ",;/|") if one_each else ()),
        *(may_be_unknown(vocabulary.classes) if settings.classes is None else ()),
    ]
    return annotated(inputs, vocabulary, path, settings, truth, notes, votes=counts)


def no_votes(classes: Sequence[str] | None) -> frozenset[str]:
    """What says that somebody gave no vote. What is named as a class is one."""
    return NO_VOTE - {_word(name) for name in classes or ()}


def _word(cell: Any) -> str:
    return str(cell).strip().lower().removesuffix(".0")


def _vote(cell: Any, no_vote: frozenset[str], separator: str) -> tuple[str, ...]:
    """The labels that a cell votes for. In jsonl it may hold a number, a list or null."""
    return () if cell is None or _word(cell) in no_vote else label_names(cell, separator)


def _no_vote_notes(cells: Iterable[Any], no_vote: frozenset[str]) -> list[str]:
    """A note, where something that could be a class is taken for no vote."""
    words = sorted({str(cell).strip() for cell in cells if _word(cell) in no_vote & _MAY_BE_CLASSES})
    if not words:
        return []
    return [f"no vote: {_some(words)}; if this is a class, name all classes: --set data.classes=[NAME,NAME]"]


def _same(table: Table, names: Sequence[str], role: str, cells: Sequence[Any]) -> dict[str, Any]:
    """By name of the example, what its rows say in a column. Some may say nothing, but no two something different."""
    rows: dict[str, int] = {}
    for row, (name, cell) in enumerate(zip(names, cells, strict=True)):
        if cell is None:
            continue
        before = rows.setdefault(name, row)
        if cells[before] != cell:
            raise UserError(
                f"{table.place(row, role)}: {quoted(cell)} for {quoted(name)}, but {table.line(before)} has "
                f"{quoted(cells[before])}; {ALL_ROWS}"
            )
    return {name: cells[row] for name, row in rows.items()}


def truth_of(
    table: Table, names: Sequence[str], role: str, no_vote: frozenset[str], notes: list[str]
) -> list[str] | None:
    """True labels of the examples that rows name, if all are there. What says that there is no vote says here that
    nothing is known."""
    if role not in table.columns:
        return None
    labels = table.parsed(role, lambda cell: None if _word(cell) in no_vote else optional_label(cell))
    known = _same(table, names, role, labels)
    missing = [row for row, name in enumerate(names) if name not in known]
    if missing and known:
        notes.append(f"{table.place(missing[0], role)}: no true label, so this column is not used")
    return None if missing else [known[name] for name in dict.fromkeys(names)]


def long_votes(table: Table, settings: DataSettings, progress: OnImages | None) -> Dataset:
    key = table.key or "id"
    for name, role in {"task": key, "worker": "worker", "label": "label"}.items():
        if role not in table.columns:
            missing = f"{name!r} is missing{did_you_mean(name, table.unused)}"
            raise UserError(f"{table.head}: votes need the columns task, worker and label; {missing}")
    tasks = table.parsed(key, partial(label_name, what="name"))
    no_vote, notes = no_votes(settings.classes), list[str]()
    labels = table.parsed("label", partial(_vote, no_vote=no_vote, separator=settings.separator))
    voted = [row for row, said in enumerate(labels) if said]
    if not voted:
        raise UserError(f"{table.path}: there are no votes")
    if len(voted) < table.n:
        place = table.place(labels.index(()), "label")
        notes.append(f"rows without a vote, left out: {table.n - len(voted)} ({place})")
        if alone := len(set(tasks)) - len({tasks[row] for row in voted}):
            notes.append(f"examples without a vote, left out: {alone}")
        notes += _no_vote_notes((cell for cell in table.columns["label"] if cell is not None), no_vote)
        table, tasks, labels = table.take(voted), [tasks[row] for row in voted], [labels[row] for row in voted]
    first: dict[str, int] = {}  # task -> its first row
    for row, task in enumerate(tasks):
        first.setdefault(task, row)
    votes = _distinct_votes(table, tasks, labels, settings.skip_bad)
    features, columns = _features_of(table, tasks, first), {key: list[Any](first)}
    if "path" in table.columns and settings.inputs is None:
        found = [(cell.strip() or None) if isinstance(cell, str) else cell for cell in table.columns["path"]]
        paths = _same(table, tasks, "path", found)
        columns["path"] = [paths.get(task, "") for task in first]
    if "text" in table.columns and settings.inputs is None:
        said = _same(table, tasks, "text", [cell or None for cell in table.columns["text"]])
        columns["text"] = [said.get(task) for task in first]
    lines = [table.lines[row] for row in first.values()]
    examples = replace(table, lines=lines, columns=columns, features=features)
    inputs = join_inputs(examples, list(first), settings, progress)
    truth = truth_of(table, tasks, "truth", no_vote, notes)
    again = sum(map(len, labels)) - len(votes)
    notes += [f"repeated votes, left out: {again}"] if again else []
    return votes_dataset(inputs, votes, table.place, table.path, settings, truth, notes)


def _distinct_votes(
    table: Table, tasks: Sequence[str], labels: Sequence[tuple[str, ...]], skip_repeated: bool
) -> list[Vote]:
    """All votes of long rows. Nobody votes twice for one label of a task: that is an error, unless it is skipped."""
    workers = table.parsed("worker", partial(label_name, what="name"))
    example = {task: number for number, task in enumerate(dict.fromkeys(tasks))}
    votes: list[Vote] = []
    seen: dict[tuple[str, str, str], int] = {}
    for row, task in enumerate(tasks):
        for label in labels[row]:
            before = seen.setdefault((task, workers[row], label), row)
            if before == row:
                votes.append((example[task], label, row, "label"))
            elif not skip_repeated:
                what = f"the vote of {quoted(workers[row])} on {quoted(task)} for {quoted(label)}"
                raise UserError(
                    f"{table.place(row, 'label')}: {what} was already given in {table.line(before)}{OR_SKIP}"
                )
    return votes


def _features_of(table: Table, tasks: Sequence[str], first: Mapping[str, int]) -> Array | None:
    """The numbers in the first row of each task, which its other rows repeat."""
    if table.features is None:
        return None
    firsts = [first[task] for task in tasks]
    other = (table.features != table.features[firsts]).any(axis=1)
    if other.any():
        row = int(other.argmax())
        what = f"the numbers for {quoted(tasks[row])} differ from those in {table.line(firsts[row])}"
        raise UserError(f"{table.place(row)}: {what}; {ALL_ROWS}")
    return table.features[list(first.values())]


def wide_votes(table: Table, settings: DataSettings, progress: OnImages | None) -> Dataset:
    if not table.texts:
        raise UserError(f"{table.head}: there is no column of votes; add one for each annotator")
    for name in table.texts if settings.annotators is None else ():
        if difflib.get_close_matches(name.lower(), ["candidates"], cutoff=0.8):
            raise UserError(
                f"{table.head}: column {quoted(name)} is not 'candidates'; rename it, or, if it holds the votes of "
                f"somebody, say so: {NAME_THEM}"
            )
    notes: list[str] = []
    if settings.skip_bad:
        table = without_repeated(table, notes)
    names, voted = own_ids(table), [False] * table.n
    known: dict[str, tuple[str, ...]] = {}
    no_vote = no_votes(settings.classes)
    for column, cells in table.texts.items():
        for row, cell in enumerate(cells):
            if cell not in known:
                try:
                    known[cell] = _vote(cell, no_vote, settings.separator)
                except ValueError as error:
                    raise UserError(f"{table.place(row, column)}: {error}") from None
            voted[row] = voted[row] or bool(known[cell])
    if not any(voted):
        raise UserError(f"{table.path}: there are no votes")
    if not all(voted):
        notes.append(f"examples without a vote, left out: {voted.count(False)}")
        kept = [row for row in range(table.n) if voted[row]]
        table, names = table.take(kept), [names[row] for row in kept]
    notes += _no_vote_notes(known, no_vote)
    if table.features is not None or not all(map(ANNOTATOR.fullmatch, table.texts)):  # recognised by cells, not by name
        features = f"; features: {_some(table.names)}" if table.features is not None else ""
        notes.append(f"votes: {_some(list(table.texts))}{features}")
        if settings.annotators is None:
            notes += _strangers({name: {v for cell in set(c) for v in known[cell]} for name, c in table.texts.items()})
    inputs = join_inputs(table, names, settings, progress)
    votes = [
        (row, label, row, column)
        for column, cells in table.texts.items()
        for row, cell in enumerate(cells)
        for label in known[cell]
    ]
    truth = truth_of(table, names, "truth" if "truth" in table.columns else "label", no_vote, notes)
    return votes_dataset(inputs, votes, table.place, table.path, settings, truth, notes)


def _strangers(labels: Mapping[str, set[str]]) -> list[str]:
    """A note, where a column of words may hold something else than votes: a time, a remark, a group."""
    columns = Counter(label for said in labels.values() for label in said)  # how many have each label
    alone = [name for name, said in labels.items() if said and all(columns[label] == 1 for label in said)]
    if not alone or len(alone) == len(labels):  # of a few rows, no two need have a label in common
        return []
    return [f"no label in {_some(alone)} is in another column; if these are not votes, name all that are: {NAME_THEM}"]


def _some(names: Sequence[str]) -> str:
    return some_of([quoted(name) for name in names], 20)


# --- scores ----------------------------------------------------------------------------------------------------------


def score_table(table: Table, settings: DataSettings, progress: OnImages | None) -> Dataset:
    """One column a class, an id or path beside."""
    notes: list[str] = []
    if settings.skip_bad:
        table = without_repeated(table, notes)
    if table.features is None:
        raise UserError(f"{table.head}: there is no column of scores; add one for each class")
    scores, classes = table.features, tuple(table.names)
    if settings.classes is not None:  # their order, not the file's
        missing = [name for name in settings.classes if name not in classes]
        if missing:
            near = did_you_mean(missing[0], classes)
            raise UserError(f"{table.head}: no column of scores for class {missing[0]!r}{near}")
        scores, classes = scores[:, [classes.index(name) for name in settings.classes]], settings.classes
    names = own_ids(table)
    inputs = join_inputs(replace(table, features=None), names, settings, progress)
    own = truth_of(table, names, "truth" if "truth" in table.columns else "label", no_votes(classes), notes)
    return annotated(inputs, Vocabulary((), classes), table.path, settings, own, notes, scores=scores)


# --- what votes, scores and tasks are about, joined to them by id ---------------------------------------------------

NOT_READ = ("inputs not read",)  # in place of the names of features


@dataclass(frozen=True)
class Inputs:
    """Examples in the form that `make_dataset` takes: features [n, d] or images [n, h, w, c]."""

    x: Examples
    ids: tuple[str, ...]
    labels: tuple[str, ...] | None = None
    x_test: Examples | None = None
    labels_test: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None  # names of the features, where a table gives them
    bad: Mapping[int, str] = field(default_factory=dict)  # rows to be left out, and why
    beside: bool = False  # whether they are columns of numbers of the same table


def join_inputs(table: Table, names: Sequence[str], settings: DataSettings, progress: OnImages | None) -> Inputs:
    """Inputs of examples that are known by name, one for each row: from `data.inputs`, else texts if the network takes
    them, else features beside, else the images that the rows or their names name."""
    if settings.sets_alone and table.features is None:
        return Inputs(np.zeros((len(names), 1), np.float32), tuple(names), columns=NOT_READ)
    role = "text" if settings.takes_texts else "path" if "path" in table.columns else table.key
    if settings.inputs is not None:
        role = table.key
    role = role if role in table.titles else None
    if settings.inputs is not None:
        return _joined(names, lambda row: table.place(row, role), Path(settings.inputs), settings, progress)
    if settings.takes_texts or table.features is not None or {"text"} == table.columns.keys() & {"text", "path"}:
        x, bad = table_inputs(table, settings, progress)
        beside = table.features is not None and not settings.takes_texts
        columns = None if settings.takes_texts else table.feature_names
        return Inputs(x, tuple(names), columns=columns, bad=bad, beside=beside)
    images, bad = table_images(table, role, table.columns.get("path", names), settings, progress)
    return Inputs(images, tuple(names), bad=bad)


def annotated(
    inputs: Inputs,
    vocabulary: Vocabulary,
    path: Path,
    settings: DataSettings,
    truth: Sequence[str] | None,
    notes: Sequence[str],
    **annotation: Array,
) -> Dataset:
    """Inputs with their votes or scores, without the examples whose inputs cannot be used; a note counts these."""
    labels, labels_test = inputs.labels if truth is None else truth, inputs.labels_test
    place = f"{settings.inputs or path}: label"
    data = make_dataset(
        inputs.x, y=None if labels is None else vocabulary.indices(labels, place), x_test=inputs.x_test,
        y_test=None if labels_test is None else vocabulary.indices(labels_test, place), classes=vocabulary.classes,
        ids=inputs.ids, columns=inputs.columns, notes=(*notes, *bad_inputs_note(inputs.bad)), place=str(path),
        **annotation,
    )  # fmt: skip
    return only_rows(data, np.setdiff1d(np.arange(data.n), list(inputs.bad))) if inputs.bad else data


def _joined(
    names: Sequence[str], place: Callable[[int], str], path: Path, settings: DataSettings, progress: OnImages | None
) -> Inputs:
    from crosel.data.sources import read_inputs  # which knows the formats, and they this module

    inputs = read_inputs(path, settings, progress)
    index = {name: row for row, name in enumerate(inputs.ids)}
    if len(index) != len(inputs.ids):
        twice, _ = Counter(inputs.ids).most_common(1)[0]
        raise UserError(f"{path}: id {quoted(twice)} appears twice, so inputs cannot be joined by id; rename one")
    if path.is_dir():  # images may be known without their ending, where that is clear
        stems = [os.path.splitext(name)[0] for name in inputs.ids]
        times = Counter(stems)
        index = {stem: row for row, stem in enumerate(stems) if times[stem] == 1} | index
    rows = []
    bad: dict[int, str] = {}
    for at, name in enumerate(names):
        if name not in index:
            bad[at] = f"{place(at)}: {path} has no inputs for id {quoted(name)}"
            if not settings.skip_bad:
                raise UserError(bad[at] + OR_SKIP)
            if len(bad) == len(names):
                raise UserError(bad[0])
        rows.append(index.get(name, 0))  # a bad one is left out in the end
    chosen = np.array(rows, dtype=np.int64)
    labels = None if inputs.labels is None else tuple(inputs.labels[row] for row in rows)
    return Inputs(inputs.x[chosen], tuple(names), labels, inputs.x_test, inputs.labels_test, inputs.columns, bad)

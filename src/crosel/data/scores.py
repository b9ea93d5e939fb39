"""Score matrices as csv: one column a class, an id or path beside; inputs as for votes. (npz: see npz.py.)"""

from __future__ import annotations

from crosel.data.dataset import Dataset, make_dataset
from crosel.data.inputs import join_inputs, without_bad
from crosel.data.settings import DataSettings, OnImages
from crosel.data.table import Table, own_ids, without_repeated
from crosel.data.vocabulary import Vocabulary
from crosel.data.votes import no_votes, truth_of
from crosel.errors import UserError, did_you_mean


def score_table(table: Table, settings: DataSettings, progress: OnImages | None) -> Dataset:
    notes: list[str] = []
    if settings.skip_bad:
        table = without_repeated(table, notes)
    if table.features is None:
        raise UserError(f"{table.path}, line 1: there is no column of scores; add one for each class")
    scores, classes = table.features, tuple(table.names)
    if settings.classes is not None:  # their order, not the file's
        missing = [name for name in settings.classes if name not in classes]
        if missing:
            near = did_you_mean(missing[0], classes)
            raise UserError(f"{table.path}, line 1: no column of scores for class {missing[0]!r}{near}")
        scores, classes = scores[:, [classes.index(name) for name in settings.classes]], settings.classes
    names = own_ids(table)
    inputs = join_inputs(
        names, lambda row: table.place(row, table.key), table.path, settings, progress, None, table.columns.get("path")
    )
    own = truth_of(table, names, "truth" if "truth" in table.columns else "label", no_votes(classes), notes)
    labels = own if own is not None else inputs.labels
    vocabulary = Vocabulary((), classes)
    try:
        y = None if labels is None else [vocabulary[name] for name in labels]
        y_test = None if inputs.labels_test is None else [vocabulary[name] for name in inputs.labels_test]
    except ValueError as error:
        raise UserError(f"{table.path}: label {error}") from None
    data = make_dataset(
        inputs.x, y=y, x_test=inputs.x_test, y_test=y_test, scores=scores, classes=classes, ids=names,
        place=str(table.path), columns=inputs.columns, notes=tuple(notes),
    )  # fmt: skip
    return without_bad(data, inputs)

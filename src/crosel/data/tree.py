"""A class tree in YAML: coarse labels become the sets of their leaves.

    animal: [cat, dog]
    vehicle:
      car: [saloon, van]
      lorry:

Children are a list or a mapping. A name may occur in several places, also at the top level to list its children there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from crosel.data.candidates import row_chunks
from crosel.data.dataset import Array, Dataset
from crosel.data.vocabulary import check_cells, label_name
from crosel.errors import UserError
from crosel.utils.settings import not_yaml, read_settings_text
from crosel.utils.text import did_you_mean, one_line, quoted

_MAX_BYTES = 16 << 20
_MAX_HELD = 1 << 24  # leaves below all names together


@dataclass(frozen=True)
class ClassTree:
    place: str
    leaves: tuple[str, ...]  # in the order of the file
    below: dict[str, frozenset[int]]  # every name -> its leaves


def _node_place(path: Path, node: yaml.Node) -> str:
    return f"{path}, line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"


def _compose(path: Path) -> yaml.Node:
    try:
        # Composed, not loaded: nodes know their lines, names stay text (`no` is no boolean), aliases stay shared.
        root = yaml.compose(read_settings_text(path, _MAX_BYTES), Loader=yaml.SafeLoader)
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{path}, line 1: too deeply nested") from None
    except yaml.YAMLError as error:
        raise not_yaml(path, error) from None
    except ValueError as error:
        raise UserError(f"{path}: not valid YAML ({one_line(error)})") from None
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}, line 1, column 1: expected a class tree, as in 'animal: [cat, dog]'")
    return root


def _name(path: Path, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise UserError(f"{_node_place(path, node)}: expected the name of a class")
    try:
        return label_name(str(node.value))
    except ValueError as error:
        raise UserError(f"{_node_place(path, node)}: {error}") from None


def _children(node: yaml.Node) -> Iterator[tuple[yaml.Node, yaml.Node | None]]:
    """(name, what is below it) for everything in a value."""
    if isinstance(node, yaml.MappingNode):
        yield from node.value
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            if isinstance(item, yaml.MappingNode):
                yield from item.value
            else:
                yield item, None
    elif node.tag != "tag:yaml.org,2002:null" and str(node.value).strip():
        yield node, None


def read_tree(path: Path) -> ClassTree:
    root = _compose(path)
    children: dict[str, dict[str, None]] = {}
    seen_at: dict[str, yaml.Node] = {}
    done: set[tuple[str, int]] = set()  # aliases share nodes: each is walked once below a name
    pending: list[tuple[str | None, yaml.Node]] = [(None, root)]
    while pending:
        parent, node = pending.pop()
        found = []
        for key, value in _children(node):
            name = _name(path, key)
            seen_at.setdefault(name, key)
            children.setdefault(name, {})
            found.append(name)
            if value is not None and (name, id(value)) not in done:
                done.add((name, id(value)))
                pending.append((name, value))
        if parent is not None:
            children[parent].update(dict.fromkeys(found))
    order = _bottom_up(path, children, seen_at)
    position = {name: (node.start_mark.line, node.start_mark.column) for name, node in seen_at.items()}
    leaves = tuple(sorted((name for name in children if not children[name]), key=position.__getitem__))
    index = {name: i for i, name in enumerate(leaves)}
    below: dict[str, frozenset[int]] = {}
    held = 0
    for name in order:
        own = frozenset([index[name]]) if name in index else frozenset[int]()
        below[name] = own.union(*(below[child] for child in children[name]))
        held += len(below[name])
        if held > _MAX_HELD:
            raise UserError(f"{_node_place(path, seen_at[name])}: too many classes below too many names")
    return ClassTree(str(path), leaves, below)


def _bottom_up(path: Path, children: dict[str, dict[str, None]], seen_at: dict[str, yaml.Node]) -> list[str]:
    """Names with children first; a name below itself is an error."""
    try:
        return list(TopologicalSorter(children).static_order())
    except CycleError as error:
        circle = error.args[1][::-1]  # parents first
        way = " > ".join([*circle[:-1][:5], circle[0]])
        where = _node_place(path, seen_at[circle[0]])
        raise UserError(f"{where}: {quoted(circle[0])} is below itself ({way}); remove one of these") from None


def to_leaves(data: Dataset, tree: ClassTree) -> Dataset:
    """Replace classes by the leaves below them. Labels that are coarse become sets; true labels are leaves."""
    k = len(tree.leaves)
    if data.scores is not None and data.candidates is None:
        raise UserError(
            "rule 'tree' works on candidates, votes or labels, not on scores; choose another rule, such as top-p:p=0.9"
        )
    unknown = [name for name in data.classes if name not in tree.below]
    if unknown:
        near = did_you_mean(unknown[0], tree.below)
        raise UserError(f"{tree.place}: class {quoted(unknown[0])} of the data is not in the tree{near}; add it")
    check_cells(data.n, k, 1 if data.weights is None else 5, tree.place)
    table = np.zeros((len(data.classes), k), dtype=bool)
    for row, name in enumerate(data.classes):
        table[row, list(tree.below[name])] = True
    names = {name: i for i, name in enumerate(tree.leaves)}
    leaf = np.array([names.get(name, -1) for name in data.classes], dtype=np.int64)
    y, y_test = (_as_leaves(labels, leaf) for labels in (data.y, data.y_test))
    coarse: Array
    if data.candidates is not None:
        coarse = data.candidates
    elif data.votes is not None:
        coarse = data.votes > 0
    else:
        assert data.y is not None
        coarse = np.eye(len(data.classes), dtype=bool)[data.y]
    weights = None
    if data.weights is not None:
        weights = (data.weights @ (table / table.sum(axis=1, keepdims=True))).astype(np.float32)
    notes = [*data.notes]
    if data.y is not None and y is None:
        notes.append("the labels are coarse: the true leaf is not known")
    if data.y_test is not None and y_test is None:
        notes.append("the test labels are coarse: the test set is left out")
    return replace(
        data, classes=tree.leaves, candidates=_expand_coarse(coarse, table), votes=None, scores=None, groups=None,
        notes=tuple(notes), weights=weights, y=y, x_test=None if y_test is None else data.x_test, y_test=y_test,
    )  # fmt: skip


def _as_leaves(labels: NDArray[np.int64] | None, leaf: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The labels as numbers of leaves; None where one is coarse."""
    fine = None if labels is None else leaf[labels]
    return None if fine is None or (fine < 0).any() else fine


def _expand_coarse(coarse: NDArray[np.bool_], table: NDArray[np.bool_]) -> NDArray[np.bool_]:
    out = np.empty((len(coarse), table.shape[1]), dtype=bool)
    numbers = table.astype(np.float32)  # products of bools are slow
    for rows in row_chunks(*out.shape):
        out[rows] = coarse[rows].astype(np.float32) @ numbers > 0
    return out

"""Names of labels, as people write them, and the classes they make."""

from __future__ import annotations

import ast
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from crosel.errors import UserError
from crosel.utils.system import check_bytes
from crosel.utils.text import did_you_mean, has_control_characters, quoted

MAX_NAME = 1000
OFTEN = 5  # examples from which on a label is surely meant
MAX_DIGITS = 40  # of a number that is a name; a UUID has 39
# In small letters, how tools print what is missing.
_NOTHING = {"nan": math.nan, "none": None, "null": None, "<na>": None}
# A set without labels, also as Python prints a list, tuple or set, and one of something that is missing.
EMPTY = frozenset(
    {"", "[]", "()", "{}", "set()", "frozenset()"}
    | {around.format(word) for around in ("[{}]", "{{{}}}", "({},)") for word in _NOTHING}
)
NO_VOTE = EMPTY | {"-1", "nan", "na", "null", "none"}
# A flat list, set or tuple as Python and JSON print it, such as a column of lists that pandas wrote: ['cat', 'dog'],
# ["cat"], [1, 2.0], {'cat', 'dog'}, ('cat',). What is just in parentheses is a name.
_ITEM = rf"""\s*(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|-?\d{{1,{MAX_DIGITS}}}(?:\.0)?|(?i:{"|".join(_NOTHING)}))\s*"""
_SEPARATOR = "--set 'data.separator=\"{}\"'"  # as a shell takes it, be it a blank or a semicolon
_ITEMS = rf"{_ITEM}(?:,{_ITEM})*"
_LIST = re.compile(rf"\[{_ITEMS}\]|\{{{_ITEMS}\}}|\({_ITEM},(?:{_ITEMS})?\)")


def label_name(value: Any, what: str = "label") -> str:
    """A label, or the name of something else. ValueError, for the caller to put a place before, if it is none."""
    if isinstance(value, float) and value.is_integer():  # as pandas writes a whole number beside missing ones
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{quoted(value)} is not a {what}; expected text or a whole number")
    if isinstance(value, int) and not -(10**MAX_DIGITS) < value < 10**MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits is not a {what}; write it in quotes")
    name = str(value).strip()
    if not (name if name.isascii() else _seen(name).strip()):  # nothing, or only characters without width
        raise ValueError(f"an empty {what}; fill it in or remove it")
    if len(name) > MAX_NAME:
        raise ValueError(f"a {what} of {len(name)} characters; at most {MAX_NAME} are allowed")
    # Line breaks and half characters would spoil what is written later.
    if has_control_characters(name):
        raise ValueError(f"{what} {quoted(name)} holds a character that cannot be printed (a line break?); remove it")
    return name


def label_names(value: Any, separator: str = "|") -> tuple[str, ...]:
    """A set of labels: a list, or names with | (or another separator) between them."""
    if isinstance(value, str):
        text = value.strip()
        value = (_listed(text) or value.split(separator)) if text.lower() not in EMPTY else []
    elif isinstance(value, int | float) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ValueError(f"{quoted(value)} is not a list of labels; write cat|dog")
    names = tuple(label_name(item) for item in value)
    if not names:
        raise ValueError("an empty set; give it at least one label")
    if len(set(names)) != len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"label {quoted(twice)} appears twice; name it once")
    return names


def _listed(text: str) -> list[Any] | None:
    """The items of a list that was printed into a cell; None where there is none. (Flat, so evaluating is no risk.)"""
    if text.startswith("frozenset({") and text.endswith("})"):
        text = text[len("frozenset(") : -1]
    if not (text.startswith(("[", "{", "(")) and _LIST.fullmatch(text)):
        return None
    items = (item.strip() for item in re.findall(_ITEM, text[1:-1]))
    try:
        return [_NOTHING[item.lower()] if item.lower() in _NOTHING else ast.literal_eval(item) for item in items]
    except (ValueError, SyntaxError):  # an escape that Python does not know, a number such as 007
        return None


def _weight(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"weight {quoted(value)} is not a number")
    try:
        if "_" in str(value):  # 1_0, which Python takes for 10
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"weight {quoted(value)} is not a number") from None
    if not 0 <= number < 1e30:
        raise ValueError(f"weight {number:g}; a weight must be finite and at least 0")
    return number


def label_weights(value: Any, names: Sequence[str] | None, separator: str = "|") -> dict[str, float]:
    """Weights by label: `cat:0.7|dog:0.3` or an object, or numbers in the order of the candidates."""
    if isinstance(value, str) and ":" in value:
        pairs = [part.rpartition(":") for part in value.split(separator)]
        if len({name.strip() for name, _, _ in pairs}) != len(pairs):
            raise ValueError("a label with two weights; give it one")
        value = {name: number for name, _, number in pairs}
    elif isinstance(value, str):
        value = value.split(separator)
    elif isinstance(value, int | float):
        value = [value]
    if isinstance(value, dict):
        found = {label_name(name): _weight(number) for name, number in value.items()}
        outside = [name for name in found if names is not None and name not in names]
        if outside:
            raise ValueError(f"a weight for {quoted(outside[0])}, which is not among the candidates; add it to them")
        if not any(found.values()):
            raise ValueError("no weight above 0; give one label at least a weight")
        return found
    if not isinstance(value, list):
        raise ValueError(f"{quoted(value)} is not a list of weights; write cat:0.7|dog:0.3")
    if names is None:
        raise ValueError("weights without names need candidates next to them; write cat:0.7|dog:0.3")
    if len(value) != len(names):
        raise ValueError(f"{len(value)} weights for {len(names)} candidates; give one for each")
    return {name: _weight(number) for name, number in zip(names, value, strict=True)}


def _order(name: str) -> tuple[int, int, str]:
    digits = name.removeprefix("-")
    number = digits.isascii() and digits.isdecimal() and len(digits) < 19
    return (0, int(name), name) if number else (1, 0, name)


class Vocabulary:
    """The classes in a fixed order: as given, or found names sorted, whole numbers by value."""

    def __init__(self, found: Iterable[str], given: Sequence[str] | None = None) -> None:
        if given is not None and len(set(given)) != len(given):
            twice, _ = Counter(given).most_common(1)[0]
            raise UserError(f"setting 'data.classes': {quoted(twice)} appears twice; name each class once")
        self.classes = tuple(given) if given is not None else tuple(sorted(set(found), key=_order))
        self._index = {name: i for i, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, name: str) -> int:
        try:
            return self._index[name]
        except KeyError:
            near = did_you_mean(name, self.classes)
            raise ValueError(f"{quoted(name)} is not one of the {len(self.classes)} classes{near}") from None

    def indices(self, names: Iterable[str], what: str) -> list[int]:
        """The numbers of these classes; `what` begins the error about a name that is none of them."""
        try:
            return [self[name] for name in names]
        except ValueError as error:
            raise UserError(f"{what} {error}") from None


def alike(names: Iterable[str]) -> list[str]:
    """Notes for people: classes whose names differ in capitals, blanks, or how letters and numbers are written."""
    first: dict[object, str] = {}
    notes = []
    for name in names:
        other = first.setdefault(_comparable(name), name)
        if other != name:
            same = unicodedata.normalize("NFKC", other) == unicodedata.normalize("NFKC", name)
            pair = f"{other!a} and {name!a}" if same else f"{quoted(other)} and {quoted(name)}"
            notes.append(f"classes {pair} are treated as different; if they are the same class, spell them alike")
    return notes[:3] + ([f"… and {len(notes) - 3} more such pairs"] if len(notes) > 3 else [])


def _comparable(name: str) -> object:
    try:
        return float(name) if name.isascii() else _folded(name)
    except ValueError:
        return _folded(name)


def _folded(name: str) -> str:
    """An é may be one character or two, a blank or hyphen of many kinds, and some characters have no width: what looks
    alike is alike here."""
    return re.sub(r"[\s_\-\u2010-\u2015]+", " ", _seen(unicodedata.normalize("NFKC", name)).strip().casefold())


def _seen(name: str) -> str:
    return "".join(c for c in name if unicodedata.category(c) != "Cf")


def misspelt(counts: Mapping[str, int]) -> list[str]:
    """Notes for people: labels seen once that are one letter off another, seen often. Digits are no letters."""
    common: dict[str, list[str]] = {}
    for name, count in counts.items():
        if count >= OFTEN:
            for form in {name, *_without_one(name)}:
                common.setdefault(form, []).append(name)
    notes = []
    for name, count in counts.items():
        if count != 1 or len(name) < 4:
            continue
        near = {other for form in (name, *_without_one(name)) for other in common.get(form, ())}
        likely = [other for other in near if _digits(other) == _digits(name) and one_edit(name, other)]
        if likely:
            other = max(likely, key=counts.__getitem__)
            notes.append(
                f"label {quoted(name)} is there once and {quoted(other)} {counts[other]:,} times; is it misspelt?"
            )
    return notes[:5] + ([f"… and {len(notes) - 5} more such labels"] if len(notes) > 5 else [])


def _without_one(name: str) -> list[str]:
    return [name[:i] + name[i + 1 :] for i in range(len(name))]


def _digits(name: str) -> str:
    return re.sub(r"\D", "", name)


def one_edit(a: str, b: str) -> bool:
    """Whether one letter more, less or changed, or two neighbours swapped, makes one name of the other."""
    a, b = sorted((a, b), key=len)
    if len(b) - len(a) > 1 or a == b:
        return False
    first = next((i for i in range(len(a)) if a[i] != b[i]), len(a))
    if len(a) < len(b):
        return a[first:] == b[first + 1 :]
    swapped = a[first : first + 2] == b[first : first + 2][::-1] and a[first + 2 :] == b[first + 2 :]
    return swapped or a[first + 1 :] == b[first + 1 :]


def may_be_unknown(names: Collection[str], remedy: str = "leave such cells blank") -> list[str]:
    """A note, where classes are named as tools write what is not known. But -1 beside 1, or other numbers below 0, is a
    class like these."""
    below = [name for name in names if _order(name)[1] < 0]
    unknown = NO_VOTE - EMPTY - ({"-1"} if len(below) > 1 or {*names, "1"} == {"-1", "1"} else set())
    words = [quoted(name) for name in names if name.lower() in unknown]
    if not words:
        return []
    return [f"taken as classes: {', '.join(words)}; if this means that the label is unknown, {remedy}"]


def looks_listed(names: Iterable[str]) -> list[str]:
    """A note, where a name looks like a list of labels: a true label is one, and a set may be written otherwise."""
    for name in names:
        if name[0] + name[-1] in ("[]", "{}") and any(mark in name for mark in ",; "):
            remedy = "write cat|dog, or ['cat', 'dog']" if not _listed(name) else "name a column of sets 'candidates'"
            return [f"class {quoted(name)} looks like several; {remedy}"]
    return []


def looks_joined(names: Sequence[str], what: str = "set", marks: str = ",;/| ") -> list[str]:
    """A note, where no set has two labels but one name looks like several labels with something between them."""
    known = set(names)
    for mark in marks:
        several = {name: [part.strip() for part in name.split(mark)] for name in names if mark in name}
        # Of cat;dog and dog;fox, too; but a fox terrier and a red fox have one name each.
        lasts = {parts[-1] for parts in several.values() if parts[0] != parts[-1]} if mark != " " else set()
        for name, parts in several.items():
            if sum(part in known for part in parts) >= min(2, len(parts) - 1) or parts[0] in lasts:
                split = _SEPARATOR.format(mark)
                return [f"no {what} has two labels, but {quoted(name)} looks like several; to split it: {split}"]
    return []


def check_cells(n: int, k: int, bytes_each: int, place: object) -> None:
    check_bytes(n * k * bytes_each, f"a table of {n:,} examples and {k:,} classes", place)

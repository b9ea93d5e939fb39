"""Cells of csv files: no formulas, and whatever goes in comes back."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosel.utils.text import csv_line, escape_formula, join_names, split_names, unescape_formula

# Surrogates have no UTF-8, and Python 3.10's csv reader stops at NUL: neither can be in a file that is read back.
text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
nasty = st.text("=+-@'\t\r\n\"|\\,; a1é漢", max_size=8)


@pytest.mark.parametrize("cell", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "-", "+1a"])
def test_what_a_spreadsheet_would_run_gets_an_apostrophe(cell):
    assert escape_formula(cell) == "'" + cell
    assert unescape_formula(escape_formula(cell)) == cell


@pytest.mark.parametrize("cell", ["-1", "+5", "-0.25", "-1e-3", "-.5", "+2.", "0.5", "", "a=b", "it's", "'s", "é"])
def test_numbers_and_plain_text_stay(cell):
    assert escape_formula(cell) == unescape_formula(cell) == cell


@pytest.mark.parametrize("cell", ["-١", "-1\n", "=-1", "-1e", "--1", "-0x1"])
def test_what_only_looks_like_a_number_is_guarded(cell):
    assert escape_formula(cell).startswith("'")


@given(st.one_of(text, nasty))
def test_guarding_is_undone_exactly(cell):
    assert unescape_formula(escape_formula(cell)) == cell


@given(st.one_of(text, nasty))
def test_no_guarded_cell_begins_as_a_formula_unless_it_is_a_number(cell):
    first = escape_formula(cell)[:1]
    if first and first in "=+-@\t\r\n":
        assert isinstance(float(cell), float)  # raises for anything but a number


@given(st.lists(st.one_of(text, nasty), min_size=2, max_size=5))
def test_a_row_comes_back_through_pythons_reader(cells):
    line = csv_line(cells)
    assert line.endswith(b"\n")
    rows = list(csv.reader(io.StringIO(line.decode("utf-8"), newline=""), strict=True))
    assert [[unescape_formula(cell) for cell in row] for row in rows] == [cells]


@given(st.lists(st.one_of(text, nasty), min_size=1, max_size=5))
def test_names_come_back_whatever_they_hold(names):
    assert split_names(join_names(names)) == names


def test_names_are_joined_as_people_write_them():
    assert join_names(["cat", "dog"]) == "cat|dog"
    assert join_names(["a|b", "c\\"]) == r"a\|b|c\\"
    assert split_names("") == [""]


def test_half_characters_do_not_stop_a_row():
    assert csv_line(["a\ud800", "b"]) == b"a\\ud800,b\n"

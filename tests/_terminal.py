"""A terminal for tests: what would be seen on it after everything that was written."""

from __future__ import annotations

import io
import re

_MOVES = re.compile(r"\033\[(\d*)([A-Za-z])|(\r)|(\n)|([^\033\r\n]+)")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """The lines down to the cursor, without colours and spaces at their ends."""
        lines, row, column = [""], 0, 0
        for number, code, back, new_line, text in _MOVES.findall(self.getvalue()):
            if text:
                lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
                column += len(text)
            elif new_line:
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif back:
                column = 0
            elif code == "A":
                row -= int(number or 1)
            elif code == "K":
                lines[row] = ""
            else:
                assert code == "m", f"unknown code {number}{code}"
        return [line.rstrip() for line in lines[: row + 1]]

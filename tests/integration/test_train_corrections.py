"""Labels corrected in a review go into the next run as known labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from _support import CroselCli, TinyRun


def test_corrections_become_sets_of_one_label(crosel_cli: CroselCli, tiny_run: TinyRun, tmp_path: Path) -> None:
    with np.load(tiny_run.path / "candidates.npz") as archive:
        before, classes = archive["candidates"], archive["classes"]
    row = int(np.flatnonzero(before.sum(axis=1) > 1)[0])
    wrong = int(np.flatnonzero(~before[row])[0]) if not before[row].all() else int(before[row].argmax())
    file = tmp_path / "corrections.csv"
    file.write_text(f"id,label,decision\n{row},{classes[wrong]},label\n")
    out = tmp_path / "run"
    command = (*tiny_run.command, "--out", out)
    result = crosel_cli(*command, "--corrections", file)
    assert result.code == 0, result.err
    with np.load(out / "candidates.npz") as archive:
        after = archive["candidates"]
        assert archive["corrected"].tolist() == [row]
    assert np.flatnonzero(after[row]).tolist() == [wrong]
    others = np.arange(len(before)) != row
    assert np.array_equal(before[others], after[others])
    assert crosel_cli("eval", out).code == 0  # the source's own sets differ from the run's in that row only
    assert crosel_cli(*command, "--resume").code == 0
    again = crosel_cli(*command, "--resume", "--corrections", file)
    assert again.code == 2
    assert "choose another --out" in again.err


def test_a_correction_for_an_unknown_example_is_refused(
    crosel_cli: CroselCli, tiny_run: TinyRun, tmp_path: Path
) -> None:
    file = tmp_path / "corrections.csv"
    file.write_text("id,label,decision\nnobody,0,label\n")
    result = crosel_cli(*tiny_run.command, "--out", tmp_path / "run", "--corrections", file)
    assert result.code == 2
    assert "corrections.csv" in result.err
    assert "nobody" in result.err
    assert not (tmp_path / "run").exists()

"""Any source -> one native file with candidate sets, and a summary of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crosel.data.annotate import draw_candidates, with_weights
from crosel.data.formats.npz import write_npz
from crosel.data.inputs import NOT_READ
from crosel.data.settings import DataSettings, OnImages
from crosel.data.sources import load
from crosel.data.summary import Summary, summarise
from crosel.errors import UserError
from crosel.utils.files import new_folder, refuse_overwrite


def convert(
    source: str,
    out: Path | None,
    rule: str | None = None,
    seed: int = 0,
    data_dir: Path | None = None,
    settings: DataSettings | None = None,
    progress: OnImages | None = None,
) -> Summary:
    """Read a source, make its candidate sets by the rule, write it to `out` (npz), and return a summary of the sets.

    Without `out`, votes, scores and tasks may still lack their inputs.
    """
    if out is None:
        settings = (settings or DataSettings()).for_sets_alone()
        data = draw_candidates(load(source, data_dir, settings, progress), rule, seed)
        return replace(summarise(data), shape=()) if data.columns == NOT_READ else summarise(data)
    if out.suffix.lower() != ".npz":
        raise UserError(f"{out}: the output is an .npz file; use this ending")
    refuse_overwrite(out, source, settings.inputs if settings else None)
    data = draw_candidates(with_weights(load(source, data_dir, settings, progress), rule), rule, seed)
    summary = summarise(data)
    with new_folder(out.parent):
        write_npz(data, out)
    return summary

"""What another γ would have selected at the end of a run of CroSel: how many labels, and how many of them are true.

    python benchmarks/gamma_curve.py RUN --data DIR --out gamma.json

This reads `selection.npz` (labels and confidence of the last t epochs, for both networks) and the true labels. It
looks back at a run and must not be used to choose a γ; to choose one, hold examples out.
"""

from __future__ import annotations

from pathlib import Path

import torch
from record import Arguments, end_with, save

from crosel.config import check_config
from crosel.data import draw_candidates
from crosel.errors import UserError
from crosel.methods.bank import confidence_is_high, label_is_candidate, label_is_stable
from crosel.runs.folder import load_data
from crosel.runs.outcome import read_selection
from crosel.utils.yaml_files import read_yaml

GAMMAS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.0)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("run", type=Path, help="finished run folder")
    parser.add_argument("--data", type=Path, default=None, help="folder with the published files")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    a = parser.parse_args()
    config = check_config(read_yaml(a.run / "config.yaml"))
    data = draw_candidates(load_data(config, a.data), config.candidates, config.seed)
    chosen = read_selection(a.run / "selection.npz", data.n)
    if chosen is None or chosen.past_labels is None or chosen.past_confidence is None:
        raise UserError(f"{a.run}: there is no selection.npz with a history")
    if data.y is None or data.candidates is None:
        raise UserError(f"{config.source}: there are no true labels")
    truth, candidates = torch.from_numpy(data.y), torch.from_numpy(data.candidates)
    rows = []
    for gamma in GAMMAS:
        ratio, right = [], []
        for labels, confidence in zip(chosen.past_labels, chosen.past_confidence, strict=True):
            past = torch.from_numpy(labels).long()
            mask = label_is_candidate(past[-1], candidates) & label_is_stable(past)
            mask &= confidence_is_high(torch.from_numpy(confidence), gamma)
            ratio.append(mask.double().mean())
            right.append((past[-1] == truth)[mask].double().mean())
        means = [float(torch.stack(values).mean()) for values in (ratio, right)]
        rows.append({"gamma": gamma, "selection_ratio": means[0], "selection_accuracy": means[1]})
        print(f"γ {gamma:.2f}: {means[0]:6.1%} selected, {means[1]:.2%} of them rightly")
    save({"run": a.run.name, "rows": rows}, a.out)


if __name__ == "__main__":
    end_with(main)

"""How much each part of the fast path gains: a CroSel step on a GPU with one part switched off at a time.

    python benchmarks/variants.py --data DIR --out results/speed/variants.json

All forms of a network are in memory and take turns. Times are in ms for a step of both networks, as medians over the
turns.
"""

from __future__ import annotations

import statistics
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from record import Arguments, end_with, save
from speed import FAST, Steps, images, open_session, seconds

from crosel.data import Dataset
from crosel.nn.cuda import StreamPool
from crosel.training.devices import pick_device

TURNS, STEPS = 7, 20
FORMS = ("all on", "parts", "casts", "lanes", "tiles", "convolutions", "fused", "graphs")  # the name says what is off


def off(form: str) -> AbstractContextManager[object]:
    """Where the form says so: one network after the other (all lanes are the stream at hand), a pass for each batch
    instead of one in parts, cuDNN's convolutions only, or ours without sums and moments of tiles."""
    if form == "lanes":
        return mock.patch.object(StreamPool, "stream", return_value=nullcontext())
    if form == "parts":
        return mock.patch(
            "crosel.methods.crosel.forward_split_bn", lambda network, *batches: [network(x) for x in batches]
        )
    if form == "tiles":
        return mock.patch("crosel.nn.fused.divides_parts", return_value=False)
    if form == "convolutions":
        return mock.patch("crosel.nn.convolution._takes_kernels", return_value=False)
    return nullcontext()


def build(data: Dataset, network: str, form: str, device: torch.device) -> Steps:
    path = FAST | {"fused": form != "fused", "cuda_graphs": form != "graphs"}
    steps = Steps(open_session(data, network, 64, "crosel", path, device))
    if form == "casts":
        steps.stepper.casts = None
    with off(form):
        for i in range(6):  # choice of kernels, compilation, recording
            steps(i)
    return steps


def kernels(steps: Steps, device: torch.device) -> int:
    """Count the kernels that a step launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds(steps, device, 1)
    return sum(e.count for e in profile.key_averages() if not e.key.startswith(("Mem", "cuda", "Activity")))


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--data", type=Path, help="folder with cifar-10-batches-py; without it, random images")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--networks", nargs="+", default=["wrn-28-2", "wrn-34-10"])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    options = parser.parse_args()
    device = pick_device(options.device)
    result: dict[str, dict[str, Any]] = {}
    data = images(options.data, 5000)
    for network in options.networks:
        forms = {form: build(data, network, form, device) for form in options.forms}
        times: dict[str, list[float]] = {form: [] for form in forms}
        for _ in range(TURNS):
            for form, steps in forms.items():
                with off(form):
                    times[form].append(1e3 * seconds(steps, device, STEPS))
        ms = {form: statistics.median(values) for form, values in times.items()}
        print(network, {form: f"{value:.2f}" for form, value in ms.items()}, flush=True)
        result[network] = {"ms": ms, "all_ms": times}
        save({"without": result}, options.out)
        result[network]["kernels"] = {form: kernels(forms[form], device) for form in forms if form != "graphs"}
        print(result[network]["kernels"], flush=True)
        save({"without": result}, options.out)


if __name__ == "__main__":
    end_with(main)

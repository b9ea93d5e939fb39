"""Memory: budgets before training, data that stay on the host, nothing that grows. See test_out_of_memory.py, too."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from _sessions import CPU, NAMES, bits, different, make_session, small_data
from _support import CroselCli, TinyRun, small_arrays

from crosel.errors import UserError
from crosel.training import memory
from crosel.training.batches import PinnedLoader
from crosel.training.memory import Budget, budget, check_budget, free_memory, inputs_stay_on_host
from crosel.training.session import Session
from crosel.training.trainer import fit
from crosel.utils.limits import gib

# --- budgets --------------------------------------------------------------------------------------------------------


def test_a_budget_counts_what_is_kept() -> None:
    session = make_session("crosel", "train.batch_size=16")
    found = budget(session)
    weights = sum(p.numel() for p in session.method.parameters())
    assert found.networks == 3 * 4 * weights
    assert found.data == 96 * 10, "on a CPU the arrays themselves are used: only the sets are copied"
    held = sum(b.numel() * b.element_size() for b in session.method.buffers())
    assert found.tables == held - 96 * 10
    assert found.step == 16 * found.per_example > 0
    assert found.total == found.kept + max(found.step, found.a_pass)
    assert str(found).startswith(gib(found.total))


def test_the_estimate_of_a_step_grows_with_batch_network_and_passes() -> None:
    one = budget(make_session("cc", "train.batch_size=8")).per_example
    assert budget(make_session("cc", "train.batch_size=16")).per_example == one
    assert budget(make_session("cc", "network.width=8")).per_example > 1.5 * one
    assert budget(make_session("crosel")).per_example == 2 * 3 * one, "two networks, three views that keep gradients"


def test_bfloat16_takes_half_where_it_is_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session("cc", "train.bf16=true")
    on_a_cpu = budget(session)
    assert on_a_cpu == budget(make_session("cc"))
    monkeypatch.setattr("crosel.training.devices.uses_bf16", lambda *_: True)
    assert budget(session).per_example == on_a_cpu.per_example // 2
    assert budget(session).networks == on_a_cpu.networks * 7 // 6, (
        "weights, gradients, momentum, and a cast of the weights"
    )


def test_copies_of_the_state_count() -> None:
    plain, skipping = budget(make_session("crosel")), budget(make_session("crosel", "train.bad_batches=skip"))
    assert (skipping.networks, skipping.tables) == (plain.networks * 5 // 3, plain.tables * 2)
    assert budget(make_session("crosel", "train.ema_decay=0.9")).networks == plain.networks * 4 // 3
    adam = ("crosel", "train.optimiser=adam")
    assert budget(make_session(*adam)).networks == plain.networks * 4 // 3
    assert budget(make_session(*adam, "train.bad_batches=skip")).networks == plain.networks * 7 // 3


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_what_does_not_fit_is_refused_with_an_estimate_and_advice(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session("cc", "train.batch_size=96", "train.eval_batch_size=1")
    on_cpu = budget(session)
    held = sum(t.numel() * t.element_size() for t in (*session.method.parameters(), *session.method.buffers()))
    session.device = torch.device(where)
    inputs = session.data.x.nbytes if where == "cuda" else 0
    monkeypatch.setattr(memory, "layer_outputs", lambda *args: (on_cpu.per_example, 1))
    needed = budget(session)
    assert needed.data == on_cpu.data + inputs
    assert (needed.libraries > 0) == needed.recorded == (where == "cuda")

    def free(count: int) -> None:
        monkeypatch.setattr(memory, "free_memory", lambda device: count - held - inputs)

    free(needed.total)
    check_budget(session)
    free(needed.kept + needed.per_example * 30)  # 96 and 48 are too many, 24 fit
    with pytest.raises(UserError) as caught:
        check_budget(session)
    text = str(caught.value)
    assert text.startswith("training would take about ")
    assert "data " in text
    assert "a step " in text
    assert text.endswith("are free; try --set train.batch_size=24")
    assert ("GPU memory" in text) == (where == "cuda")
    free(needed.networks - 1)
    with pytest.raises(UserError, match="use a smaller network"):
        check_budget(session)


@pytest.mark.parametrize(
    ("data", "free", "recorded", "advice"),
    [  # a step takes 640 and a pass 1280: both at once where steps are recorded
        (90, 1300, True, "try --set train.eval_batch_size=16"),
        (90, 800, False, "try --set train.eval_batch_size=32"),
        (90, 600, False, "try --set train.batch_size=16 --set train.eval_batch_size=16"),
        (90, 180, True, "try --set train.batch_size=2 --set train.eval_batch_size=2"),
        (5000, 1300, False, "try --set train.data_on=host"),
        (90, 20, False, "use a smaller network"),
    ],
)
def test_the_least_change_that_fits_is_named(data: int, free: int, recorded: bool, advice: str) -> None:
    needed = Budget(
        data=data, tables=5, networks=5, libraries=0, per_example=20, per_row=20, batch_size=32, rows=64,
        recorded=recorded,
    )  # fmt: skip
    assert memory._advice(needed, free).startswith(advice)


def test_what_is_alive_at_once() -> None:
    """Three layers one after the other: never more than two of their outputs at a time, and nothing of the weights."""
    layers = [torch.nn.Linear(1000, 1000) for _ in range(3)]

    def work() -> None:
        x = torch.zeros(2, 1000)
        for layer in layers:
            x = layer(x)
            x = x.view(2, 10, 100).view(2, 1000)

    with torch.no_grad(), memory._Alive() as alive:
        work()
        work()
        assert torch.eye(3).to_sparse().sum() == 3  # no memory to show, no harm
    assert alive.most == 2 * (2 * 1000 * 4)


def test_the_bound_by_the_command_line(
    tmp_path: Path, crosel_cli: CroselCli, image_npz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", image_npz, "--method", "cc", "--set", "train.epochs=1", "--out", tmp_path / "run")
    monkeypatch.setenv("CROSEL_MEMORY_GB", "0.002")
    result = crosel_cli(*command)
    assert result.code == 2
    assert result.err.startswith("crosel: training would take about ")
    assert "try --set train.batch_size=" in result.err
    assert not (tmp_path / "run").exists(), "nothing is written before the budget is checked"
    monkeypatch.setenv("CROSEL_MEMORY_GB", "4")
    assert crosel_cli(*command).code == 0


def test_free_memory_is_what_the_system_says() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    total = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:")), 1 << 50)
    assert 0 < free_memory(CPU) < total


# --- data that stay on the host -------------------------------------------------------------------------------------


def test_auto_keeps_on_the_host_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    assert not inputs_stay_on_host("auto", 500, cuda)
    assert inputs_stay_on_host("auto", 700, cuda)
    assert not inputs_stay_on_host("auto", 10**9, CPU)
    assert not inputs_stay_on_host("device", 10**9, cuda)
    assert inputs_stay_on_host("host", 1, CPU)


@pytest.mark.parametrize("name", NAMES)
def test_from_the_host_the_bits_are_the_same(name: str) -> None:
    resident, streamed = make_session(name), make_session(name, "train.data_on=host")
    rows, others = fit(resident), fit(streamed)
    assert streamed.train.host is not None
    assert streamed.train.host._buffers, "batches went through the host's buffers"
    assert different(bits(resident), bits(streamed)) == []
    for row, other in zip(rows, others, strict=True):
        assert row["loss"] == other["loss"]
        assert row.get("test_accuracy") == other.get("test_accuracy")


def test_features_from_the_host_too() -> None:
    data = small_data(**{k: v for k, v in small_arrays(images=False).items() if k.startswith("x")})
    resident, streamed = make_session("crosel", data=data), make_session("crosel", "train.data_on=host", data=data)
    fit(resident)
    fit(streamed)
    assert different(bits(resident), bits(streamed)) == []


def test_a_run_may_go_on_with_the_data_elsewhere(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    import shutil

    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    result = crosel_cli(*tiny_run.command, "--set", "train.data_on=host", "--out", run, "--resume")
    assert result.code == 0, result.err


def test_a_buffer_is_not_overwritten_by_the_next_step() -> None:
    x = torch.arange(40, dtype=torch.uint8).view(20, 2)
    rows = PinnedLoader(x, CPU)
    rows.begin_epoch({"a": torch.tensor([[0, 1], [2, 3], [4, 5]]), "b": torch.tensor([[6], [7], [8]])})
    first, second = rows.fetch(0), rows.fetch(1)
    assert first["a"].tolist() == x[:2].tolist()
    assert second["a"].tolist() == x[2:4].tolist()
    assert rows.fetch(2)["b"].tolist() == x[8:9].tolist()


# --- nothing grows --------------------------------------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_no_tensor_outlives_its_epoch() -> None:
    """The long form (500 epochs, the memory of the process) is `python -m soak leak`."""
    counts: dict[int, int] = {}

    class Count:
        def on_step(self, *args: Any) -> None: ...
        def on_checkpoint(self, *args: Any) -> None: ...
        def on_epoch(self, session: Session, row: dict[str, Any]) -> None:
            if row["epoch"] in (5, 20):
                counts[row["epoch"]] = live_tensors()

    session = make_session("crosel", epochs=20)
    fit(session, (Count(),))
    assert counts[5] == counts[20] > 10

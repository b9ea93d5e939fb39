"""The contract between a method and the training loop, and the registry of methods.

A method is a `Module`. It says which batches it wants (`streams`), turns them into losses (`loss`), may act
after the optimiser's step (`after_step`) and after the pass over the training set (`observe`, `end_epoch`),
and predicts (`outputs`, `combine`). It knows neither the loop nor the true labels.

Rules that make checkpoints, resuming and CUDA graphs work for every method:

* What must survive a restart is a registered buffer or a parameter (per-example tables: float32 or int32, [n, ...]).
* `begin_epoch` may be called a second time when a run resumes in the middle of an epoch, so it may only set what
  follows from the epoch number and from buffers that the steps of an epoch leave alone.
* `loss` and `after_step` run on the device only: no `.item()`, no Python `if` on a tensor, static shapes. A number
  that changes between epochs is a 0-dim buffer set in `begin_epoch`; where the *code path* changes, `phase` changes.
* All randomness comes from the generator that is passed in.
* `loss` does not change parameters that learn by gradient: all passes of a step share one cast of them
  (`crosel.nn.casts`).

Rules that make several processes learn what one would (`utils.distributed`; with one process they change nothing):

* A batch holds this rank's rows of the drawn batch. A loss is a mean over them. State is the same on every rank, so
  whatever changes it is gathered first: `self.all_gather(values, batch)`. Numbers are drawn for the whole batch
  (`len(batch.global_index)`); then `self.world.local_shard` takes this rank's.
* A table has a row for each example. `self.read(table, batch)` and `self.write(table, batch, rows)` know where each row
  is: every rank has all of them, or, if the class names the buffer in `tables`, only those of the examples `self.rows`.
  `problem.own_candidates` are the sets that the rows of such a table begin with.
* `observe` sees this rank's rows, which are `self.rows`; `end_epoch` gathers the results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Literal

import torch
from pydantic import create_model
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from torch import Tensor, nn

from crosel.errors import UserError
from crosel.methods.losses import log_candidate_weights
from crosel.utils.distributed import SINGLE_PROCESS, World
from crosel.utils.settings import Settings
from crosel.utils.system import import_by_name
from crosel.utils.text import choose_from, one_line


class MethodSettings(Settings):
    """Base of every method's settings."""

    name: str

    def remarks(self, epochs: int) -> list[str]:
        """Lines for the user about settings that are allowed, but do not work as named in a run of this many epochs."""
        return [
            f"method.{name}={length} with train.epochs={epochs}: {self.name} never gets past that stage; raise "
            f"train.epochs or lower method.{name}"
            for name in stages(type(self))
            if isinstance(length := getattr(self, name), int) and length >= epochs
        ]

    def filled_in(self, epochs: int) -> MethodSettings:
        """With what was left open filled in, as it follows from the number of epochs: a run's config says it all."""
        return self


# json_schema_extra of a setting that says how many epochs a stage at the beginning of a run takes, such as a warm-up.
# Where the epochs of a preset or a file are cut short, stages are too (`crosel.config`). Not for what goes on all the
# time, such as the epochs between two purifications, nor for shares of the run, which fit by themselves.
STAGE: JsonDict = {"stage": True}


def stages(settings: type[MethodSettings]) -> dict[str, FieldInfo]:
    return {name: field for name, field in settings.model_fields.items() if field.json_schema_extra == STAGE}


@dataclass(frozen=True)
class Problem:
    """All that a method may know about its run: the candidate sets (bool [n, k]), the number of epochs, and how likely
    each candidate is by those who gave it (float32 [n, k], of any scale; None: they did not say).

    `n` and `classes` are the sizes of the sets' matrix; `rows` are the examples that this rank makes tables for.
    """

    candidates: Tensor
    epochs: int
    weights: Tensor | None = None
    own_rows: slice | None = None  # None: all

    @property
    def rows(self) -> slice:
        return slice(0, self.n) if self.own_rows is None else self.own_rows

    @property
    def own_candidates(self) -> Tensor:
        return self.candidates[self.rows]

    @property
    def n(self) -> int:
        return self.candidates.shape[0]

    @property
    def classes(self) -> int:
        return self.candidates.shape[1]


@dataclass(frozen=True)
class Stream:
    """One batch per step: `views` of the examples in `pool`, which is cycled through in random order.

    `pool` holds int64 indices, at least one; None means all examples. An epoch sees `share` of all examples: with less
    than 1, batches are smaller (`crosel.training.batches.stream_batch`).
    """

    views: tuple[str, ...]
    pool: Tensor | None = None
    share: float = 1.0


def unique_view_names(views: Sequence[str]) -> tuple[str, ...]:
    """Names for several views of one example in a stream: what is behind # makes another draw of the same kind."""
    first, *others = views
    return (first, *(f"{view}#{number}" for number, view in enumerate(others, start=1)))


@dataclass(frozen=True)
class Batch:
    """Examples of one stream: `index`, their rows in the training set, and their normalised views, `batch["weak"]`."""

    index: Tensor
    views: Mapping[str, Tensor]
    all_ranks_index: Tensor | None = None  # of what was drawn for all ranks; None: there is but one
    weight: float = (
        1.0  # of this rank's mean over a smaller batch, whose ranks may have other shares than of a full one
    )

    @property
    def global_index(self) -> Tensor:
        return self.index if self.all_ranks_index is None else self.all_ranks_index

    def __getitem__(self, view: str) -> Tensor:
        if view not in self.views:
            raise ValueError(f"this batch has no view '{view}'; its stream asks for {', '.join(self.views)}")
        return self.views[view]


@dataclass(frozen=True)
class Losses:
    """What to minimise, and what to report by name (0-dim tensors, which the loop averages over the epoch).

    What is minimised is reported as `loss`, unless something else is given under this name.
    """

    objective: Tensor
    report: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        report = {"loss": self.objective, **self.report}
        object.__setattr__(self, "report", {name: value.detach() for name, value in report.items()})


@dataclass(frozen=True)
class TrainingLabels:
    """What a method says about the labels of its training set; one row per network, [v, n]. While several ranks train,
    all but `labels` and `selected` may be of this rank's examples only."""

    labels: Tensor  # int64, the label each network would give; -1 where it has none
    confidence: Tensor  # float32, how sure it has been of late
    stable: Tensor  # bool: stable and confident, inside the candidate set or not
    selected: Tensor  # bool: stable and confident, and inside the candidate set
    epochs_selected: Tensor | None = None  # int32: in how many epochs so far
    # What each network predicted in the last t epochs, the newest last: [v, t, n]. Label -1: an epoch not seen.
    past_labels: Tensor | None = None
    past_confidence: Tensor | None = None


class Method(nn.Module, ABC):
    """Base class: one network, one stream of weak views, prediction by softmax.

    A method finds its networks in `self.networks`, the candidate sets on the device in `self.candidates` (bool [n, k]),
    its settings in `self.settings`, and the sizes of the problem in `self.problem`.
    """

    name: ClassVar[str]
    title: ClassVar[str]  # what reports call it
    paper: ClassVar[str]
    Settings: ClassVar[type[MethodSettings]]
    watches_training_set: ClassVar[bool] = False  # True: `observe` must see every example after every epoch
    view_defaults: ClassVar[Mapping[str, Any]] = {}  # settings of `augment` for which it has other defaults
    tables: ClassVar[Mapping[str, int]] = {}  # buffers that ranks share out, and which dimension counts the examples
    witness: ClassVar[str | None] = None  # the method whose networks judge its labels out of sample; None: its own
    many_rows_defaults: ClassVar[Mapping[str, Any]] = {}  # of its own settings, for features
    best_on: ClassVar[Literal["many rows", "few rows"] | None] = None  # of features: where it did best of all methods

    settings: MethodSettings  # a method states its own class of settings here, for type checkers
    candidates: Tensor
    log_weights: Tensor | None  # [n, k], of the candidates; None: there are none
    world: World = SINGLE_PROCESS  # the ranks that share the work

    def __init__(
        self, settings: MethodSettings, problem: Problem, make_network: Callable[[], nn.Module], networks: int = 1
    ) -> None:
        super().__init__()
        self.settings = settings
        self.problem = problem
        self.rows = problem.rows  # the examples whose rows of `tables` this process has
        self.networks = nn.ModuleList(make_network() for _ in range(networks))
        # The run folder keeps the candidate sets; no need to write them into every checkpoint again.
        self.register_buffer("candidates", problem.candidates, persistent=False)
        given = problem.weights
        log_weights = None if given is None else log_candidate_weights(given, problem.candidates)
        self.register_buffer("log_weights", log_weights, persistent=False)
        self.phase = "training"

    # --- training ---------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Prepare epoch 1, 2, …: set `phase` and the numbers that change between epochs."""

    def streams(self) -> dict[str, Stream]:
        """Return the batches wanted in every step of this epoch, by name."""
        return {"all": Stream(("weak",))}

    @abstractmethod
    def loss(self, batches: Mapping[str, Batch], generator: torch.Generator) -> Losses:
        """Compute the losses of one step. No backward pass, no host synchronisation."""

    def after_step(self, batches: Mapping[str, Batch]) -> None:
        """Update state after the optimiser's step, without gradient."""

    def observe(self, rows: slice, outputs: Tensor) -> None:
        """Look at `outputs` [v, rows, k] of un-augmented training examples in evaluation mode, chunk by chunk.

        Methods that need this after every epoch set `watches_training_set`.
        """

    def end_epoch(self, epoch: int) -> None:
        """Close the epoch, after `observe` has seen the whole training set."""

    def metrics(self) -> dict[str, float]:
        """Return the method's own numbers for this epoch's line in `metrics.jsonl`. May synchronise."""
        return {}

    def log_weights_of(self, batch: Batch) -> Tensor | None:
        return None if self.log_weights is None else self.log_weights[batch.index]

    # --- several ranks ----------------------------------------------------------------------------------------

    def all_gather(self, values: Tensor, batch: Batch) -> Tensor:
        """Return the values of the whole batch, gathered from each rank's values of its own rows."""
        return self.world.all_gather(values, len(batch.global_index))

    def read(self, table: Tensor, batch: Batch) -> Tensor:
        """This batch's rows of a table [n, ...], wherever they are."""
        if len(table) == self.problem.n:
            return table[batch.index]
        at, ours = self._places(batch)
        rows = table[at.clamp(0, len(table) - 1)]
        rows = torch.where(ours.view(-1, *[1] * (rows.ndim - 1)), rows, torch.zeros_like(rows))
        return self.world.local_shard(self.world.all_reduce(rows))  # one rank has each; the others add nothing

    def write(self, table: Tensor, batch: Batch, rows: Tensor) -> None:
        """Write this batch's rows into a table [n, ...], with the rows of all other ranks."""
        rows = self.all_gather(rows, batch)
        if len(table) == self.problem.n:
            table[batch.global_index] = rows
            return
        at, ours = self._places(batch)
        table[at[ours]] = rows[ours]

    def _places(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where the whole batch's rows are in this rank's part of a table, and which of them are there at all."""
        at = batch.global_index - self.rows.start
        return at, (at >= 0) & (at < self.rows.stop - self.rows.start)

    def all_tables(self) -> dict[str, tuple[nn.Module, str, int]]:
        """By the name in `state_dict`: the module that has the table, its name there, and the examples' dimension."""
        return {
            f"{prefix}.{name}".lstrip("."): (module, name, dim)
            for prefix, module in self.named_modules()
            for name, dim in getattr(module, "tables", {}).items()
        }

    def split_tables(self) -> None:
        """Share out what rank 0 has whole."""
        if self.world.size > 1:
            self.rows = self.world.local_rows(self.problem.n)
            for module, name, dim in self.all_tables().values():
                setattr(module, name, self.world.scatter_table(getattr(module, name), self.problem.n, dim))

    def gather_tables(self) -> dict[str, Tensor]:
        """On rank 0: all tables as a whole, in the host's memory. On others, or if there are none: nothing."""
        if self.world.size == 1:
            return {}
        found = {
            key: self.world.gather_table(getattr(module, name), self.problem.n, dim)
            for key, (module, name, dim) in self.all_tables().items()
        }
        return {key: table for key, table in found.items() if table is not None}

    def join_tables(self) -> None:
        """Have all of them on rank 0 again."""
        for key, table in self.gather_tables().items():
            module, name, _ = self.all_tables()[key]
            setattr(module, name, table.contiguous().to(getattr(module, name).device))
        if self.world.rank == 0:
            self.rows = slice(0, self.problem.n)

    def own_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state with this rank's rows of all tables; those that are left out stay as they are."""
        out, n = dict(tensors), self.problem.n
        for key, (module, name, dim) in self.all_tables().items():
            held = getattr(module, name)
            if held.shape[dim] < n:
                given = out.get(key, held)
                whole = given.ndim == held.ndim and given.shape[dim] == n
                out[key] = given.narrow(dim, self.rows.start, held.shape[dim]) if whole else given
        return out

    # --- prediction -------------------------------------------------------------------------------------------

    def outputs(self, x: Tensor) -> Tensor:
        """Return the logits of every network, [v, B, k]."""
        return torch.stack([network(x) for network in self.networks])

    def combine(self, outputs: Tensor) -> Tensor:
        """Return class probabilities [B, k] from the networks' logits [v, B, k]."""
        return torch.softmax(outputs.float().mean(dim=0), dim=1)

    def training_labels(self, outside_gamma: float | None = None) -> TrainingLabels | None:
        """Return the labels of the training set, for methods that select; None for others.

        `outside_gamma`, if given, replaces the confidence from which on a label counts as stable.
        """
        return None


# --- the registry -------------------------------------------------------------------------------------------------

_METHODS: dict[str, type[Method]] = {}
_BROKEN: dict[str, str] = {}  # methods of other packages that cannot be used, and why


def register(method: type[Method]) -> type[Method]:
    """Class decorator: make a method known by its `name`."""
    for attribute in ("name", "title", "paper", "Settings"):
        if not hasattr(method, attribute):
            raise TypeError(f"method {method.__name__} needs the class attribute '{attribute}'")
    if _METHODS.get(method.name, method) is not method:
        raise ValueError(f"a method named '{method.name}' is already registered")
    _METHODS[method.name] = method
    return method


def methods() -> dict[str, type[Method]]:
    """Return all known methods by name: ours, those registered in this process, those of installed packages."""
    import crosel.methods  # noqa: F401  (its import registers our own)

    for entry in entry_points(group="crosel.methods"):
        if entry.name not in _METHODS and entry.name not in _BROKEN:
            _load_entry_point(entry)
    return dict(sorted(_METHODS.items()))


def _load_entry_point(entry: EntryPoint) -> None:
    """Register a method of an installed package. What is wrong with it matters only to those who ask for it."""
    try:
        found = entry.load()
        if getattr(found, "name", None) != entry.name:
            raise ValueError(f"the class must have the entry point's name, name = '{entry.name}'")
        register(found)
    except Exception as error:  # whatever its import may raise, perhaps after it has registered the method
        _METHODS.pop(entry.name, None)
        package = entry.dist.name if entry.dist else entry.module
        why = " ".join(f"{type(error).__name__}: {error}".split())
        _BROKEN[entry.name] = f"{entry.value} of the package {package} cannot be used ({why})"


def broken_methods() -> dict[str, str]:
    """Methods that installed packages name but that cannot be used, with the reason."""
    methods()
    return dict(sorted(_BROKEN.items()))


_trusts_code = False


def trust_method_code() -> None:
    """From now on, a method named `module:Class` may be imported."""
    global _trusts_code
    _trusts_code = True


class _ImportedSettings(MethodSettings):
    def __reduce__(self) -> Any:  # another rank imports the method, too
        return method_settings, (self.model_dump(),)


def import_method(name: str) -> type[Method]:
    """The user's own class that a name `module:Class` stands for, known by that name from now on."""
    if name in _METHODS:
        return _METHODS[name]
    try:
        found = import_by_name(name)
    except (Exception, SystemExit) as error:  # whatever a module may do
        raise UserError(
            f"method '{name}' cannot be imported ({one_line(f'{type(error).__name__}: {error}')}); check the name, and "
            "that its file is in the working folder or on PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"method '{name}' is not a class derived from crosel.methods.Method; give MODULE:CLASS")
    # By the name that leads to it, in the run's config too.
    field: Any = (Literal[name], name)
    settings = create_model(found.Settings.__name__, __base__=(_ImportedSettings, found.Settings), name=field)
    body = {"name": name, "Settings": settings, "__module__": found.__module__}
    _METHODS[name] = type(found.__name__, (found,), body)
    return _METHODS[name]


def find_method(name: str) -> type[Method]:
    import crosel.methods  # noqa: F401  (its import registers our own)

    if ":" in name:
        if not _trusts_code and name not in _METHODS:
            raise UserError(f"method '{name}' is code from outside crosel; add --trust-code if you trust it")
        return import_method(name)
    if name in _METHODS:  # without searching installed packages, which takes longer than all else here
        return _METHODS[name]
    known = methods()
    if name in _BROKEN:
        raise UserError(f"method '{name}': {_BROKEN[name]}; fix or remove that package")
    if name not in known:
        raise UserError(f"unknown method '{name}'{choose_from(name, known)}")
    return known[name]


def method_settings(values: Mapping[str, Any]) -> MethodSettings:
    """Build the settings of the method that `values['name']` names."""
    return find_method(str(values.get("name"))).Settings.model_validate(dict(values))

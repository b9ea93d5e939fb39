"""The process around a command: arguments, streams, signals, threads and exit codes."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn, TextIO

import typer

from crosel.errors import Diverged, Interrupted, RankLost, RankZeroFailed, UserError, on_one_line
from crosel.utils.console import log_lines
from crosel.utils.system import WINDOWS, stop_with_parent


def run_app(app: typer.Typer) -> None:
    """Run the command line with the exit codes of the product: 0, 2 for the user, 1 for us, 130 on Ctrl-C."""
    # typer brings its own click from some version on; its exceptions are reached through those it exports.
    usage_error = typer.BadParameter.__mro__[1]
    stop = _Stop()
    stop_with_parent()
    _open_closed_streams()
    _let_waiting_threads_sleep()
    try:
        with _stopped_by_signals(stop), log_lines():
            code = app(_arguments() or ["--help"], standalone_mode=False)
            sys.stdout.flush()
        if code == 130:  # how newer versions of typer put Ctrl-C; older ones let it through or raise Abort
            raise KeyboardInterrupt
    except (UserError, Diverged) as error:
        _fail(str(error), 2)
    except Interrupted as stopped:
        _fail(str(stopped), 130)
    except RankLost as lost:
        _fail(str(lost), 1)
    except RankZeroFailed as ended:
        raise SystemExit(ended.code) from None
    except (KeyboardInterrupt, typer.Abort):
        _fail("stopped", 130)
    except BrokenPipeError:  # whoever read our output has gone
        _give_up(sys.stdout)
        raise SystemExit(1) from None
    except Exception as error:
        if stop.asked:  # a module that was cut off while it was imported does not work
            _fail("stopped", 130)
        if isinstance(error, usage_error):
            message = getattr(error, "format_message", error.__str__)()
            _fail(f"{message} ({_help_hint(error)})", 2)
        if isinstance(error, OSError) and error.filename and error.strerror:
            _fail(f"{error.filename}: {error.strerror[0].lower() + error.strerror[1:]}", 2)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # files say so with their name
            _give_up(sys.stdout)
            _fail("the output cannot be written: no space left where it goes", 2)
        raise
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            _give_up(sys.stderr)


def _fail(text: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # nobody may be there to read it; the exit code tells as much
        sys.stderr.write(f"crosel: {on_one_line(text)}\n")
    raise SystemExit(code)


def _open_closed_streams() -> None:
    """Replace streams that are closed (`>&-`, some services), so that no file gets their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (open to the end)
    if isinstance(sys.stdout, io.TextIOWrapper):  # code pages lack half of what we write, and names may be no UTF-8
        sys.stdout.reconfigure(errors="replace" if WINDOWS else "backslashreplace")


def _give_up(stream: TextIO) -> None:
    """Keep Python from flushing at exit what could not be written: that would change the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _help_hint(error: Any) -> str:
    """Where to look after a wrong option or argument: the help of that command."""
    context = error.ctx  # None where an option lacks its value, or is given one that it does not take
    hint = f"{context.command_path if context else 'crosel'} --help shows what there is"
    if context and hasattr(error, "option_name") and any(option.name == "set_" for option in context.command.params):
        example = "train.epochs=20" if context.command.name in ("train", "bench") else "data.image_size=64"
        hint += f"; settings are passed with --set, as in --set {example}"
    return hint


def _arguments() -> list[str]:
    """The arguments, with ~ expanded after an equals sign, which shells do not do. An empty argument, which an unset
    variable leaves, is refused: as a path it would mean the working folder."""
    given = sys.argv[1:]
    for before, argument in zip(["crosel", *given], given, strict=False):
        if argument == "" or re.fullmatch(r"--[\w-]+=", argument):
            what = argument or f"what follows {before}"
            raise UserError(f"{what} is empty; give it a value (is a shell variable not set?)")
    for argument in given:
        try:
            argument.encode()
        except UnicodeEncodeError:  # the bytes of a file's name: they could not be written into any page or table
            raise UserError(f"{argument!a} is not UTF-8; give the file or folder another name") from None
    home = r"^((?:[\w.:-]+=)+(?=~/)|--[\w-]+=(?=~$))~"  # a setting of just ~ is YAML's null
    return [re.sub(home, lambda found: found[1] + os.path.expanduser("~"), word) for word in given]


class _Stopped(KeyboardInterrupt):
    """`python -m` ends by SIGINT if KeyboardInterrupt itself has passed through an `exec`, also if it was caught."""


class _Stop:
    """Ctrl-C and SIGTERM end a command. A module that is being imported may swallow the exception, so it is also
    remembered, for a run that begins nevertheless (`crosel.runs.pipeline.stop_signals`)."""

    asked = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        self.asked = True
        raise _Stopped


@contextlib.contextmanager
def _stopped_by_signals(stop: _Stop) -> Iterator[None]:
    """Until a run takes the signals over. Signals that are ignored, as Ctrl-C after a shell's &, stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    old = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _let_waiting_threads_sleep() -> None:
    # PyTorch's threads keep a core busy while they wait for each other, and slow down another run on the same cores
    # (docs/performance.md). OpenMP reads the variable when torch is imported.
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"  # instead of 300,000

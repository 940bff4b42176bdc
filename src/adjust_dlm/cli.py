"""`adjust`: finds the command, runs it, writes its files, and turns every failure into one line and an exit code.

0 good, 1 failed, 2 bad input, 130 interrupted (also when a training run saved its state first). Results go to stdout,
everything else to stderr.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import adjust_dlm
from adjust_dlm.commands import COMMANDS, GROUPS, Command, named
from adjust_dlm.commands.common import set_malloc
from adjust_dlm.words import known

GOOD, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(argv: list[str] | None = None) -> int:
    """Runs one command, by default that of `sys.argv`; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # The memory of every large tensor would go back to the kernel and be mapped anew, page by page. Measured on two CPU
    # cores with the default model: the row scores of a commit take 43 instead of 78 ms, decoding 64 tokens 4.2 instead
    # of 6.1 to 8.1 s. GLIBC_TUNABLES or mallopt do the same for a library user.
    set_malloc(map_from=1 << 30, keep=2**31 - 1)
    # Threads that spin for each other lose their turns where anything else runs. Measured on two CPU cores with a small
    # block base: 16 tokens beside two busy processes take 2.1 instead of 11.9 s. Alone 64 tokens take 2 % longer.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    gc.set_threshold(100_000, 20, 20)  # importing torch and transformers with the usual one takes half a second longer
    verbose = "--verbose" in argv or bool(os.environ.get("ADJUST_DEBUG"))
    handler = _log_to_stderr(verbose)
    # SIGTERM unwinds like Ctrl-C, so that work folders and temporary files go away.
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not verbose:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars look at it, too
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what matters in its warnings, we check ourselves
    try:
        with warnings.catch_warnings():
            if not verbose:
                # Between libraries, nothing for a user: peft asks transformers for what it has renamed.
                warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
            code = _dispatch(argv)
        sys.stdout.flush()
    except SystemExit as stop:  # help and wrong flags
        code = stop.code if isinstance(stop.code, int) else GOOD
    except KeyboardInterrupt:
        code = _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has seen enough
        code = FAILED
    except Exception as error:
        code = _failed(error, verbose)
    finally:
        signal.signal(signal.SIGTERM, old)
        logger = logging.getLogger("adjust_dlm")
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    try:
        sys.stdout.flush()
    except OSError:  # nothing may be left that the interpreter would fail to write, with a traceback, on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _dispatch(argv: list[str]) -> int:
    name, rest = _name(argv)
    if name in COMMANDS:
        return _run(name, COMMANDS[name], rest)
    if name == "--version":
        print(f"adjust {adjust_dlm.__version__}")
        return GOOD
    parts = [command for command in COMMANDS if command.startswith(f"{name} ")]
    if name in (None, "-h", "--help") or (parts and rest[:1] and rest[0] in ("-h", "--help")):
        print(_help(name if parts else None, parts or list(COMMANDS)))
        return GOOD
    if parts:
        word = rest[0] if rest and not rest[0].startswith("-") else ""
        tasks = [part.removeprefix(f"{name} ") for part in parts]
        return _complain(f"error: adjust {name} wants one more word; {known(word, tasks)}", BAD_INPUT)
    return _complain(f"error: unknown command {name!r}; {known(str(name), COMMANDS)} (see adjust --help)", BAD_INPUT)


def _help(name: str | None, listed: list[str]) -> str:
    """All commands, in groups, or those that begin with a name."""
    width = max(map(len, listed))
    lines = [f"usage: adjust {'COMMAND' if name is None else f'{name} TASK'} [FLAGS]", ""]
    lines += ["Joint sampling for masked diffusion language models."]
    for group, names in GROUPS.items():
        if found := [command for command in names if command in listed]:
            lines += ["", f"{group}:", *(f"  {command:{width}}  {COMMANDS[command].help}" for command in found)]
    return "\n".join(
        [*lines, "", "adjust COMMAND --help shows a command's flags; each is also a key of --config FILE (YAML)."]
    )


def _name(argv: list[str]) -> tuple[str | None, list[str]]:
    """The command, of one word or two, and what follows it."""
    for words in (2, 1):
        if " ".join(argv[:words]) in COMMANDS:
            return " ".join(argv[:words]), argv[words:]
    return (argv[0] if argv else None), argv[1:]


def _run(name: str, command: Command, argv: list[str]) -> int:
    """Flags and file to settings, settings to outcome, outcome to files (one process of several writes them)."""
    from adjust_dlm.commands.output import Outcome, check_folder, show_results, write_outcome
    from adjust_dlm.commands.settings import parse
    from adjust_dlm.hub import check_named

    settings, _ = parse(named(command.settings), argv, prog=f"adjust {name}", description=command.help)
    output = getattr(settings, "output", None)
    folder = None if output is None else Path(output)
    check_folder(folder)
    check_named(settings)
    if hasattr(settings, "check_files"):
        settings.check_files()
    if getattr(settings, "dry_run", False):
        folder = None
    outcome: Any = named(command.function)(settings)
    if os.environ.get("RANK", "0") != "0":
        return GOOD
    shown = isinstance(outcome, Outcome)
    outcome = outcome if shown else Outcome(results=outcome)
    if folder is not None:
        write_outcome(folder, name, settings, outcome)
    if not shown:
        show_results(outcome.results)
    if problems := outcome.results.get("problems"):  # a dry run found some
        return _complain(f"error: {'; '.join(problems)}", FAILED)
    if outcome.results.get("finished") is False:  # `train` and `adapt` save when they are told to stop
        return _complain("stopped before the end; the same command goes on from here", INTERRUPTED)
    return GOOD


def _failed(error: Exception, verbose: bool) -> int:
    """One line, and the traceback for those who ask."""
    if verbose:
        traceback.print_exception(error)
    types = sys.modules.get("adjust_dlm.types")  # not loaded: then nothing can have raised an InputError
    if types is not None and isinstance(error, types.InputError):
        return _complain(f"error: {error}", BAD_INPUT)
    if isinstance(error, OSError) and error.strerror:
        return _complain(f"error: {error.strerror}" + (f": {error.filename}" if error.filename else ""), FAILED)
    hint = "" if verbose else " (--verbose shows where)"
    return _complain(f"error: {type(error).__name__}: {error}{hint}", FAILED)


def _complain(message: str, code: int) -> int:
    print("adjust:", " ".join(message.split()), file=sys.stderr)
    return code


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what `sys.stderr` is at the time: a live bar takes its place, and puts log lines above itself."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, _: Any) -> None: ...


def _log_to_stderr(verbose: bool) -> logging.Handler:
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("adjust: %(message)s"))
    logger = logging.getLogger("adjust_dlm")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    if not verbose:  # what torchao says when it is imported on another machine than its kernels are for
        for name in ("torchao", "torch.utils._pytree"):
            logging.getLogger(name).setLevel(logging.ERROR)
    return handler


if __name__ == "__main__":
    sys.exit(main())

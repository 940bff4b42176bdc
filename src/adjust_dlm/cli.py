"""`adjust`: finds the command, runs it, writes its files, and turns every failure into one line and an exit code.

0 good, 1 failed, 2 bad input, 130 interrupted (also when a training run saved its state first). Results go to stdout,
everything else to stderr.
"""

from __future__ import annotations

import ctypes
import difflib
import gc
import importlib
import logging
import os
import platform
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from adjust_dlm.commands import COMMANDS, Command

GOOD, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments behind the program's name; `sys.argv` unless given.

    Returns:
        The exit code.
    """
    argv = sys.argv[1:] if argv is None else argv
    _keep_freed_memory()
    collector = gc.get_threshold()
    gc.set_threshold(100_000, 20, 20)  # importing torch and transformers with the usual one takes half a second longer
    verbose = "--verbose" in argv or bool(os.environ.get("ADJUST_DEBUG"))
    handler = _log_to_stderr(verbose)
    main_thread = threading.current_thread() is threading.main_thread()
    # SIGTERM unwinds like Ctrl-C, so that work folders and temporary files go away.
    old = signal.signal(signal.SIGTERM, _interrupt) if main_thread else None
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
        gc.set_threshold(*collector)
        if main_thread:
            signal.signal(signal.SIGTERM, old)
        logger = logging.getLogger("adjust_dlm")
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    _flush_or_drop(sys.stdout)
    return code


def _keep_freed_memory() -> None:
    """Tells glibc not to return the memory of every large tensor to the kernel, which would map it anew, page by page.

    Measured on two CPU cores with the default model: the row scores of a commit take 43 instead of 78 ms, decoding 64
    tokens 4.2 instead of 6.1 to 8.1 s. For this process only; GLIBC_TUNABLES or mallopt do the same for a library user.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _dispatch(argv: list[str]) -> int:
    name, argv = _name(argv)
    if name in ("-h", "--help"):
        print(_overview())
        return GOOD
    if name == "--version":
        import adjust_dlm

        print(f"adjust {adjust_dlm.__version__}")
        return GOOD
    if name not in COMMANDS and argv[:1] in (["-h"], ["--help"]) and _parts(name):
        print(f"usage: adjust {name} TASK [FLAGS]\n\n{_listed(_parts(name))}")
        return GOOD
    if name not in COMMANDS:
        return _complain(f"error: {_unknown(name)}", BAD_INPUT)
    return _run(name, COMMANDS[name], argv)


def _name(argv: list[str]) -> tuple[str | None, list[str]]:
    """The command, of one word or two, and what follows it."""
    for words in (2, 1):
        if " ".join(argv[:words]) in COMMANDS:
            return " ".join(argv[:words]), argv[words:]
    return (argv[0] if argv else None), argv[1:]


def _overview() -> str:
    return (
        "usage: adjust COMMAND [FLAGS]\n\nJoint sampling for masked diffusion language models.\n\n"
        f"{_listed(COMMANDS)}\n\n"
        "adjust COMMAND --help shows a command's flags; each is also a key of --config FILE (YAML)."
    )


def _listed(names: Collection[str]) -> str:
    width = max(map(len, names))
    return "\n".join(f"  {name:{width}}  {COMMANDS[name].help}" for name in names)


def _parts(name: str | None) -> list[str]:
    """Commands of two words that begin with this one."""
    return [command for command in COMMANDS if command.startswith(f"{name} ")]


def _unknown(name: str | None) -> str:
    known = f"known are {', '.join(COMMANDS)}"
    if name is None:
        return f"no command given; {known} (see adjust --help)"
    if parts := _parts(name):
        return f"adjust {name} wants one more word: {', '.join(part.split()[1] for part in parts)}"
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"unknown command {name!r}; " + (f"did you mean {near[0]!r}? " if near else "") + known


def _run(name: str, command: Command, argv: list[str]) -> int:
    """Flags and file to settings, settings to outcome, outcome to files (one process of several writes them)."""
    from adjust_dlm.commands.output import Outcome, check_folder, show_results, write_outcome
    from adjust_dlm.commands.settings import parse

    module = importlib.import_module(command.module)
    settings_class = getattr(module, command.config)
    settings, _ = parse(settings_class, argv, prog=f"adjust {name}", description=command.help)
    output = getattr(settings, "output", None)
    folder = None if output is None else Path(output)
    check_folder(folder)
    if getattr(settings, "dry_run", False):
        folder = None
    outcome: Any = getattr(module, command.function)(settings)
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


def _log_to_stderr(verbose: bool) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("adjust: %(message)s"))
    logger = logging.getLogger("adjust_dlm")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    if not verbose:  # what torchao says when it is imported on another machine than its kernels are for
        for name in ("torchao", "torch.utils._pytree"):
            logging.getLogger(name).setLevel(logging.ERROR)
    return handler


def _flush_or_drop(stream: Any) -> None:
    """Leaves nothing in the buffer that the interpreter would fail to write, with a traceback, on its way out."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())

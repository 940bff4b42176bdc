"""One dataclass, three ways in: flags beat the YAML file, the file beats the defaults.

Field types understood in a file: bool, int, float, str, Path, Literal, X | None, tuple, list and nested dataclasses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, make_dataclass
from itertools import zip_longest
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
import yaml

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class Common:
    """Flags that every command has.

    Attributes:
        config: YAML file with settings of this command; a flag beats the file, the file beats the default.
        verbose: more log lines, and tracebacks of errors.
    """

    config: Path | None = None
    verbose: bool = False


def parse(settings: type[C], argv: list[str], *, prog: str, description: str) -> tuple[C, Common]:
    """Settings of a command from its arguments and the YAML file they may name.

    Args:
        settings: the command's dataclass.
        argv: arguments behind the command's name.
        prog: what the help calls the program.
        description: first lines of the help.

    Raises:
        InputError: unreadable file, unknown key or a value of the wrong type in it.
        SystemExit: `--help` (0) or wrong flags (2).
    """
    file = _file_flag(argv)
    start = filled(settings, read_yaml(file) if file else {}, where=str(file))
    run_class = make_dataclass(
        "Run",
        [
            ("settings", Annotated[settings, tyro.conf.arg(name="")]),
            ("common", Annotated[Common, tyro.conf.arg(name="")]),
        ],
        frozen=True,
    )
    run: Any = tyro.cli(run_class, args=argv, default=run_class(start, Common()), prog=prog, description=description)
    return run.settings, run.common


def _file_flag(argv: list[str]) -> Path | None:
    """The value of `--config`, found before the other flags are read; the last one counts."""
    file = None
    for word, following in zip_longest(argv, argv[1:]):
        if word == "--":
            break
        if word == "--config" and following is not None:
            file = Path(following)
        elif word.startswith("--config="):
            file = Path(word.removeprefix("--config="))
    return file


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        InputError: no such file, no YAML, or no mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        bad_input(f"cannot read the settings file {path}: {getattr(error, 'strerror', None) or error}")
    except yaml.YAMLError as error:
        bad_input(f"{path} is not YAML: {' '.join(str(error).split())}")
    if content is not None and not isinstance(content, dict):
        bad_input(f"{path} holds a {type(content).__name__}; it must be a mapping of settings to values")
    return {str(key).replace("-", "_"): value for key, value in (content or {}).items()}


def filled(settings: type[C], values: Mapping[str, Any], *, where: str, base: Any = None) -> C:
    """An instance with the file's values over `base` or the defaults; nothing is validated yet.

    Fields without a default stay `tyro.MISSING`, so that a flag must give them. `__post_init__` is not run here:
    flags may still change what the file says.

    Args:
        settings: a dataclass.
        values: what the file says.
        where: the file, and the section in it, for messages.
        base: an instance whose values stand in for the defaults.

    Raises:
        InputError: an unknown key or a value of the wrong type.
    """
    known = {field.name: field for field in fields(settings) if field.init}  # type: ignore[arg-type]
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        bad_input(f"{where}: unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    hints = get_type_hints(settings, include_extras=True)
    made = object.__new__(settings)
    for name, field in known.items():
        value = _default(field) if base is None else getattr(base, name)
        if name in values:
            value = convert(hints[name], values[name], f"{where}: {name}", value)
        object.__setattr__(made, name, value)
    return made


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return tyro.MISSING if field.default_factory is MISSING else field.default_factory()


def convert(kind: Any, value: Any, where: str, default: Any = None) -> Any:
    """A YAML value as the type of its field.

    Raises:
        InputError: it is of another type.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return convert(args[0], value, where, default)
    if origin in (Union, UnionType):
        return _convert_union(args, value, where, default)
    if origin is Literal:
        return value if value in args else _wrong(where, value, f"one of {', '.join(map(str, args))}")
    if origin in (tuple, list):
        return _convert_items(origin, args, value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            _wrong(where, value, "a mapping")
        return filled(kind, value, where=where, base=None if default is tyro.MISSING else default)
    return _convert_plain(kind, value, where)


def _convert_union(args: tuple[Any, ...], value: Any, where: str, default: Any) -> Any:
    if value is None and NoneType in args:
        return None
    kinds = [kind for kind in args if kind is not NoneType]
    for kind in kinds[:-1]:
        try:
            return convert(kind, value, where, default)
        except ValueError:
            continue
    return convert(kinds[-1], value, where, default)


def _convert_items(origin: Any, args: tuple[Any, ...], value: Any, where: str) -> Any:
    """A list of items; one that stands alone needs no brackets."""
    items = value if isinstance(value, list) else [value]
    if origin is tuple and args[-1] is not Ellipsis:
        if len(items) != len(args):
            _wrong(where, value, f"a list of {len(args)}")
        return tuple(convert(kind, item, where) for kind, item in zip(args, items, strict=True))
    return origin(convert(args[0], item, where) for item in items)


def _convert_plain(kind: Any, value: Any, where: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and (number or isinstance(value, str)):  # YAML 1.1 reads 1e-3 as text
        try:
            return float(value)
        except ValueError:
            _wrong(where, value, "a number")
    right = {
        bool: isinstance(value, bool),
        int: number and isinstance(value, int),
        float: False,
        str: isinstance(value, str),
        Path: isinstance(value, str),
    }
    if not right.get(kind, True):
        _wrong(where, value, {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "text"))
    return Path(value) if kind is Path else value


def _wrong(where: str, value: Any, wanted: str) -> NoReturn:
    bad_input(f"{where} is {value!r}; it must be {wanted}")


def bad_input(message: str) -> NoReturn:
    """Raises `InputError`. Imported late: `types` needs torch, and help must not wait for it."""
    from adjust_dlm.types import InputError

    raise InputError(message) from None

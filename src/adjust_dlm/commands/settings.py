"""One dataclass, three ways in: flags beat the YAML file, the file beats the defaults.

Field types understood in a file: bool, int, float, str, Path, Literal, X | None, tuple[X, ...] and nested dataclasses.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, make_dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
import yaml

from adjust_dlm import words
from adjust_dlm.checks import InputError, in_words, refusing, require
from adjust_dlm.commands import FLAGS
from adjust_dlm.hub import once

C = TypeVar("C")
_OTHER_BASE = re.compile(r"[-+]?0[0-7_]+$|.*:")


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
    """Settings of a command from the arguments behind its name, and from the YAML file they may name.

    Raises:
        InputError: unreadable file, unknown key or a value of the wrong type in it.
        SystemExit: `--help` (0) or wrong flags (2).
    """
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, action="append", default=[])
    named = parser.parse_known_args(argv)[0].config
    require(len(named) < 2, f"--config is given {len(named)} times; give one file")
    file = named[0] if named else None
    start = filled(settings, read_yaml(file) if file else {}, where=str(file))
    left, bare = _names(settings), tyro.conf.arg(name="")
    parts: list[tuple[str, Any]] = [("common", Annotated[_part(Common, _names(Common), Common()), bare])]
    for box, flags in FLAGS.items():
        mine = [name for name in flags if name in left and flags[0] in left]
        left = [name for name in left if name not in mine]
        parts.append((box, Annotated[_part(settings, mine, start), tyro.conf.OmitArgPrefixes]))
    parts.insert(1, ("own", Annotated[_part(settings, left, start), bare]))
    run_class = make_dataclass("Run", parts, frozen=True)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            bare_help = (tyro.conf.HelptextFromCommentsOff,)  # made classes have none, and to look takes long
            run = vars(tyro.cli(run_class, args=argv, prog=prog, description=description, config=bare_help))
    except SystemExit as stop:
        if stop.code:
            sys.stderr.write(f"adjust: error: {one_line(said.getvalue())} (see {prog} --help)\n")
        raise
    common, *boxes = run.values()
    return _made(settings, {name: value for box in boxes for name, value in vars(box).items()}), Common(**vars(common))


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind) if field.init]


def _part(kind: Any, names: Sequence[str], start: Any) -> type:
    """A dataclass of some fields of another, with the values of an instance: a box of the help."""
    hints, parts, said = get_type_hints(kind, include_extras=True), list[Any](), dict[str, str]()
    for one in reversed(kind.__mro__):
        about = inspect.cleandoc(one.__doc__ or "").partition("Attributes:")[2]
        for found, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8,}.*)*)", about, re.M):
            said |= dict.fromkeys(found.split(", "), " ".join(text.split()))
    for name in names:
        value, hint = getattr(start, name), hints[name]
        if is_dataclass(hint):
            parts.append((name, _part(hint, _names(hint), value)))
            parts[-1][1].__doc__ = said.get(name)
        else:
            shown = tyro.conf.arg(help=said.get(name), help_behavior_hint=_default_told)
            parts.append((name, Annotated[hint, shown], dataclass_field(default=value)))
    return make_dataclass("Part", parts, frozen=True, kw_only=True)


def _default_told(default: str) -> str:
    """What the help says of a default: nothing where there is none, and of a long list its first."""
    first, *more = default.split() or [""]
    shown = default if len(default) < 80 else f"{first} and {len(more)} more"
    return "" if default in ("", "None") else f"(default: {shown})"


def _made(kind: type[C], values: Mapping[str, Any]) -> C:
    """An instance from the values of its parts; its own checks run here."""
    hints = get_type_hints(kind)
    nested = {name: _made(hints[name], vars(value)) for name, value in values.items() if is_dataclass(hints[name])}
    return kind(**{**values, **nested})


def one_line(box: str) -> str:
    """What a box of tyro says: its first paragraph, and the flags that may have been meant."""
    box = re.sub(r"\x1b\[[0-9;]*m", "", box)  # colours
    lines = [line.strip("\u2502 ") for line in box.splitlines() if line[:1] not in ("\u256d", "\u2570")]
    lines = list(filter(None, lines))
    if len(lines) > 1 and not lines[1].strip("-"):  # where stdout is not UTF-8, the title stands on a rule
        del lines[:2]
    rule = [n for n, line in enumerate(lines) if not line.strip("\u2500-") or line == "Got errors:"]
    text = " ".join(lines[: rule[0] if rule else None])
    for told, said in (
        (r"no type matching (?P<kind>.*?) could be instantiated from \[(?P<value>.*)\]\.", r"\g<kind>"),
        ("could not convert string to float: (?P<value>.*)", "FLOAT"),
        (r"invalid literal for int\(\) with base 10: (?P<value>.*)", "INT"),
    ):
        text = re.sub(rf"^Error parsing (\S+): {told}$", rf"\1 is \g<value>; it takes {said}", text)
    if choice := re.match(r"invalid choice (.*) for argument '(\S+)'\. Expected one of \((.*)\)", text):
        known = sorted(set(re.findall(r"'([^']*)'", choice[3])) - {"None"})
        text = f"{choice[2].removeprefix('own.')} is {choice[1]}; it must be one of {', '.join(known)}"
    meant = [line.split()[0] for line in lines if re.match(r"--\w", line)] if "Perhaps you meant:" in lines else []
    return text.rstrip(".") + (f"; did you mean {' or '.join(meant[:2])}?" if meant else "")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; an empty file is an empty mapping.

    Raises:
        InputError: no such file, no YAML, no mapping, or a name twice in one.
    """
    with refusing(f"cannot read {path}", OSError, ValueError, yaml.YAMLError):
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=_once) if path.suffix == ".json" else yaml.load(text, _Yaml) or {}
    mapping = isinstance(content, dict)
    require(mapping, f"{path} holds a {type(content).__name__}; it must be a mapping of names to values")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


class _Yaml(yaml.SafeLoader):
    """Refuses a name twice in one mapping, where PyYAML takes the last, and 010 and 1:30, which are 8 and 90 to it."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        _once([(str(key.value), None) for key, _ in node.value])
        return node

    def compose_scalar_node(self, anchor: Any) -> Any:
        node = super().compose_scalar_node(anchor)
        if node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and _OTHER_BASE.match(node.value):
            raise ValueError(f"YAML reads {node.value} in base 8 or 60; write it without 0 in front and without colons")
        return node


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    once([(key.replace("-", "_"), None) for key, _ in pairs])
    return dict(pairs)


def filled(settings: type[C], values: Mapping[str, Any], *, where: str, base: Any = None) -> C:
    """An instance with the file's values over `base` or the defaults; nothing else is validated yet.

    Fields without a default stay `tyro.MISSING`, so that a flag must give them. `__post_init__` is not run here:
    flags may still change what the file says. `where` is the file, and the section in it, for messages.

    Raises:
        InputError: an unknown key or a value of the wrong type.
    """
    known = {field.name: field for field in fields(settings) if field.init}  # type: ignore[arg-type]
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise InputError(
            f"{where}: unknown setting {', '.join(unknown)}; {words.known(unknown[0], sorted(known))}"
        ) from None
    hints = get_type_hints(settings)
    made = object.__new__(settings)
    for name, field in known.items():
        value, kind = _default(field) if base is None else getattr(base, name), hints[name]
        if name in values and is_dataclass(kind) and isinstance(values[name], dict):
            value = filled(kind, values[name], where=f"{where}: {name}", base=value)  # type: ignore[arg-type]
        elif name in values:
            try:
                value = _converted(kind, values[name])
            except (TypeError, ValueError):
                raise InputError(f"{where}: {name} is {values[name]!r}; it must be {in_words(kind)}") from None
        object.__setattr__(made, name, value)
    return made


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return tyro.MISSING if field.default_factory is MISSING else field.default_factory()


def _converted(kind: Any, value: Any) -> Any:
    """A YAML value as the type of its field; raises TypeError or ValueError where it is of another."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for one in args:
            with contextlib.suppress(TypeError, ValueError):
                return _converted(one, value)
    if origin is tuple:  # one item that stands alone needs no brackets
        return tuple(_converted(args[0], item) for item in (value if isinstance(value, list) else [value]))
    if kind in (float, Path) and not isinstance(value, bool):  # YAML 1.1 reads 1e-3 as text
        return kind(value)
    if type(value) is kind or (origin is Literal and value in args):
        return value
    raise TypeError

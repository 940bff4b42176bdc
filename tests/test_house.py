"""Rules of the house that no linter knows: size, layering by name, a light import, ASCII."""

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "adjust_dlm"
SOURCES = sorted(PACKAGE.rglob("*.py"))
DECODERS = sorted((PACKAGE / "decoders").rglob("*.py"))
BASES = sorted((PACKAGE / "bases").rglob("*.py"))

HEAVY = ("transformers", "lm_eval", "fastapi", "ray", "peft", "pyarrow")
FAMILIES = ("smol", "dream", "llada")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def words_in_code(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every identifier, module name and string of the code with its line; docstrings and comments are prose."""
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in prose:
                yield line, node.value
            continue
        for _, value in ast.iter_fields(node):
            for word in value if isinstance(value, list) else [value]:
                if isinstance(word, str):
                    yield line, word


def imported_modules(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """Absolute dotted names of all that a file imports, also inside functions; `from a import b` gives a.b."""
    package = ("adjust_dlm", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else ()
            stem = [*parent, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*stem, alias.name])) for alias in node.names)


def family_words(tree: ast.Module) -> list[tuple[int, str]]:
    return [(line, word) for line, word in words_in_code(tree) if any(f in word.lower() for f in FAMILIES)]


def decoder_imports(tree: ast.Module, path: Path) -> list[tuple[int, str]]:
    target = "adjust_dlm.decoders"
    return [(n, m) for n, m in imported_modules(tree, path) if m == target or m.startswith(target + ".")]


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside functions counted; the package's own lazy exports point at every layer."""
    files = {".".join(("adjust_dlm", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in SOURCES}
    modules = {name.removesuffix(".__init__"): path for name, path in files.items()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = {name for _, name in imported_modules(parse(path), path)}
        known = {next((n for n in (name, name.rpartition(".")[0]) if n in modules), "") for name in found}
        graph[module] = known - {"", "adjust_dlm", module}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
    assert "adjust_dlm.bases.base" in graph["adjust_dlm.bases.exact"]


def test_importing_the_package_stays_light() -> None:
    program = "import json, sys, adjust_dlm; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)  # also fails if the import prints anything
    assert "adjust_dlm" in loaded
    assert [name for name in HEAVY if name in loaded] == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    sizes = {
        f"{node.name} (line {node.lineno})": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_sources_are_ascii(path: Path) -> None:
    lines = path.read_bytes().splitlines()
    assert [number for number, line in enumerate(lines, start=1) if not line.isascii()] == []


@pytest.mark.parametrize("path", DECODERS, ids=name_of)
def test_no_decoder_names_a_model_family(path: Path) -> None:
    assert family_words(parse(path)) == []


@pytest.mark.parametrize("path", BASES, ids=name_of)
def test_no_base_imports_a_decoder(path: Path) -> None:
    assert decoder_imports(parse(path), path) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("x = base.name == 'dream-7b'", [(1, "dream-7b")]),
        ("from ..bases.llada import LladaBase as L", [(1, "bases.llada"), (1, "LladaBase")]),
        ("def for_smol(*, dream_shift=0): ...", [(1, "for_smol"), (1, "dream_shift")]),
        ('"""Dream orders by entropy."""\nx = 1  # LLaDA by confidence', []),
    ],
)
def test_the_family_check_reads_code_and_not_prose(code: str, found: list[tuple[int, str]]) -> None:
    assert sorted(family_words(ast.parse(code))) == sorted(found)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import adjust_dlm.decoders.joint", ["adjust_dlm.decoders.joint"]),
        ("from adjust_dlm import decoders", ["adjust_dlm.decoders"]),
        ("def f():\n    from ..decoders.joint import decode", ["adjust_dlm.decoders.joint.decode"]),
        ("from .. import decoders, types", ["adjust_dlm.decoders"]),
        ("from .decoders import x\nimport tokenizers.decoders", []),
    ],
)
def test_the_import_check_resolves_every_spelling(code: str, found: list[str]) -> None:
    path = PACKAGE / "bases" / "made_up.py"
    assert [module for _, module in decoder_imports(ast.parse(code), path)] == found

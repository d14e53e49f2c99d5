"""What a reviewer would otherwise have to look for: the house rules that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("refitd", "clients", "tests", "scripts")
TEXT_SUFFIXES = {".py", ".md", ".proto", ".toml", ".sh", ".yml", ".yaml", ".service", ".txt", ""}
MAX_LINES = 500
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers", "handler", "handlers", "common", "misc"}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


def files() -> list[Path]:
    """What git tracks or would track: build output and virtual environments are ignored there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
        return sorted(path for path in found if path.is_file())
    # A source archive has no git; nothing but sources is in it, save the environments made there.
    hidden = re.compile(r"^(\.venv|\.git|\.[a-z]+_cache|\.hypothesis|__pycache__|build|dist)")
    return sorted(
        path
        for path in ROOT.rglob("*")
        if path.is_file() and not any(hidden.match(part) for part in path.relative_to(ROOT).parts)
    )


def python_files() -> Iterator[Path]:
    """Hand-written Python; the generated stubs are not."""
    for path in files():
        inside = path.relative_to(ROOT).parts
        if path.suffix == ".py" and inside[0] in CODE and inside[:2] != ("refitd", "v1"):
            yield path


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    found = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in python_files()}
    assert len(found) > 20
    return found


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    long = {str(path.relative_to(ROOT)): count for path in python_files() if (count := len(lines(path))) > MAX_LINES}
    assert long == {}


def test_no_module_has_a_name_that_says_nothing() -> None:
    vague = [str(path) for path in python_files() if VAGUE_NAMES & set(path.stem.strip("_").lower().split("_"))]
    assert vague == []


def test_code_is_ascii() -> None:
    assert [place for path in python_files() for place in not_ascii(path)] == []


def test_every_module_says_what_it_does(trees: dict[str, ast.Module]) -> None:
    silent = [name for name, tree in trees.items() if tree.body and not ast.get_docstring(tree)]
    assert silent == []


def test_nothing_is_pickled(trees: dict[str, ast.Module]) -> None:
    # Tests may pickle to show that something can be.
    found = [
        f"{name}:{line}"
        for name, tree in trees.items()
        if not name.startswith("tests/")
        for line in pickled_lines(tree)
    ]
    assert found == []


def test_no_file_names_a_place_of_one_machine() -> None:
    # Built from pieces, so that this file does not name them itself.
    places = ["/" + "work/", "/home" + "/", "/" + "tmp/venvs", "/" + "Users/", "." + "library", "/opt/" + "wheels"]
    hosts = ["pypi" + ".org", "files.python" + "hosted", "download.pytorch" + ".org"]
    found = []
    for path in files():
        if path.suffix in TEXT_SUFFIXES:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{path.relative_to(ROOT)}: {place}" for place in places + hosts if place in text]
    assert found == []


def test_no_dictionary_of_anything_crosses_a_layer(trees: dict[str, ast.Module]) -> None:
    """A public function's annotation `dict[str, Any]` hides what is in it; at the edges libraries ask for it."""
    layers = tuple(f"refitd/{name}/" for name in ("domain", "control", "store", "copy", "source", "engine", "agent"))
    found = []
    for name, tree in trees.items():
        if not name.startswith(layers):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                annotations = [argument.annotation for argument in (*node.args.args, *node.args.kwonlyargs)]
                texts = [ast.unparse(item).lower() for item in (*annotations, node.returns) if item is not None]
                found += [f"{name}:{node.lineno}" for text in texts if text == "dict[str, any]"]
    assert found == []


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def not_ascii(path: Path) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{number}" for number, line in enumerate(lines(path), 1) if not line.isascii()]


def pickled_lines(tree: ast.Module) -> list[int]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and PICKLES & {alias.name.partition(".")[0] for alias in node.names}:
            found.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLES:
            found.append(node.lineno)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.save"):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "source", ["import pickle", "from pickle import loads", "import os, pickle as p", "import torch\ntorch.load('x')"]
)
def test_the_search_for_pickle_finds_it(source: str) -> None:
    assert pickled_lines(ast.parse(source))


def test_the_search_for_other_letters_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.py"
    path.write_text("a = 1\nb = '\u00e9'\n", encoding="utf-8")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert not_ascii(path) == ["x.py:2"]

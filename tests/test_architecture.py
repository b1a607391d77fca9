"""The walls of the house: who may import whom, and what the core may not touch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.cli.main import COMMANDS

SOURCE = Path(__file__).parent.parent / "src" / "atoll"
BELOW_RUNTIME = {"wire", "store", "tensors", "core", "errors", "streams"}
BELOW_TRAIN = {"runtime", *BELOW_RUNTIME}
BELOW_RECIPES = {"train", *BELOW_TRAIN}
ALL = {"recipes", "launch", "study", "watch", "sim", "chaos", "testing", *BELOW_RECIPES}

ALLOWED = {
    "core": {"errors"},
    "tensors": {"core", "errors"},
    "wire": {"core", "tensors", "errors"},
    "store": {"core", "tensors", "errors"},
    "runtime": BELOW_RUNTIME,
    "train": BELOW_TRAIN,
    "recipes": BELOW_RECIPES,
    "sim": {"core", "tensors", "errors"},
    "study": {"sim", "recipes", *BELOW_RECIPES},
    "chaos": {"recipes", *BELOW_RECIPES},
    "launch": {"recipes", "watch", *BELOW_RECIPES},
    "watch": {"store", "core", "errors"},
    "testing": {"sim", "errors"},
    "cli": ALL,
}
PURE = {
    "__future__", "abc", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq", "itertools", "math",
    "operator", "statistics", "types", "typing",
}  # fmt: skip
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}


def modules() -> list[Path]:
    return [p for p in sorted(SOURCE.rglob("*.py")) if not p.name.endswith(("_pb2.py", "_pb2_grpc.py"))]


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            if node.module == "atoll":
                names |= {f"atoll.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_follow_the_table(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0]
    if room.endswith(".py"):
        return
    assert room in ALLOWED, f"{room} is not a room of the house"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "atoll" and len(parts) > 1:
            assert parts[1] == room or parts[1] in ALLOWED[room] | {"join", "__version__"}, f"{path} imports {name}"


@pytest.mark.parametrize("path", sorted((SOURCE / "core").glob("*.py")), ids=lambda p: p.name)
def test_the_core_is_pure(path: Path) -> None:
    for name in imports(path):
        assert name.split(".")[0] in PURE | {"atoll"}, f"core imports {name}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in IMPURE_CALLS, f"{path}:{node.lineno} calls {node.func.id}"


def test_nothing_is_unpickled() -> None:
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    for path in modules():
        assert not {n.split(".")[0] for n in imports(path)} & banned, path
        text = path.read_text()
        assert "torch.load(" not in text, path
        assert "_object_list(" not in text, path


@pytest.mark.parametrize("module", ["atoll", "atoll.sim.world", "atoll.core.syncer", "atoll.core.agent"])
def test_no_torch_on_this_path(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_orphan_modules() -> None:
    """Every module is imported by another, is a package, or is an entrance."""
    entrances = {"atoll.__main__", "atoll.cli.main", "atoll.runtime.agent_main", "atoll.sim.world"}
    entrances |= {module for module, _ in COMMANDS.values()}
    known: set[str] = set()
    for path in [*modules(), *Path(__file__).parent.rglob("*.py")]:
        for name in imports(path):
            known.add(name)
        text = path.read_text()
        known |= {word.strip("\"'(),:") for word in text.split() if word.strip("\"'(),:").startswith("atoll.")}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("atoll"):
                known |= {f"{node.module}.{alias.name}" for alias in node.names}
    for path in modules():
        if path.name == "__init__.py":
            continue
        name = "atoll." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        assert name in known | entrances, f"nothing imports {name}"


NAMES = ("empty", "zeros", "ones", "full", "tensor", "as_tensor", "asarray", "arange", "scalar_tensor", "linspace")
CONSTRUCTORS = {f"torch.{name}" for name in NAMES}
IN_A_USERS_PROCESS = ("tensors", "train", "runtime", "store", "launch")


@pytest.mark.parametrize("room", IN_A_USERS_PROCESS)
def test_no_tensor_of_ours_takes_the_scripts_default_device_or_dtype(room: str) -> None:
    for path in (path for path in modules() if f"/atoll/{room}/" in path.as_posix()):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in CONSTRUCTORS:
                told = {keyword.arg for keyword in node.keywords}
                assert {"device", "dtype"} <= told, f"{path.name}:{node.lineno}: {ast.unparse(node)}"

"""The one direction of imports, `producer <- worker -> engine -> kernels`, and what importing the producer loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import producer

ROOT = Path(__file__).resolve().parent.parent
# What each package may import of ours, and what of others' it must not.
OURS: dict[str, set[str]] = {
    "kernels": set(),
    "engine": {"kernels"},
    "producer": set(),
    "worker": {"producer", "engine"},
}
# A name that is used or imported, as against a package: nothing may be imported by a name that comes from outside.
NAME = "name:"
IMPORTS_BY_NAME = {f"{NAME}import_module", f"{NAME}__import__"}
NOT_IN_THE_PRODUCT = {"tests", "benchmarks", "examples", "transformers", "peft", "pickle", "marshal", "shelve", "dill"}
FORBIDDEN: dict[str, set[str]] = {
    "kernels": NOT_IN_THE_PRODUCT | {"redis", "rq", "pydantic", "msgpack", "tokenizers", "safetensors", "PIL"},
    "engine": NOT_IN_THE_PRODUCT | {"redis", "rq", "pydantic", "msgpack"},
    "producer": NOT_IN_THE_PRODUCT | {"torch", "numpy", "triton", "tokenizers", "safetensors"},
    "worker": NOT_IN_THE_PRODUCT,
}
MODULES = [path.relative_to(ROOT) for package in OURS for path in sorted((ROOT / package).rglob("*.py"))]


def imported(package: str, source: str) -> list[str]:
    """The packages that `source`, a module of `package`, imports, wherever in it, and the names that it uses."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [package if node.level else node.module or "", *(f"{NAME}{a.name}" for a in node.names)]
        elif isinstance(node, ast.Name):
            found.append(f"{NAME}{node.id}")
        elif isinstance(node, ast.Attribute):
            found.append(f"{NAME}{node.attr}")
    return [name.partition(".")[0] for name in found]


def broken_rules(package: str, source: str) -> list[str]:
    """What the rules forbid of a module's imports."""
    other_ours = set(OURS) - OURS[package] - {package}
    return sorted(set(imported(package, source)) & (other_ours | FORBIDDEN[package] | IMPORTS_BY_NAME))


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_imports_in_the_one_direction(module: Path) -> None:
    assert broken_rules(module.parts[0], (ROOT / module).read_text()) == []


def test_every_package_is_looked_at() -> None:
    assert {module.parts[0] for module in MODULES} == set(OURS)


@pytest.mark.parametrize(
    ("package", "source", "broken"),
    [
        ("kernels", "import engine", ["engine"]),
        ("engine", "from producer.errors import Fault", ["producer"]),
        ("engine", "def f():\n    import redis.asyncio as r", ["redis"]),
        ("engine", "import kernels.norms, worker.settings", ["worker"]),
        ("producer", "if True:\n    from torch import nn", ["torch"]),
        ("producer", "from engine import Engine", ["engine"]),
        ("worker", "from kernels import norms", ["kernels"]),
        ("worker", "class A:\n    def f(self):\n        import pickle", ["pickle"]),
        ("worker", "from importlib import import_module as load", ["name:import_module"]),
        ("worker", "import importlib\nimportlib.import_module(name)", ["name:import_module"]),
        ("worker", "__import__(name)", ["name:__import__"]),
        ("worker", "import torch, redis, producer, engine\nfrom . import settings\nfrom .commands import run", []),
    ],
)
def test_the_rules_find_what_breaks_them(package: str, source: str, broken: list[str]) -> None:
    assert broken_rules(package, source) == broken


def loaded_by(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after `statement`."""
    program = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import producer", "import producer.__main__"])
def test_the_producer_loads_no_torch(statement: str) -> None:
    loaded = loaded_by(statement)
    assert {"producer", "redis"} <= loaded
    assert not loaded & {"torch", "numpy", "transformers", "tokenizers", "safetensors", "engine", "kernels", "worker"}


def test_all_is_what_the_producer_exports() -> None:
    exported = {
        name
        for name, value in vars(producer).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert exported == set(producer.__all__)
    assert list(producer.__all__) == sorted(producer.__all__)

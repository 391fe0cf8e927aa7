"""What a linter does not check about the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    "pdserve",
    "router/pdserve_router",
    "prefill_server/pdserve_prefill",
    "decode_server/pdserve_decode",
]
MODULES = sorted(
    file.relative_to(ROOT)
    for package in [*PACKAGES, "bench"]
    for file in (ROOT / package).rglob("*.py")
    if "_pb2" not in file.name
)
# Where an error of any kind must not end the program, see docs/architecture.md.
BROAD_EXCEPT_ALLOWED = {Path("pdserve/engine/loop.py"), Path("router/pdserve_router/app.py")}


def tree(module: Path) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_says_what_lives_in_it(module: Path) -> None:
    assert ast.get_docstring(tree(module)), f"{module} has no docstring"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_keeps_no_state(module: Path) -> None:
    writes = [node.lineno for node in ast.walk(tree(module)) if isinstance(node, ast.Global)]
    assert not writes, f"{module}: global at lines {writes}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_only_the_last_resorts_catch_everything(module: Path) -> None:
    broad = [
        node.lineno
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"})
    ]
    assert not broad or module in BROAD_EXCEPT_ALLOWED, f"{module}: lines {broad}"


def test_there_are_modules_to_check() -> None:
    assert len(MODULES) > 50

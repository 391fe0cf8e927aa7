"""What importing a part brings along. The arrows between packages are import-linter's (scripts/check)."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "numpy", "safetensors"}
TORCH_FREE = [
    "pdserve_router.main",
    "pdserve.cli.main",
    "pdserve.transfer.tcp",
    "pdserve.rpc.session",
    "pdserve.engine.scheduler",
    "pdserve_decode.reservations",
]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize("module", TORCH_FREE)
def test_it_does_not_import_torch(module: str) -> None:
    assert not modules_after(f"import {module}") & HEAVY


def test_importing_pdserve_imports_nothing_else_of_it() -> None:
    assert {name for name in modules_after("import pdserve") if name.startswith("pdserve")} == {"pdserve"}

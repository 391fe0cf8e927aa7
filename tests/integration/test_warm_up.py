"""A worker that says it is ready computes its first step as fast as any other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ONE_STEP = """
import time
from numba.core import event

class Compiled(event.Listener):
    num = 0
    def on_start(self, event): self.num += 1
    def on_end(self, event): pass

from tests.support.engines import generate, greedy, real_engine
from tests.support.tiny_models import tiny_model

built = real_engine(tiny_model("llama"))
compiled = Compiled()
event.register("numba:compile", compiled)
generate(built.engine, [list(range(3, 40))], greedy(4))
generate(built.engine, [list(range(3, 40)), list(range(5, 12))], greedy(4))
assert not compiled.num, f"{compiled.num} kernels were compiled in the first step"
"""


@pytest.mark.slow
def test_no_kernel_is_compiled_once_the_engine_is_built(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", ONE_STEP],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr

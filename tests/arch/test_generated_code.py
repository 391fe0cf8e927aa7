"""The committed code under pdserve/rpc/v1 is what the .proto files say today."""

from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    protos = [str(file) for file in (ROOT / "proto").rglob("*.proto")]
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}", *outputs, *protos]) == 0
    fresh = sorted(file for file in tmp_path.rglob("*") if file.is_file())
    assert len(fresh) == 3 * len(protos)
    for file in fresh:
        committed = ROOT / file.relative_to(tmp_path)
        assert committed.read_text() == file.read_text(), f"{committed.name} is stale: run scripts/proto"

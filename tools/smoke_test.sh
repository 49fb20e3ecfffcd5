#!/usr/bin/env bash
# Installs a wheel into an empty environment, and uses it there as a new user does: tools/smoke_test.sh DIST [PIP OPTIONS]
set -euo pipefail
wheel=$(realpath "$1"/*.whl)
shift
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"
"${PYTHON:-python3}" -m venv env
env/bin/python -m pip install --quiet "$@" torch==2.13.0
env/bin/python -m pip install --quiet "$@" "$wheel[mpich]"
export PATH="$directory/env/bin:$PATH" PYTHONDONTWRITEBYTECODE=1
python - <<'PROGRAM'
import importlib.util
import torchmn

for name in torchmn.__all__:
    getattr(torchmn, name)
assert "site-packages" in torchmn.__file__, torchmn.__file__
assert not importlib.util.find_spec("pytest") and not importlib.util.find_spec("matplotlib")
PROGRAM
torchmn doctor
cat > hello.py <<'PROGRAM'
import torch
import torchmn

with torchmn.create_communicator() as comm:
    total = comm.allreduce(torch.ones(1))
    print(f"rank {comm.rank} of {comm.size}: {total.item():g}")
PROGRAM
torchmn run -n 2 hello.py | sort | diff - <(printf '[0] rank 0 of 2: 2\n[1] rank 1 of 2: 2\n')
torchmn new mnist-cnn
torchmn train mnist-cnn.yaml -n 2 --halopar --sample 2% --epochs 1 --out run
test -s run/report.html
echo "the wheel works"

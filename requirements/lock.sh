#!/bin/sh
# usage: lock.sh UV TORCH TORCH_INDEX    writes requirements/cpu.lock and requirements/cuda.lock
set -eu
uv=$1 torch=$2 torch_index=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="--generate-hashes --no-annotate --no-header --python-version 3.11 --quiet"
{ cat requirements/overrides.txt; echo "$torch"; } > "$work/overrides.txt"
# --find-links lets a wheel that pip already found here stand for the index.
"$uv" pip compile pyproject.toml --extra cpu --extra dev $flags --python-platform x86_64-manylinux_2_28 \
    --override "$work/overrides.txt" --no-emit-package torch --find-links "${PIP_FIND_LINKS:-$torch_index}" -o "$work/cpu.lock"
"$uv" pip compile pyproject.toml --extra cuda $flags --python-platform aarch64-manylinux_2_34 -o "$work/cuda.lock"
{ echo "# CPU, x86-64 Linux, Python 3.11. Made by 'make lock'; installed with --no-deps --require-hashes after torch."; cat "$work/cpu.lock"; } > requirements/cpu.lock
{ echo "# CUDA 13, Linux x86-64 and aarch64, Python 3.11. Made by 'make lock'; resolved, never run on the machine that made it."; cat "$work/cuda.lock"; } > requirements/cuda.lock

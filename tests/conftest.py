"""Shared by all tests."""

from __future__ import annotations

import os

# Tests never ask a hub for anything; what they need they make.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

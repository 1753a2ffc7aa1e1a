"""What in the environment is a secret: told by a variable's name, so that no file of a run ever holds its value."""

from __future__ import annotations

import os
import re

NAMES = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|CREDENTIAL", re.IGNORECASE)
SHORTEST = 6  # characters; shorter values occur in ordinary text


def secret_values() -> dict[str, str]:
    """Values by variable, longest first: one may be a part of another."""
    found = {name: value.strip() for name, value in os.environ.items() if NAMES.search(name)}
    secrets = [(name, value) for name, value in found.items() if len(value) >= SHORTEST]
    return dict(sorted(secrets, key=lambda secret: -len(secret[1])))


def without_secrets(text: str) -> str:
    """`text` with the values of secrets replaced by `<NAME>`."""
    for name, value in secret_values().items():
        text = text.replace(value, f"<{name}>")
    return text

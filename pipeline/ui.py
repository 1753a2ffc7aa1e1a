"""python -m pipeline.ui [out=FOLDER] [port=5000] — MLflow on the runs of an output folder, on loopback."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.command import command
from pipeline.config import PipelineConfig


def main(args: Sequence[str]) -> int:
    """Replaces this process by MLflow's server. Exit status 2 when there is nothing to show."""
    options = {"out": PipelineConfig("x").out, "port": "5000"}
    for arg in args:
        key, equals, value = arg.partition("=")
        if not equals or key not in options:
            print(f"error: argument {arg!r}: expected out=FOLDER or port=N", file=sys.stderr)
            return 2
        options[key] = value
    if not options["port"].isdigit():
        print(f"error: port={options['port']}: expected a number", file=sys.stderr)
        return 2
    database = Path(options["out"]).resolve() / "mlflow.db"
    if not database.exists():
        print(
            f"error: {database}: expected the database of earlier runs, found none; run `make run` first",
            file=sys.stderr,
        )
        return 2
    print(f"MLflow shows {database.parent} at http://127.0.0.1:{options['port']} (Ctrl-C ends it)", flush=True)
    # The module and not the script beside the interpreter, which may not be on the path.
    server = [
        "-m",
        "mlflow",
        "ui",
        "--backend-store-uri",
        f"sqlite:///{database}",
        "--host",
        "127.0.0.1",
        "--port",
        options["port"],
        "--workers",
        "1",
    ]
    return os.execv(sys.executable, [sys.executable, *server])


if __name__ == "__main__":
    command(main, f"usage: {__doc__}\n")

"""python -m pipeline.status — runs, stages, and why each would be made again. Starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.command import command
from pipeline.config import ConfigError, parse
from pipeline.console import headline, table
from pipeline.dag import plan
from pipeline.run import read_run, resolve, status_of
from stages.artifacts import Layout, Record

HELP = """\
usage: python -m pipeline.status [conf=NAME | run=ID] [section.key=value ...]

Shows the runs in the output folder, and for the config that is named (default: conf=tiny) every stage:
whether it is complete, and otherwise why `pipeline.run` with the same arguments would make it.
"""


def main(args: Sequence[str]) -> int:
    """Exit status 0, or 2 when the config is refused."""
    try:
        config, _ = resolve(parse(args))
        nodes = plan(config)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    layout = Layout(Path(config.out).resolve())
    runs = [_run_row(path) for path in layout.runs()]
    if runs:
        print(table(["run", "status", "seconds", "made"], runs, right=[2]), end="\n\n")
    else:
        print(f"no runs in {layout.root}\n")
    rows = []
    for name, node in nodes.items():
        result = headline(name, Record.read(node.workspace.final)) if node.complete else ""
        state, why = ("complete", node.reason) if node.complete else ("to make", node.reason)
        if not node.complete and node.workspace.busy:
            progress = node.workspace.events.read_progress()
            told = "" if progress is None else f"{progress.done} of {progress.total} {progress.unit}"
            state, why = "running", told
        rows.append([name, node.workspace.identity, state, why, result])
    print(table(["stage", "identity", "state", "why", "result"], rows))
    return 0


def _run_row(path: Path) -> list[str]:
    run = read_run(path)
    return [str(run["run"]), status_of(run), str(run.get("seconds", "")), ", ".join(run["made"]) or "nothing"]


if __name__ == "__main__":
    command(main, HELP)

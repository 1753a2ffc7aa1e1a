"""What is found out about the data before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.engine.config import EngineConfig
from stages.hidden_states.config import HiddenStatesConfig
from stages.train.inputs import read_inputs
from tests.stages.draft_helpers import DRAFT
from tests.stages.train_helpers import SEQUENCES, usual_job


@pytest.mark.parametrize(("transport", "fits"), [("disk", True), ("mooncake", False)])
def test_all_of_the_window_is_the_one_readers_that_fills_a_folder(transport: str, fits: bool, tmp_path: Path) -> None:
    """The longest sequence needs more than half of the window, and two ranks train."""
    job = usual_job(tmp_path)
    states = HiddenStatesConfig(transport=transport, segment_gib=12000 / 2**30, window_share=1.0)

    def used() -> int:
        how = {"draft": DRAFT, "engine": EngineConfig(max_model_len=64), "hidden_states": states}
        found = read_inputs(job.config, job.target, job.corpus, **how)
        return len(found.data.sequences) + len(found.validation.sequences)

    if fits:
        assert used() == SEQUENCES
        return
    with pytest.raises(ValueError, match="a rank may have 1 to 6000 in flight"):
        used()

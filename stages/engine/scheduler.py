"""The scheduler of engines that capture hidden states on a CPU; vLLM loads it by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.outputs import DraftTokenIds


class CaptureScheduler(Scheduler):
    """Schedules no draft tokens.

    To vLLM capturing is a way of speculating, whose draft of every sequence is the token it has just sampled
    (`vllm/v1/spec_decode/extract_hidden_states.py`). Verified, in vain, it doubles the positions of every step of
    generation. A GPU waits for the weights meanwhile; a CPU computes.
    """

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take up none."""

"""Measures what a draft is worth: served by unmodified vLLM, on prompts that training never saw."""

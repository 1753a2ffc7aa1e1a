"""From prompts to a corpus: the target answers every prompt itself, and its exact tokens are kept."""

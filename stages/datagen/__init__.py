"""From prompts to a corpus: the target answers every prompt, or given answers are kept; exact tokens either way."""

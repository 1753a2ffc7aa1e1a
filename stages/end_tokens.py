"""The tokens at which a target's answers end: in its corpus, in a draft's vocabulary, and where drafts are judged."""

from __future__ import annotations

import json

from transformers import AutoTokenizer

from stages.target import Target


def end_token_ids(target: Target) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json, else of config.json, and the tokenizer's; in order.

    Engines that know the tokenizer stop at all of them. Raises ValueError when there is none, since answers would
    then only end by length.
    """
    folder, found = target.folder, set[int]()
    for name in ("generation_config.json", "config.json"):
        config = json.loads((folder / name).read_text(encoding="utf-8")) if (folder / name).is_file() else {}
        ids = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        if ids is not None:
            found = {ids} if isinstance(ids, int) else set(ids)
            break
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=target.trust_remote_code)
        found |= {tokenizer.eos_token_id} - {None}
    if not found:
        raise ValueError(
            f"{folder}: expected eos_token_id in generation_config.json, config.json or an end of sequence in "
            "tokenizer_config.json, found none"
        )
    return tuple(sorted(found))

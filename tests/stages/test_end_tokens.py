"""Where answers end, from the files of a target."""

from __future__ import annotations

from pathlib import Path

import pytest
from served_helpers import artifact, target_facts
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from stages.artifacts import write_json
from stages.end_tokens import end_token_ids
from stages.target import Target


def test_answers_end_where_generation_config_or_tokenizer_say(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    target = artifact(Target, tmp_path / "target", facts=target_facts(folder))
    write_json(folder / "config.json", {})
    with pytest.raises(ValueError, match="eos_token_id"):
        end_token_ids(target)
    write_json(folder / "config.json", {"text_config": {"eos_token_id": 5}})
    assert end_token_ids(target) == (5,)
    write_json(folder / "generation_config.json", {"eos_token_id": [8, 7]})
    assert end_token_ids(target) == (7, 8)
    write_json(folder / "generation_config.json", {"eos_token_id": 7})
    words = Tokenizer(models.WordLevel({"a": 0, "<|im_end|>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>").save_pretrained(folder)
    assert end_token_ids(target) == (1, 7)  # the end of a turn is often the tokenizer's alone

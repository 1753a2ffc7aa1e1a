"""The DSpark draft: speculators' modules, and our forward over packed sequences and anchors.

The layout is vLLM's when it serves a speculators checkpoint (`v1/worker/gpu/spec_decode/dspark` and
`dflash`, `model_executor/models/qwen3_dflash.py`): the block of anchor p has its slots at positions
p, p+1, …; slot 0 holds the anchor's token and the others the mask token; context is every position
before p. With `sample_from_anchor` slot j makes prediction j, else slot j+1 does. Either way prediction
j is of token p+j+1, given token p+j by the Markov head, and the target's answer is its state at p+j.

Legend: T packed tokens, A anchors, S slots of a block, B predictions of a block, D hidden size,
V target vocabulary, W draft vocabulary (V when not reduced), L aux layers, R Markov rank.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from stages.draft.attention import NAMES, Attention, attention_mask
from stages.draft.batch import PackedBatch
from stages.draft.config import DraftConfig, check_draft
from stages.draft.mask import Blocks
from stages.draft.rope import rope_parameters
from stages.draft.vocab import set_vocab, vocab_ids
from stages.target import TargetHead, TargetShape, load_head

# Parameters that belong to the target: never trained.
FROZEN = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def speculators_config(
    config: DraftConfig, shape: TargetShape, *, verifier: str | None, architectures: list[str]
) -> DSparkSpeculatorConfig:
    """The checkpoint's config. `verifier` is the target's Hub id or folder, as users will read it."""
    sliding = config.sliding_window is not None
    layers = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope_parameters(config),
        use_sliding_window=sliding,
        sliding_window=config.sliding_window,
        layer_types=["sliding_attention" if sliding else "full_attention"] * config.num_layers,
        tie_word_embeddings=False,
    )
    return DSparkSpeculatorConfig(
        architectures=["DSparkDraftModel"],
        transformer_layer_config=layers,
        draft_vocab_size=shape.vocab_size if config.vocab_size is None else config.vocab_size,
        block_size=config.block_size,
        aux_hidden_state_layer_ids=list(config.aux_layer_ids),
        mask_token_id=config.mask_token_id,
        sample_from_anchor=config.sample_from_anchor,
        sliding_window_non_causal=False,
        markov_rank=config.markov_rank,
        markov_head_type="vanilla",
        enable_confidence_head=config.confidence_head,
        confidence_head_with_markov=config.confidence_with_markov,
        speculators_config=SpeculatorsConfig(
            algorithm="dspark",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=config.num_speculative_tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=verifier, architectures=architectures),
        ),
    )


def construct(config: DSparkSpeculatorConfig) -> DSparkDraftModel:
    """speculators' model in fp32 with random trainable and unset (NaN) frozen parameters.

    One parameter serves both as the draft's and as the verifier's LM head: they are the same rows of
    the target's, and the largest matrix of all unless the vocabulary is reduced.
    """
    config.transformer_layer_config._attn_implementation = NAMES["sdpa"]
    model = DSparkDraftModel(config)
    model.rotary_emb = _rotary_embedding(config.transformer_layer_config)
    model.verifier_lm_head.weight = model.lm_head.weight
    return model


def _rotary_embedding(config: Qwen3Config) -> Qwen3RotaryEmbedding:
    """Tables of the part of a head that is rotated: as wide as they are, they are those of a smaller head."""
    part = deepcopy(config)
    part.head_dim = int(config.head_dim * part.rope_parameters.pop("partial_rotary_factor", 1.0))
    return Qwen3RotaryEmbedding(part)


def use_attention(model: DSparkDraftModel, attention: Attention) -> None:
    """Let the layers attend in another of the ways of `attention.py`."""
    model.config.transformer_layer_config._attn_implementation = NAMES[attention]


def fill_frozen(model: DSparkDraftModel, head: TargetHead) -> None:
    """Copy the target's embedding, final norm and LM head. Raises ValueError on another shape.

    Of the LM head the rows of the draft's vocabulary, which must have been set.
    """
    ids_W, embed_VD = vocab_ids(model), model.embed_tokens.weight
    pairs = (
        ("embed_tokens", embed_VD, head.embed_VD, embed_VD.shape),
        ("lm_head", model.lm_head.weight, head.lm_head_VD, embed_VD.shape),
        ("final norm", model.verifier_norm.weight, head.norm_D, embed_VD.shape[1:]),
    )
    for name, parameter, value, shape in pairs:
        if value.shape != shape:
            raise ValueError(f"target's {name}: expected shape {tuple(shape)}, found {tuple(value.shape)}")
        parameter.data.copy_(value[ids_W] if name == "lm_head" and ids_W is not None else value)
        parameter.requires_grad_(False)


def shared_head(model: DSparkDraftModel, head: TargetHead) -> TargetHead:
    """`head` on the model's device and in its dtype, sharing with the model what that holds already."""
    embed_VD = model.embed_tokens.weight
    if not model.use_draft_vocab:
        lm_head_VD = model.lm_head.weight
    else:
        lm_head_VD = embed_VD if head.lm_head_VD is head.embed_VD else head.lm_head_VD.to(embed_VD)
    return replace(head, embed_VD=embed_VD, norm_D=model.verifier_norm.weight, lm_head_VD=lm_head_VD)


def build_draft(
    config: DraftConfig,
    shape: TargetShape,
    target_folder: Path,
    *,
    verifier: str,
    seed: int,
    vocab_W: np.ndarray | None = None,
) -> DSparkDraftModel:
    """A new draft of the target in `target_folder`: fp32, the same bits for the same seed.

    `verifier` is recorded in the checkpoint's config as the target's name (Hub id or folder). `vocab_W`
    are the ids of a reduced vocabulary (`choose_vocab`), needed when `config.vocab_size` is set.
    Raises ValueError when the config cannot be served or does not fit the target.
    """
    check_draft(config, shape)
    architectures = list(Qwen3Config.get_config_dict(str(target_folder))[0].get("architectures") or [])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The verifier is named after construction: speculators resolves a name at once, maybe on the Hub.
        model = construct(speculators_config(config, shape, verifier=None, architectures=architectures))
    model.config.speculators_config.verifier.name_or_path = verifier
    if model.use_draft_vocab:
        set_vocab(model, torch.from_numpy(np.zeros(0, np.int64) if vocab_W is None else vocab_W))
    fill_frozen(model, load_head(target_folder))
    return model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that training moves, by name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@dataclass(frozen=True)
class BlockOutput:
    """What the draft says of every block. `confidence_AB` (logits) is None without the head."""

    logits_ABW: torch.Tensor
    confidence_AB: torch.Tensor | None


def num_predictions(model: DSparkDraftModel) -> int:
    """B: tokens proposed by one block."""
    return int(model.block_size) if model.config.sample_from_anchor else int(model.block_size) - 1


def block_positions(batch: PackedBatch, anchors_A: torch.Tensor, size: int) -> torch.Tensor:
    """Packed index [A, size] of p+j for every anchor p and j < size, held inside the batch.

    An index past the anchor's document is meaningless; the label mask (`anchors.py`) excludes it.
    """
    offsets_S = torch.arange(size, device=anchors_A.device)
    return (anchors_A[:, None] + offsets_S).clamp(max=max(len(batch) - 1, 0))


def backbone(model: DSparkDraftModel, batch: PackedBatch, anchors_A: torch.Tensor) -> torch.Tensor:
    """Normed hidden states [A, B, D] of all blocks in one pass, before any head.

    `anchors_A` are packed indices (int64, ascending). The dtype is that of the model's parameters.
    """
    num_anchors, slots = len(anchors_A), int(model.block_size)
    tokens_AS = torch.full((num_anchors, slots), model.mask_token_id, device=anchors_A.device)
    tokens_AS[:, 0] = batch.input_ids_T[anchors_A]
    hidden_1QD = model.embed_tokens(tokens_AS.view(1, -1)).to(model.fc.weight.dtype)
    aux_TX = batch.aux_TLD.flatten(1).to(model.embed_tokens.weight.dtype)  # that of products (stages/train/prepare.py)
    context_1TD = model.hidden_norm(model.fc(aux_TX))[None]

    slots_S = torch.arange(slots, device=anchors_A.device)
    positions_Q = (batch.positions_T[anchors_A][:, None] + slots_S).view(-1)
    rotary = model.rotary_emb(hidden_1QD, torch.cat([batch.positions_T, positions_Q])[None])
    window = model.sliding_window if model.uses_sliding_window_attn else None
    blocks = Blocks(batch.documents_T, batch.positions_T, anchors_A, slots, window, causal=window is not None)
    mask = attention_mask(model.config.transformer_layer_config._attn_implementation, blocks, hidden_1QD.dtype)
    part = None
    if rotary[0].shape[-1] < model.config.transformer_layer_config.head_dim:
        # speculators' layers rotate whole heads: they turn by nothing, and the attention rotates the part
        part, rotary = rotary, (torch.ones_like(rotary[0][..., :1]), torch.zeros_like(rotary[1][..., :1]))
    for layer in model.layers:
        hidden_1QD = layer(
            hidden_states=hidden_1QD,
            target_hidden=context_1TD,
            attention_mask=mask,
            position_embeddings=rotary,
            part_rotary=part,
            use_cache=False,
        )
    hidden_ASD = model.norm(hidden_1QD).view(num_anchors, slots, -1)
    return hidden_ASD if model.config.sample_from_anchor else hidden_ASD[:, 1:]


def confidence_logits(
    model: DSparkDraftModel, hidden_XD: torch.Tensor, embedded_XR: torch.Tensor, *, detach: bool = False
) -> torch.Tensor | None:
    """Logits [X] of the confidence head, None without one, for any leading dimensions X.

    With `detach` the head sees its features without their gradients.
    """
    if model.confidence_head is None:
        return None
    with_markov = model.config.confidence_head_with_markov
    features = torch.cat([hidden_XD, embedded_XR], dim=-1) if with_markov else hidden_XD
    return model.confidence_head(features.detach() if detach else features)


def heads(model: DSparkDraftModel, hidden_ABD: torch.Tensor, previous_AB: torch.Tensor) -> BlockOutput:
    """LM, Markov and confidence heads, given the token before each prediction (`previous_AB`, int64)."""
    embedded_ABR = model.markov_head.prev_embeddings(previous_AB)
    bias_ABW = model.markov_head.block_bias(prev_token_ids=previous_AB, hidden_states=hidden_ABD, prev_emb=embedded_ABR)
    confidence_AB = confidence_logits(model, hidden_ABD, embedded_ABR)
    return BlockOutput(model.lm_head(hidden_ABD) + bias_ABW, confidence_AB)

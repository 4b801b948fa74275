"""Writes tiny models, mixtures of experts or dense: real programs run them, and what they say means nothing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

# The seed makes every run's model the same, so that a failure is not a matter of luck.
SEED = 20260

# `-ncmoe 4` is all layers of it.
LAYERS = 4
EMBEDDING_WIDTH = 64
HEADS, KEY_VALUE_HEADS, HEAD_WIDTH = 4, 2, 16
EXPERTS, EXPERTS_USED, EXPERT_WIDTH = 8, 2, 64

# Long enough for a request that takes seconds: the model makes thousands of tokens in one.
CONTEXT_TOKENS = 32768

# Small weights keep the activations finite through any number of tokens.
WEIGHT_SCALE = 0.05

WORDS = ("\u2581the", "\u2581floor", "\u2581rises", "\u2581and", "\u2581falls")


class Token(NamedTuple):
    text: str
    score: float
    kind: gguf.TokenType


def vocabulary() -> list[Token]:
    """Special tokens first, where the `llama` tokenizer expects them; the byte tokens let it read any text."""
    special = [
        Token("<unk>", 0.0, gguf.TokenType.UNKNOWN),
        Token("<s>", 0.0, gguf.TokenType.CONTROL),
        Token("</s>", 0.0, gguf.TokenType.CONTROL),
    ]
    every_byte = [Token(f"<0x{byte:02X}>", 0.0, gguf.TokenType.BYTE) for byte in range(256)]
    words = [Token(word, -float(rank), gguf.TokenType.NORMAL) for rank, word in enumerate(WORDS, start=1)]
    return special + every_byte + words


def tensor_shapes(vocabulary_size: int, layers: int, dense: bool, expert_width: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a qwen3moe or qwen3 model, rows first as in numpy: a GGUF file has them the other way round."""
    queries, keys = HEADS * HEAD_WIDTH, KEY_VALUE_HEADS * HEAD_WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (vocabulary_size, EMBEDDING_WIDTH),
        "output_norm": (EMBEDDING_WIDTH,),
        "output": (vocabulary_size, EMBEDDING_WIDTH),
    }
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (EMBEDDING_WIDTH,),
        "attn_q_norm": (HEAD_WIDTH,),
        "attn_k_norm": (HEAD_WIDTH,),
        "attn_q": (queries, EMBEDDING_WIDTH),
        "attn_k": (keys, EMBEDDING_WIDTH),
        "attn_v": (keys, EMBEDDING_WIDTH),
        "attn_output": (EMBEDDING_WIDTH, queries),
        "ffn_norm": (EMBEDDING_WIDTH,),
    }
    network = {"gate": (expert_width, EMBEDDING_WIDTH), "up": (expert_width, EMBEDDING_WIDTH)}
    network["down"] = (EMBEDDING_WIDTH, expert_width)
    if dense:
        layer.update({f"ffn_{name}": shape for name, shape in network.items()})
    else:
        layer["ffn_gate_inp"] = (EXPERTS, EMBEDDING_WIDTH)
        layer.update({f"ffn_{name}_exps": (EXPERTS, *shape) for name, shape in network.items()})
    for number in range(layers):
        shapes.update({f"blk.{number}.{name}": shape for name, shape in layer.items()})
    return shapes


def write_model(path: Path, layers: int = LAYERS, dense: bool = False, expert_width: int = EXPERT_WIDTH) -> None:
    """Write a model, half a megabyte a layer, as a GGUF file; a dense one has no experts."""
    architecture = gguf.MODEL_ARCH.QWEN3 if dense else gguf.MODEL_ARCH.QWEN3MOE
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    tokens = vocabulary()
    _add_architecture(writer, layers, dense, expert_width)
    _add_tokenizer(writer, tokens)
    random = np.random.default_rng(SEED)
    for name, shape in tensor_shapes(len(tokens), layers, dense, expert_width).items():
        if name.endswith("_norm"):
            weights = np.ones(shape, dtype=np.float32)
        else:
            weights = random.normal(scale=WEIGHT_SCALE, size=shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_architecture(writer: gguf.GGUFWriter, layers: int, dense: bool, expert_width: int) -> None:
    writer.add_name("tiny random model")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(EMBEDDING_WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(expert_width)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_value_length(HEAD_WIDTH)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if dense:
        return
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(EXPERTS_USED)
    writer.add_expert_feed_forward_length(expert_width)


def _add_tokenizer(writer: gguf.GGUFWriter, tokens: list[Token]) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token.text for token in tokens])
    writer.add_token_scores([token.score for token in tokens])
    writer.add_token_types([token.kind for token in tokens])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

"""What a plan puts in the place of what is not on this machine."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

from llmfoundry.models.mpt import ComposerMPTCausalLM

from composer_fsdp2.foundry.offline_model import fuse_attention, offline_config, without_flash
from composer_fsdp2.patches import install_for_foundry


@pytest.mark.filterwarnings("ignore:Propagating key_padding_mask")
@pytest.mark.parametrize(
    "attention", [{}, {"attn_type": "grouped_query_attention", "kv_n_heads": 2}]
)
def test_an_mpt_computes_the_same_with_fused_attention(attention):
    block = {
        "name": "mpt_causal_lm",
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 16,
        "vocab_size": 64,
        "attn_config": attention,
    }
    changed, had = without_flash(block)
    assert had
    assert without_flash(changed) == (changed, False)
    del changed["name"]
    torch.manual_seed(3)
    install_for_foundry()
    model = ComposerMPTCausalLM(tokenizer=None, **changed)
    ids = torch.randint(0, 64, (2, 16))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
    expected = model(batch).logits
    fuse_attention(model)
    torch.testing.assert_close(model(batch).logits, expected)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 32),
        ("Qwen/Qwen3-8B-Base", 36),
        ("meta-llama/Meta-Llama-3.1-8B", 32),
    ],
)
def test_a_tuned_model_has_the_sizes_of_its_family(name: str, layers: int):
    assert offline_config(name, {})[0]["num_hidden_layers"] == layers

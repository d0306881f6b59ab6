"""LLM Foundry's calls of transformers: 5 answers as 4 does once ours are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from composer_fsdp2 import uninstall
from composer_fsdp2.patches import install_for_foundry
from tests.support.models import llama_config

mpt = pytest.importorskip("llmfoundry.models.mpt", reason="needs the extra foundry")


@pytest.fixture(autouse=True)
def _installed():
    install_for_foundry()
    yield
    uninstall()


def small_mpt(**changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 32}
    changes = {"attn_config": {"attn_impl": "torch"}, **changes}
    config = mpt.MPTConfig(vocab_size=50, **sizes, **changes)
    return mpt.MPTForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore:The `use_auth_token` argument is deprecated:FutureWarning")
def test_old_arguments_are_not_the_models(tmp_path: Path):
    LlamaForCausalLM(llama_config()).save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for cls in (AutoModelForCausalLM, LlamaForCausalLM):
        found = cls.from_pretrained(tmp_path, use_auth_token=False, load_in_8bit=False)
        torch.testing.assert_close(found.state_dict(), expected, rtol=0, atol=0)


def test_8_bits_are_asked_for(tmp_path: Path):
    """The library that makes them is not installed here, which transformers says."""
    LlamaForCausalLM(llama_config()).save_pretrained(tmp_path)
    with pytest.raises(ImportError, match="bitsandbytes"):
        AutoModelForCausalLM.from_pretrained(tmp_path, load_in_8bit=True)


@pytest.mark.parametrize("tied", [True, False])
def test_an_mpt_is_read_as_it_was_saved(tmp_path: Path, tied: bool):
    model = small_mpt(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    found = mpt.MPTForCausalLM.from_pretrained(tmp_path).state_dict()
    torch.testing.assert_close(found, model.state_dict(), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Propagating key_padding_mask:UserWarning")
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("padded", [0, 2])
def test_an_mpt_generates_its_likeliest_words(padded: int, use_cache: bool):
    model = small_mpt()
    words = torch.randint(0, 50, (2, 5))
    mask = torch.ones_like(words)
    mask[0, :padded] = 0
    expected, seen = words, mask
    for _ in range(6):
        logits = model(input_ids=expected, attention_mask=seen).logits
        expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
        seen = torch.cat([seen, seen.new_ones(2, 1)], 1)
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": use_cache}
    found = model.generate(words, attention_mask=mask, **options)
    assert torch.equal(found, expected)
    if use_cache and not padded:
        rows = model.transformer.wte(words)
        assert torch.equal(model.generate(inputs_embeds=rows, **options), expected[:, 5:])


@pytest.mark.filterwarnings("ignore:alibi or rope is turned on:UserWarning")
def test_the_rotation_of_an_mpt_is_that_of_llama():
    rope = {"rope": True, "rope_theta": 5000, "rope_impl": "hf"}
    scaling = {"rope_hf_config": {"type": "linear", "factor": 2.0}}
    model = small_mpt(attn_config={"attn_impl": "torch", **rope, **scaling})
    expected = 5000 ** -(torch.arange(0, 8, 2) / 8) / 2
    torch.testing.assert_close(model.transformer.rotary_embedding.inv_freq, expected)
    words = torch.randint(0, 50, (2, 5))
    logits = model(input_ids=words).logits
    torch.testing.assert_close(logits[:, :3], model(input_ids=words[:, :3]).logits)

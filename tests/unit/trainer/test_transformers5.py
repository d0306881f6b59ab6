"""LLM Foundry's calls of transformers: 5 answers as 4 does once ours are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from composer_fsdp2 import uninstall
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.patches import install_for_foundry
from tests.support import recent_models
from tests.support.models import llama_config

mpt = pytest.importorskip("llmfoundry.models.mpt", reason="needs the extra foundry")

quiet = pytest.mark.filterwarnings("ignore:The `use_auth_token` argument:FutureWarning")


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


@quiet
def test_old_arguments_are_not_the_models(tmp_path: Path):
    LlamaForCausalLM(llama_config()).save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for cls in (AutoModelForCausalLM, LlamaForCausalLM):
        found = cls.from_pretrained(tmp_path, use_auth_token=False, load_in_8bit=False)
        torch.testing.assert_close(found.state_dict(), expected, rtol=0, atol=0)


@quiet
@pytest.mark.parametrize("family", ["Gemma 3", "Gemma 4"])
def test_the_text_part_is_read_from_a_model_of_text_and_images(tmp_path: Path, family: str):
    """As LLM Foundry asks for it: with the configuration of that part."""
    if family == "Gemma 4" and (why := recent_models.missing(family)):
        pytest.skip(why)
    model = gemma3_with_images() if family == "Gemma 3" else gemma4_with_images()
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path).text_config
    found = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, use_auth_token=False)
    assert type(found).__name__.endswith("ForCausalLM")
    expected = {
        name.rpartition("language_model.")[2].removeprefix("model."): value
        for name, value in model.state_dict().items()
    }
    for name, value in found.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def gemma3_with_images() -> Any:
    library: Any = transformers
    sizes = {**recent_models.SIZES, "num_hidden_layers": 2, "sliding_window": 4}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = library.Gemma3Config(text_config=sizes, vision_config=vision, mm_tokens_per_image=4)
    return library.Gemma3ForConditionalGeneration(config)


def gemma4_with_images() -> Any:
    library: Any = transformers
    text = recent_models.gemma4().config.to_dict()
    return library.Gemma4ForConditionalGeneration(library.Gemma4Config(text_config=text))


@quiet
@pytest.mark.skipif(hasattr(PreTrainedModel, "generate"), reason="transformers has no row to try")
def test_a_folder_of_another_model_is_refused(tmp_path: Path):
    model = torch.nn.Linear(2, 2)
    LlamaForCausalLM(llama_config()).config.save_pretrained(tmp_path)
    safetensors.torch.save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="draw all of its weights at random"):
        AutoModelForCausalLM.from_pretrained(tmp_path, use_auth_token=False)


@pytest.mark.skipif(hasattr(PreTrainedModel, "generate"), reason="transformers has no row to try")
def test_8_bits_are_asked_for(tmp_path: Path):
    pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
    LlamaForCausalLM(llama_config()).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, load_in_8bit=True)
    assert model.is_loaded_in_8bit


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

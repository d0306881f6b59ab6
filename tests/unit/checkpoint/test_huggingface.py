"""Checkpoints of Hugging Face models as folders that `from_pretrained` loads."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from composer.models import HuggingFaceModel
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from composer_fsdp2.cli.main import app
from composer_fsdp2.patches import install_for_foundry
from tests.support.saved import save_file, save_folder

WORDS = ["[UNK]", "[PAD]", "all", "who", "wander.v", "are", "not", "lost"]
LLAMA = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def tiny(name: str) -> Any:
    torch.manual_seed(5)
    if name == "gpt2":
        config = GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        return GPT2LMHeadModel(config)
    return LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=name == "llama tied"))


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", model_max_length=16
    )


def composers(model: Any, tokens: Any = None) -> HuggingFaceModel:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tokenizer was not provided")
        return HuggingFaceModel(model, tokenizer=tokens)


def save(path: Path, model: HuggingFaceModel, kind: str) -> Path:
    """What Composer puts into a checkpoint without an optimizer."""
    state = {"model": model.state_dict(), "integrations": {"huggingface": model.get_metadata()}}
    if kind == "sharded":
        return save_folder(path, {"state": state})
    return save_file(path, {"state": state})


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", "convert", *map(str, args), "--to", "hf"])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model.eval()(ids).logits


def names_in(folder: Path) -> dict[str, str]:
    """Name -> file, of every tensor."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= dict.fromkeys(opened.keys(), file.name)
    return found


@pytest.mark.table("llama-sharded")
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("name", ["llama tied", "llama", "gpt2"])
def test_from_pretrained_gives_equal_logits(name: str, kind: str, tmp_path: Path):
    model = tiny(name)
    source = save(tmp_path / "source", composers(model, tokenizer()), kind)
    run(source, tmp_path / "out")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    assert type(loaded) is type(model)
    assert loaded.config._attn_implementation == model.config._attn_implementation
    assert torch.equal(logits(loaded), logits(model))
    tied = name != "llama"
    assert ("lm_head.weight" in names_in(tmp_path / "out")) is not tied
    assert (loaded.get_input_embeddings().weight is loaded.lm_head.weight) is tied
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["torch_dtype"], config["architectures"]) == ("float32", [type(model).__name__])
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words("not all who wander").input_ids == tokenizer()("not all who wander").input_ids
    assert words.get_vocab() == tokenizer().get_vocab()


def test_the_class_that_fsdp2_made_has_its_own_name(tmp_path: Path):
    """As Composer saves it without this package."""
    model = composers(tiny("llama"), tokenizer())
    stored = model.get_metadata()
    stored["model"]["config"]["class"] = "torch.distributed.fsdp._fully_shard.FSDPLlamaForCausalLM"
    state = {"model": model.state_dict(), "integrations": {"huggingface": stored}}
    text = run(save_file(tmp_path / "source", {"state": state}), tmp_path / "out")
    assert "FSDPLlama" not in text
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_sharded_safetensors(tmp_path: Path):
    model = tiny("llama")
    source = save(tmp_path / "source", composers(model), "sharded")
    text = run(source, tmp_path / "out", "--max-shard-size", "5KB")
    assert "holds no tokenizer" in text
    files = sorted(item.name for item in (tmp_path / "out").glob("*.safetensors"))
    n = len(files)
    assert n > 2
    assert files == [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == names_in(tmp_path / "out")
    size = sum(value.nbytes for value in model.state_dict().values())
    assert index["metadata"]["total_size"] == size
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype(dtype: str, tmp_path: Path):
    tiny("llama tied").save_pretrained(tmp_path / "base")
    # Its config names the dtype of the base.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", torch_dtype=torch.float32)
    source = save(tmp_path / "source", composers(model), "full")
    run(source, tmp_path / "out", "--dtype", dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", torch_dtype="auto")
    assert loaded.dtype == getattr(torch, dtype)
    truth = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, truth[name].to(value.dtype))


def test_equal_but_untied_weights_are_written_twice(tmp_path: Path):
    """`from_pretrained` would leave the head at random values."""
    model = tiny("llama")
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    run(save(tmp_path / "source", composers(model), "sharded"), tmp_path / "out")
    assert "lm_head.weight" in names_in(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))


def test_equal_matrices_are_no_word_embeddings(tmp_path: Path):
    model = tiny("llama tied")
    first, second = (layer.mlp.up_proj.weight for layer in model.model.layers)
    second.data.copy_(first)
    run(save(tmp_path / "source", composers(model), "sharded"), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))


def test_equal_embeddings_of_two_parts_are_both_written(tmp_path: Path):
    """Each part ties its own: from_pretrained would leave those of the other at random values."""
    state, rows = _stored(), torch.ones(31, 2)
    state["state"]["integrations"]["huggingface"]["model"]["config"]["content"] = {
        "encoder": {"vocab_size": 31},
        "decoder": {"vocab_size": 31},
    }
    state["state"]["model"] = {"model.encoder.words": rows, "model.decoder.words": rows.clone()}
    run(save_file(tmp_path / "a.pt", state), tmp_path / "out")
    assert names_in(tmp_path / "out").keys() == {"encoder.words", "decoder.words"}


# --- Without a config in the checkpoint. ---


def _without_config(tmp_path: Path, name: str = "llama tied") -> tuple[Any, Path]:
    model = tiny(name)
    state = {"state": {"model": composers(model).state_dict()}}
    return model, save_folder(tmp_path / "source", state)


def test_no_config(tmp_path: Path):
    _, source = _without_config(tmp_path)
    text = run(source, tmp_path / "out", code=2)
    assert "holds no Hugging Face config" in text
    assert "Give --config with a config.json, or with a folder that has one" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.table("folder")
@pytest.mark.parametrize("given", ["folder", "file"])
def test_given_config(given: str, tmp_path: Path):
    model, source = _without_config(tmp_path)
    base = tmp_path / "base"
    model.save_pretrained(base, max_shard_size="5KB")
    tokenizer().save_pretrained(base)
    config = base if given == "folder" else base / "config.json"
    run(source, tmp_path / "out", "--config", config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert (tmp_path / "out" / "tokenizer.json").exists() is (given == "folder")


@pytest.mark.parametrize("text", [None, "{", "[]", "\xff"])
def test_given_config_is_none(text: str | None, tmp_path: Path):
    _, source = _without_config(tmp_path)
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    said = run(source, tmp_path / "out", "--config", tmp_path / "config.json", code=2)
    assert "CheckpointError" in said
    assert "Give a config.json, or a folder that has one" in said
    assert not (tmp_path / "out").exists()


# --- Adapters of PEFT. ---

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama tied", {"target_modules": ["q_proj", "up_proj"]}),
    "dora": ("llama", {"target_modules": ["q_proj"], "use_dora": True}),
    "patterns": ("llama", {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 4}}),
    "whole head": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "v_proj"]}),
    "every bias": ("gpt2", {"target_modules": ["c_attn"], "bias": "all"}),
    "their bias": ("gpt2", {"target_modules": ["c_attn"], "bias": "lora_only"}),
}


# PEFT says so of GPT-2's layers, of embeddings, and of a base that has no name.
@pytest.mark.table("their bias-sharded")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set", "ignore:Setting `save_embedding")
@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.parametrize(
    ("case", "kind"), [("lora", "full"), *((case, "sharded") for case in ADAPTERS)]
)
def test_adapters_are_what_peft_writes(case: str, kind: str, tmp_path: Path):
    name, settings = ADAPTERS[case]
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(tiny(name), config)
    only = case in ("lora", "dora", "patterns")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tokenizer was not provided")
        model = HuggingFaceModel(adapted, tokenizer(), should_save_peft_only=only)
    adapted.save_pretrained(tmp_path / "expected")
    text = run(save(tmp_path / "source", model, kind), tmp_path / "out")
    assert "These are adapters: load the base model first" in text
    expected = names_in(tmp_path / "expected")
    if case == "their bias" and not any("bias" in name for name in expected):
        # PEFT before 0.21 loses them: it looks for `bias` beside `lora_A`, not in `base_layer`.
        assert {"lora" in n or "base_layer.bias" in n for n in names_in(tmp_path / "out")} == {True}
    else:
        assert _files(tmp_path / "out") == _files(tmp_path / "expected")
    assert not list((tmp_path / "out").glob("model*"))
    loaded = peft.PeftModel.from_pretrained(tiny(name), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(adapted))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(tokenizer())


def _files(folder: Path) -> list[bytes]:
    return [(folder / f).read_bytes() for f in ("adapter_model.safetensors", "adapter_config.json")]


def _resized(tmp_path: Path, name: str, only: bool, kind: str = "sharded") -> tuple[Any, Path]:
    """Adapters on a model with more tokens than the one they were made for."""
    tiny(name).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(40, mean_resizing=False)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    adapted = peft.get_peft_model(base, config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tokenizer was not provided")
        model = HuggingFaceModel(adapted, tokenizer(), should_save_peft_only=only)
    return adapted, save(tmp_path / "source", model, kind)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding")
@pytest.mark.parametrize(("name", "kind"), [("llama", "sharded"), ("llama tied", "full")])
def test_adapters_of_a_resized_vocabulary_come_with_it(name: str, kind: str, tmp_path: Path):
    adapted, source = _resized(tmp_path, name, only=False, kind=kind)
    adapted.save_pretrained(tmp_path / "expected")
    run(source, tmp_path / "out")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "expected" / file).read_bytes()
    assert len([n for n in names_in(tmp_path / "out") if "lora" not in n]) == 2


def test_a_resized_vocabulary_that_was_not_saved(tmp_path: Path):
    _, source = _resized(tmp_path, "llama", only=True)
    assert "another number of tokens than its base" in run(source, tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


def test_dtype_of_adapters(tmp_path: Path):
    source = save_file(tmp_path / "a.pt", _with_adapters(LORA_A))
    run(source, tmp_path / "out", "--dtype", "bfloat16")
    [(name, value)] = load_file(tmp_path / "out" / "adapter_model.safetensors").items()
    assert (name, value.dtype) == ("base_model.model.q.lora_A.weight", torch.bfloat16)


# --- Checkpoints that cannot become such a folder. ---


def _stored(**changes: Any) -> dict[str, Any]:
    model = composers(tiny("llama"))
    stored = {**model.get_metadata(), **changes}
    return {"state": {"model": model.state_dict(), "integrations": {"huggingface": stored}}}


def test_weights_of_no_hugging_face_model(tmp_path: Path):
    state = _stored()
    state["state"]["model"] = {"net.weight": torch.ones(2)}
    text = run(save_file(tmp_path / "a.pt", state), tmp_path / "out", code=2)
    assert "holds the weight 'net.weight', which is outside of a HuggingFaceModel" in text


def test_others_may_read_the_weights(tmp_path: Path):
    path = save(tmp_path / "a.pt", composers(tiny("llama")), "full")
    before = os.umask(0o027)
    try:
        run(path, tmp_path / "b", "--max-shard-size", "4KB")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "b").iterdir()}
    assert set(modes.values()) == {0o640}, modes


def test_a_dtype_that_safetensors_cannot_hold(tmp_path: Path):
    weights = {"model.w": torch.ones(2), "model.z": torch.ones(2, dtype=torch.complex128)}
    path = save_file(tmp_path / "a.pt", {"state": {"model": weights}})
    (tmp_path / "config.json").write_text("{}")
    said = run(path, tmp_path / "b", "--config", tmp_path / "config.json", code=2)
    assert "holds 'z' in complex128" in said
    assert not (tmp_path / "b").exists()


def test_no_weights(tmp_path: Path):
    state = _stored()
    state["state"]["model"] = {}
    text = run(save_file(tmp_path / "a.pt", state), tmp_path / "out", code=2)
    assert "holds no weights" in text


def _with_adapters(model: dict[str, Any], **config: Any) -> dict[str, Any]:
    state = _stored()
    content = {"peft_type": "LORA", "bias": "none", **config}
    state["state"]["integrations"]["huggingface"]["model"]["peft_config"] = {"content": content}
    state["state"]["model"] = model
    return state


LORA_A = {"model.base_model.model.q.lora_A.default.weight": torch.ones(2, 2)}


@pytest.mark.parametrize(
    ("model", "config", "said"),
    [
        (LORA_A, {"peft_type": "LOHA"}, "peft_type 'LOHA' and bias 'none'"),
        (LORA_A, {"bias": "some"}, "known for LoRA only"),
        (LORA_A, {"trainable_token_indices": [1]}, "trained rows of an embedding"),
        (LORA_A, {"modules_to_save": ["head"]}, "trained beside them: 'head' of modules_to_save"),
        ({"model.q.weight": torch.ones(2)}, {}, "no weights of them"),
        ({"net.lora_A.default": torch.ones(2)}, {}, "outside of a HuggingFaceModel"),
    ],
    ids=["kind", "bias", "tokens", "modules", "none", "outside"],
)
def test_adapters_that_cannot_be_written(model: Any, config: Any, said: str, tmp_path: Path):
    source = save_file(tmp_path / "a.pt", _with_adapters(model, **config))
    assert said in run(source, tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


def test_adapters_take_no_config(tmp_path: Path):
    source = save_file(tmp_path / "a.pt", _with_adapters(LORA_A))
    assert "Remove --config" in run(source, tmp_path / "out", "--config", tmp_path, code=2)


@pytest.mark.parametrize("name", ["../evil.json", "/evil.json", ".."])
def test_tokenizer_file_that_climbs_out(name: str, tmp_path: Path):
    entry = {"file_extension": name[-5:] if name != ".." else "", "content": {"a": 1}}
    state = _stored(tokenizer={name: entry})
    text = run(save_file(tmp_path / "a.pt", state), tmp_path / "out", code=2)
    assert f"calls a file of its tokenizer '{name}', which is no file name" in text
    assert [item.name for item in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "a\0b.json", "\ud800.json"])
def test_tokenizer_file_that_takes_a_place_or_has_none(name: str, tmp_path: Path):
    entry = {"file_extension": Path(name).suffix, "content": "{}"}
    source = save_file(tmp_path / "a.pt", _stored(tokenizer={name: entry}))
    assert "Do not use this checkpoint" in run(source, tmp_path / "out", code=2)
    assert [item.name for item in tmp_path.iterdir()] == ["a.pt"]


def test_every_kind_of_tokenizer_file(tmp_path: Path):
    files = {
        "vocab.txt": {"file_extension": ".txt", "content": ["a", "b"]},
        "old": {"file_extension": ".json", "content": {"a": ["ü"]}},
        "chat.jinja": {"file_extension": ".jinja", "content": "{{ x }}"},
        "spiece.model": {"file_extension": ".model", "content": b"\x00\x01"},
    }
    source = save_folder(tmp_path / "source", _stored(tokenizer=files))
    assert "holds no tokenizer" not in run(source, tmp_path / "out")
    out = tmp_path / "out"
    assert (out / "vocab.txt").read_text() == "a\nb"
    assert json.loads((out / "old.json").read_text()) == {"a": ["ü"]}
    assert (out / "chat.jinja").read_text() == "{{ x }}"
    assert (out / "spiece.model").read_bytes() == b"\x00\x01"


# LLM Foundry indexes in a way that newer torch deprecates.
@pytest.mark.matrix
def test_mpt(tmp_path: Path):
    """Its class is LLM Foundry's; transformers has another one for the same `model_type`."""
    mpt = pytest.importorskip("llmfoundry.models.mpt", reason="needs the extra foundry")
    install_for_foundry()
    model = mpt.ComposerMPTCausalLM(
        tokenizer=tokenizer(),
        d_model=16,
        n_heads=2,
        n_layers=2,
        expansion_ratio=2,
        max_seq_len=16,
        vocab_size=31,
        attn_config={"attn_impl": "torch"},
        loss_fn="torch_crossentropy",
    )
    # What a run has that starts on the meta device, and whose attention needs a GPU.
    model.model.config.init_device = "meta"
    model.model.config.attn_config["attn_impl"] = "flash"
    source = save(tmp_path / "source", model, "sharded")
    text = run(source, tmp_path / "out")
    assert "class is llmfoundry.models.mpt.modeling_mpt.MPTForCausalLM, not one of" in text
    loaded = mpt.MPTForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model.model))

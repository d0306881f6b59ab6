"""Hugging Face models under FSDP2: generating, evaluating, predicting and `save_pretrained`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.metrics import LanguageCrossEntropy
from composer.models import HuggingFaceModel
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from composer_fsdp2 import (
    CheckpointError,
    installed,
    prepare_fully_shard,
    summon_full_params,
    uninstall,
)
from composer_fsdp2.torch_private.units import is_gathered, param_groups
from composer_fsdp2.trainer.extensions import hugging_face
from tests.support.models import llama_config
from tests.support.parity import OPTIMIZERS
from tests.support.saved import no_space
from tests.support.training import Tokens, built, largest_difference, loader_of, trainer_for

WORDS = 31


def _tokenizer() -> Any:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w1")


def _model(tied: bool = True, rows: int = WORDS, **kwargs: Any) -> Any:
    config = llama_config(
        tied, vocab_size=rows, max_position_embeddings=64, bos_token_id=1, pad_token_id=0
    )
    return HuggingFaceModel(
        LlamaForCausalLM(config),
        _tokenizer(),
        use_logits=True,
        metrics=[LanguageCrossEntropy()],
        shift_labels=True,
        **kwargs,
    )


def _pair(tied: bool = True, **kwargs: Any) -> tuple[Any, Any]:
    """An unsharded model and its sharded equal."""
    plain, model = (built(lambda: _model(tied, **kwargs)) for _ in range(2))
    prepare_fully_shard(model, None, {})
    return plain.eval(), model.eval()


@pytest.mark.world_size(2)
def test_a_loop_of_ones_own_saves_and_generates_without_installing(tmp_path: Path):
    uninstall()
    plain, model = _pair()
    folder = tmp_path / "saved"
    plain, model = plain.model, model.model
    model.save_pretrained(folder)
    saved = LlamaForCausalLM.from_pretrained(folder)
    assert largest_difference(saved, plain) == 0
    settings = {"max_new_tokens": 2 + 3 * dist.get_rank(), "do_sample": False}
    assert torch.equal(model.generate(_prompt(), **settings), plain.generate(_prompt(), **settings))


# --- Generating: ranks differ in the length of their prompts and in when they are done. ---


def _prompt_of(rank: int) -> torch.Tensor:
    return torch.arange(3, 5 + 4 * rank)[None]


def _prompt() -> torch.Tensor:
    return _prompt_of(dist.get_rank())


def _settings(plain: Any, cache: bool) -> dict[str, Any]:
    """An end of sequence that rank 0 meets early."""
    settings = {"max_new_tokens": 9, "do_sample": False, "use_cache": cache, "pad_token_id": 0}
    tokens = [plain.generate(_prompt_of(rank), **settings)[0, 2 + 4 * rank :] for rank in range(2)]
    first = [token for token in tokens[0].tolist() if token not in tokens[1].tolist()]
    assert first, "the prompts lead to the same words"
    return {**settings, "eos_token_id": first[0]}


@pytest.mark.table("composer-True", "hugging face-False")
@pytest.mark.smoke
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("way", "cache"),
    [("composer", True), ("hugging face", True), ("hugging face", False), ("summoned", True)],
)
def test_generates_like_one_process(way: str, cache: bool):
    plain, model = _pair()
    settings = _settings(plain, cache)
    expected = plain.model.generate(_prompt(), **settings)
    lengths = [None, None]
    dist.all_gather_object(lengths, expected.shape[1] - _prompt().shape[1])
    assert lengths[0] < lengths[1] == 9
    with installed():
        for _ in range(2):  # before any forward, and after
            if way == "composer":
                got = model.generate(_prompt(), **settings)
            elif way == "hugging face":
                got = model.model.generate(_prompt(), **settings)
            else:
                with summon_full_params(model.model, writeback=False, recurse=False):
                    got = model.generate(_prompt(), synced_gpus=True, **settings)
            assert torch.equal(got, expected)
    model.train()
    ids = Tokens(2).ids
    model({"input_ids": ids, "labels": ids})["loss"].backward()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("synced", [None, False])
def test_no_unit_is_left_gathered(synced: bool | None):
    _, model = _pair()
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    if synced is not None:
        settings["synced_gpus"] = synced
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in param_groups(unit)]
    with installed():
        for generate in (model.generate, model.model.generate):
            generate(torch.arange(3, 7)[None], **settings)
            assert groups
            assert not any(map(is_gathered, groups))
            assert all(isinstance(param, DTensor) for param in model.parameters())


def _translator() -> Any:
    config = T5Config(
        vocab_size=WORDS,
        d_model=12,
        d_kv=6,
        d_ff=20,
        num_layers=2,
        num_heads=2,
        initializer_factor=8.0,
        decoder_start_token_id=0,
    )
    return HuggingFaceModel(T5ForConditionalGeneration(config), _tokenizer(), use_logits=True)


def _translators() -> tuple[Any, Any, dict[str, Any]]:
    """An unsharded model, its sharded equal, and an end of sequence that rank 0 meets early."""
    plain, model = (built(_translator, seed=2).eval() for _ in range(2))
    prepare_fully_shard(model, None, {})
    settings = {"max_new_tokens": 9, "do_sample": False}
    texts = [plain.generate(_prompt_of(rank), eos_token_id=-1, **settings) for rank in range(2)]
    first = [token for token in texts[0][0, 1:].tolist() if token not in texts[1][0].tolist()]
    assert len({*texts[0][0].tolist(), *texts[1][0].tolist()}) > 3
    return plain, model, {**settings, "eos_token_id": first[0]}


@pytest.mark.table("{'use_cache': False}", "{'num_beams': 2}")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("changes", [{}, {"use_cache": False}, {"num_beams": 2}], ids=str)
def test_a_model_with_an_encoder_generates_like_one_process(changes: dict[str, Any]):
    plain, model, settings = _translators()
    settings |= changes
    expected = plain.model.generate(_prompt(), **settings)
    lengths = [None, None]
    dist.all_gather_object(lengths, expected.shape[1])
    assert changes.get("num_beams") or lengths[0] < lengths[1] == 10
    with installed():
        for generate in (model.generate, model.model.generate):  # before any forward, and after
            assert torch.equal(generate(_prompt(), **settings), expected)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("when", ["before it encodes", "while it decodes"])
def test_an_error_of_one_rank_does_not_stop_an_encoder(when: str):
    plain, model, settings = _translators()
    wrong = {"max_new_tokens": -1}
    if when == "while it decodes":
        wrong = {"prefix_allowed_tokens_fn": lambda *_: 1 // 0}
    with installed():
        if dist.get_rank() == 1:
            with pytest.raises((ValueError, ZeroDivisionError)):
                model.generate(_prompt(), **{**settings, **wrong})
        else:
            got = model.generate(_prompt(), **settings)
            assert torch.equal(got, plain.model.generate(_prompt(), **settings))


@pytest.mark.world_size(2)
def test_generates_with_adapters_like_one_process():
    """The unit around the adapters is not what transformers calls."""
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    plain, model = _pair(peft_config=lora)
    settings = _settings(plain, cache=True)
    expected = plain.generate(_prompt(), **settings)
    with installed():
        assert torch.equal(model.generate(_prompt(), **settings), expected)
        assert torch.equal(model.model.generate(input_ids=_prompt(), **settings), expected)


@pytest.mark.world_size(2)
def test_evaluates_by_generating_like_one_process():
    plain, model = _pair()
    settings = _settings(plain, cache=True)
    del settings["pad_token_id"]
    batch = {
        "mode": "generate",
        "input_ids": _prompt(),
        "attention_mask": torch.ones_like(_prompt()),
        "labels": ["-"],
        "generation_kwargs": settings,
    }
    expected = plain.tokenizer.batch_decode(
        plain.model.generate(_prompt(), pad_token_id=0, **settings)[:, _prompt().shape[1] :],
        skip_special_tokens=True,
    )
    with installed():
        assert [text.strip() for text in model.eval_forward(dict(batch))] == expected


@pytest.mark.world_size(2)
def test_an_error_of_one_rank_does_not_stop_the_others():
    plain, model = _pair()
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with installed():
        if dist.get_rank() == 1:
            with pytest.raises(ZeroDivisionError):
                model.generate(_prompt(), prefix_allowed_tokens_fn=lambda *_: 1 // 0, **settings)
        else:
            got = model.generate(_prompt(), **settings)
            assert torch.equal(got, plain.model.generate(_prompt(), **settings))


# --- The Trainer: eval and predict, before training and after. ---


@pytest.mark.world_size(2)
def test_evaluates_and_predicts_like_one_process():
    plain, model = built(_model), built(_model)
    tokens = Tokens(8)
    with installed():
        trainer = trainer_for(
            model,
            OPTIMIZERS["sgd"](model.parameters()),
            tokens,
            eval_dataloader=loader_of(tokens, 2),
        )
        _check_evaluation(trainer, plain, tokens)
        trainer.fit()
        ids = tokens.ids
        plain({"input_ids": ids, "labels": ids})["loss"].backward()
        OPTIMIZERS["sgd"](plain.parameters()).step()
        assert largest_difference(model, plain) <= 1e-6
        _check_evaluation(trainer, plain, tokens)
    trainer.close()


def _check_evaluation(trainer: Any, plain: Any, tokens: Tokens) -> None:
    trainer.eval()
    metric = LanguageCrossEntropy()
    batch = {"input_ids": tokens.ids, "labels": tokens.ids.clone()}  # Composer shifts in place
    plain.eval()
    with torch.no_grad():
        logits = plain.eval_forward(dict(batch))
    metric.update(logits, plain.labels)
    [got] = trainer.state.eval_metrics["eval"].values()
    assert abs(got.compute() - metric.compute()) <= 1e-6
    outputs = trainer.predict(loader_of(tokens, 2))
    with torch.no_grad():
        whole = plain({"input_ids": tokens.ids})["logits"]
    mine = torch.cat([output["logits"] for output in outputs])
    assert (mine - whole[dist.get_rank() :: 2]).abs().max() <= 1e-6
    plain.train()


# --- save_pretrained writes what it writes of an unsharded copy, to the bit. ---


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


WAYS = ["every rank", "a main rank", "summoned on rank 0", "summoned"]


@pytest.mark.table("a main rank-True", "summoned-True")
@pytest.mark.smoke
@pytest.mark.world_size(2)
@pytest.mark.parametrize(("way", "tied"), [*((way, True) for way in WAYS), ("gathered", False)])
def test_saves_what_one_process_saves(way: str, tied: bool, tmp_path: Path):
    plain, model = _pair(tied)
    rank = dist.get_rank()
    if rank == 0:
        plain.model.save_pretrained(tmp_path / "plain")
    folder, net = tmp_path / "sharded", model.model
    with installed():
        if way == "every rank":
            net.save_pretrained(folder)
        elif way == "a main rank":
            net.save_pretrained(folder, is_main_process=rank == 1)
        elif way == "gathered":
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(net, options=options)
            if rank == 0:
                net.save_pretrained(folder, state_dict=state)
        elif way == "summoned":
            with summon_full_params(model, writeback=False, rank0_only=True):
                net.save_pretrained(folder)
        else:
            with summon_full_params(model, writeback=False, rank0_only=True):
                if rank == 0:
                    net.save_pretrained(folder)
    dist.barrier()
    assert _files(folder) == _files(tmp_path / "plain")
    loaded = LlamaForCausalLM.from_pretrained(folder)
    ids = Tokens(2).ids
    assert torch.equal(loaded(ids).logits, plain.model(ids).logits)
    net.train()(ids).logits.sum().backward()


@pytest.mark.world_size(2)
def test_rank_0_alone_is_told_so(tmp_path: Path):
    _, model = _pair()
    usual, hugging_face._WAIT_SECONDS = hugging_face._WAIT_SECONDS, 0.2
    with installed():
        if dist.get_rank() == 0:
            with pytest.raises(CheckpointError, match=r"1 of 2 ranks.* Call it on every rank"):
                model.model.save_pretrained(tmp_path / "alone")
        dist.barrier()
        hugging_face._WAIT_SECONDS = usual
        assert not (tmp_path / "alone").exists()
        model.model.save_pretrained(tmp_path / "together")
    assert (tmp_path / "together" / "model.safetensors").exists()


@pytest.mark.world_size(2)
def test_what_cannot_be_written_is_told_to_every_rank(tmp_path: Path):
    _, model = _pair()
    (tmp_path / f"file{dist.get_rank()}").touch()
    dist.barrier()
    with installed(), pytest.raises(CheckpointError, match=r"could not write .*Not a directory"):
        model.model.save_pretrained(tmp_path / "file0" / "folder")
    assert type(model.model).__name__ == "FSDPLlamaForCausalLM"


@pytest.mark.world_size(2)
@pytest.mark.parametrize("way", [*WAYS, "gathered"])
def test_a_full_disk_is_told_plainly(way: str, tmp_path: Path):
    """Files end at 1 MB here. Whoever writes is told; where all call, everyone is.

    The ranks' own store is a file too, of 0.2 MB after a session of tests: it stays below.
    """
    _, model = _pair(rows=40_000)
    alone = way in ("summoned", "summoned on rank 0", "gathered")
    told = contextlib.nullcontext()
    if dist.get_rank() == 0 or not alone:
        told = pytest.raises(CheckpointError, match=r"could not write '.*(too large|all of its)")
    with installed():
        # Ranks that meet for the first time write into a file themselves.
        _save(way, model, tmp_path / "whole", contextlib.nullcontext())
        with no_space(1_000_000):
            _save(way, model, tmp_path / "sharded", told)
    dist.barrier()


def _save(way: str, model: Any, folder: Path, told: Any) -> None:
    rank, net = dist.get_rank(), model.model
    if way == "gathered":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(net, options=options)
        with told:
            if rank == 0:
                net.save_pretrained(folder, state_dict=state)
    elif way in ("summoned", "summoned on rank 0"):
        with summon_full_params(model, writeback=False, rank0_only=True), told:
            if rank == 0 or way == "summoned on rank 0":
                net.save_pretrained(folder)
    else:
        with told:
            net.save_pretrained(folder, is_main_process=way == "every rank" or rank == 1)


@pytest.mark.world_size(1)
def test_a_model_without_fsdp2_is_saved_as_ever(tmp_path: Path):
    plain = built(_model)
    with installed():
        plain.model.save_pretrained(tmp_path / "installed")
    plain.model.save_pretrained(tmp_path / "plain")
    assert _files(tmp_path / "installed") == _files(tmp_path / "plain")

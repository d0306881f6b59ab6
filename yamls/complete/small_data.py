"""Data and a model to start from for the runs beside this file; loaded through `code_paths`.

A sum is the prompt, its result the response; of two results the wrong one is rejected. The model is
a Llama of random weights: what matters here is that everything comes from local files, as yours do.
"""

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from llmfoundry import registry
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
SIZES = {"train": 512, "test": 64}
WAIT_SECONDS = 600


@registry.config_transforms.register("small_data")
def prepare_data(cfg: dict[str, Any]) -> dict[str, Any]:
    """Write `variables.data` before anything reads it.

    LLM Foundry calls this on every rank before `torch.distributed` starts: the first rank of a node
    writes into a folder of its own and renames it, the others wait for the new name.
    """
    if not asked_for(cfg):
        return cfg
    folder = Path(cfg["variables"]["data"])
    if int(os.environ.get("LOCAL_RANK", 0)) == 0 and not folder.exists():
        write_data(folder)
    deadline = time.monotonic() + WAIT_SECONDS
    while not folder.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder} did not appear; see the output of the first rank.")
        time.sleep(0.1)
    return cfg


def asked_for(cfg: dict[str, Any]) -> bool:
    """Whether the run names this file; LLM Foundry applies transforms to every later run too."""
    return Path(__file__).resolve() in (Path(p).resolve() for p in cfg.get("code_paths") or [])


def write_data(folder: Path) -> None:
    """Write the model with its tokenizer, and the splits of both kinds of data."""
    draft = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(draft / "model")
    small_llama(len(tokenizer)).save_pretrained(draft / "model")
    for number, (split, size) in enumerate(SIZES.items()):
        samples = list(sums(size, seed=number))
        write_lines(
            draft / "prompts" / f"{split}.jsonl",
            [{"prompt": s["prompt"], "response": s["chosen"]} for s in samples],
        )
        write_lines(draft / "preferences" / f"{split}.jsonl", samples)
    draft.rename(folder)


def sums(size: int, seed: int) -> Iterator[dict[str, str]]:
    """Sums with a right and a wrong result."""
    draw = random.Random(seed)
    for _ in range(size):
        a, b = draw.randrange(50), draw.randrange(50)
        wrong = a + b + draw.choice([-2, -1, 1, 2])
        yield {"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {wrong}"}


def write_lines(file: Path, samples: list[dict[str, str]]) -> None:
    """One JSON object a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and one that ends a text and pads a batch."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([END_OF_TEXT, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )


def small_llama(vocab_size: int) -> LlamaForCausalLM:
    """The same random weights wherever it is built."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)

"""Data and summary of `quickstart.yaml`; loaded by LLM Foundry through `code_paths`.

The text is what every machine with Python has: the source files of the standard library. A
byte-level BPE tokenizer is trained on it; the tokens are packed into sequences and written once as
MDS shards. Nothing is downloaded.
"""

import json
import os
import shutil
import sysconfig
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist
from llmfoundry import registry
from streaming import MDSWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
WAIT_SECONDS = 600
# Tests, tables of code points and generated help text teach a small model little.
SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "site-packages",
    "turtledemo",
}


@registry.config_transforms.register("quickstart_data")
def prepare_data(cfg: dict[str, Any]) -> dict[str, Any]:
    """Write tokenizer and data before anything reads them.

    LLM Foundry applies config transforms on every rank before `torch.distributed` starts, so there
    is no barrier: the first rank of each node writes into a folder of its own and renames it, the
    others wait for the new name. Nodes that share a disk may race; the first rename wins, and the
    data are the same.
    """
    if not asked_for(cfg):
        return cfg
    settings = {**cfg["variables"]["text"], "max_seq_len": cfg["max_seq_len"]}
    folder = Path(cfg["variables"]["data"])
    if int(os.environ.get("LOCAL_RANK", 0)) == 0 and not folder.exists():
        write_data(folder, **settings)
    wait_for(folder / "settings.json")
    check_settings(folder, settings)
    return cfg


def asked_for(cfg: dict[str, Any]) -> bool:
    """Whether the run names this file; LLM Foundry applies transforms to every later run too."""
    return Path(__file__).resolve() in (Path(p).resolve() for p in cfg.get("code_paths") or [])


def wait_for(file: Path) -> None:
    """Return when `file` exists; all beside it is complete then, as they are renamed together."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{file} did not appear within {WAIT_SECONDS} s; see the output of the first rank."
            )
        time.sleep(0.2)


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse data that were written for other settings."""
    written = json.loads((folder / "settings.json").read_text())
    if written != settings:
        raise ValueError(
            f"{folder} was written with {written}, but this run asks for {settings}. Training "
            f"would silently use the old settings. Delete {folder}, or set variables.data=<other>."
        )


def write_data(folder: Path, *, max_seq_len: int, vocab_size: int, megabytes: float) -> None:
    """Write tokenizer, `train` and `val` shards and the settings that made them."""
    print(f"Preparing data in {folder}: {megabytes} MB of the Python standard library", flush=True)
    draft = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    train, val = split_files(stdlib_files(), int(megabytes * 1e6))
    tokenizer = train_tokenizer(train, vocab_size)
    wrap_tokenizer(tokenizer, max_seq_len).save_pretrained(draft / "tokenizer")
    for split, texts in (("train", train), ("val", val)):
        write_split(draft / split, pack(tokenizer, texts, max_seq_len))
    settings = {"max_seq_len": max_seq_len, "vocab_size": vocab_size, "megabytes": megabytes}
    (draft / "settings.json").write_text(json.dumps(settings))
    publish(draft, folder)


def publish(draft: Path, folder: Path) -> None:
    """Rename `draft` to `folder`; when another node was first, drop the draft."""
    try:
        draft.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(draft)


def stdlib_files() -> list[Path]:
    """Source files of the standard library; their order looks random and is always the same."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in root.rglob("*.py") if not SKIPPED & set(p.relative_to(root).parts)]
    return sorted(files, key=lambda p: zlib.crc32(p.relative_to(root).as_posix().encode()))


def split_files(files: list[Path], size_bytes: int) -> tuple[list[str], list[str]]:
    """Read whole files up to `size_bytes`; every tenth is held out for evaluation."""
    train, val, total = [], [], 0
    for i, file in enumerate(files):
        if total >= size_bytes:
            break
        text = file.read_text(encoding="utf-8", errors="replace")
        total += len(text)
        (val if i % 10 == 9 else train).append(text)
    return train, val


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with one special token that ends a text and pads a batch."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrap_tokenizer(tokenizer: Tokenizer, max_seq_len: int) -> PreTrainedTokenizerFast:
    """The tokenizer as Hugging Face and LLM Foundry load it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_seq_len,
    )


def pack(tokenizer: Tokenizer, texts: Iterable[str], max_seq_len: int) -> Iterator[np.ndarray]:
    """Join the texts and cut them into full sequences, so that no position is spent on padding."""
    end, rest = tokenizer.token_to_id(END_OF_TEXT), []
    for text in texts:
        rest += [*tokenizer.encode(text).ids, end]
        full = len(rest) // max_seq_len * max_seq_len
        yield from np.array(rest[:full], dtype=np.int32).reshape(-1, max_seq_len)
        rest = rest[full:]


def write_split(folder: Path, sequences: Iterable[np.ndarray]) -> None:
    """Write MDS shards with one column of tokens."""
    with MDSWriter(out=str(folder), columns={"tokens": "ndarray:int32"}) as writer:
        for tokens in sequences:
            writer.write({"tokens": tokens})


@registry.loggers.register("quickstart_summary")
class QuickstartSummary(LoggerDestination):
    """What the run achieved, on rank 0 at its end."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.evals: list[tuple[int, float]] = []  # batch and loss
        self.finished = False

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep the newest value of every metric."""
        self.metrics.update(metrics)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Keep the loss on held-out files."""
        loss = float(self.metrics["metrics/eval/LanguageCrossEntropy"])
        self.evals.append((state.timestamp.batch.value, loss))

    def fit_end(self, state: State, logger: Logger) -> None:
        """Training came to its end; one more evaluation may follow."""
        self.finished = True

    def state_dict(self) -> dict[str, Any]:
        """Goes into the checkpoint, so that a resumed run can compare with the very start."""
        return {"evals": self.evals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Comes from the checkpoint."""
        self.evals = list(state["evals"])

    def post_close(self) -> None:
        """Say what the runs achieved and how to go on, when all else is said."""
        if not self.finished or len(self.evals) < 2 or dist.get_global_rank() != 0:
            return
        (start, before), (end, after) = self.evals[0], self.evals[-1]
        print(
            f"\nHeld-out loss: {before:.3f} at batch {start}, {after:.3f} at batch {end} "
            f"({1 - after / before:.0%} lower).\nThe same command with a larger "
            "`max_duration=...` goes on from the checkpoint.",
            flush=True,
        )

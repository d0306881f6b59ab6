"""Two models in one: a student with its teacher, a policy with its reference.

Loaded by LLM Foundry through `code_paths`. Both parts are sharded. The frozen one is gathered block
by block when it is called and freed again; it has no gradients, and nothing of it is reduced.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from composer.core import DataSpec
from composer.utils import dist
from llmfoundry import registry
from llmfoundry.models.hf import ComposerHFCausalLM
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric
from transformers import PreTrainedModel, PreTrainedTokenizerBase

IGNORED = -100


class WithFrozen(ComposerHFCausalLM):
    """A causal language model that is trained, `model`, and a pretrained one beside it, `frozen`.

    Args:
        frozen: Folder or name of the pretrained model that is not trained.
        init_device: Of both.
        trained: Settings of the trained model, as for `hf_causal_lm`.
    """

    def __init__(self, frozen: str, init_device: str = "cpu", **trained: Any) -> None:
        super().__init__(init_device=init_device, **trained)
        inner = self.build_inner_model(
            frozen,
            pretrained_lora_id_or_path=None,
            trust_remote_code=False,
            init_device=init_device,
            use_flash_attention_2=False,
            use_auth_token=False,
            config_overrides={},
            load_in_8bit=False,
            pretrained=True,
            attn_implementation=trained.get("attn_implementation"),
        )
        assert isinstance(inner, PreTrainedModel)
        self.prepare_inner_model(inner, init_device)
        self.frozen = inner.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "WithFrozen":
        """The Trainer calls this on the whole; the frozen part never drops anything out."""
        super().train(mode)
        self.frozen.eval()
        return self

    def frozen_logits(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """What the frozen model says."""
        with torch.no_grad():
            return self.frozen(input_ids=ids, attention_mask=mask).logits


@registry.models.register("distillation")
class Distillation(WithFrozen):
    """Learns the responses, and what the teacher thinks of every token of them.

    Args:
        weight: Of the teacher's part in the loss; the responses have the rest.
        temperature: Above 1, more of what the teacher holds for less likely counts.
        others: As for `WithFrozen`.
    """

    def __init__(self, weight: float = 0.5, temperature: float = 2.0, **others: Any) -> None:
        super().__init__(**others)
        self.weight, self.temperature = weight, temperature

    def loss(self, outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Cross entropy with the responses, and divergence from the teacher."""
        kept = batch["labels"][:, 1:] != IGNORED
        expected = self.frozen_logits(batch["input_ids"], batch["attention_mask"])
        student, teacher = (
            (logits[:, :-1][kept] / self.temperature).log_softmax(-1)
            for logits in (outputs["logits"], expected)
        )
        divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        # Gradients of the divergence shrink with the square of the temperature.
        divergence = divergence * self.temperature**2
        return (1 - self.weight) * outputs["loss"] + self.weight * divergence


@registry.models.register("preference")
class Preference(WithFrozen):
    """Direct preference optimisation: prefers what was chosen more than the reference does.

    Source: https://arxiv.org/abs/2305.18290, equation 7.

    Args:
        beta: How strongly it is held at the reference.
        others: As for `WithFrozen`.
    """

    def __init__(self, beta: float = 0.1, **others: Any) -> None:
        super().__init__(**others)
        self.beta = beta
        self.accuracy = MeanMetric()

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """By how much more than the reference it prefers the chosen response, (batch,)."""
        ids, mask, labels = (
            batch[key].flatten(0, 1) for key in ("input_ids", "attention_mask", "labels")
        )
        policy = self.model(input_ids=ids, attention_mask=mask).logits
        ratio = log_likelihood(policy, labels) - log_likelihood(
            self.frozen_logits(ids, mask), labels
        )
        chosen, rejected = ratio.view(-1, 2).unbind(1)
        return chosen - rejected

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        """The mean over the batch."""
        return -F.logsigmoid(self.beta * outputs).mean()

    def eval_forward(self, batch: Any, outputs: torch.Tensor | None = None) -> torch.Tensor:
        """The same margins."""
        return self.forward(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """How often it prefers the chosen response more than the reference does."""
        return {} if is_train else {"PreferenceAccuracy": self.accuracy}

    def update_metric(self, batch: Any, outputs: torch.Tensor, metric: Metric) -> None:
        """Counts the margins above zero."""
        metric.update((outputs > 0).float())


def log_likelihood(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the labelled tokens of every sequence, (sequences,)."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    each = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return -each.view_as(labels).sum(1)


# --- Data. ---


@registry.dataloaders.register("preferences")
def build_preferences(
    tokenizer: PreTrainedTokenizerBase,
    device_batch_size: int,
    dataset: dict[str, Any],
    drop_last: bool = True,
    num_workers: int = 0,
) -> DataSpec:
    """Pairs of responses from `data_dir/split.jsonl`.

    Every line is `{"prompt": "...", "chosen": "...", "rejected": "..."}`.
    """
    lines = Path(dataset["data_dir"], f"{dataset['split']}.jsonl").read_text().splitlines()
    pairs = [encoded(json.loads(line), tokenizer, dataset["max_seq_len"]) for line in lines]
    sampler = dist.get_sampler(pairs, shuffle=dataset.get("shuffle", False), drop_last=drop_last)  # pyright: ignore
    loader = DataLoader(
        pairs,  # pyright: ignore[reportArgumentType]
        batch_size=device_batch_size,
        sampler=sampler,
        drop_last=drop_last,
        num_workers=num_workers,
    )
    return DataSpec(
        loader, get_num_tokens_in_batch=lambda batch: int(batch["attention_mask"].sum())
    )


def encoded(
    line: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, length: int
) -> dict[str, torch.Tensor]:
    """Both sequences, padded to `length`; labels are the tokens of the responses, (2, length)."""
    end = tokenizer.eos_token_id
    prompt = tokenizer(line["prompt"], add_special_tokens=False).input_ids
    ids = torch.full((2, length), end)
    mask = torch.zeros(2, length, dtype=torch.long)
    labels = torch.full((2, length), IGNORED)
    for row, key in enumerate(("chosen", "rejected")):
        response = [*tokenizer(line[key], add_special_tokens=False).input_ids, end]
        tokens = torch.tensor((prompt + response)[:length])
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, len(prompt) : len(tokens)] = tokens[len(prompt) :]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}

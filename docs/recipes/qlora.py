"""Trains adapters on a base that is packed in 4 bits, and writes adapters and merged weights.

torchrun --nproc-per-node 2 qlora.py path/of/base runs/qlora
"""

import os
import sys
from pathlib import Path

import torch
from composer import Trainer
from composer.models import HuggingFaceModel
from composer.utils import dist, get_device
from peft import LoraConfig
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from composer_fsdp2 import ModelWeights, install

BASE, FOLDER = sys.argv[1], Path(sys.argv[2])
GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if GPU else torch.float32


def batches() -> DataLoader:
    """Returns prompts and responses of this rank: here, numbers that count up."""
    starts = torch.arange(64).unsqueeze(1) * 5 + torch.arange(16)
    samples = [{"input_ids": ids, "labels": ids} for ids in starts % 64]
    return DataLoader(samples, 4, sampler=dist.get_sampler(samples, shuffle=True))


def main() -> None:
    """Loads, trains and exports."""
    install()
    dist.initialize_dist(get_device(None))
    packing = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPE,
    )
    # On every rank, with values, where it is to compute: it is packed on the way there.
    base = AutoModelForCausalLM.from_pretrained(
        BASE,
        quantization_config=packing,
        torch_dtype=DTYPE,
        device_map={"": f"cuda:{os.environ['LOCAL_RANK']}" if GPU else "cpu"},
    )
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = HuggingFaceModel(base, peft_config=adapters, should_save_peft_only=True)
    trained = [param for param in model.parameters() if param.requires_grad]
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(trained, lr=2e-3),
        train_dataloader=batches(),
        max_duration="2ep",
        precision="amp_bf16" if GPU else "fp32",
        parallelism_config={"fsdp2": {"frozen": "shard", "activation_checkpointing": True}},
        save_folder=str(FOLDER / "checkpoints"),
        save_interval="1ep",
        autoresume=True,
        run_name="qlora",
        progress_bar=False,
    )
    trainer.fit()

    merged = dict(ModelWeights(model, dtype=DTYPE))  # gathered on every rank, handed out on rank 0
    if dist.get_global_rank() == 0:
        (FOLDER / "merged").mkdir(exist_ok=True)
        save_file(merged, FOLDER / "merged" / "model.safetensors", {"format": "pt"})
        AutoConfig.from_pretrained(BASE).save_pretrained(FOLDER / "merged")
    trainer.close()


if __name__ == "__main__":
    main()

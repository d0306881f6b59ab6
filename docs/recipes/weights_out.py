"""Trains on two ranks, and sends the weights to an engine in a third process, over gloo.

    torchrun --nproc-per-node 2 weights_out.py &
    python weights_out.py engine

The engine is transformers here. Both print the tokens that they generate.
"""

import datetime
import json
import sys

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

from composer_fsdp2 import ModelWeights, install, prepare_fully_shard

PROMPT = torch.arange(5).unsqueeze(0)


def connect(number: int) -> tuple[distributed.Store, distributed.ProcessGroup]:
    """Joins rank 0 of the run (0) and the engine (1), beside the ranks' own group."""
    wait = datetime.timedelta(minutes=5)
    store = distributed.TCPStore("127.0.0.1", 29410, 2, is_master=number == 0, timeout=wait)
    return store, distributed.ProcessGroupGloo(store, number, 2, wait)


def run() -> None:
    """Trains a few steps, sends the weights, and generates."""
    distributed.init_process_group("gloo")
    install()  # lets a sharded model generate
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=64,
            eos_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepare_fully_shard(model, optimizer, {}, device="cpu")
    rank = distributed.get_rank()
    for _ in range(5):
        tokens = torch.randint(64, (4, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    weights = ModelWeights(model, bucket_bytes=2**16)
    if rank == 0:
        store, group = connect(0)
        told = [[w.name, str(w.dtype).removeprefix("torch."), w.shape] for w in weights.metadata()]
        store.set("config", model.config.to_json_string())
        store.set("weights", json.dumps(told))
        for _, tensor in weights:
            group.send([tensor], 1, 0).wait()
    else:
        for _ in weights:  # takes part in gathering; nothing is yielded here
            pass
    generated = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
    if rank == 0:
        print("run   ", generated.tolist())
    distributed.destroy_process_group()


def engine() -> None:
    """Receives the weights into a model of its own, and generates."""
    store, group = connect(1)
    model = LlamaForCausalLM(LlamaConfig(**json.loads(store.get("config"))))
    weights = {}
    for name, dtype, shape in json.loads(store.get("weights")):
        weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        group.recv([weights[name]], 0, 0).wait()
    model.load_state_dict(weights)
    generated = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
    print("engine", generated.tolist())


if __name__ == "__main__":
    engine() if "engine" in sys.argv else run()

"""Writes the FSDP1 checkpoint fixtures (see fsdp1_checkpoints/README.md).

    python make_fsdp1_checkpoints.py                      # all variants
    python make_fsdp1_checkpoints.py sharded_dtensor_2r   # some of them
    python make_fsdp1_checkpoints.py --list

Each variant trains the model of ``fsdp1_checkpoints/tiny_model.py`` for 8 batches with the
Composer Trainer, saves after batch 3, and records in ``expected.json`` what the live
model and optimizer held at that moment and the losses of the 5 batches that followed.

Two patches let the stock FSDP1 path run without an accelerator, a third keeps hardware descriptions
out of the files (see ``patch_for_cpu``); everything else is unmodified.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE / "fsdp1_checkpoints"
SEED = 7
SAVE_AT = 3
NEXT = 5

# name -> world size, parallelism config, and what differs from the defaults.
VARIANTS: dict[str, dict] = {
    # --- FSDP1 with a device mesh (Composer's default): DTensor shards.
    "sharded_dtensor_2r": {
        "world": 2,
        "fsdp": {"state_dict_type": "sharded", "data_parallel_shard_degree": 2},
    },
    "sharded_dtensor_4r": {
        "world": 4,
        "fsdp": {"state_dict_type": "sharded", "data_parallel_shard_degree": 4},
        "model": {"n_layers": 1},
    },
    "sharded_dtensor_hsdp_2x2": {
        "world": 4,
        "fsdp": {
            "state_dict_type": "sharded",
            "sharding_strategy": "HYBRID_SHARD",
            "data_parallel_replicate_degree": 2,
            "data_parallel_shard_degree": 2,
        },
        "model": {"n_layers": 1},
    },
    "sharded_dtensor_actckpt_2r": {
        "world": 2,
        "fsdp": {
            "state_dict_type": "sharded",
            "activation_checkpointing": True,
            "activation_checkpointing_reentrant": False,
        },
    },
    "sharded_dtensor_dropout_2r": {
        "world": 2,
        "fsdp": {"state_dict_type": "sharded"},
        "model": {"dropout": 0.2},
    },
    "sharded_dtensor_weights_only_2r": {
        "world": 2,
        "fsdp": {"state_dict_type": "sharded"},
        "weights_only": True,
    },
    # --- FSDP1 with an explicit process group: Composer then ignores the mesh, and shards are
    # ShardedTensors. torch 2.7 cannot save one that leaves a rank without rows: no 1-row tensor.
    "sharded_shardedtensor_2r": {
        "world": 2,
        "fsdp": {"state_dict_type": "sharded", "process_group": "mod1"},
        "model": {"scale_rows": 64},
    },
    "sharded_shardedtensor_hsdp_2x2": {
        "world": 4,
        "fsdp": {
            "state_dict_type": "sharded",
            "sharding_strategy": "HYBRID_SHARD",
            "process_group": ["set2", "mod2"],
        },
        "model": {"scale_rows": 64, "n_layers": 1},
    },
    # --- use_orig_params=False: one FlatParameter per wrapped module, and one parameter group.
    "sharded_flatparam_2r": {
        "world": 2,
        "fsdp": {"state_dict_type": "sharded", "use_orig_params": False},
        "groups": 1,
    },
    "sharded_flatparam_shardedtensor_2r": {
        "world": 2,
        "fsdp": {"state_dict_type": "sharded", "use_orig_params": False, "process_group": "mod1"},
        "model": {"scale_rows": 64},
        "groups": 1,
    },
    # --- One file written by rank 0.
    "full_2r": {"world": 2, "fsdp": {"state_dict_type": "full"}},
    "full_actckpt_2r": {
        "world": 2,
        "fsdp": {
            "state_dict_type": "full",
            "activation_checkpointing": True,
            "activation_checkpointing_reentrant": False,
        },
    },
    "full_flatparam_2r": {
        "world": 2,
        "fsdp": {"state_dict_type": "full", "use_orig_params": False},
        "groups": 1,
    },
    "full_weights_only_2r": {"world": 2, "fsdp": {"state_dict_type": "full"}, "weights_only": True},
    # --- No FSDP at all.
    "ddp_2r": {"world": 2, "fsdp": None},
    "single_process": {"world": 1, "fsdp": None},
}

# name -> the variant it is rewritten from. Composer's loader still has a branch for sharded
# checkpoints with the optimizer at the root ('optimizers.AdamW...' next to 'state....'). Composer
# 0.32.1 does not write them any more, so the keys of a real checkpoint are renamed.
LEGACY = {"sharded_legacy_optimizer_root_2r": "sharded_shardedtensor_2r"}


def make_legacy(name: str, out: Path) -> None:
    import torch.distributed.checkpoint.metadata  # noqa: F401 (the pickle refers to it)

    source, target = out / LEGACY[name], out / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    path = target / "checkpoint" / ".metadata"
    metadata = pickle.loads(path.read_bytes())

    def rename(key: str) -> str:
        return key.removeprefix("state.") if key.startswith("state.optimizers.") else key

    metadata.state_dict_metadata = {rename(k): v for k, v in metadata.state_dict_metadata.items()}
    metadata.planner_data = {
        rename(k): v[1:] if rename(k) != k else v for k, v in metadata.planner_data.items()
    }
    metadata.storage_data = {
        dataclasses.replace(i, fqn=rename(i.fqn)): v for i, v in metadata.storage_data.items()
    }
    path.write_bytes(pickle.dumps(metadata))
    expected = json.loads((target / "expected.json").read_text())
    expected["name"] = name
    expected["rewritten_from"] = LEGACY[name]
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(name, "ok", flush=True)


def digest(tensor) -> dict:
    """Exact identity (sha256 of the contiguous bytes), and a sum that shows how far off one is."""
    tensor = tensor.detach().cpu().contiguous()
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "sha256": hashlib.sha256(tensor.numpy().tobytes()).hexdigest(),
        "sum": tensor.double().sum().item(),
    }


def live_state(model, optimizer) -> dict:
    """The full, unsharded state of the running model; does not go through any checkpoint file."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True)
    model_sd = get_model_state_dict(model, options=options)
    optim_sd = get_optimizer_state_dict(model, optimizer, options=options)
    plain = (int, float, bool, str, list, tuple, type(None))
    groups = [
        {k: v for k, v in group.items() if isinstance(v, plain)}
        for group in optim_sd.get("param_groups", [])
    ]
    return {
        "model": {k: digest(v) for k, v in sorted(model_sd.items())},
        "optimizer_state": {
            name: {k: digest(v) for k, v in sorted(state.items())}
            for name, state in sorted(optim_sd.get("state", {}).items())
        },
        "param_groups": groups,
    }


def patch_for_cpu() -> None:
    import composer.core.state as composer_state
    import torch

    # 1. Composer passes ``device_id=torch.cuda.current_device()`` to FullyShardedDataParallel.
    torch.cuda.current_device = lambda: torch.device("cpu")

    # 2. Composer asks for full state dicts with ``cpu_offload=True``. FSDP1 assumes that the copy
    #    to CPU is a copy. When the tensors already are on CPU it is not: the model state dict is a
    #    segfault (freed storage) and ``exp_avg`` comes out as ``exp_avg_sq`` (one reused buffer).
    real_options = composer_state.StateDictOptions

    def options(**kwargs):
        if kwargs.get("full_state_dict"):
            kwargs["cpu_offload"] = False
        return real_options(**kwargs)

    composer_state.StateDictOptions = options

    # Keep hardware descriptions out of the files (same keys, neutral values).
    real_env = composer_state.get_composer_env_dict
    composer_state.get_composer_env_dict = lambda: {
        k: v if k == "composer_version" else f"<{k}>" if isinstance(v, str) else 0
        for k, v in real_env().items()
    }


def train_and_save(name: str, out: Path) -> None:
    import composer
    import tiny_model
    import torch
    from composer import Callback, Trainer
    from composer.optim import CosineAnnealingWithWarmupScheduler
    from composer.utils import dist
    from torch.utils.data import DataLoader

    variant = VARIANTS[name]
    rank, world = dist.get_global_rank(), dist.get_world_size()
    assert world == variant["world"]

    model = tiny_model.build_model(SEED, **variant.get("model", {}))
    optimizer = tiny_model.build_optimizer(model, variant.get("groups", 2))
    data = tiny_model.build_dataset()
    loader = DataLoader(
        data,
        batch_size=tiny_model.GLOBAL_BATCH // world,
        sampler=dist.get_sampler(data, shuffle=False, drop_last=True),
    )

    losses: list[float] = []
    snapshots: list[dict] = []

    class Recorder(Callback):
        def batch_end(self, state, logger):
            loss = state.loss.detach().double().clone()
            if world > 1:
                torch.distributed.all_reduce(loss)
            losses.append(loss.item() / world)

        def batch_checkpoint(self, state, logger):
            # After the scheduler step, at the same moment as the CheckpointSaver.
            if state.timestamp.batch.value in (SAVE_AT, SAVE_AT + NEXT):
                snapshots.append(live_state(state.model, state.optimizers[0]))

    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        schedulers=CosineAnnealingWithWarmupScheduler("2ba", "20ba", alpha_f=0.1),
        train_dataloader=loader,
        max_duration=f"{SAVE_AT + NEXT}ba",
        device="cpu",
        precision="fp32",
        seed=SEED,
        run_name=name,
        parallelism_config={"fsdp": dict(variant["fsdp"])} if variant["fsdp"] is not None else None,
        save_folder=f"saved/{name}",  # relative: .metadata records the path
        save_filename="ba{batch}.pt",
        save_interval=f"{SAVE_AT}ba",
        save_weights_only=variant.get("weights_only", False),
        callbacks=[Recorder()],
        progress_bar=False,
        log_to_console=False,
    )
    trainer.fit()
    trainer.close()

    if rank == 0:
        at_save, at_end = snapshots[0], snapshots[-1]
        target = out / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        monolithic = Path("saved") / name / f"ba{SAVE_AT}.pt"
        if monolithic.exists():
            shutil.copy(monolithic, target / "checkpoint.pt")
        else:
            shutil.copytree(Path("saved") / name / f"ep0-ba{SAVE_AT}", target / "checkpoint")
        expected = {
            "name": name,
            "made_with": {
                "python": ".".join(map(str, sys.version_info[:3])),
                "torch": torch.__version__.split("+")[0],
                "mosaicml": composer.__version__,
            },
            "world_size": world,
            "parallelism_config": {"fsdp": variant["fsdp"]}
            if variant["fsdp"] is not None
            else None,
            "model_kwargs": variant.get("model", {}),
            "optimizer_groups": variant.get("groups", 2),
            "weights_only": variant.get("weights_only", False),
            "model_seed": SEED,
            "saved_at_batch": SAVE_AT,
            "losses_until_save": losses[:SAVE_AT],
            "next_losses": losses[SAVE_AT:],
            "at_save": at_save,
            "final_model_sums": {k: v["sum"] for k, v in at_end["model"].items()},
        }
        (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    dist.barrier()


def worker(names: list[str], out: Path) -> None:
    warnings.filterwarnings("ignore")
    patch_for_cpu()
    sys.path.insert(0, str(OUT))
    from composer.utils import dist
    from composer.utils.device import get_device

    dist.initialize_dist(get_device("cpu"), timeout=120)
    for name in names:
        train_and_save(name, out)
        if dist.get_global_rank() == 0:
            print(name, "ok", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="variants to make (default: all)")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        print("\n".join([*VARIANTS, *LEGACY]))
        return
    if args.worker:
        worker(args.names, args.out)
        return
    names = args.names or [*VARIANTS, *LEGACY]
    failed = False
    for world in sorted({VARIANTS[name]["world"] for name in names if name in VARIANTS}):
        batch = [name for name in names if name in VARIANTS and VARIANTS[name]["world"] == world]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={world}", str(Path(__file__).resolve()), *batch]
        command += ["--worker", "--out", str(args.out.resolve())]
        with tempfile.TemporaryDirectory() as scratch:
            failed |= bool(
                subprocess.run(
                    command, cwd=scratch, env={**os.environ, "OMP_NUM_THREADS": "1"}
                ).returncode
            )
    for name in names:
        if name in LEGACY and not failed:
            make_legacy(name, args.out)
    sys.exit(failed)


if __name__ == "__main__":
    main()

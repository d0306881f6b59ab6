"""What only an accelerator can show; one GPU is enough, as a group of one rank."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import Callback, State
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import installed, prepare_fully_shard
from composer_fsdp2.torch_private.collectives import Collective, around_collectives
from tests.accelerator.training import Pretend, trained_beside_a_copy
from tests.support.models import TinyComposer, TinyLM, batches, lm_loss
from tests.support.training import built, samples_of, trainer_for

pytestmark = pytest.mark.gpu


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 20) -> None:
    for ids, targets in batches(steps, 8):
        lm_loss(model(ids.cuda()), targets.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}


@pytest.mark.world_size(1, backend="nccl")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # inductor says so, once
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"activation_checkpointing": True},
        {"activation_cpu_offload": True},
        {"activation_checkpointing": {"mode": "selective"}, "activation_cpu_offload": True},
        {"compile": True, "activation_checkpointing": True},
        {"data_parallel_replicate_degree": 1},
    ],
)
def test_trains_like_the_unsharded_copy(config: dict[str, Any]):
    oracle = TinyLM("two modules")
    model = copy.deepcopy(oracle)  # on the CPU: it is moved unit by unit
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepare_fully_shard(model, optimizer, config, precision="fp32")
    assert all(param.device.type == "cuda" for param in model.parameters())
    oracle.cuda()
    if config.get("compile"):  # whose kernels round differently
        for block in oracle.blocks:
            block.compile()
    _train(oracle, torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9))
    _train(model, optimizer)
    for name, value in _whole(model).items():
        assert (value - oracle.state_dict()[name]).abs().max().item() <= 1e-5, name


class OneGPU(Pretend):
    """The GPU that all ranks have; Composer's own device takes one for each rank, and TF32."""

    dist_backend = "gloo"
    name = "cuda"


def through_the_host(collective: Collective) -> Any:
    """Sends what is on a device by way of the CPU: NCCL refuses two ranks on one GPU."""
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_the_host(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            return [on_the_host(one) for one in value]
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return value
        sent.append((value, value.cpu()))
        return sent[-1][1]

    given = {name: on_the_host(value) for name, value in collective.given.items()}
    if "async_op" in given:
        given["async_op"] = False  # the host has waited for the device already
    result = collective.original(**given)
    for there, here in sent:
        there.copy_(here)
    return result.to(sent[0][0].device) if sent and isinstance(result, torch.Tensor) else result


@pytest.mark.world_size(2, backend="cpu:gloo,cuda:gloo")
@pytest.mark.filterwarnings("ignore:gradient_sync is 'last'")
@pytest.mark.parametrize(
    "settings",
    [{}, {"forward_prefetch": 2}, {"activation_cpu_offload": True}, {"gradient_sync": "last"}],
    ids=str,
)
def test_two_ranks_on_one_gpu_train_like_the_unsharded_copy(settings: dict[str, Any]):
    """Torch 2.15 gathers and reduces nothing where a rank is alone."""
    torch.cuda.set_device(0)  # or a mesh takes that of the local rank
    with around_collectives(through_the_host):
        trained_beside_a_copy(settings, "sgd", device=OneGPU())


class _Losses(Callback):
    """The loss of every batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def batch_end(self, state: State, logger: Any) -> None:
        self.seen.append(float(state.loss))


@pytest.mark.world_size(1, backend="nccl")
def test_a_trainer_in_bf16_trains_like_composer_alone():
    def losses(parallelism: Any) -> list[float]:
        model, found = built(TinyComposer), _Losses()
        with installed():
            trainer = trainer_for(
                model,
                torch.optim.AdamW(model.parameters(), lr=1e-2),
                samples_of(20, 8),
                batch=8,
                device="gpu",
                precision="amp_bf16",
                parallelism_config=parallelism,
                callbacks=[found],
            )
            trainer.fit()
            trainer.close()
        return found.seen

    assert losses({"fsdp2": {}}) == pytest.approx(losses(None), rel=0.02)


@pytest.mark.world_size(1, backend="nccl")
def test_offloaded_activations_leave_the_device():
    ids, targets = (part.cuda() for part in batches(1, 64, length=64)[0])
    held = {}
    for offload in (False, True):
        model = TinyLM()
        prepare_fully_shard(model, None, {"activation_cpu_offload": offload}, precision="fp32")
        lm_loss(model(ids), targets).backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()  # with what cuBLAS keeps
        loss = lm_loss(model(ids), targets)
        torch.cuda.synchronize()
        held[offload] = torch.cuda.memory_allocated() - before
        loss.backward()
    assert held[True] < 0.7 * held[False], held


@pytest.mark.world_size(1, backend="nccl")
def test_meta_starts_on_the_device():
    with torch.device("meta"):
        model = TinyLM("two modules")
    prepare_fully_shard(model, None, {}, precision="amp_bf16")
    assert all(value.isfinite().all() for value in _whole(model).values())
    assert model.head.weight is model.embed.weight
    ids, _ = batches(1, 8)[0]
    assert model(ids.cuda()).dtype == torch.bfloat16


@pytest.mark.world_size(1, backend="nccl")
def test_nothing_is_cast_without_a_precision():
    model = TinyLM()
    prepare_fully_shard(model, None, {})
    ids, _ = batches(1, 8)[0]
    assert model(ids.cuda()).dtype == torch.float32


class _Scales(Callback):
    """The scale of the loss and a weight, after every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, torch.Tensor]] = []

    def fit_start(self, state: State, logger: Any) -> None:
        # Too large for the gradients to be finite at first.
        state.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)

    def batch_end(self, state: State, logger: Any) -> None:
        assert state.scaler is not None
        head = _whole(state.model)["net.head.weight"].cpu().clone()
        self.seen.append((state.scaler.get_scale(), head))


@pytest.mark.world_size(1, backend="nccl")
def test_fp16_skips_steps_until_gradients_are_finite(tmp_path: Path):
    from composer.callbacks import MemorySnapshot

    model, scales = built(TinyComposer), _Scales()
    snapshot = MemorySnapshot(0, "1ba", folder=str(tmp_path), remote_file_name=None)
    with installed():
        trainer = trainer_for(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            samples_of(40, 8),
            batch=8,
            device="gpu",
            precision="amp_fp16",
            callbacks=[scales, snapshot],
        )
        assert type(trainer.state.scaler) is torch.amp.GradScaler
        trainer.fit()
        trainer.close()
    first = scales.seen[0][1]
    for (before, old), (after, new) in itertools.pairwise(scales.seen):
        assert torch.equal(old, new) == (after < before)
    assert not torch.equal(first, scales.seen[-1][1])
    assert scales.seen[-1][1].isfinite().all()
    # The weights were on the CPU when Composer looked for them.
    assert list(tmp_path.glob("*.pickle"))


class _Hungry(TinyComposer):
    """Takes 256 MiB a sample, and as much again for its gradient."""

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any) -> torch.Tensor:
        room = torch.zeros(len(outputs), 2**26, device=outputs.device)
        unused = (outputs[:, 0, :1] * room).square().sum()
        return super().loss(outputs, batch, *args) + unused


@pytest.mark.world_size(1, backend="nccl")
@pytest.mark.filterwarnings("ignore:.*may potentially fail", "ignore:CUDA out of memory or exc")
@pytest.mark.parametrize("fsdp2", [{}, {"cpu_offload": True}])
def test_a_limit_of_memory_halves_the_microbatch(fsdp2: dict[str, Any]):
    def trained(size: int | str) -> tuple[Any, dict[str, torch.Tensor]]:
        model = built(_Hungry)
        trainer = trainer_for(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            samples_of(3, 16),
            fsdp2,
            batch=16,
            device="gpu",
            device_train_microbatch_size=size,
        )
        trainer.fit()
        trainer.close()
        return trainer.state.device_train_microbatch_size, _whole(trainer.state.model)

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(6 * 2**30 / total)
    try:
        with installed():
            size, found = trained("auto")
            _, expected = trained(size)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert size in (2, 4, 8)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.world_size(1, backend="nccl")
@pytest.mark.parametrize("written", [True, {"pin_memory": False}])
@pytest.mark.parametrize("on_meta", [False, True])
def test_offloaded_shards_train_like_the_unsharded_copy(written: Any, on_meta: bool):
    oracle = TinyLM("two modules").cuda()
    model = TinyLM("two modules")
    if on_meta:
        with torch.device("meta"):
            model = TinyLM("two modules")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepare_fully_shard(model, optimizer, {"cpu_offload": written}, precision="fp32")
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    oracle.load_state_dict(_whole(model))
    pair = [(oracle, torch.optim.AdamW(oracle.parameters(), lr=1e-2)), (model, optimizer)]
    for ids, targets in batches(5, 8):
        norms = []
        for trained, stepped in pair:
            lm_loss(trained(ids.cuda()), targets.cuda()).backward()
            norm = torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            stepped.step()
            stepped.zero_grad()
        assert norms[1].item() == pytest.approx(norms[0].item(), rel=1e-4)
    assert all(s["exp_avg"].device.type == "cpu" for s in optimizer.state.values())
    for name, value in _whole(model).items():
        assert (value.cuda() - oracle.state_dict()[name]).abs().max().item() <= 1e-4, name


@pytest.mark.world_size(1, backend="nccl")
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_offloaded_runs_resume(tmp_path: Path, kind: str):
    def run(**kwargs: Any) -> dict[str, torch.Tensor]:
        model = built(TinyComposer)
        config = {"cpu_offload": True, "state_dict_type": kind}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with installed():
            trainer = trainer_for(
                model,
                optimizer,
                samples_of(4, 8),
                config,
                batch=8,
                device="gpu",
                save_folder=str(tmp_path),
                save_interval="2ba",
                save_overwrite=True,
                **kwargs,
            )
            trainer.fit()
            trainer.close()
        return {name: value.cpu() for name, value in _whole(model).items()}

    through = run()
    name = "ep0-ba2" if kind == "sharded" else "ep0-ba2-rank0.pt"
    resumed = run(load_path=str(tmp_path / name))
    for key, value in through.items():
        assert (value - resumed[key]).abs().max().item() <= 1e-6, key

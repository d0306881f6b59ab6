"""Every error of docs/reference/errors.md is raised by the case that the page gives for it."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composer.models import ComposerModel
from composer.utils.parallelism import FSDPConfig
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM

from composer_fsdp2 import (
    CheckpointError,
    installed,
    patches,
    prepare_fully_shard,
    summon_full_params,
)
from composer_fsdp2.tools.migrate.engine import migrate
from composer_fsdp2.torch_private import members
from composer_fsdp2.trainer.config import parse_parallelism_config
from composer_fsdp2.trainer.extensions import hugging_face
from tests.dist import test_explain, test_gathered
from tests.dist.test_trainer_checkpoints import FORMATS, HALF, _run
from tests.support.models import WIDTH, TinyComposer, TinyLM, batches, llama_config
from tests.support.training import built, samples_of, trainer_for

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
TABLE = re.compile(r"<!-- errors -->\n(.*?)<!-- end of errors -->", re.DOTALL)
DOCUMENTED = re.findall(r"^\| `([^`]+)` \|", TABLE.findall(PAGE.read_text())[0], re.MULTILINE)


def prepare(model: nn.Module, config: Any = None, **kwargs: Any) -> None:
    prepare_fully_shard(model, kwargs.pop("optimizer", None), config or {}, **kwargs)


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(batches(1, 2)[0][0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()  # gradients from before are refused by a sentence of their own
    return optimizer


def another_models_optimizer() -> None:
    prepare(TinyLM(), optimizer=torch.optim.SGD(TinyLM().parameters(), lr=0.1))


class ByRows(torch.optim.SGD):
    """Keeps a number for each row."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            self.state[param]["row_var"] = torch.zeros(len(param), 1)
        return super().step(closure)


def optimizer_state_without_rows() -> None:
    model = TinyLM()
    prepare(model, optimizer=_stepped(model, ByRows(model.parameters(), lr=0.1)))


def one_memory_in_two_groups() -> None:
    model = TinyLM("storage")
    rest = [param for name, param in model.named_parameters() if name != "head.weight"]
    groups = [{"params": rest}, {"params": [model.head.weight]}]
    prepare(model, optimizer=torch.optim.SGD(groups, lr=0.1))


def chunked() -> TinyLM:
    model = TinyLM()
    prepare_fully_shard(model, None, {"chunked_loss": {"chunks": 2, "names": ["head"]}})
    return model


def chunked_logits() -> torch.Tensor:
    return chunked()(batches(1, 2)[0][0])


def two_losses(logits: torch.Tensor) -> torch.Tensor:
    targets = torch.zeros(len(logits), dtype=torch.long)
    F.cross_entropy(logits, targets).backward()
    return F.cross_entropy(logits, targets + 1)


def tensor_hook() -> None:
    model = TinyLM()
    model.norm.weight.register_hook(lambda grad: grad)
    prepare(model)


def scalar() -> None:
    model = TinyLM()
    model.blocks[0].scale = nn.Parameter(torch.tensor(1.0))
    prepare(model)


def held_in_a_list() -> None:
    model = TinyLM()
    model.kept = [model.norm.weight]
    prepare(model)


def mixed_dtypes() -> None:
    model = TinyLM()
    model.norm.bias = nn.Parameter(model.norm.bias.detach().to(torch.bfloat16))
    prepare(model)


def run_with(optimizer: dict[str, Any]) -> None:
    """As LLM Foundry's train script asks, before it builds anything."""
    from llmfoundry.utils.registry_utils import save_registry

    from composer_fsdp2.foundry.names import refuse_unknown
    from composer_fsdp2.foundry.registered import register, register_names

    with save_registry():
        register()
        register_names()
        refuse_unknown({"optimizer": optimizer})


def nothing_to_checkpoint() -> None:
    prepare(nn.Sequential(nn.Linear(2, 2)), {"activation_checkpointing": True})


def unannounced() -> None:
    model = TinyLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer=optimizer)
    model.unshard()
    model.norm.weight.square().sum().backward()
    optimizer.step()


def penalty_in_backward() -> None:
    prepare(model := TinyLM())
    loss = model(batches(1, 2)[0][0]).sum()
    (loss + sum(param.square().sum() for param in model.parameters())).backward()


def copied() -> None:
    model = TinyLM()
    prepare(model)
    copy.deepcopy(model)


def sharded_twice() -> None:
    model = TinyLM()
    prepare(model)
    prepare(model)


def another_order() -> None:
    model = TinyLM()
    prepare(model)
    order = (0, 1, 2) if dist.get_rank() == 0 else (0, 2, 1)
    model.blocks._modules = {str(i): model.blocks[i] for i in order}
    model(batches(1, 2)[0][0])


def without_torchao() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchao", None)
        prepare(TinyLM(), {"fp8": True})


def another_method() -> None:
    test_explain.step(test_explain.Calls(lambda block, x: block.again(x)))


def in_forward(deed: Callable[[Any], object]) -> None:
    model = test_gathered.model_with(test_gathered.Writes(deed))
    for _ in range(2):
        test_gathered.step(model)


def resized() -> None:
    model = LlamaForCausalLM(llama_config(False))
    prepare(model)
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    model.resize_token_embeddings(40)


def returned() -> None:
    test_gathered.step(test_gathered.model_with(test_gathered.Returns()))


def mapped() -> None:
    model = TinyLM()
    prepare(model)
    torch.vmap(model)(batches(1, 2)[0][0])


def graph_of_gradients() -> None:
    model = TinyLM()
    prepare(model)
    model(batches(1, 2)[0][0]).sum().backward(create_graph=True)


def another_dtype() -> None:
    model = TinyLM()
    model.blocks[1] = test_explain.ToFloat()
    prepare(model, {**test_explain.POLICY, "mixed_precision": {"param_dtype": "bf16"}})
    test_explain.step(model)


def input_in_place() -> None:
    model = TinyLM()
    model.blocks[1] = test_explain.DoublesItsInput()
    prepare(model, test_explain.POLICY)
    test_explain.step(model)


class WithoutReset(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def nothing_initialises() -> None:
    with torch.device("meta"):
        model = WithoutReset(4)
    prepare(model)


def meta_on_rank_0() -> None:
    with torch.device("meta" if dist.get_rank() == 0 else "cpu"):
        model = TinyLM()
    prepare(model)


def another_composer() -> None:
    patches.uninstall()  # a train script that an earlier test has called installs and stays so
    owner, name = patches.engine._locate(patches.PATCHES[0].target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, another_method)
        with installed():
            pass


def another_torch() -> None:
    members._is_there.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(FSDPModule, "_get_fsdp_state")
            prepare(TinyLM())
    finally:
        members._is_there.cache_clear()


def read_and_write_on_rank_0() -> None:
    model = TinyLM()
    prepare(model)
    with summon_full_params(model, rank0_only=True):
        pass


def saved_by_one_rank(folder: Path) -> None:
    model, errors = LlamaForCausalLM(llama_config()), []
    prepare(model)
    with pytest.MonkeyPatch.context() as patch, installed():
        patch.setattr(hugging_face, "_WAIT_SECONDS", 0.1)
        for rank in range(2):
            if rank == dist.get_rank():
                with pytest.raises(CheckpointError) as caught:
                    model.save_pretrained(folder)
                errors.append(caught.value)
            dist.barrier()
    raise errors[0]


# --- Checkpoints: five steps with AdamW, then a run that does not fit. ---


def saved(folder: Path, **kwargs: Any) -> str:
    _run(folder, {}, until=HALF, **kwargs)
    return str(folder / FORMATS["sharded"])


def load(path: str, make: Callable[[], ComposerModel] = TinyComposer, **kwargs: Any) -> None:
    model = built(make)
    optimizer = kwargs.pop("optimizer", torch.optim.AdamW)(model.parameters())
    with installed():
        trainer_for(model, optimizer, samples_of(1, 8), load_path=path, **kwargs)


def weights_only(folder: Path) -> None:
    load(saved(folder, save_weights_only=True))


def another_optimizer(folder: Path) -> None:
    load(saved(folder), optimizer=torch.optim.Adagrad)


def _by_rank(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    held = list(params)
    matrices = [param for param in held if param.ndim > 1]
    vectors = [param for param in held if param.ndim == 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])


def other_groups(folder: Path) -> None:
    load(saved(folder), optimizer=_by_rank)


def another_model(folder: Path) -> None:
    load(saved(folder), lambda: TinyComposer(layers=4))


def folder_above(folder: Path) -> None:
    load(str(Path(saved(folder)).parent))


class _Calls:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def a_checkpoint_that_calls(folder: Path) -> None:
    path = folder / "bad.pt"
    if dist.get_rank() == 0:
        torch.save({"state": {"model": {}, "run_name": _Calls()}}, path)
    dist.barrier()
    load(str(path))


BOTH_BLOCKS = "fsdp_config: {verbose: true}\nparallelism_config: {tp: null}\n"
TRIGGERS: dict[str, Callable[[Path], object]] = {
    "is not a key of parallelism_config. The run would": lambda _: parse_parallelism_config(
        {"fdsp2": {}}
    ),
    "is a key of FSDP1 and has no effect in FSDP2": lambda _: parse_parallelism_config(
        {"fsdp2": {"sharding_strategy": "FULL_SHARD"}}
    ),
    "of FSDP1 has no equal in FSDP2": lambda _: prepare(
        TinyLM(), FSDPConfig(sync_module_states=True, keep_low_precision_grads=True)
    ),
    "has both 'fsdp' and 'fsdp2'": lambda _: parse_parallelism_config({"fsdp": {}, "fsdp2": {}}),
    "has both 'fsdp_config' and 'parallelism_config'": lambda _: migrate(BOTH_BLOCKS),
    "does not multiply to the world size": lambda _: prepare(
        TinyLM(), {"data_parallel_shard_degree": 8}
    ),
    "parameters that are not in the model": lambda _: another_models_optimizer(),
    "Use one that steps element by element": lambda _: prepare(
        (model := TinyLM()), optimizer=torch.optim.Rprop(model.parameters())
    ),
    "cannot be divided into the parameter's shards": lambda _: optimizer_state_without_rows(),
    "which share memory": lambda _: one_memory_in_two_groups(),
    "have tensor hooks": lambda _: tensor_hook(),
    "is a scalar parameter": lambda _: scalar(),
    "has max_norm=": lambda _: prepare(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))),
    "is also held by": lambda _: held_in_a_list(),
    "holds parameters of different dtypes": lambda _: mixed_dtypes(),
    "has no forward. FSDP gathers": lambda _: prepare(
        TinyLM(), {"wrap_policy": {"names": ["blocks"]}}
    ),
    "left out by ignored_params and trainable": lambda _: prepare(
        TinyLM(), {"ignored_params": ["norm.*"]}
    ),
    "no module was chosen for it": lambda _: nothing_to_checkpoint(),
    "which torch does not know. The first batch would": lambda _: prepare(
        TinyLM(), {"compile": {"backend": "inductr"}}
    ),
    "is in no registry of": lambda _: run_with({"name": "muonn"}),
    "has no argument": lambda _: run_with({"name": "muon", "betas": [0.9, 0.95]}),
    "the model has no blocks. Nothing would be compiled": lambda _: prepare(
        nn.Sequential(nn.Linear(2, 2)), {"compile": True}
    ),
    "tiled_mlp is on, but no module is called": lambda _: prepare(
        TinyLM(), {"tiled_mlp": {"shards": 2}}
    ),
    "chunked_loss is on, but the model names no output head": lambda _: prepare(
        TinyLM(), {"chunked_loss": {"chunks": 2}}
    ),
    "inside the head": lambda _: prepare(
        TinyLM(), {"chunked_loss": {"chunks": 2, "names": ["blocks"]}}
    ),
    "was asked of the logits of": lambda _: chunked_logits().softmax(-1),
    "Another loss of the logits of": lambda _: two_losses(chunked_logits().flatten(0, 1)),
    "is not called with the hidden states as its first argument": lambda _: chunked().head(
        input=torch.ones(1, 2, WIDTH)
    ),
    "was chosen for tiled_mlp, but": lambda _: prepare(
        TinyLM(), {"tiled_mlp": {"shards": 2, "names": ["blocks"]}}
    ),
    "There are no replicas to average over later": lambda _: prepare(
        TinyLM(), {"gradient_sync": "reduce_scatter_only"}
    ),
    "'cpu_offload' is set in a run on the CPU": lambda _: prepare(
        TinyLM(), {"cpu_offload": True}, device="cpu"
    ),
    "'communication.symmetric_memory' is set": lambda _: prepare(
        TinyLM(), {"communication": {"symmetric_memory": True}}, device="cpu"
    ),
    "torchao is not installed": lambda _: without_torchao(),
    "is sharded by FSDP2 already": lambda _: sharded_twice(),
    "that FSDP2 shards was to be copied": lambda _: copied(),
    "hold a different plan": lambda _: prepare(TinyLM(layers=2 + dist.get_rank())),
    "The next collective is": lambda _: another_order(),
    "computed with this rank's shard of": lambda _: another_method(),
    "A sharded tensor was computed with another": lambda _: penalty_in_backward(),
    "resize_token_embeddings was called on a sharded model": lambda _: resized(),
    "The model was given tensors in": lambda _: test_explain.given_an_object(),
    "was changed in place while": lambda _: in_forward(lambda block: block.up.weight.data.mul_(2)),
    "Another tensor was put in the place of": lambda _: in_forward(test_gathered.assign_module),
    "holds gradients of a backward that came to none of its results": lambda _: unannounced(),
    "returns its parameter": lambda _: returned(),
    "called inside a transformation of torch.func": lambda _: mapped(),
    "leaves a graph in the gradients of parameters": lambda _: graph_of_gradients(),
    "in another dtype than that in which": lambda _: another_dtype(),
    "changes an input or output of": lambda _: input_in_place(),
    "Nothing initialises": lambda _: nothing_initialises(),
    "Rank 0 holds the model on meta": lambda _: meta_on_rank_0(),
    "is not one the replacement was written for": lambda _: another_composer(),
    "cannot work without it, and would fail in the middle of a run": lambda _: another_torch(),
    "rank0_only and writeback were both asked for": lambda _: read_and_write_on_rank_0(),
    "no rank can gather them alone": saved_by_one_rank,
    "holds weights only": weights_only,
    "The run's optimizer is": another_optimizer,
    "are not those of this run": other_groups,
    "does not fit this run": another_model,
    "is no checkpoint: the folder has no": folder_above,
    "Loading it could execute code": a_checkpoint_that_calls,
}


def test_the_page_lists_these_errors():
    assert sorted(DOCUMENTED) == sorted(TRIGGERS)


@pytest.mark.table(
    "is not a key of parallelism_config. The run would",
    "is in no registry of",
    "Another loss of the logits of",
    "Another tensor was put in the place of",
    "holds weights only",
    "resize_token_embeddings was called on a sharded model",
    "The model was given tensors in",
)
@pytest.mark.world_size(2)
@pytest.mark.parametrize("said", DOCUMENTED)
def test_each_error_is_raised(said: str, tmp_path: Path):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        TRIGGERS[said](tmp_path)
    assert said in str(caught.value)
    dist.barrier()

"""Runs drawn by chance: a model, a layout, settings, an optimizer, and what happens between steps.

`run_case` trains a case in float64 beside one process and compares losses, what each event shows,
and at the end parameters and state. A refusal must be a sentence of ours, the same on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.metrics import LanguageCrossEntropy
from composer.models import ComposerModel, HuggingFaceModel
from composer.optim import DecoupledAdamW
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers.modeling_outputs import CausalLMOutput

from composer_fsdp2 import clip_grad_norm_, installed, prepare_fully_shard, summon_full_params
from composer_fsdp2.errors import (
    CheckpointError,
    ConfigError,
    PatchError,
    PlanError,
    ShardReadError,
)
from tests.dist.test_tensor_parallel import gpt2, llama, mpt, phi3, qwen3
from tests.dist.test_tensor_with import adapted, mixtral
from tests.support.models import TIES, VOCAB, TinyLM
from tests.support.parity import full, gathered
from tests.support.training import loader_of, trainer_for

__all__ = ["Case", "Result", "draw", "run_case"]

STEPS, SIZE, LENGTH = 4, 8, 7
EXACT, NEAR = 1e-9, 2e-6
"""tolerances: where all is double, and where a model computes its loss or router in fp32"""
OURS = (CheckpointError, ConfigError, PatchError, PlanError, ShardReadError)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. Its text can be pasted into a test."""

    number: int
    layout: str
    model: str
    host: str
    way: str
    optimizer: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    microbatches: int = 1
    clip: str = ""
    held: str = ""
    """how the last layers are left out of the optimizer at first, if they are"""
    warm: bool = False
    """whether the optimizer has state from before"""
    middle: tuple[str, ...] = ()
    """what happens between backward and step, by step; an empty text is nothing"""
    events: tuple[tuple[str, ...], ...] = ()
    """what happens after each step"""

    @property
    def world_size(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def has_own_loss(self) -> bool:
        """Whether the model computes its loss, which those of transformers do in fp32."""
        needed = self.layout.startswith("SP") or "chunked_loss" in self.settings
        return needed or self.host == "Hugging Face"


@dataclass(frozen=True, kw_only=True)
class Result:
    outcome: str
    """equal or refused"""
    text: str = ""


# --- What is drawn from. ---

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP 2": (2, {}),
    "FSDP 4": (4, {}),
    "HSDP 2 x 2": (4, {"data_parallel_replicate_degree": 2}),
    "TP 2": (2, {"tensor_parallel": 2}),
    "TP 2 x FSDP 2": (4, {"tensor_parallel": 2}),
    "TP 2 x HSDP 2": (4, {"tensor_parallel": 2, "data_parallel_replicate_degree": 2}),
    "SP 2": (2, {"sequence_parallel": 2}),
    "SP 2 x 2": (4, {"sequence_parallel": {"degree": 2, "method": "gather_kv"}}),
    "SP 2 x TP 2": (4, {"sequence_parallel": 2, "tensor_parallel": 2}),
}


class Tiny(TinyLM):
    """A `TinyLM` that is called as a model of transformers is."""

    def forward(self, input_ids: Any = None, labels: Any = None, **_: Any) -> Any:
        logits = super().forward(input_ids)
        loss = None if labels is None else next_token_loss(logits, labels)
        return CausalLMOutput(loss=loss, logits=logits)


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": llama,
    "Llama, tied": lambda: llama(tie_word_embeddings=True),
    "Llama, LoRA": lambda: adapted(llama(), ["q_proj", "o_proj", "down_proj"]),
    "Llama, LoRA on the head": lambda: adapted(llama(), ["v_proj", "lm_head"]),
    "Qwen3": qwen3,
    "Phi-3": phi3,
    "GPT-2": gpt2,
    "MPT": mpt,
    "Mixtral": mixtral,
    **{f"tiny, ties: {tie}": lambda tie=tie: Tiny(tie) for tie in TIES if tie != "storage"},
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # A gradient that is zero but for rounding would be blown up to a full step by a smaller eps.
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.02),
    "SGD, momentum": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=3e-3, eps=1e-3),
    "AdamW, foreach": lambda groups: torch.optim.AdamW(groups, lr=3e-3, eps=1e-3, foreach=True),
    "AdamW, fused": lambda groups: torch.optim.AdamW(groups, lr=3e-3, eps=1e-3, fused=True),
    "Adam, amsgrad": lambda groups: torch.optim.Adam(groups, lr=3e-3, eps=1e-3, amsgrad=True),
    "DecoupledAdamW": lambda groups: DecoupledAdamW(groups, lr=3e-3, eps=1e-3, weight_decay=1e-4),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, eps=1e-3),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, eps=1e-3),
}

SETTINGS: dict[str, tuple[Any, ...]] = {
    "reshard_after_forward": (True, False, 2),
    "forward_prefetch": (2,),
    "backward_prefetch": (2,),
    "gradient_sync": ("last", "reduce_scatter_only"),
    "order_check": ("always", "never"),
    "unused_parameters": (True, False),
    "activation_checkpointing": (True, {"every": 2}, {"mode": "selective"}),
    "activation_cpu_offload": (True,),
    "compile": ({"backend": "aot_eager"},),
    "tiled_mlp": ({"shards": 2},),
    "chunked_loss": ({"chunks": 2},),
    "local_step": (True, False),
    "keep_fp32": (["*norm*"],),
    "wrap_policy": ({"min_num_params": 300}, {"max_unit_bytes": 9000}, {"embeddings": True}),
    "eval_reshard_after_forward": (True, False),
}
RARE = {"compile": 0.06, "activation_cpu_offload": 0.06, "keep_fp32": 0.06}
"""share of cases that have a setting, where it is not a sixth"""


def draw(number: int) -> Case:
    """Returns the case of that number, always the same."""
    rng = random.Random(f"case {number}")
    way = rng.choice(["loop", "loop", "trainer"])
    settings = {
        name: rng.choice(values)
        for name, values in SETTINGS.items()
        if rng.random() < RARE.get(name, 1 / 6)
    }
    layout, model = rng.choice(list(LAYOUTS)), rng.choice(list(MODELS))
    if model.startswith("tiny"):  # nobody knows how to divide it
        layout = rng.choice(["FSDP 2", "FSDP 4", "HSDP 2 x 2"])
        settings.pop("chunked_loss", None)
        settings.pop("tiled_mlp", None)
    if "HSDP" not in layout and settings.get("gradient_sync") == "reduce_scatter_only":
        settings["gradient_sync"] = "every"  # what is refused
    hosts = ["language", "Hugging Face"]
    if model.startswith("tiny"):
        hosts.remove("Hugging Face")
    elif layout.startswith("SP") or "chunked_loss" in settings:
        hosts.remove("language")  # its loss is no model's own
    names = list(EVENTS) if way == "loop" else [*EVENTS, *IN_TRAINER]
    return Case(
        number=number,
        layout=layout,
        model=model,
        host=rng.choice(hosts if way == "trainer" else ["module", *hosts]),
        way=way,
        optimizer=rng.choice(list(OPTIMIZERS)),
        settings=settings,
        microbatches=rng.choice([1, 1, 2]),
        clip=rng.choice(["", "", "norm", "value"]),
        held=rng.choice(["", "", "frozen", "trained"]),
        warm=way == "loop" and rng.random() < 0.2,
        middle=tuple(
            rng.choice(MIDDLE) if way == "loop" and rng.random() < 0.3 else "" for _ in range(STEPS)
        ),
        events=tuple(
            tuple(rng.choices(names, k=rng.choice([0, 1, 1, 2]))) for _ in range(STEPS - 1)
        ),
    )


# --- Models and data. ---


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """In the dtype of the logits."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Language(ComposerModel):
    """Computes the loss by itself, in double."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Any) -> Any:
        return self.net(input_ids=batch["input_ids"], use_cache=False)

    def loss(self, outputs: Any, batch: Any, *_: Any) -> torch.Tensor:
        return next_token_loss(outputs.logits, batch["input_ids"])

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        return {} if is_train else {"LanguageCrossEntropy": LanguageCrossEntropy()}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        # Torchmetrics wants both in one piece, which they are not without shards either.
        targets = batch["input_ids"][:, 1:].contiguous()
        metric.update(outputs.logits[:, :-1].contiguous(), targets)


def built(case: Case) -> nn.Module:
    """The model in its host. Its weights depend on the case alone."""
    torch.manual_seed(case.number)
    net = MODELS[case.model]().double()
    for name, module in list(net.named_modules()):
        if "RMSNorm" in type(module).__name__:  # those of transformers compute in fp32
            norm = nn.RMSNorm(module.weight.shape, module.variance_epsilon, dtype=torch.double)
            norm.requires_grad_(module.weight.requires_grad)
            net.set_submodule(name, norm)
    with torch.no_grad():
        for param in net.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    if case.host == "language":
        return Language(net)
    if case.host == "Hugging Face":
        metrics = [LanguageCrossEntropy()]
        return HuggingFaceModel(
            net, tokenizer=None, eval_metrics=metrics, shift_labels=True, use_logits=True
        )
    return net


def batch_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "labels": ids}


def ids_of(seed: int, rows: int = SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (rows, LENGTH), generator=generator)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Each row of some batches is a sample."""

    def __init__(self, *batches: torch.Tensor) -> None:
        self.ids = torch.cat(batches)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return batch_of(self.ids[index])


def loss_of(case: Case, host: Any, ids: torch.Tensor) -> torch.Tensor:
    if isinstance(host, ComposerModel):
        batch = batch_of(ids)
        return host.loss(host(batch), batch)
    if case.has_own_loss:
        return host(**batch_of(ids), use_cache=False).loss
    return next_token_loss(logits_of(host, ids), ids)


def logits_of(host: Any, ids: torch.Tensor) -> torch.Tensor:
    if isinstance(host, ComposerModel):
        return host(batch_of(ids)).logits
    return host(input_ids=ids, use_cache=False).logits


# --- A run. ---


class Run:
    """Both sides of a case: one process, and the sharded model."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.rng = random.Random(case.number)
        self.batches = 1000 * case.number
        tensor, sequence = ("TP" in case.layout), ("SP" in case.layout)
        self.shared = 2**tensor * 2**sequence
        """how many ranks read the same batch"""
        self.tolerance = NEAR if case.has_own_loss or case.model == "Mixtral" else EXACT
        self.settings = {"mixed_precision": "FULL", **LAYOUTS[case.layout][1], **case.settings}
        self.oracle, model = built(case), built(case)
        names = [name for name, param in self.oracle.named_parameters() if param.requires_grad]
        later = names[-max(1, len(names) // 4) :] if case.held else []
        self.groups = [[name for name in names if name not in later]]
        self.later = later
        self.frozen = set(later if case.held == "frozen" else [])
        for host in (self.oracle, model):
            self.flag(host)
        self.optimizer = self.optimizer_for(self.oracle)
        self.trainer: Trainer | None = None
        self.put(model)

    def put(self, model: nn.Module, load: Path | None = None) -> None:
        """Shards a model, by itself or in a Trainer. Collective: yes."""
        optimizer = self.optimizer_for(model)
        if self.case.warm and load is None:
            for host, own in ((self.oracle, self.optimizer), (model, optimizer)):
                self.loss(host, ids_of(self.batches)).backward()
                own.step()
                host.zero_grad()
        self.model, self.sharded = model, optimizer
        if self.case.way == "loop":
            prepare_fully_shard(model, optimizer, self.settings)
            return
        per_rank = SIZE * self.shared // self.case.world_size
        clips = [GradientClipping(self.case.clip, 0.1)] if self.case.clip else None
        self.trainer = trainer_for(
            model,
            optimizer,
            Rows(*(ids_of(1000 * self.case.number + step) for step in range(STEPS))),
            self.settings,
            batch=per_rank,
            device_train_microbatch_size=max(1, per_rank // self.case.microbatches),
            algorithms=clips,
            max_duration=f"{STEPS}ba",
            load_path=str(load) if load else None,
        )
        self.model, self.sharded = self.trainer.state.model, self.trainer.state.optimizers[0]

    def optimizer_for(self, model: nn.Module) -> torch.optim.Optimizer:
        params = by_name(model)
        groups = [{"params": [params[name] for name in group]} for group in self.groups]
        return OPTIMIZERS[self.case.optimizer](groups)

    def flag(self, model: nn.Module) -> None:
        """Freezes what is frozen, and nothing else that was trained."""
        params = by_name(model)
        for name in [*self.later, *(name for group in self.groups for name in group)]:
            params[name].requires_grad_(name not in self.frozen)

    def loss(self, host: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return loss_of(self.case, host, ids)

    def part(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of this rank's group."""
        return ids.chunk(self.case.world_size // self.shared)[dist.get_rank() // self.shared]

    def next(self, rows: int = SIZE) -> torch.Tensor:
        """Another batch, which no step has."""
        self.batches += STEPS
        return ids_of(-self.batches - 1 + 2**40, rows)

    def step(self, number: int) -> None:
        """One step of both. Collective: yes."""
        ids = ids_of(1000 * self.case.number + number)
        if self.trainer is not None:
            self.optimizer.zero_grad()  # as the Trainer does, of groups that were added too
        expected = self.loss(self.oracle, ids)
        expected.backward()
        if self.trainer is not None:
            clip(self.case, self.oracle, torch.nn.utils.clip_grad_norm_)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.trainer.fit(duration="1ba")
            got = self.trainer.state.total_loss_dict["loss/train/total"]
            self.close(f"loss of step {number}", expected, torch.tensor(got), NEAR)
            return
        got = torch.zeros((), dtype=torch.double)
        for micro in self.part(ids).chunk(self.case.microbatches):
            loss = self.loss(self.model, micro) / self.case.microbatches
            loss.backward()
            got += loss.detach()
        self.close(f"loss of step {number}", expected, got)
        if event := self.case.middle[number]:
            EVENTS[event](self)
        for host, norm in (
            (self.oracle, torch.nn.utils.clip_grad_norm_),
            (self.model, clip_grad_norm_),
        ):
            clip(self.case, host, norm)
        for one in (self.optimizer, self.sharded):
            one.step()
            one.zero_grad()

    def close(
        self, what: str, expected: torch.Tensor, got: torch.Tensor, tolerance: float = 0.0
    ) -> None:
        """Compares with the mean over ranks. Collective: yes."""
        got = got.detach().double().clone()
        dist.all_reduce(got)
        self.equal(what, expected, got / self.case.world_size, tolerance)

    def equal(
        self, what: str, expected: torch.Tensor, got: torch.Tensor, tolerance: float = 0.0
    ) -> None:
        expected, got = expected.detach().double(), got.detach().double()
        if expected.shape != got.shape:
            raise AssertionError(f"{what}: {tuple(got.shape)} for {tuple(expected.shape)}")
        size = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        off = (expected - got).abs().max().item() if expected.numel() else 0.0
        if not off <= max(tolerance, self.tolerance) * size:  # NaN is not <=
            raise AssertionError(f"{what} is off by {off:.1e}")

    def finish(self) -> None:
        """Compares parameters, buffers and the optimizer's state. Collective: yes."""
        expected, got = gathered(self.oracle), gathered(self.model)
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            self.equal(name, value, got[name])
        theirs, ours = (one.state_dict()["state"] for one in (self.optimizer, self.sharded))
        for number, state in theirs.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self.equal(f"{key} of parameter {number}", value, full(ours[number][key]))


def by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): param
        for name, param in model.named_parameters()
    }


def clip(case: Case, host: nn.Module, norm: Callable[..., Any]) -> None:
    if case.clip == "norm":
        norm(host.parameters(), 0.1)
    elif case.clip == "value":
        torch.nn.utils.clip_grad_value_(host.parameters(), 0.1)


# --- What happens between steps. ---


@contextlib.contextmanager
def evaluating(run: Run) -> Iterator[None]:
    """In evaluation, without gradients."""
    hosts = {host: host.training for host in (run.oracle, run.model)}
    for host in hosts:
        host.eval()
    with torch.no_grad():
        yield
    for host, training in hosts.items():
        host.train(training)


def evaluate(run: Run) -> None:
    ids = run.next()
    with evaluating(run):
        run.close("evaluation", run.loss(run.oracle, ids), run.loss(run.model, run.part(ids)))


def predict(run: Run) -> None:
    part = run.part(run.next())
    with evaluating(run):
        run.equal("logits", logits_of(run.oracle, part), logits_of(run.model, part))


def generate(run: Run) -> None:
    if run.case.model.startswith("tiny"):
        return
    prompts = run.part(run.next())[:2, :3]
    told = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
    texts = []
    with evaluating(run):
        for host in (run.oracle, run.model):
            net = host.net if isinstance(host, Language) else host
            texts.append(net.generate(input_ids=prompts, **told))
    run.equal("words", *texts)


def read(run: Run) -> None:
    with summon_full_params(run.model, writeback=False, with_grads=True):
        ours = by_name(run.model)
        for name, param in by_name(run.oracle).items():
            run.equal(f"summoned {name}", param, ours[name])
            if param.requires_grad and param.grad is not None:
                assert ours[name].grad is not None, f"no gradient of {name}"
                run.equal(f"summoned gradient of {name}", param.grad, ours[name].grad)


def write(run: Run) -> None:
    with summon_full_params(run.model):
        for host in (run.oracle, run.model):
            for param in host.parameters():
                param.data.mul_(1 + 2**-6)


def freeze(run: Run) -> None:
    """Freezes one module's parameters, or a few, and never all of them."""
    names = [name for name in run.groups[0] if name not in run.frozen]
    module = run.rng.choice(names).rpartition(".")[0]
    chosen = [name for name in names if name.startswith(module)]
    if len(chosen) < len(names):
        run.frozen |= set(chosen)
    for host in (run.oracle, run.model):
        run.flag(host)


def unfreeze(run: Run) -> None:
    run.frozen = {name for name in run.frozen if name in run.later}
    for host in (run.oracle, run.model):
        run.flag(host)


def add_group(run: Run) -> None:
    """Trains, from here on, what was left out."""
    if not run.later or run.case.optimizer == "Adagrad":
        return  # Adagrad makes state when it is built, and fails with a group that is added
    run.frozen -= set(run.later)
    for host, optimizer in ((run.oracle, run.optimizer), (run.model, run.sharded)):
        params = by_name(host)
        run.flag(host)
        optimizer.add_param_group({"params": [params[name] for name in run.later]})
    run.groups.append(run.later)
    run.later = []


def forward_alone(run: Run) -> None:
    """A forward of training whose loss nobody uses."""
    run.loss(run.model, run.part(run.next()))


def throw_away(run: Run) -> None:
    """A batch whose gradients are thrown away."""
    ids = run.next()
    for host, part in ((run.oracle, ids), (run.model, run.part(ids))):
        run.loss(host, part).backward()
        host.zero_grad()


def state_dict(run: Run) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(run.model, options=options)
    if dist.get_rank() == 0:
        for name, value in get_model_state_dict(run.oracle).items():
            run.equal(f"state_dict: {name}", value, found[name])


def reload(run: Run) -> None:
    """Takes weights and state, changes the weights, and puts back what was taken."""
    stepped = all(param in run.sharded.state for param in run.model.parameters())
    if run.frozen or not stepped:
        return  # torch's functions leave out the state of what is frozen or has none
    weights, state = get_state_dict(run.model, run.sharded)
    weights, state = copy.deepcopy((weights, state))
    with torch.no_grad():
        for param in run.model.parameters():
            if param.requires_grad:
                param.mul_(0.5)
    set_state_dict(
        run.model,
        run.sharded,
        model_state_dict=weights,
        optim_state_dict=state,
        options=StateDictOptions(strict=False),  # a HuggingFaceModel gives its adapters alone
    )


def change_rate(run: Run) -> None:
    for optimizer in (run.optimizer, run.sharded):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


EVENTS: dict[str, Callable[[Run], None]] = {
    each.__name__: each
    for each in (
        evaluate,
        predict,
        generate,
        read,
        write,
        freeze,
        unfreeze,
        add_group,
        forward_alone,
        throw_away,
        state_dict,
        reload,
        change_rate,
    )
}
MIDDLE = ["evaluate", "predict", "generate", "read", "state_dict"]
"""events that change nothing"""


def trainer_evaluates(run: Run) -> None:
    assert run.trainer is not None
    ids = run.next()
    per_rank = SIZE * run.shared // run.case.world_size
    run.trainer.eval(loader_of(Rows(ids), per_rank))
    (metrics,) = run.trainer.state.eval_metrics.values()
    with evaluating(run):
        expected = run.loss(run.oracle, ids)
    run.equal("metric", expected, metrics["LanguageCrossEntropy"].compute(), 1e-5)


def trainer_predicts(run: Run) -> None:
    assert run.trainer is not None
    ids = run.next()
    groups = run.case.world_size // run.shared
    loader = loader_of(Rows(ids), SIZE // groups)
    (outputs,) = run.trainer.predict(loader, return_outputs=True)
    with evaluating(run):
        expected = logits_of(run.oracle, ids[dist.get_rank() // run.shared :: groups])
    run.equal("predicted", expected, outputs["logits"] if isinstance(outputs, dict) else outputs)


def resume(run: Run) -> None:
    """Goes on in another Trainer, from a checkpoint."""
    assert run.trainer is not None
    folder = Path(tempfile.mkdtemp(dir=run.folder)) if dist.get_rank() == 0 else None
    holder = [folder]
    dist.broadcast_object_list(holder)
    assert holder[0] is not None
    run.trainer.save_checkpoint(str(holder[0] / "saved" / "whole.pt"))
    run.trainer.close()
    dist.barrier()
    model = built(run.case)
    run.flag(model)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.mul_(0.5)
    run.put(model, next((holder[0] / "saved").glob("*")))


IN_TRAINER: dict[str, Callable[[Run], None]] = {
    each.__name__: each for each in (trainer_evaluates, trainer_predicts, resume)
}


def run_case(case: Case, folder: Path) -> Result:
    """Trains a case. Collective: yes.

    Raises:
        AssertionError: for a number that is not that of one process.
    """
    with warnings.catch_warnings(), installed():
        warnings.simplefilter("ignore")
        try:
            run = Run(case, folder)
            for number in range(STEPS):
                run.step(number)
                for event in case.events[number] if number < STEPS - 1 else ():
                    {**EVENTS, **IN_TRAINER}[event](run)
            run.finish()
        except OURS as error:
            return Result(outcome="refused", text=str(error))
    return Result(outcome="equal")

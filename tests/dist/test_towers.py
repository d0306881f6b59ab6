"""Models of several parts: a teacher beside a student, an image tower before a language model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer.models import ComposerModel
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.plan.module_tree import is_wrapper
from tests.support.models import VOCAB, WIDTH, Block, TinyLM, batches, llama_config, lm_loss
from tests.support.parity import (
    OPTIMIZERS,
    Recipe,
    assert_same_gradients,
    assert_same_values,
    train_together,
)
from tests.support.traffic import Bytes

IMAGE = VOCAB
"""the token in whose place an image is seen"""


class Distilled(ComposerModel):
    """A student learns from targets and from a teacher that only ever evaluates."""

    def __init__(self, teacher_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.student = TinyLM()
        self.teacher = TinyLM().to(teacher_dtype).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, batch: Any) -> Any:
        with torch.no_grad():
            expected = self.teacher(batch[0])
        return self.student(batch[0]), expected.float()

    def loss(self, outputs: Any, batch: Any, *_args: Any) -> torch.Tensor:
        logits, expected = (each.flatten(0, 1).log_softmax(-1) for each in outputs)
        divergence = F.kl_div(logits, expected, reduction="batchmean", log_target=True)
        return lm_loss(outputs[0], batch[1]) + divergence


def distilled(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """An unsharded model and its sharded twin, each with an optimizer."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Distilled(dtype))
    pair = [OPTIMIZERS["adamw"](model.student.parameters()) for model in models]
    prepare_fully_shard(models[1], pair[1], config)
    return models[0], pair[0], models[1], pair[1]


@pytest.mark.table("True", "False")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("reshard", ["auto", True, False])
def test_a_student_learns_like_in_one_process(reshard: Any):
    train_together(*distilled({"reshard_after_forward": reshard}), Recipe(steps=5, evaluate=True))


@pytest.mark.world_size(2)
def test_a_teacher_is_sharded_and_freed_and_never_reduced():
    _, _, model, _ = distilled({})
    size = sum(param.numel() for param in model.student.parameters())
    kept = sum(param.numel() for param in model.student.norm.parameters())
    kept += model.student.embed.weight.numel() + model.student.head.weight.numel()
    batch = batches(1, 4)[0]
    with Bytes() as sent:
        model.loss(model(batch), batch).backward()
    padded = {
        "gathered": sum(sent.gathered.values()) / 4,
        "reduced": sum(sent.reduced.values()) / 4,
    }
    assert all(isinstance(param, DTensor) for param in model.teacher.parameters())
    # The student's blocks are gathered again for backward; odd rows are padded by one.
    assert size <= padded["reduced"] <= size + 2 * WIDTH + 2
    assert 3 * size - kept <= padded["gathered"] <= 3 * size - kept + 4 * WIDTH + 4


NAMED = {
    "teacher": {"mixed_precision": "FULL"},
    r"re:teacher\.blocks\.\d": {"mixed_precision": "FULL"},
    r"re:student\.blocks\.\d": {},
}


@pytest.mark.world_size(2)
def test_a_teacher_in_bf16_beside_a_student_in_fp32():
    oracle, stepped, model, optimizer = distilled({"wrap_policy": {"names": NAMED}}, torch.bfloat16)
    seen: set[torch.dtype] = set()
    for part in (model.teacher.blocks[0], model.student.blocks[0]):
        part.norm.register_forward_pre_hook(lambda module, _: seen.add(module.weight.dtype))
    train_together(oracle, stepped, model, optimizer, Recipe(steps=5))
    assert seen == {torch.bfloat16, torch.float32}


@pytest.mark.world_size(2)
def test_a_tower_that_keeps_its_inputs_by_name():
    bf16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    names = {"0": {**bf16, "cast_forward_inputs": False}, "1": bf16}
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    seen: list[torch.dtype] = []
    for linear in (model[0], model[1][0]):
        linear.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    policy = {"names": {name: {"mixed_precision": spec} for name, spec in names.items()}}
    prepare_fully_shard(model, None, {"mixed_precision": bf16, "wrap_policy": policy})
    with torch.autocast("cpu", torch.bfloat16):
        model[1](model[0](torch.randn(2, WIDTH)).float())
    assert seen == [torch.float32, torch.bfloat16]


# --- Images on some ranks only. ---


class Seeing(TinyLM):
    """The tower is called in every step, with no image where a batch has none."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(Block() for _ in range(3))).requires_grad_(not frozen)
        self.bridge = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor, images: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        seen = self.bridge(self.tower(images)).unsqueeze(1)
        x = self.embed(ids)
        x = x.index_add(0, rows, seen.expand(-1, x.shape[1], -1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


WITH_IMAGE = [[0, 1, 3], [4, 7], [], [2, 6]]
"""samples of every step; rank 0 has the first four, rank 1 the others"""


@pytest.mark.table("True")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("frozen", [True, False])
def test_images_on_one_rank_only(frozen: bool):
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Seeing(frozen))
        optimizers.append(OPTIMIZERS["sgd"](models[-1].parameters()))
    prepare_fully_shard(models[1], optimizers[1], {})
    for step, (ids, targets) in enumerate(batches(len(WITH_IMAGE), 8)):
        images = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        mine = range(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        for model, samples in zip(models, (range(8), mine), strict=True):
            rows = [row for row in WITH_IMAGE[step] if row in samples]
            here = torch.tensor(rows, dtype=torch.long)
            logits = model(ids[list(samples)], images[here], here - samples[0])
            lm_loss(logits, targets[list(samples)]).backward()
        assert_same_gradients(*models)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(*models)


class Llava(LlavaForConditionalGeneration):
    """Looks only where there are images."""

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> Any:
        seen = {"pixel_values": pixel_values} if len(pixel_values) else {}
        return super().forward(input_ids=input_ids, **seen)


class LooksAlways(LlavaForConditionalGeneration):
    """Its vision tower cannot take zero images, so it sees a blank one that counts for nothing."""

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> Any:
        if len(pixel_values):
            return super().forward(input_ids=input_ids, pixel_values=pixel_values)
        layer, strategy = self.config.vision_feature_layer, "default"
        blank = self.get_image_features(pixel_values.new_zeros(1, 3, 8, 8), layer, strategy)
        # A list in an output of transformers 5.
        features = sum(feature.sum() for feature in getattr(blank, "pooler_output", blank))
        embedded = self.get_input_embeddings()(input_ids) + 0 * features
        return super().forward(inputs_embeds=embedded)


def llava(kind: type[LlavaForConditionalGeneration], frozen: bool) -> nn.Module:
    """Trained projector and language model; four tokens an image."""
    shape = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    vision = CLIPVisionConfig(**shape, num_attention_heads=2, image_size=8, patch_size=4)
    text = llama_config(vocab_size=IMAGE + 1, pad_token_id=0, use_cache=False)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = kind(config)
    # transformers 4 has it in the model itself.
    getattr(model, "model", model).vision_tower.requires_grad_(not frozen)
    return model


WHOLE = "ignore:.*were chosen as units, and some ranks may leave them out"
CASES: dict[str, tuple[type[LlavaForConditionalGeneration], bool, dict[str, Any], int]] = {
    "frozen": (Llava, True, {}, 0),
    "replicated": (Llava, True, {"frozen": "replicate"}, 0),
    "trained": (Llava, False, {}, 0),
    "recomputed": (Llava, False, {"activation_checkpointing": True}, 0),
    "blank image": (LooksAlways, True, {"unused_parameters": False}, 2),
    "blank image, replicated": (
        LooksAlways,
        True,
        {"unused_parameters": False, "frozen": "replicate"},
        2,
    ),
}
"""and how many units are in the tower"""


@pytest.mark.table("frozen", "recomputed", "replicated")
@pytest.mark.fault("ranks leave out a tower", "survived")
@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.filterwarnings(WHOLE)
@pytest.mark.parametrize("case", CASES)
def test_llava_with_images_on_one_rank_only(case: str):
    kind, frozen, config, inside = CASES[case]
    models = [llava(kind, frozen), llava(kind, frozen)]
    optimizers = [OPTIMIZERS["sgd"](trained_of(model)) for model in models]
    _, units = prepare_fully_shard(models[1], optimizers[1], config)
    assert sum("vision_tower" in name for name in units) == inside
    if "activation_checkpointing" in config:
        wrapped = [name for name, module in models[1].named_modules() if is_wrapper(module)]
        assert sum("vision_tower" in name for name in wrapped) == 2
    for step, (ids, targets) in enumerate(batches(len(WITH_IMAGE), 8)):
        ids[WITH_IMAGE[step], :4] = IMAGE
        pixels = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        mine = range(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        for model, samples in zip(models, (range(8), mine), strict=True):
            rows = torch.tensor([r for r in WITH_IMAGE[step] if r in samples], dtype=torch.long)
            here = list(samples)
            logits = model(input_ids=ids[here], pixel_values=pixels[rows]).logits
            lm_loss(logits, targets[here]).backward()
        assert_same_gradients(*models)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(*models)


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]

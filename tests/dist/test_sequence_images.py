"""Models with a tower for images, whose sequences ranks divide, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import distributed as dist
from torch import nn

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.errors import PlanError
from tests.support.parity import OPTIMIZERS, assert_close, assert_same_values

WORDS, IMAGE, START = 30, 30, 31
STEPS, SIZE, LENGTH = 8, 4, 22
TEXT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": 29,
    "vision_start_token_id": START,
    "vision_end_token_id": 28,
}
PATCHES: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "in_channels": 3}
ROPE = {"type": "default", "rope_type": "default", "mrope_section": [0, 1, 1]}
_IS_NEW = hasattr(transformers, "Qwen3VLConfig")


def _grouped(text: dict[str, Any]) -> dict[str, Any]:
    """Older configurations have those of text at the top."""
    return {"text_config": text} if _IS_NEW else text


def qwen2_vl() -> nn.Module:
    vision = {**PATCHES, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    text = _grouped({**TEXT, "rope_scaling": dict(ROPE)})
    config = transformers.Qwen2VLConfig(**text, **TOKENS, vision_config=vision)
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> nn.Module:
    vision = {
        **PATCHES,
        "hidden_size": 16,
        "intermediate_size": 24,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    text = _grouped({**TEXT, "rope_scaling": dict(ROPE)})
    config = transformers.Qwen2_5_VLConfig(**text, **TOKENS, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> nn.Module:
    library: Any = transformers
    vision = {
        **PATCHES,
        "hidden_size": 16,
        "intermediate_size": 24,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    text = {**TEXT, "head_dim": 4, "rope_parameters": {**ROPE, "mrope_interleaved": True}}
    config = library.Qwen3VLConfig(text_config=text, vision_config=vision, **TOKENS)
    return library.Qwen3VLForConditionalGeneration(config)


def llava() -> nn.Module:
    shape = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    vision = transformers.CLIPVisionConfig(
        **shape, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(**TEXT, pad_token_id=0, use_cache=False)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE
    )
    return transformers.LlavaForConditionalGeneration(config)


def gemma3() -> nn.Module:
    """Each token of an image sees the whole image."""
    vision = transformers.SiglipVisionConfig(
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    text = transformers.Gemma3TextConfig(**TEXT, head_dim=4, sliding_window=8)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE
    )
    return transformers.Gemma3ForConditionalGeneration(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "Qwen2-VL": qwen2_vl,
    "Qwen2.5-VL": qwen2_5_vl,
    "LLaVA": llava,
    **({"Qwen3-VL": qwen3_vl} if _IS_NEW else {}),
}


def batch(name: str, seed: int) -> dict[str, torch.Tensor]:
    """Four rows: no image, one, two, and a padded row with one that crosses the ranks' border.

    The third batch has no image at all.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 28, (SIZE, LENGTH), generator=generator)
    begins, images = {1: (3,), 2: (1, 14), 3: (9,)} if seed != 2 else {}, 0
    for row, columns in begins.items():
        for column in columns:
            ids[row, column - 1] = START
            ids[row, column : column + 4] = IMAGE
            images += 1
    mask = torch.ones_like(ids)
    mask[3, 17:] = 0
    labels = ids.masked_fill((mask == 0) | (ids >= 28), -100)
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if not images:
        return given
    if name == "LLaVA":
        given["pixel_values"] = torch.randn(images, 3, 8, 8, generator=generator)
        return given
    # Two frames of (4 x 4) patches, of which four each make a token.
    given["image_grid_thw"] = torch.tensor([[1, 4, 4]] * images)
    given["pixel_values"] = torch.randn(images * 16, 3 * 2 * 4 * 4, generator=generator)
    if _IS_NEW:
        given["mm_token_type_ids"] = (ids == IMAGE).long()
    return given


def part(given: dict[str, torch.Tensor], rows: range, name: str) -> dict[str, torch.Tensor]:
    """The rows of one group, and their images."""
    counts = [0, 1, 2, 1]
    first, last = sum(counts[: rows.start]), sum(counts[: rows.stop])
    patches = 1 if name == "LLaVA" else 16
    cut = {key: value[rows.start : rows.stop] for key, value in given.items()}
    if "pixel_values" in given:
        cut["pixel_values"] = given["pixel_values"][first * patches : last * patches]
    if "image_grid_thw" in given:
        cut["image_grid_thw"] = given["image_grid_thw"][first:last]
    return cut


IGNORED = (
    "ignore:.*were chosen as units, and some ranks may leave them out",
    "ignore:FSDP2-wrapped module .* returned a view tensor",
)


def check(name: str, config: dict[str, Any], *, frozen: str = "") -> None:
    """Trains both; ranks of a group read the same rows."""
    torch.manual_seed(0)
    oracle = MODELS[name]().train()
    for path, param in oracle.named_parameters():
        param.requires_grad_(not frozen or frozen not in path)
    model = copy.deepcopy(oracle)
    pair = [
        OPTIMIZERS["sgd"]([p for p in m.parameters() if p.requires_grad]) for m in (oracle, model)
    ]
    prepare_fully_shard(model, pair[1], config, precision="fp32")
    groups = dist.get_world_size() // 2
    group = dist.get_rank() * groups // dist.get_world_size()
    share = SIZE // groups
    for step in range(STEPS):
        given = batch(name, step)
        own = part(given, range(group * share, (group + 1) * share), name)
        counts = [int((b["labels"][:, 1:] != -100).sum()) for b in (given, own)]
        oracle(**given).loss.backward()
        # One process averages over the words of all groups.
        (model(**own).loss * groups * counts[1] / counts[0]).backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(oracle, model)
    given = batch(name, STEPS)
    own = part(given, range(group * share, (group + 1) * share), name)
    with torch.no_grad():
        logits = [m.eval()(**b).logits for m, b in ((oracle, given), (model, own))]
    assert_close("logits", logits[0][group * share : (group + 1) * share], logits[1])


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.table("Qwen2-VL-gather_kv", "LLaVA-ulysses")
@pytest.mark.parametrize("method", ["gather_kv", "ulysses"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_like_one_process(name: str, method: str):
    check(name, {"sequence_parallel": {"degree": 2, "method": method}})


@pytest.mark.skipif(not _IS_NEW, reason="transformers has no Qwen3VLConfig")
@pytest.mark.world_size(2)
@pytest.mark.filterwarnings(*IGNORED)
def test_features_of_images_in_each_layer_lie_at_their_positions():
    check("Qwen3-VL", {"sequence_parallel": 2})


LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "two groups": ({}, ""),
    "tower frozen": ({}, "vis"),
    "recomputed": ({"activation_checkpointing": True}, "merger"),
}


@pytest.mark.world_size(4)
@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.table("Qwen2-VL-two groups")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_layouts_train_like_one_process(name: str, layout: str):
    config, frozen = LAYOUTS[layout]
    check(name, {"sequence_parallel": 2, **config}, frozen=frozen)


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings(*IGNORED)
def test_images_whose_tokens_see_each_other_are_refused():
    model = gemma3().train()
    given = batch("LLaVA", 0)
    given["token_type_ids"] = (given["input_ids"] == IMAGE).long()

    def run() -> None:
        prepare_fully_shard(model, None, {"sequence_parallel": 2}, precision="fp32")
        model(**given)

    # Transformers 4 has a loss of its own in this model, so its masks are not looked at.
    with pytest.raises(PlanError, match=r"sequences are divided|computes its loss by itself"):
        run()

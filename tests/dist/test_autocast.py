"""Composer's Trainer in amp_bf16 against one process under the same autocast.

FSDP2 with its own settings alone: `test_trainer.py`, and every `check_parity`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel

from composer_fsdp2 import installed
from composer_fsdp2.patches import install_for_foundry
from tests.dist.test_sequence_parallel import SIZES
from tests.dist.test_sequence_trainer import MODELS, SIZE, STEPS, VIEWS, Samples, hugging_face, sgd
from tests.support.parity import autocast, rounded
from tests.support.training import autocast_on_the_cpu, largest_difference, trainer_for

EXACT, DIVIDED = 1e-6, 1e-4
"""Sums over parts of rows are rounded to bf16 before they are added; weights move by 7e-3."""


def mpt() -> ComposerModel:
    """Its blocks are handed ALiBi's biases, which are fp32 under autocast too."""
    pytest.importorskip("llmfoundry")
    from llmfoundry.models.mpt import ComposerMPTCausalLM

    install_for_foundry()

    sizes = {"d_model": 32, "n_heads": 8, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64}
    return ComposerMPTCausalLM(
        vocab_size=SIZES["vocab_size"],
        loss_fn="torch_crossentropy",
        attn_config={"attn_impl": "torch", "alibi": True},
        **sizes,
    )


FOUNDRY = pytest.mark.filterwarnings("ignore:alibi or rope is turned on")
RECOMPUTED = {"activation_checkpointing": True, "activation_cpu_offload": True}
GATHERING = {"sequence_parallel": {"degree": 2, "method": "gather_kv"}}
MODES: dict[str, tuple[int, int, Any, dict[str, Any], float]] = {
    # ranks, of which so many are a group that computes together
    "MPT": (2, 1, mpt, {}, EXACT),
    "MPT, recomputed": (2, 1, mpt, RECOMPUTED, EXACT),
    "recomputed": (2, 1, hugging_face, RECOMPUTED, EXACT),
    "chunked loss": (2, 1, hugging_face, {"chunked_loss": {"chunks": 2}}, DIVIDED),
    "tiled MLP": (2, 1, hugging_face, {"tiled_mlp": {"shards": 2}}, DIVIDED),
    "tensor": (4, 2, hugging_face, {"tensor_parallel": 2}, DIVIDED),
    "ulysses": (2, 2, hugging_face, {"sequence_parallel": 2}, DIVIDED),
    "gather_kv": (2, 2, hugging_face, GATHERING, DIVIDED),
}


def built(make: Any) -> ComposerModel:
    torch.manual_seed(0)
    return make()


def trained_alone(make: Any, groups: int) -> tuple[ComposerModel, list[float]]:
    """Groups of ranks read batches of their own; in bf16, sums of other parts round to others."""
    model, data, losses = built(make), Samples(kind="plain"), list[float]()
    optimizer = sgd(model)
    for step in range(STEPS):
        rows = [data[step * SIZE + row] for row in range(SIZE)]
        losses.append(0.0)
        for group in range(groups):
            own = rows[group::groups]
            batch = {name: torch.stack([row[name] for row in own]) for name in own[0]}
            with autocast("amp_bf16"), rounded(model):
                loss = model.loss(model(batch), batch) / groups
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def trained(model: ComposerModel, settings: dict[str, Any], batch: int) -> list[float]:
    logger = InMemoryLogger()
    with installed(), autocast_on_the_cpu():
        trainer = trainer_for(
            model,
            sgd(model),
            Samples(kind="plain"),  # type: ignore[arg-type]
            settings,
            batch=batch,
            precision="amp_bf16",
            loggers=logger,
        )
        trainer.fit()
    trainer.close()
    return [float(value) for _, value in logger.data["loss/train/total"]]


@pytest.mark.table("chunked loss", "gather_kv", "recomputed", "tiled MLP", "ulysses")
@MODELS
@VIEWS
@FOUNDRY
@pytest.mark.parametrize(
    "mode", [pytest.param(name, marks=pytest.mark.world_size(MODES[name][0])) for name in MODES]
)
def test_trains_like_one_process(mode: str):
    ranks, together, make, settings, tolerance = MODES[mode]
    groups = ranks // together
    model, (alone, losses) = built(make), trained_alone(make, groups)
    logged = trained(model, settings, SIZE // groups)
    assert logged == pytest.approx(losses, abs=tolerance)
    assert largest_difference(model, alone) <= tolerance


@FOUNDRY
@pytest.mark.world_size(2)
def test_slopes_of_alibi_reach_the_blocks_of_mpt_in_fp32():
    """Flash attention takes them in fp32 alone."""
    model: Any = built(mpt)
    # As with that attention, which needs a GPU; the layers compute as before.
    model.model.transformer.attn_impl = "flash"
    name = "llmfoundry.models.mpt.modeling_mpt.gen_flash_attn_padding_info"
    seen: set[torch.dtype] = set()

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        seen.add(kwargs["alibi_slopes"].dtype)

    for block in model.model.transformer.blocks:
        block.attn.register_forward_pre_hook(note, with_kwargs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name, lambda *_: {})
        trained(model, RECOMPUTED, 2)
    assert seen == {torch.float32}

"""The parts of `yamls/complete/dpo.yaml`, against an unsharded copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import default_collate

from composer_fsdp2 import installed
from tests.support.parity import OPTIMIZERS, TOLERANCE
from tests.support.training import largest_difference, trainer_for

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

from llmfoundry.data.dataloader import build_dataloader
from llmfoundry.utils.builders import build_composer_model, build_tokenizer
from llmfoundry.utils.registry_utils import import_file
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]
STEPS, SIZE = 4, 8
quiet = pytest.mark.filterwarnings("ignore:The `use_auth_token` argument:FutureWarning")


def settings_in(folder: Path) -> dict[str, Any]:
    """The YAML with its data written into a folder; samples come in order."""
    cfg = OmegaConf.create(yaml.safe_load((ROOT / "yamls/complete/dpo.yaml").read_text()))
    cfg.variables.folder = str(folder)
    cfg.train_loader.dataset.shuffle = False
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    code = {Path(file).stem: import_file(str(ROOT / file)) for file in settings["code_paths"]}
    code["small_data"].prepare_data(settings)
    return settings


@pytest.mark.matrix
@quiet
@pytest.mark.world_size(2)
def test_a_policy_is_trained_like_in_one_process(tmp_path: Path):
    settings = settings_in(tmp_path)
    tokenizer = build_tokenizer(**{f"tokenizer_{k}": v for k, v in settings["tokenizer"].items()})
    name = settings["model"].pop("name")
    with installed():  # transformers 5 needs its rows
        oracle = build_composer_model(name, {**settings["model"], "init_device": "cpu"}, tokenizer)
        model = build_composer_model(name, settings["model"], tokenizer)
    loaders = [
        build_dataloader(settings[f"{part}_loader"], tokenizer, SIZE // 2)
        for part in ("train", "eval")
    ]
    samples = loaders[0].dataloader.dataset
    with installed():
        trainer = trainer_for(
            model,
            OPTIMIZERS["sgd"](model.model.parameters()),
            samples,
            settings["parallelism_config"]["fsdp2"],
            train_dataloader=loaders[0],
            eval_dataloader=loaders[1],
            max_duration=f"{STEPS}ba",
            device_train_microbatch_size=2,
        )
        trainer.fit()
        trainer.eval()
    trainer.close()
    optimizer = OPTIMIZERS["sgd"](oracle.model.parameters())
    for step in range(STEPS):
        batch = default_collate([samples[step * SIZE + index] for index in range(SIZE)])
        oracle.loss(oracle(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(model, oracle) <= TOLERANCE
    with torch.no_grad():
        right = oracle(default_collate(list(loaders[1].dataloader.dataset))) > 0
    found = trainer.state.eval_metrics["eval"]["PreferenceAccuracy"].compute()
    assert found == right.float().mean()
    assert 0 < found < 1

"""The number of this node, as the launchers say it."""

from __future__ import annotations

import pytest
from composer.utils import dist

from composer_fsdp2 import installed

NAMES = ("GROUP_RANK", "NODE_RANK", "RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NODEID")
SECOND_TASK = {"SLURM_PROCID": "1", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("environment", "node"),
    [
        pytest.param({}, 0, id="one process"),
        pytest.param({"GROUP_RANK": "1", "RANK": "2", "LOCAL_WORLD_SIZE": "2"}, 1, id="torchrun"),
        pytest.param({"GROUP_RANK": "1", "NODE_RANK": "0"}, 1, id="torchrun, and the shell's"),
        pytest.param({"GROUP_RANK": "0", "RANK": "1", **SECOND_TASK}, 0, id="torchrun in srun"),
        pytest.param({"NODE_RANK": "1", "RANK": "2"}, 1, id="Composer's"),
        pytest.param({"NODE_RANK": "0", "RANK": "1", **SECOND_TASK}, 0, id="Composer's in srun"),
        pytest.param({"RANK": "1", "LOCAL_WORLD_SIZE": "2", **SECOND_TASK}, 1, id="srun, cyclic"),
        pytest.param({"RANK": "5", "LOCAL_WORLD_SIZE": "4"}, 1, id="another one"),
        pytest.param({"RANK": "3", "LOCAL_WORLD_SIZE": "2", **SECOND_TASK}, 1, id="one in srun"),
    ],
)
def test_node_rank(environment: dict[str, str], node: int, monkeypatch: pytest.MonkeyPatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with installed():
        assert dist.get_node_rank() == node

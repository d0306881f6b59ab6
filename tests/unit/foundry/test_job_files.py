"""Files of the platform, which hold a run under `parameters`."""

from __future__ import annotations

import pytest

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry.run_file import read_parallelism, read_run, read_yaml
from composer_fsdp2.tools.migrate.engine import migrate

JOB = """\
name: nightly
compute: {gpus: 16}
parameters:
  size: 8
  model: {name: mpt_causal_lm, d_model: "${size}"}
  fsdp_config:
    sharding_strategy: SHARD_GRAD_OP
"""


@pytest.fixture
def job(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(migrate(JOB).text)
    return file


def test_the_run_inside_is_the_run(job):
    assert read_yaml(job).model.d_model == 8
    settings = read_parallelism(read_run(job, ["parallelism_config.fsdp2.verbose=true"]))
    assert settings["fsdp_config"]["reshard_after_forward"] is False
    assert settings["fsdp_config"]["verbose"] is True


def test_a_run_with_parameters_of_its_own_is_a_run(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {name: a}\nparameters: {x: 1}\n")
    assert "model" in read_yaml(file)


def test_training_from_a_job_file_is_refused(job):
    with pytest.raises(ConfigError, match="is a job file: its run stands under 'parameters'"):
        read_run(job, [], jobs=False)

"""Top-level keys of a run: found before LLM Foundry is imported, where nobody could take them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_fsdp2.cli import main
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.foundry import run_keys
from composer_fsdp2.foundry.run_file import read_run
from composer_fsdp2.foundry.run_keys import check_keys, known_keys

pytest.importorskip("llmfoundry", reason="needs the extra foundry")
ROOT = Path(__file__).parents[3]
TRANSFORM = (
    "from llmfoundry import registry\nregistry.config_transforms.register('a', func=print)\n"
)
RUN = "parallelism_config: {fsdp2: {}}\nmax_duration: 1ba\n"


@pytest.fixture
def check(write):
    return lambda text, command="train": check_keys(read_run(write(text), []), command)


def test_they_are_those_of_llm_foundry():
    from llmfoundry.utils.config_utils import EVAL_CONFIG_KEYS, TRAIN_CONFIG_KEYS

    assert known_keys("train") == {*TRAIN_CONFIG_KEYS, "parallelism_config"}
    assert known_keys("eval") - set(EVAL_CONFIG_KEYS) == {
        *("parallelism_config", "model", "tokenizer", "model_name", "load_path")
    }


@pytest.mark.parametrize("command", ["train", "eval"])
def test_evaluation_takes_keys_of_training(check, command):
    refused = [] if command == "eval" else ["model_name"]
    for key in ("model", "tokenizer", "load_path", "model_name"):
        text = f"{RUN if command == 'train' else ''}{key}: 1"
        if key in refused:
            with pytest.raises(ConfigError):
                check(text, command)
        else:
            assert check(text, command) is None


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("optimiser: {}", ("'optimiser' is not a key", "Did you mean 'optimizer'?", "`variables`")),
        ("max_duratoin: 1ba", ("Did you mean 'max_duration'?",)),
        ("fsdp2: {}", ("parallelism_config: {fsdp2: ...}",)),
        ("my_own: 3", ("'my_own' is not a key of LLM Foundry's training. It would stop the run.",)),
        ("1: 3", ("is not a key",)),
        ("a1: 1\na2: 1\na3: 1\na4: 1\na5: 1\na6: 1\na7: 1", ("2 more are none either.",)),
    ],
)
def test_a_misspelt_key_is_refused(check, line, parts):
    with pytest.raises(ConfigError) as caught:
        check(RUN + line)
    for part in parts:
        assert part in str(caught.value)


def test_of_an_override(write):
    with pytest.raises(ConfigError, match=r"'optimiser' is not a key.* Did you mean 'optimizer'"):
        check_keys(read_run(write(RUN), ["optimiser.lr=1"]), "train")


def test_variables_are_the_users(check):
    assert check(f"{RUN}variables: {{anything: 1}}") is None


def test_the_runs_of_this_repository_pass():
    files = [*ROOT.glob("yamls/*.yaml"), *ROOT.glob("yamls/*/*.yaml")]
    assert len(files) >= 10
    for file in files:
        assert check_keys(read_run(file, []), "train") is None


@pytest.mark.parametrize("file", ["quickstart_data.py", "complete/small_data.py", "towers.py"])
def test_code_that_does_not_name_a_misspelt_key_does_not_take_it(check, file):
    path = next((ROOT / "yamls").rglob(Path(file).name))
    with pytest.raises(ConfigError, match="Did you mean 'optimizer'"):
        check(f"{RUN}optimiser: {{}}\ncode_paths: ['{path}']")


def test_what_may_be_no_misspelling_is_left_to_the_run(check, tmp_path):
    """The key that is meant is there already, or none is like it."""
    code = tmp_path / "own.py"
    code.write_text(TRANSFORM)
    for line in ("optimiser: {}\noptimizer: {}", "my_own: 1"):
        assert "unless" in check(f"{RUN}{line}\ncode_paths: ['{code}']")


def test_a_key_that_code_names_is_left_to_the_run(check, tmp_path):
    code = tmp_path / "own.py"
    for use in ("cfg.pop('optimiser')", "cfg['optimiser']", "dict(optimiser=1)"):
        code.write_text(f"{TRANSFORM}\ndef f(cfg):\n    {use}\n")
        assert "unless" in check(f"{RUN}optimiser: {{}}\ncode_paths: ['{code}']")


def test_code_that_registers_no_transform_takes_no_key(check, tmp_path):
    code = tmp_path / "own.py"
    code.write_text("import torch\ndef f(model):\n    return model.eval()\n")
    with pytest.raises(ConfigError, match="'my_own' is not a key"):
        check(f"{RUN}my_own: 1\ncode_paths: ['{code}']")


@pytest.mark.parametrize(
    "code",
    [
        "import my_company.everything",
        "from . import neighbour",
        "def later():\n    import my_company",
        "import importlib\nimportlib.import_module('a' + 'b')",
        "from llmfoundry.utils.registry_utils import import_file",
        "exec(open('a').read())",
        "this is no python",
    ],
)
def test_code_that_may_register_one_is_left_to_the_run(check, tmp_path, code):
    (tmp_path / "own.py").write_text(code)
    said = check(f"{RUN}optimiser: {{}}\ncode_paths: ['{tmp_path / 'own.py'}']")
    assert "Did you mean 'optimizer'?" in said
    assert "unless a config transform takes it out" in said


def test_code_that_is_elsewhere_is_left_to_the_run(check):
    assert check(f"{RUN}optimiser: {{}}\ncode_paths: [nowhere.py]") is not None
    for paths in ("${elsewhere:1}", "['${elsewhere:1}']", "3", "own.py", "{a: 1}"):
        assert check(f"{RUN}optimiser: {{}}\ncode_paths: {paths}") is not None


def test_a_plugin_that_transforms_is_left_to_the_run(check, monkeypatch):
    entry = importlib.metadata.EntryPoint("x", "other.module:f", "llmfoundry_config_transforms")
    monkeypatch.setattr(run_keys.importlib.metadata, "entry_points", lambda group: [entry])
    assert check(f"{RUN}optimiser: {{}}") is not None
    with pytest.raises(ConfigError, match="evaluation"):
        check("optimiser: {}", "eval")


def test_another_llm_foundry_is_left_to_the_run(check, monkeypatch):
    monkeypatch.setattr(run_keys, "_read_fields", lambda name: [])
    assert check(f"{RUN}optimiser: {{}}") is None


def test_train_says_it_before_anything_is_started(write, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(main, "_launch", lambda *args: pytest.fail(f"ranks started: {args}"))
    result = CliRunner().invoke(main.app, ["train", str(write(f"{RUN}optimiser: {{}}"))])
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert said.startswith("ConfigError: 'optimiser' is not a key of LLM Foundry's training.")


@pytest.mark.matrix
def test_neither_composer_nor_llm_foundry_is_imported(write):
    path = write(f"{RUN}optimiser: {{}}")
    code = (
        "import sys\nfrom composer_fsdp2.cli import main\n"
        f"sys.argv = ['composer-fsdp2', 'train', {str(path)!r}]\n"
        "try:\n    main.main()\nexcept SystemExit as left:\n    assert left.code == 2\n"
        "print([m for m in ('composer', 'llmfoundry', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
    assert "Did you mean 'optimizer'?" in done.stderr

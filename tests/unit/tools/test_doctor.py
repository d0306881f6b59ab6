"""`composer-fsdp2 doctor`: facts to findings, and the command around them."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from composer.utils.misc import ParallelismType
from typer.testing import CliRunner

from composer_fsdp2 import patches
from composer_fsdp2.cli import main
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.foundry.findings import Finding
from composer_fsdp2.patches import PATCHES, PatchState
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.tools.doctor import (
    LocalGpu,
    Machine,
    RunFacts,
    describe_run,
    examine,
    mesh_of,
    runs_on,
)
from composer_fsdp2.torch_private import members
from composer_fsdp2.torch_private.members import (
    EVERY_RUN,
    PRIVATE_MEMBERS,
    MemberState,
    PrivateMember,
)

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "yamls" / "quickstart.yaml")
NEEDED = [row for row in PATCHES if row.needed()]

# --- Facts to findings. Nothing is wrong with these two. ---

FITS = PatchState(
    target="composer.a:b",
    feature="core",
    why="does a thing",
    upstream="https://github.com/mosaicml/composer/blob/v0.32.1/composer/a.py#L1",
    versions="mosaicml 0.32.1",
    state="fits",
)
MACHINE = Machine(
    versions={"torch": "2.7.0", "mosaicml": "0.32.1", "llm-foundry": "0.22.0"}, patches=(FITS,)
)
RUN = RunFacts(
    asks="FSDP2", settings=parse_config({}), ranks=8, ranks_per_node=8, on_gpus=True, others={}
)
HSDP = {"data_parallel_shard_degree": 8, "data_parallel_replicate_degree": -1}


def machine(**changes: Any) -> Machine:
    return dataclasses.replace(MACHINE, **changes)


def run(fsdp2: dict[str, Any] | None = None, **changes: Any) -> RunFacts:
    """The good run, with FSDP2 settings and other facts; keys with dots are those of `others`."""
    others = {key: value for key, value in changes.items() if key not in RunFacts.__slots__}
    facts = {key: value for key, value in changes.items() if key in RunFacts.__slots__}
    settings = parse_config(fsdp2 or {})
    return dataclasses.replace(RUN, settings=settings, written=fsdp2 or {}, others=others, **facts)


def fsdp1(**changes: Any) -> RunFacts:
    return dataclasses.replace(run(**changes), asks="FSDP1", settings=None)


CPU = {"on_gpus": False, "precision": "fp32", "ranks": 2, "ranks_per_node": 2}
TWO_NODES = {"ranks": 16}
MISFIT = dataclasses.replace(FITS, state="does not fit", problem="The source differs.")
GONE = MemberState(PrivateMember("torch.a:Unit", "_gone", EVERY_RUN, "read"), found=False)
FP8_GONE = MemberState(PrivateMember("torch.a:Unit", "_cast", "fp8", "reset"), found=False)
OFF = dataclasses.replace(MISFIT, state="switched off", feature="SWA")
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2"}
SWITCHED = {"FSDP_VERSION": "2"}

# What is said -> (machine, run, level, part of what it says, part of what to do).
CASES: dict[str, tuple[Machine, RunFacts | None, str, str, str]] = {
    "patch": (machine(patches=(FITS, MISFIT)), None, "problem", "1 of 2", "mosaicml 0.32.1"),
    "feature": (machine(patches=(FITS, OFF)), None, "warning", "SWA", "mosaicml 0.32.1"),
    "version": (
        machine(versions={**MACHINE.versions, "mosaicml": "0.33.0"}),
        None,
        "warning",
        "mosaicml 0.33.0 is not a version",
        "Install mosaicml 0.32.1",
    ),
    "private member": (
        machine(members=(GONE,)),
        None,
        "problem",
        "torch 2.7.0 has no Unit._gone. Runs with FSDP2 stop",
        "Install a torch",
    ),
    "private member of a feature": (
        machine(members=(FP8_GONE,)),
        None,
        "warning",
        "Runs with fp8 stop",
        "leave fp8 out",
    ),
    "launched": (
        machine(environment=LAUNCHED),
        None,
        "warning",
        "takes itself for one rank",
        "unset RANK WORLD_SIZE",
    ),
    "switch": (machine(environment=SWITCHED), None, "warning", "FSDP_VERSION=2", "unset"),
    "interface": (
        machine(environment={"GLOO_SOCKET_IFNAME": "eth"}, interfaces=("lo", "eth0")),
        None,
        "warning",
        "GLOO_SOCKET_IFNAME is eth, and the interfaces of this machine are lo, eth0",
        "the interface that the nodes share",
    ),
    "interface of NCCL": (
        machine(environment={"NCCL_SOCKET_IFNAME": "=eth"}, interfaces=("lo", "eth0")),
        None,
        "warning",
        "NCCL_SOCKET_IFNAME is =eth",
        "`ip address`",
    ),
    "open files": (
        machine(open_files=256),
        run({**HSDP, "async_save": True}, ranks=512),
        "warning",
        "each of 512 ranks has about 284 open",
        "ulimit -n 65536",
    ),
    "no copy engines": (
        machine(nccl=(2, 30, 7)),
        run({"communication": {"symmetric_memory": True}}),
        "warning",
        "NCCL_CTA_POLICY is not 2",
        "export NCCL_CTA_POLICY=2",
    ),
    "no symmetric memory": (
        machine(nccl=(2, 30, 7), environment={"NCCL_CTA_POLICY": "2", "NCCL_WIN_ENABLE": "0"}),
        run({"communication": {"symmetric_memory": True}}),
        "problem",
        "NCCL_WIN_ENABLE=0 takes the registration of windows away",
        "unset NCCL_WIN_ENABLE",
    ),
    "tensor groups over nodes": (
        MACHINE,
        run({"tensor_parallel": 16}, **TWO_NODES),
        "warning",
        "groups of 16 ranks do not fit into nodes of 8: every divided layer exchanges",
        "Use one of 2, 4, 8.",
    ),
    "tensor groups and ranks": (
        MACHINE,
        run({"tensor_parallel": 3}),
        "problem",
        "tensor_parallel.degree is 3, which does not divide the world size 8",
        "Use one of 1, 2, 4, 8.",
    ),
    "neither": (
        MACHINE,
        dataclasses.replace(run(), asks="neither", settings=None),
        "warning",
        "FSDP2 is not asked for",
        "parallelism_config: {fsdp2: {}}",
    ),
    "FSDP1": (MACHINE, fsdp1(path="a.yaml"), "warning", "FSDP1's", "migrate a.yaml -o NEW.yaml"),
    "FSDP1 without a GPU": (
        MACHINE,
        fsdp1(path="a.yaml", **CPU),
        "problem",
        "there is no GPU",
        "migrate a.yaml -o NEW.yaml",
    ),
    "one rank": (MACHINE, run(ranks=1), "warning", "nobody to share with", "--ranks 2"),
    "degrees": (
        MACHINE,
        run({"data_parallel_replicate_degree": 3}),
        "problem",
        "does not multiply to the world size 8",
        "Set degrees whose product is 8",
    ),
    "reshard": (
        MACHINE,
        run({"reshard_after_forward": 3}),
        "problem",
        "does not divide the shard degree 8",
        "Use one of 1, 2, 4, 8",
    ),
    "reshard in a node": (
        MACHINE,
        run({"reshard_after_forward": 2}),
        "warning",
        "keeps 1/2 of the parameters between forward and backward instead of 1/8",
        "Write auto",
    ),
    "over nodes": (
        MACHINE,
        run(**TWO_NODES),
        "warning",
        "The 16 ranks of one replica are on more than one node",
        "data_parallel_shard_degree: 8 and data_parallel_replicate_degree: -1. "
        "Or reshard_after_forward: 8",
    ),
    "over thousands": (
        MACHINE,
        run(ranks=16384, units=34),
        "warning",
        "To prepare 34 units over 16,384 shard ranks takes torch 2.7 about 59.6 CPU seconds on "
        "each rank, over 64 ranks 0.1.",
        "data_parallel_shard_degree: 8 and data_parallel_replicate_degree: -1",
    ),
    "mixed": (
        MACHINE,
        dataclasses.replace(run(**{"model.init_device": "mixed"}), builds_on_meta=True),
        "warning",
        "rank 0 holds the whole model",
        "init_device: meta",
    ),
    "asynchronous and full": (
        MACHINE,
        run({"async_save": True, "state_dict_type": "full"}),
        "warning",
        "training waits until rank 0 has gathered",
        "state_dict_type: sharded",
    ),
    "full on many": (
        MACHINE,
        run({**HSDP, "state_dict_type": "full"}, **TWO_NODES),
        "warning",
        "full on 16 ranks",
        "checkpoint convert",
    ),
}


@pytest.mark.parametrize("written", ["eth", "^docker", "=eth0", "ib,eth"])
def test_interfaces_that_nccl_finds(written: str):
    here = machine(environment={"NCCL_SOCKET_IFNAME": written}, interfaces=("lo", "eth0"))
    assert examine(here, RUN) == []


CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")


@pytest.mark.parametrize(
    ("capability", "built_for", "expected"),
    [
        ((8, 9), CU126, True),
        ((9, 0), CU126, True),
        ((10, 0), CU126, False),
        ((12, 0), (*CU126, "sm_120", "compute_120"), True),
        ((12, 1), ("sm_75", "compute_75"), True),
        ((7, 0), ("sm_75", "compute_75"), False),
        ((10, 3), ("sm_90a", "sm_100a"), True),
        ((9, 0), ("gfx90a",), True),  # ROCm counts in another way
        ((9, 0), (), True),
    ],
)
def test_architectures_that_torch_has_code_for(capability, built_for, expected: bool):
    assert runs_on(capability, built_for) == expected


@pytest.mark.parametrize(
    ("capability", "cuda"), [((10, 0), "12.8 or newer"), ((7, 0), "12.6 or older")]
)
def test_a_gpu_without_kernels_is_a_problem(capability, cuda: str):
    gpus = (LocalGpu("B200", 2**37, capability),) * 8
    here = machine(versions={**MACHINE.versions, "torch": "2.7.0+cu118"}, gpus=gpus)
    (found,) = examine(dataclasses.replace(here, built_for=("sm_80", "sm_90")), None)
    assert found.level == "problem"
    assert "torch 2.7.0+cu118 was compiled for sm_80, sm_90. The first kernel" in found.what
    assert f"built with CUDA {cuda}." in found.advice
    assert examine(here, None) == []


def test_a_good_run_gives_no_findings():
    assert examine(MACHINE, RUN) == []
    assert examine(MACHINE, None) == []
    assert examine(MACHINE, run(**CPU)) == []
    assert examine(MACHINE, run({**HSDP, "reshard_after_forward": 4}, **TWO_NODES)) == []


@pytest.mark.table(
    "feature",
    "version",
    "private member of a feature",
    "switch",
    "tensor groups over nodes",
    "one rank",
    "reshard in a node",
    "mixed",
    "asynchronous and full",
    "full on many",
)
@pytest.mark.parametrize("case", CASES)
def test_a_finding(case: str):
    on, asked, level, what, advice = CASES[case]
    (found,) = examine(on, asked)
    assert found.level == level
    assert what in found.what
    assert advice in found.advice


def said(on: Machine, asked: RunFacts | None) -> list[tuple[str, str]]:
    return [(found.level, found.what) for found in examine(on, asked)]


def test_problems_come_first():
    found = said(machine(environment=LAUNCHED), run({"tensor_parallel": 3}))
    assert [level for level, _ in found] == ["problem", "warning"]


@pytest.mark.parametrize(
    ("others", "shown"),
    [({}, "precision is amp_bf16, LLM Foundry's default,"), ({"precision": "amp_fp16"}, "16, and")],
)
def test_low_precision_on_the_cpu(others: dict[str, str], shown: str):
    asked = run(ranks=2, ranks_per_node=2, on_gpus=False, **others)
    ((level, what),) = said(MACHINE, asked)
    assert level == "problem"
    assert shown in what


def test_composers_switch_with_fsdp1_settings():
    texts = " ".join(what for _, what in said(machine(environment=SWITCHED), fsdp1()))
    assert "go to Composer's own FSDP2, which ignores sharding_strategy" in texts
    assert examine(machine(environment=SWITCHED), RUN) == []


@pytest.mark.parametrize(
    ("fsdp2", "per_node", "expected"),
    [
        ({"data_parallel_shard_degree": 16}, 8, 1),
        ({"reshard_after_forward": 8}, 8, 1),
        ({"reshard_after_forward": 16}, 8, 2),
        ({"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": -1}, 2, 1),
        ({"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": -1}, 2, 0),
    ],
)
def test_groups_that_cross_nodes(fsdp2: dict[str, Any], per_node: int, expected: int):
    found = examine(MACHINE, run(fsdp2, ranks=16, ranks_per_node=per_node))
    assert len([f for f in found if "network" in f.what]) == expected


# --- The run in words. ---


def test_axis_names_are_composers():
    text = dict(describe_run(run(HSDP, **TWO_NODES)))["mesh"]
    shard, replicate = ParallelismType.DATA_PARALLEL_SHARD, ParallelismType.DATA_PARALLEL_REPLICATE
    assert text == f"{replicate.value} 2 x {shard.value} 8"


@pytest.mark.parametrize(
    ("degrees", "groups"),
    [
        ((8, None), "each replica on 8 ranks: 0-7"),
        ((2, 4), "each replica on 2 ranks: 0-1, 2-3, 4-5, 6-7"),
        ((1, 8), "each replica on 1 rank: 0, 1, 2, 3, ..."),
    ],
)
def test_ranks_of_a_copy(degrees: tuple[int, int | None], groups: str):
    names = ("data_parallel_shard_degree", "data_parallel_replicate_degree")
    asked = run(dict(zip(names, degrees, strict=True)))
    assert groups in [text for _, text in describe_run(asked)]
    assert mesh_of(asked) == MeshShape(shard=degrees[0], replicate=degrees[1])


def test_precision_and_settings_in_words():
    settings = {
        "mixed_precision": "PURE",
        "reshard_after_forward": 2,
        "activation_checkpointing": True,
        "wrap_policy": {"classes": ["Block"]},
    }
    # The config transform writes more than the file holds.
    written = {**settings, "version": 2, "load_monolith_rank0_only": False}
    lines = dict(describe_run(dataclasses.replace(run(settings), written=written)))
    assert "computes in bfloat16, reduces gradients in bfloat16" in lines["precision"]
    assert lines["reshard"] == "2: after forward, groups of 2 ranks keep one copy"
    assert lines["activation_checkpointing"] == "true"
    assert lines["wrap_policy"] == "{classes: ['Block']}"
    assert not {"async_save", "load_monolith_rank0_only", "version"} & lines.keys()


def test_what_does_not_work_out_is_still_described():
    lines = dict(describe_run(run({"data_parallel_replicate_degree": 3}, precision="amp_int4")))
    assert lines["mesh"] == "none fits the ranks"
    assert lines["precision"] == "amp_int4: not supported"
    assert mesh_of(fsdp1()) is None


def test_defaults_are_those_of_llm_foundry():
    config_utils = pytest.importorskip(
        "llmfoundry.utils.config_utils", reason="needs the extra foundry"
    )
    default = config_utils.TrainConfig.__dataclass_fields__["precision"].default
    assert RUN.value("precision") == default


# --- The command. ---


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of the quickstart, which writes its data as soon as it is looked at."""
    folder = tmp_path_factory.mktemp("quickstart")
    return [f"variables.folder={folder}", "variables.text.megabytes=0.1"]


@pytest.fixture
def doctor(monkeypatch, small: list[str]):
    for name in ("RANK", "WORLD_SIZE", "FSDP_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)

    def run(*args: object):
        given = [*map(str, args), *(small if QUICKSTART in args else [])]
        return CliRunner().invoke(main.app, ["doctor", *given])

    return run


def test_shows_versions_and_patches(doctor):
    result = doctor("--verbose")
    assert result.exit_code == 0, result.output
    for name in ("python 3", "composer-fsdp2 ", "torch 2", "mosaicml 0", "GPUs ", "backend gloo"):
        assert name in result.stdout
    for point in NEEDED:
        assert f"{point.target}\n  fits, not installed\n  because it {point.why}" in result.stdout
    text = " ".join(result.stdout.split())
    for member in PRIVATE_MEMBERS:
        assert member.title in text
    assert "MISSING" not in text


def test_a_private_member_that_is_gone(doctor, monkeypatch):
    monkeypatch.setattr(members, "PRIVATE_MEMBERS", (GONE.member, PRIVATE_MEMBERS[0]))
    result = doctor(QUICKSTART, "--gpus-per-node", 8)
    assert result.exit_code == 1
    assert "Unit._gone (MISSING)" in result.stdout
    assert PRIVATE_MEMBERS[0].title not in result.stdout
    assert "problem: torch" in result.stdout


def test_shows_what_a_run_does(doctor):
    given = ("--ranks", 4, "--gpus-per-node", 2, "precision=amp_bf16", "--verbose")
    result = doctor(QUICKSTART, *given)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert f"{len(NEEDED)} of {len(NEEDED)} places in Composer fit" in text
    assert f"{len(PRIVATE_MEMBERS)} of {len(PRIVATE_MEMBERS)} internals" in text
    assert "asks for FSDP2 ranks 4 on 2 nodes, on GPUs mesh data_parallel_shard 4" in text
    assert "init_device cpu" in text
    assert "warning: The 4 ranks of one replica are on more than one node" in text
    run = result.stdout.partition("Replaced in Composer")[0]
    assert max(map(len, run.splitlines())) <= 100


@pytest.mark.matrix
def test_a_screen_is_enough_and_problems_come_first(doctor):
    mistakes = ("precision=amp_bf16", "global_train_batch_size=15", "nonsense=1")
    for given in ((), mistakes):
        lines = doctor(QUICKSTART, *given).stdout.splitlines()
        assert len(lines) <= 20
    assert lines[0].startswith("3 problems")
    assert lines[1].startswith("problem: ")
    levels = [line.partition(":")[0] for line in lines if re.match("problem: |warning: ", line)]
    assert levels == sorted(levels)
    assert lines.index("The run:") > max(n for n, line in enumerate(lines) if "  do: " in line)
    assert any("more lines about the run with --verbose" in line for line in lines)
    assert PATCHES[0].target not in "".join(lines)


def test_what_going_through_the_run_finds_again_is_said_once(doctor):
    wrong = "parallelism_config.fsdp2.data_parallel_shard_degree=3"
    said = " ".join(doctor(QUICKSTART, "-n", 4, wrong).stdout.split())
    assert said.count("does not multiply to the world size") == 1


def test_colours_only_on_a_terminal(doctor):
    assert "\x1b" not in doctor().stdout


def test_a_problem_is_exit_code_1(doctor):
    result = doctor(QUICKSTART, "-n", 4, "parallelism_config.fsdp2.data_parallel_shard_degree=3")
    assert result.exit_code == 1
    assert "problem: data_parallel_shard_degree 3 x" in result.stdout


def test_a_patch_that_does_not_fit(doctor, monkeypatch):
    row = dataclasses.replace(PATCHES[0], fingerprints=frozenset({"0" * 16}))
    monkeypatch.setattr(patches, "PATCHES", (row, PATCHES[1]))
    result = doctor(QUICKSTART, "--gpus-per-node", 8)
    assert result.exit_code == 1
    assert f"{row.target}\n  cannot be installed: " in result.stdout
    assert PATCHES[1].target not in result.stdout
    assert "problem: 1 of 2 places in Composer" in result.stdout


def test_a_missing_module(doctor, monkeypatch):
    monkeypatch.setitem(sys.modules, "pkg_resources", None)
    result = doctor(QUICKSTART, "--gpus-per-node", 8)
    assert result.exit_code == 1
    assert "'pkg_resources' is missing" in result.stdout


@pytest.mark.matrix
def test_the_environment(doctor, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "FSDP_VERSION": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "ranks            4 on " in doctor(QUICKSTART).stdout
    result = doctor()
    assert result.exit_code == 0
    assert "RANK and WORLD_SIZE are set" in result.stdout
    assert "FSDP_VERSION=2 is set" in result.stdout


BAD: dict[str, tuple[str, list[str]]] = {
    "empty": ("", []),
    "no YAML": ("a: [1, 2", []),
    "unknown key": ("parallelism_config: {fsdp2: {reshard_after_forwrd: true}}", []),
    "both": ("parallelism_config: {fsdp: {verbose: true}, fsdp2: {}}", []),
    "wrong override": ("parallelism_config: {fsdp2: {}}", ["parallelism_config.fsdp2.verbose=3"]),
    "interpolation": ("parallelism_config: {fsdp2: {verbose: '${nowhere}'}}", []),
    "several": ("parallelism_config: {fsdp2: {verbose: 3, state_dict_type: x}}", []),
    "degree": ("parallelism_config: {fsdp2: {data_parallel_shard_degree: 0}}", []),
    "tensor parallelism": ("parallelism_config: {fsdp2: {}, tp: {strategy: ffn}}", []),
    "another trainer's": ("distributed_type: FSDP\nnum_processes: 8\nmachine_rank: 0", []),
    "cannot be applied": ("a: 1", ["a=[1, 2"]),
}


@pytest.mark.table("interpolation", "degree")
@pytest.mark.parametrize("case", BAD)
def test_a_bad_config_is_found_for_what_train_says(doctor, write, case: str):
    """Exit code 1 as of whatever else would make the run fail."""
    pytest.importorskip("llmfoundry", reason="needs the extra foundry")
    text, overrides = BAD[case]
    path = write(text)
    result = doctor(path, *overrides, "--json")
    trained = CliRunner().invoke(main.app, ["train", str(path), *overrides, "--no-check"])
    assert (result.exit_code, trained.exit_code) == (1, 2)
    found = json.loads(result.stdout)["findings"]
    problems = [f"{one['what']} {one['advice']}" for one in found if one["level"] == "problem"]
    said = " ".join(trained.stderr.split())
    # doctor goes on to all other keys, which these files lack.
    assert sum(problem in said for problem in problems) == (2 if case == "several" else 1)
    in_words = doctor(path, *overrides)
    assert in_words.exit_code == 1
    assert "problem: " in in_words.stdout
    assert "mosaicml " in in_words.stdout  # a bug report has the versions all the same


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_a_file_that_cannot_be_read(doctor):
    result = doctor("/proc/self/mem")
    assert result.exit_code == 1
    assert "'/proc/self/mem' cannot be read" in " ".join(result.stdout.split())


@pytest.mark.matrix
def test_a_resolver_of_code_paths(doctor, tmp_path):
    """A setting that only a file of the run can resolve is no mistake."""
    code = tmp_path / "later.py"
    code.write_text(
        "from omegaconf import OmegaConf\n"
        "OmegaConf.register_new_resolver('later', lambda number: number, replace=True)\n"
    )
    later = ("seed=${later:17}", "--gpus-per-node", 8)
    assert "Unsupported interpolation type later" in doctor(QUICKSTART, *later).stdout
    paths = f"code_paths=[yamls/quickstart_data.py,{code}]"
    result = doctor(QUICKSTART, *later, paths)
    assert result.exit_code == 0, result.output


@pytest.mark.table("options0-without CONFIG", "options1-12 ranks do not fill nodes of 8 GPUs")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "2"], "without CONFIG"),
        ([QUICKSTART, "-n", "12", "--gpus-per-node", "8"], "12 ranks do not fill nodes of 8 GPUs"),
        (["nowhere.yaml"], "no file 'nowhere.yaml'"),
        ([QUICKSTART, "max_duration"], "'max_duration' is not an override"),
    ],
)
def test_options_that_cannot_be(doctor, options: list[str], message: str):
    result = doctor(*options)
    assert result.exit_code == 2
    assert json.loads(doctor(*options, "--json").stdout)["error"] in result.stderr
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("fsdp2", "ranks", "lines"),
    [
        (
            {"tensor_parallel": 8, "data_parallel_replicate_degree": 2},
            64,
            [
                "mesh             dp_replicate 2 x dp_shard 4 x tp 8",
                "each layer on 8 ranks: 0-7, 8-15, 16-23, 24-31, ...",
                "each replica on 32 ranks: 0-31, 32-63",
            ],
        ),
        ({"tensor_parallel": 2}, 4, ["dp_shard 2 x tp 2", "each layer on 2 ranks: 0-1, 2-3"]),
    ],
)
def test_the_mesh_of_tensor_groups_is_drawn(fsdp2: dict[str, Any], ranks: int, lines: list[str]):
    asked = run(fsdp2, ranks=ranks, ranks_per_node=min(ranks, 8))
    shown = [f"{label:16} {text}" for label, text in describe_run(asked)]
    for line in lines:
        assert any(line in text for text in shown), shown


def test_json(doctor):
    result = doctor(QUICKSTART, "--json", "-n", 16, "--gpus-per-node", 8)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["error"] is None
    assert document["machine"]["versions"]["mosaicml"]
    assert len(document["machine"]["patches"]) == len(NEEDED)
    assert len(document["machine"]["members"]) == len(PRIVATE_MEMBERS)
    assert document["run"]["mesh"] == {"shard": 16, "replicate": None, "tensor": 1}
    assert document["run"]["settings"]["state_dict_type"] == "sharded"
    assert (document["run"]["nodes"], document["run"]["backend"]) == (2, "nccl")
    levels = {Finding(**found).level for found in document["findings"]}
    assert levels == {"warning"}


def test_json_of_a_bad_config(doctor, write):
    result = doctor(write("parallelism_config: 3"), "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["error"] is None
    assert any("takes a mapping" in found["what"] for found in document["findings"])

"""Private members of torch: named in one place only, and looked up before they are needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2 import PatchError
from composer_fsdp2.shard.torch_private import members
from composer_fsdp2.shard.torch_private.members import (
    EVERY_RUN,
    PRIVATE_MEMBERS,
    PrivateMember,
    check_private_members,
    member_states,
)

ROOT = Path(__file__).parents[3] / "composer_fsdp2"
ONLY_PLACE = ROOT / "shard" / "torch_private"
ELSEWHERE = sorted(file for file in ROOT.rglob("*.py") if ONLY_PLACE not in file.parents)

ANYWHERE = {"_buffers", "_modules", "_parameters", "_version"}
"""See [Note: private members]."""

NOT_TORCHS = {
    # Composer
    *("_activation_checkpointing", "_apply_fsdp", "_ensure_valid_checkpoint", "_fsdp_wrap"),
    "_save_checkpoint",
    *("_format_path_with_rank_zero", "_get_integrations_state_dict", "_get_local_rank_zero_path"),
    *("_get_num_ranks_that_saved_rng", "_get_state_metadata", "_original_model"),
    *("_train_data_spec", "_use_grad_scaling", "_write_checkpoint_file"),
    # transformers
    *("_init_weights", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    *("_keys_to_ignore_on_load_unexpected", "_no_split_modules"),
    "_prepare_encoder_decoder_kwargs_for_generation",
    # torchao, Python
    *("_precomputed_scale", "_exit", "_getframe"),
}

OURS = {"_enter", "_places"}
"""Fields that a file reads of a class in the file beside it."""

WITHOUT_UNDERSCORE = {
    *("all_reduce_grads", "comm_ctx", "device_handle", "finalize_backward", "fsdp_params"),
    *("is_unsharded", "mesh_info", "post_backward", "post_forward_mesh_info", "reduce_grads"),
    *("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed", "unsharded_param"),
    *("unsharded_accumulated_grad", "queue_callback"),
}
"""Members of classes that are private as a whole."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_names(tree: ast.Module) -> set[str]:
    """Attributes that the file itself defines: methods, fields, and what it sets on `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(inner.name)
                elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    found.add(inner.target.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{node.attr}":
            found.update({node.attr} if isinstance(node.ctx, ast.Store) else ())
    return found


def violations(source: str) -> Iterator[str]:
    """Uses of private members of torch in a file's source, with their lines."""
    tree = ast.parse(source)
    known = _own_names(tree) | ANYWHERE | NOT_TORCHS | OURS
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            private = _is_private(node.attr) and node.attr not in known
            names = [node.attr] * (private or node.attr in WITHOUT_UNDERSCORE)
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if _is_private_module(a.name)]
        elif isinstance(node, ast.ImportFrom):
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            names = [name for name in full if _is_private_module(name)]
        elif isinstance(node, ast.Call):
            names = [text for text in _texts(node) if _is_private(text) and text not in known]
            names += [text for text in _texts(node) if _is_private_module(text)]
        yield from (f"line {node.lineno}: {name}" for name in names)  # type: ignore[attr-defined]


def _is_private_module(name: str) -> bool:
    first, *others = name.split(".")
    return first == "torch" and any(map(_is_private, others))


def _texts(call: ast.Call) -> list[str]:
    """What `getattr` and its kind, or `import_module`, are given as text."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in {"attrgetter", "delattr", "getattr", "hasattr", "import_module", "setattr"}:
        return []
    return [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]


@pytest.mark.parametrize("file", ELSEWHERE, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_private_members_are_named_in_one_place(file: Path):
    assert not list(violations(file.read_text()))


@pytest.mark.parametrize(
    ("line", "found"),
    {
        "attribute": ("unit._get_fsdp_state()", "_get_fsdp_state"),
        "assigned": ("group._with_fqn = hear", "_with_fqn"),
        "text": ("getattr(param, '_unsharded_param', None)", "_unsharded_param"),
        "of C": ("torch._C.thing()", "_C"),
        "import": ("import torch._dynamo", "torch._dynamo"),
        "name": ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        "private name": ("from torch.nn.f import _Norm", "torch.nn.f._Norm"),
        "imported late": ("import_module('torch._inductor')", "torch._inductor"),
        "without underscore": ("group.post_backward = around", "post_backward"),
    }.values(),
)
def test_a_violation_is_found(line: str, found: str):
    assert list(violations(f"import torch\n{line}\n")) == [f"line 2: {found}"]


def test_what_is_ours_or_everybodys_is_none():
    good = """
class Watch:
    _count: int

    def __init__(self, other):
        self._seen = other._count + other._seen
        self._look(other.__class__, other._version)

    def _look(self, kind, module):
        return module._parameters, getattr(kind, "name"), trainer._original_model
"""
    assert not list(violations(good))


# --- Whether this torch has them. ---


@pytest.fixture(autouse=True)
def _looks_anew() -> Iterator[None]:
    members._is_there.cache_clear()
    members._set_by_methods.cache_clear()
    yield
    members._is_there.cache_clear()
    members._set_by_methods.cache_clear()


def test_this_torch_has_all():
    assert not [state.member for state in member_states() if not state.found]
    check_private_members({member.feature for member in PRIVATE_MEMBERS})


def row(name: str, feature: str) -> PrivateMember:
    rows = [m for m in PRIVATE_MEMBERS if m.name == name and m.feature == feature]
    return rows[0]


def owner_of(member: PrivateMember) -> type:
    module, _, name = member.owner.partition(":")
    return getattr(sys.modules[module], name)


def test_one_of_every_run_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(FSDPModule, "_get_fsdp_state")
    with pytest.raises(PatchError) as caught:
        check_private_members()
    text = str(caught.value)
    assert f"torch {torch.__version__} has no 'FSDPModule._get_fsdp_state'" in text
    assert f"{EVERY_RUN} cannot work without it" in text
    assert "Install a torch" in text
    assert "leave" not in text


def test_one_of_a_feature_is_missed_by_that_feature_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(owner_of(row("_init_extensions", "fp8")), "_init_extensions")
    check_private_members(["unused_parameters"])
    with pytest.raises(PatchError, match=r"FSDPParam._init_extensions.*or leave fp8 out"):
        check_private_members(["fp8"])


def test_one_that_only_methods_set_is_missed(monkeypatch: pytest.MonkeyPatch):
    """Attributes of instances: the method that sets this one is another one now."""
    member = row("_partial_reduce_output", "gradient_sync")
    owner = owner_of(member)

    def renamed(self: object) -> None:
        self._partial_output = None  # type: ignore[attr-defined]

    setters = [n for n, f in vars(owner).items() if _sets(f, member.name)]
    assert "__init__" in setters
    for name in setters:
        monkeypatch.setattr(owner, name, renamed)
    with pytest.raises(PatchError, match=r"FSDPParamGroup._partial_reduce_output"):
        check_private_members(["gradient_sync"])


def _sets(value: object, name: str) -> bool:
    code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
    return code is not None and name in code.co_names


def test_one_that_can_no_longer_be_set_is_missed(monkeypatch: pytest.MonkeyPatch):
    member = row("post_forward_mesh_info", "eval_reshard_after_forward")
    monkeypatch.setattr(owner_of(member), member.name, property(lambda _: None), raising=False)
    with pytest.raises(PatchError, match="or does not let it be set"):
        check_private_members(["eval_reshard_after_forward"])


def test_either_of_two_names_will_do(monkeypatch: pytest.MonkeyPatch):
    there = PrivateMember("torch:Tensor", "_no_such_name|_base", "x", "read")
    monkeypatch.setattr(members, "PRIVATE_MEMBERS", (there,))
    check_private_members(["x"])


def test_looking_costs_little():
    code = (
        "import time; from composer_fsdp2.trainer import prepare as p;"
        "from composer_fsdp2.shard.torch_private.members import check_private_members as check;"
        "start = time.perf_counter(); check(['unused_parameters', 'gradient_sync']);"
        "print(time.perf_counter() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=True, text=True
    )
    assert float(done.stdout) < 0.5

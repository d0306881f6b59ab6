"""Uses of FSDP1 in Python code: what is found, what is not, and what to write instead."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from composer_fsdp2.cli.main import app
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.python_code.files import migrate_code
from composer_fsdp2.tools.migrate.python_code.table import CODE_ROWS, Found, Kind
from composer_fsdp2.tools.migrate.python_code.uses import Source, Unreadable, find_uses
from tests.support.limits import Limit

FSDP = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
CONFIG = "from composer.utils import FSDPConfig\n"
TRAINER = "from composer import Trainer\n"
PREPARE = "from composer.distributed import prepare_fsdp_module\n"
WRAP = "from torch.distributed.fsdp.wrap import "
CLASS, NAMED, CHECKED = "FullyShardedDataParallel", "FSDPConfig (Composer)", "isinstance(..., FSDP)"


def uses(code: str | bytes):
    return find_uses(Source.read(code if isinstance(code, bytes) else code.encode()))


def found(code: str) -> list[str]:
    """What was found with certainty, and with a question mark what is there perhaps."""
    return [use.row.title + ("" if use.certain else "?") for use in uses(code)]


def beside(code: str, *expected: str) -> list[str]:
    """What was found besides what the imports of an example bring."""
    titles = found(code)
    for title in expected:
        titles.remove(title)
    return titles


CASES = [
    ("prepare_fsdp_module", PREPARE + "prepare_fsdp_module(m, o, c)", 2),
    ("prepare_fully_shard", "from composer.distributed.fsdp2 import prepare_fully_shard", 1),
    ("torch.optim.Muon", "import torch\no = torch.optim.Muon(hidden, lr=0.02)", 1),
    ("torch.optim.Muon", "from composer_fsdp2 import Muon\nMuon(m)", 0),
    ("is_model_fsdp", "from composer.utils import misc\nmisc.is_model_fsdp(m)", 1),
    (
        "fsdp_state_dict_type_context",
        "from composer.core.state import fsdp_state_dict_type_context as c\nwith c(m): pass",
        2,
    ),
    (
        "get_fsdp_full_optim_state_dict",
        "import composer.core.state as s\ns.get_fsdp_full_optim_state_dict(m, o)",
        1,
    ),
    (
        "get_fsdp_sharded_optim_state_dict",
        "import composer.core.state\ncomposer.core.state.get_fsdp_sharded_optim_state_dict(s, m)",
        1,
    ),
    (
        "apply_gradient_clipping(..., fsdp_enabled=)",
        "from composer.algorithms.gradient_clipping import apply_gradient_clipping as clip\n"
        "clip(m, 'norm', 1.0, True)\nclip(m, 'norm', 1.0, fsdp_enabled=on)\n"
        "clip(m, 'norm', 1.0, False)\nclip(m, 'norm', 1.0, fsdp_enabled=False)\nclip(*a)",
        2,
    ),
    ("isinstance(..., FSDPConfig)", CONFIG + "isinstance(state.fsdp_config, FSDPConfig)", 1),
    (NAMED, CONFIG + "FSDPConfig(verbose=True)", 2),
    (
        "FSDPConfig(..., keep_low_precision_grads=)",
        CONFIG + "FSDPConfig(keep_low_precision_grads=True)",
        1,
    ),
    (
        "FSDPConfig(..., keep_low_precision_grads=)",
        CONFIG + "FSDPConfig(keep_low_precision_grads=False)",
        0,
    ),
    ("FSDPConfig(..., ignored_modules=)", CONFIG + "FSDPConfig(ignored_modules=[m])", 1),
    ("FSDPConfig(..., process_group=)", CONFIG + "FSDPConfig(process_group='node')", 1),
    ("FSDPConfig(..., auto_wrap=)", CONFIG + "FSDPConfig(auto_wrap=False)", 1),
    ("FSDPConfig(..., auto_wrap=)", CONFIG + "FSDPConfig(auto_wrap=True)", 0),
    ("Trainer(fsdp_config=)", TRAINER + "Trainer(model=m, fsdp_config={})", 1),
    ("Trainer(fsdp_config=)", TRAINER + "Trainer(model=m, fsdp_config=None)", 0),
    (
        "parallelism_config={'fsdp': ...}",
        TRAINER + "Trainer(parallelism_config={'fsdp': {}, 'tp': None})",
        1,
    ),
    ("ParallelismConfig(fsdp=)", "from composer.utils import *\nParallelismConfig(fsdp=c)", 0),
    (
        "ParallelismConfig(fsdp=)",
        "from composer.utils.parallelism import ParallelismConfig as P\nP(fsdp=c)\nP(c)\nP(None)",
        2,
    ),
    ("FSDP_VERSION", "import os\nos.environ['FSDP_VERSION'] = '2'", 1),
    ("FSDP_VERSION", "from os import getenv\ngetenv('FSDP_VERSION', '1')", 1),
    ("FSDP_VERSION", "env = {'FSDP_VERSION': '2'}\ndict(os.environ, FSDP_VERSION='2')", 2),
    ("FSDP_VERSION", "run('FSDP_VERSION=2 composer train.py')", 1),
    (
        "TrainingArguments(fsdp=)",
        "from transformers import TrainingArguments\nTrainingArguments('o', fsdp='full_shard')",
        1,
    ),
    (
        "FullyShardedDataParallelPlugin",
        "import accelerate\naccelerate.FullyShardedDataParallelPlugin()",
        1,
    ),
    (CHECKED, FSDP + "isinstance(m, FSDP)\nissubclass(c, (FSDP, D))", 2),
    (CLASS, FSDP + "class Mine(FSDP):\n    pass", 2),
    (
        "ShardedGradScaler",
        "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler",
        1,
    ),
    ("FlatParameter", "from torch.distributed.fsdp import FlatParameter\nx: FlatParameter", 2),
    ("ShardingStrategy", "import torch\ntorch.distributed.fsdp.ShardingStrategy.FULL_SHARD", 1),
    ("MixedPrecision", "import torch.distributed.fsdp as f\nf.MixedPrecision()", 1),
    ("BackwardPrefetch", "from torch.distributed import fsdp\nfsdp.BackwardPrefetch", 1),
    ("CPUOffload", "from torch.distributed.fsdp.api import CPUOffload", 1),
    (
        "StateDictType",
        "from torch.distributed.fsdp import FullStateDictConfig, StateDictType\n"
        "StateDictType.FULL_STATE_DICT",
        3,
    ),
    ("ModuleWrapPolicy", WRAP + "transformer_auto_wrap_policy, ModuleWrapPolicy", 2),
    ("size_based_auto_wrap_policy", WRAP + "size_based_auto_wrap_policy as s\ns(1)", 2),
    ("CustomPolicy", WRAP + "enable_wrap, wrap\nwrap(m)", 3),
    ("FSDP.summon_full_params", FSDP + "with FSDP.summon_full_params(m):\n    pass", 1),
    ("FSDP.state_dict_type", FSDP + "FSDP.state_dict_type(m)\nFSDP.set_state_dict_type(m)", 2),
    ("FSDP.full_optim_state_dict", FSDP + "FSDP.optim_state_dict(m, o)", 1),
    ("FSDP.optim_state_dict_to_load", FSDP + "FSDP.scatter_full_optim_state_dict(s, m)", 1),
    ("FSDP.fsdp_modules", FSDP + "FSDP.fsdp_modules(m)", 1),
    ("FSDP.clip_grad_norm_", FSDP + "m = FSDP(net)\nm.clip_grad_norm_(1.0)", 1),
    ("FSDP.no_sync", FSDP + "self.model = FSDP(net)\nwith self.model.no_sync():\n    pass", 1),
    ("FSDP.register_comm_hook", FSDP + "def f(m: FSDP):\n    m.register_comm_hook(s, h)", 1),
    ("FSDP.check_is_root", FSDP + "m = FSDP(net)\nif m.check_is_root():\n    pass", 1),
    ("FSDP.module", FSDP + "m: FSDP = wrap(net)\nm.module", 1),
    ("_fsdp_wrapped_module", "m._fsdp_wrapped_module._fsdp_wrapped_module = x", 2),
    (
        "'_fsdp_wrapped_module' in a string",
        "name.replace('_fsdp_wrapped_module.', '')\nre.sub(r'\\b_fsdp_wrapped_module', '', n)\n"
        "f'{n}._fsdp_wrapped_module'",
        3,
    ),
    ("_flat_param", "m._flat_param.numel()", 1),
    ("'_flat_param' in a string", "k.endswith('._flat_param')", 1),
    ("state.fsdp_modules", "event.state.fsdp_modules.values()", 1),
    ("state.fsdp_enabled", "if state.fsdp_enabled: state.fsdp_config_version", 2),
    ("fsdp_config.sharding_strategy", "state.fsdp_config.sharding_strategy", 1),
    ("FSDP(..., sharding_strategy=)", FSDP + "FSDP(m, sharding_strategy=s)", 1),
    ("FSDP(..., process_group=)", FSDP + "FSDP(m, process_group=g, device_mesh=d)", 2),
    ("FSDP(..., cpu_offload=)", FSDP + "FSDP(m, cpu_offload=c)", 1),
    (
        "FSDP(..., auto_wrap_policy=)",
        FSDP + "import functools\nfunctools.partial(FSDP, auto_wrap_policy=p)",
        1,
    ),
    ("FSDP(..., mixed_precision=)", FSDP + "FSDP(m, mixed_precision=p)", 1),
    ("FSDP(..., ignored_modules=)", FSDP + "FSDP(m, ignored_states=p)", 1),
    ("FSDP(..., param_init_fn=)", FSDP + "FSDP(m, param_init_fn=f)", 1),
    ("FSDP(..., use_orig_params=)", FSDP + "FSDP(m, use_orig_params=True)", 1),
    ("FSDP(..., sync_module_states=)", FSDP + "FSDP(m, sync_module_states=True)", 1),
    ("FSDP(..., backward_prefetch=)", FSDP + "FSDP(m, forward_prefetch=True)", 1),
    ("FSDP(..., device_id=)", FSDP + "FSDP(m, device_id=0)", 1),
    (
        "private module of FSDP1",
        "import torch.distributed.fsdp._runtime_utils\n"
        "from torch.distributed.fsdp._common_utils import clean_tensor_name\n"
        "from torch.distributed.fsdp import _traversal_utils",
        3,
    ),
]


@pytest.mark.table(
    (
        "fsdp_state_dict_type_context-from composer.core.state import fsdp_state_dict_typ"
        "e_context as c\\nwith c(m): pass-2"
    ),
    (
        "FSDPConfig(..., keep_low_precision_grads=)-from composer.utils import FSDPConfig"
        "\\nFSDPConfig(keep_low_precision_grads=False)-0"
    ),
    ("Trainer(fsdp_config=)-from composer import Trainer\\nTrainer(model=m, fsdp_config=None)-0"),
    (
        "TrainingArguments(fsdp=)-from transformers import TrainingArguments\\nTrainingArg"
        "uments('o', fsdp='full_shard')-1"
    ),
    "FlatParameter-from torch.distributed.fsdp import FlatParameter\\nx: FlatParameter-2",
    (
        "ModuleWrapPolicy-from torch.distributed.fsdp.wrap import transformer_auto_wrap_p"
        "olicy, ModuleWrapPolicy-2"
    ),
    (
        "FSDP.full_optim_state_dict-from torch.distributed.fsdp import FullyShardedDataPa"
        "rallel as FSDP\\nFSDP.optim_state_dict(m, o)-1"
    ),
    "FSDP.register_comm_hook-code47-1",
    (
        "FSDP.module-from torch.distributed.fsdp import FullyShardedDataParallel as FSDP"
        "\\nm: FSDP = wrap(net)\\nm.module-1"
    ),
    "state.fsdp_modules-event.state.fsdp_modules.values()-1",
    (
        "FSDP(..., cpu_offload=)-from torch.distributed.fsdp import FullyShardedDataParal"
        "lel as FSDP\\nFSDP(m, cpu_offload=c)-1"
    ),
    (
        "FSDP(..., use_orig_params=)-from torch.distributed.fsdp import FullyShardedDataP"
        "arallel as FSDP\\nFSDP(m, use_orig_params=True)-1"
    ),
)
@pytest.mark.parametrize(("title", "code", "count"), CASES)
def test_each_row(title, code, count):
    assert found(code).count(title) == count


def test_every_row_has_a_case_and_a_title_of_its_own():
    titles = [row.title for row in CODE_ROWS]
    assert len(set(titles)) == len(titles)
    assert {title for title, _, count in CASES if count} == set(titles)


def test_every_row_says_what_and_why():
    for row in CODE_ROWS:
        assert row.use, row.title
        assert row.reason, row.title
        assert bool(row.replacement) == (row.kind is Kind.REPLACE)


# --- The table against the packages it speaks of. ---

GONE = "composer.trainer.dist_strategy"
"""where Composer had `prepare_fsdp_module` before `composer.distributed`"""


def locate(name: str):
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise AssertionError(f"no such module: {name}")


@pytest.mark.table(
    "prepare_fsdp_module",
    "apply_gradient_clipping(..., fsdp_enabled=)",
    "FSDPConfig(..., process_group=)",
    "TrainingArguments(fsdp=)",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "size_based_auto_wrap_policy",
    "FSDP.optim_state_dict_to_load",
    "FSDP.check_is_root",
    "'_flat_param' in a string",
    "FSDP(..., auto_wrap_policy=)",
    "FSDP(..., use_orig_params=)",
)
@pytest.mark.parametrize("row", CODE_ROWS, ids=lambda row: row.title)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_names_of_the_table_exist(row):
    """In one home of each name at least; not all homes have all names."""
    homes = [home for home in row.homes if home != GONE]
    if row.found in (Found.NAME, Found.CHECK, Found.MEMBER):
        if row.title == "torch.optim.Muon" and not hasattr(torch.optim, "Muon"):
            return  # torch 2.7 has none
        for name in row.names:
            assert any(_has(home, name) for home in homes if home != "dion"), name
    elif row.found is Found.ARGUMENT:
        parameters: set[str] = set()
        for home in homes:
            if _has(*home.rsplit(".", 1)):
                parameters |= set(inspect.signature(locate(home)).parameters)
        if row.title.startswith("FSDPConfig("):  # takes any keyword, and has these as fields
            parameters = set(locate(homes[0]).__annotations__)
        assert {*row.names} - {"fsdp_config"} <= parameters


def _has(home: str, name: str) -> bool:
    try:
        locate(f"{home}.{name}")
    except AttributeError:
        return False
    return True


def test_what_to_write_instead_exists():
    pattern = r"\b(?:torch|composer|composer_fsdp2)(?:\.[A-Za-z_]\w*)+"
    names = {name for row in CODE_ROWS for name in re.findall(pattern, f"{row.use} {row.reason}")}
    assert len(names) > 8
    for name in names - {"composer_fsdp2.install"}:
        assert locate(name) is not None, name
    module = locate("torch.distributed.fsdp.FSDPModule")
    methods = {name for row in CODE_ROWS for name in re.findall(r"model\.(set_\w+)", row.use)}
    assert methods == {"set_requires_gradient_sync", "set_all_reduce_hook"}
    assert all(hasattr(module, method) for method in methods)


def test_attributes_are_those_an_fsdp2_configuration_lacks():
    from composer.utils.parallelism import FSDPConfig

    from composer_fsdp2 import TrainerFSDP2Config

    (row,) = [row for row in CODE_ROWS if row.title == "fsdp_config.sharding_strategy"]
    theirs = [name for name in FSDPConfig.__annotations__ if not name.startswith("_")]
    ours = TrainerFSDP2Config()
    assert sorted(row.names) == sorted(name for name in theirs if not hasattr(ours, name))


# --- Whose name it is. ---


@pytest.mark.table(
    "from .config import FSDPConfig\\nFSDPConfig(process_group='node')",
    "def prepare_fsdp_module(m): pass\\nprepare_fsdp_module(m)",
    '"""Uses _fsdp_wrapped_module and FSDP_VERSION."""',
    ("from torch.distributed.fsdp import FSDPModule, fully_shard\\nisinstance(m, FSDPModule)"),
    ("from deepspeed import CPUOffload, MixedPrecision, StateDictType\\nStateDictType.FULL"),
    "config.state_dict_type == 'full'\\nself.state_dict_type()",
    "config.fsdp_config.state_dict_type\\nbackend.process_group",
    "config = {'fsdp': {}}\\nrun(fsdp=1)\\nTrainer(fsdp_config=1)",
    ("from composer import Trainer\\nTrainer(parallelism_config={'fsdp2': {}, 'fsdp': None})"),
    "import torch.distributed.fsdp as fsdp\\nfsdp.fully_shard(m)",
    "a = b\\nb = a\\na.FullyShardedDataParallel",
    "from composer_fsdp2 import prepare_fully_shard\\nprepare_fully_shard(m, o, {})",
)
@pytest.mark.parametrize(
    "code",
    [
        "class FSDPConfig: pass\nFSDPConfig(te_shard_fp8_weight=True)",
        "from .config import FSDPConfig\nFSDPConfig(process_group='node')",
        "def prepare_fsdp_module(m): pass\nprepare_fsdp_module(m)",
        "# FSDP.summon_full_params and _fsdp_wrapped_module",
        '"""Uses _fsdp_wrapped_module and FSDP_VERSION."""',
        "def f():\n    'The _flat_param of FSDP.'",
        "from torch.distributed.fsdp import MixedPrecisionPolicy as CPUOffload\nCPUOffload()",
        "from torch.distributed.fsdp import FSDPModule, fully_shard\nisinstance(m, FSDPModule)",
        "from torch.distributed.checkpoint.state_dict import get_model_state_dict, no_sync",
        "from deepspeed import CPUOffload, MixedPrecision, StateDictType\nStateDictType.FULL",
        "config.state_dict_type == 'full'\nself.state_dict_type()",
        "torch.nn.utils.clip_grad_norm_(p, 1.0)\nddp.no_sync()\nddp.module",
        "config.fsdp_config.state_dict_type\nbackend.process_group",
        "log('unsharded_flat_param', '_flat_params', 'x_fsdp_wrapped_module_y')",
        "config = {'fsdp': {}}\nrun(fsdp=1)\nTrainer(fsdp_config=1)",
        TRAINER + "Trainer(parallelism_config={'fsdp2': {}, 'fsdp': None})",
        "import torch.distributed.fsdp as fsdp\nfsdp.fully_shard(m)",
        "a = b\nb = a\na.FullyShardedDataParallel",
        "from composer_fsdp2 import prepare_fully_shard\nprepare_fully_shard(m, o, {})",
    ],
)
def test_what_only_looks_alike_is_not_reported(code):
    assert found(code) == []


CONFIGURED = "parallelism_config={'fsdp': ...}?"


@pytest.mark.table(
    "from .shared import prepare_fsdp_module-expected2",
    "from fairscale.nn import FullyShardedDataParallel as F\\nF(m)-expected3",
    "build(use_orig_params=True)-expected4",
    "with self.model.summon_full_params(m): pass-expected5",
    "build(parallelism_config={'fsdp': {}})-expected6",
    "parallelism_config['fsdp']-expected7",
    "parallelism_config.get('fsdp', {})-expected8",
    "kw = {'parallelism_config': {'fsdp': {}}}-expected9",
    "trainer.fsdp_modules-expected10",
)
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from torch.distributed.fsdp import *\nFullyShardedDataParallel(m)", [f"{CLASS}?"]),
        ("from composer.utils import *\nFSDPConfig()", [f"{NAMED}?"]),
        ("from .shared import prepare_fsdp_module", ["prepare_fsdp_module?"]),
        ("from fairscale.nn import FullyShardedDataParallel as F\nF(m)", [f"{CLASS}?"] * 2),
        ("build(use_orig_params=True)", ["FSDP(..., use_orig_params=)?"]),
        ("with self.model.summon_full_params(m): pass", ["FSDP.summon_full_params?"]),
        ("build(parallelism_config={'fsdp': {}})", ["parallelism_config={'fsdp': ...}?"]),
        ("parallelism_config['fsdp']", ["parallelism_config={'fsdp': ...}?"]),
        ("parallelism_config.get('fsdp', {})", ["parallelism_config={'fsdp': ...}?"]),
        ("kw = {'parallelism_config': {'fsdp': {}}}", ["parallelism_config={'fsdp': ...}?"]),
        ("trainer.fsdp_modules", ["state.fsdp_modules?"]),
        ("parallelism_config: dict[str, Any] = {'fsdp': {}}", [CONFIGURED]),
        ("build(parallelism_config={'fsdp': a} if n > 1 else None)", [CONFIGURED]),
        ("build(parallelism_config=given or {'fsdp': a})", [CONFIGURED]),
        ("build(parallelism_config={**{'fsdp': a}, 'tp': None} | more)", [CONFIGURED]),
        ("build(n, parallelism_config=(found := {'fsdp': a}))", [CONFIGURED]),
        ("parallelism_config.update({'fsdp': a})", [CONFIGURED]),
        ("parallelism_config.setdefault('fsdp', a)", [CONFIGURED]),
    ],
)
def test_what_cannot_be_known_is_reported_as_perhaps(code, expected):
    assert found(code) == expected


def test_a_mapping_that_is_put_into_the_configuration():
    code = "base = {'fsdp': a}\nTrainer(parallelism_config={**base, 'tp': None})"
    assert found(TRAINER + code) == ["parallelism_config={'fsdp': ...}"]


def test_a_name_with_two_origins_is_perhaps_and_a_failed_import_is_not():
    other = "try:\n    from torch.distributed.fsdp import CPUOffload\nexcept ImportError:\n    "
    assert found(other + "CPUOffload = None\nCPUOffload()") == ["CPUOffload"] * 2
    own = other + "class CPUOffload: pass\nCPUOffload()"
    assert found(own) == ["CPUOffload", "CPUOffload?"]


def test_a_name_that_another_function_binds_is_perhaps():
    code = FSDP + (
        "def other(FSDP):\n    return FSDP(m)\n"
        "def local():\n    from torch.distributed.fsdp import CPUOffload\n    CPUOffload()\n"
    )
    assert found(code) == [CLASS, f"{CLASS}?", "CPUOffload", "CPUOffload"]


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed.fsdp as f\nWrapper = f.FullyShardedDataParallel\nWrapper(m)",
        "import torch\nfsdp = torch.distributed.fsdp\nfsdp.FullyShardedDataParallel(m)",
        "from torch import distributed as d\nd.fsdp.FullyShardedDataParallel(m)",
        "from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel",
    ],
)
def test_aliases(code):
    assert set(found(code)) == {CLASS}


def test_a_configuration_is_followed_to_the_trainer():
    code = TRAINER + "settings = {'fsdp': {}}\nsettings['fsdp'] = 1\n"
    assert found(code) == []
    title = "parallelism_config={'fsdp': ...}"
    assert found(code + "Trainer(parallelism_config=settings)") == [title, title]
    assert found(TRAINER + "Trainer(parallelism_config=dict(fsdp=c))") == [title]


def test_methods_are_certain_where_the_object_is_made_and_perhaps_where_it_is_asked_for():
    code = FSDP + "def f(m):\n    if isinstance(m, FSDP):\n        m.module\n"
    assert beside(code, CLASS, CHECKED) == ["FSDP.module?"]
    assert beside(FSDP + "m = FSDP(n)\nm.module", CLASS, CLASS) == ["FSDP.module"]


def test_names_in_strings_that_are_patched():
    code = "mock.patch('composer.distributed.prepare_fsdp_module')"
    assert found(code) == ["prepare_fsdp_module"]


def test_places():
    code = FSDP + "é = 'ü'; x = [é, FSDP(é, use_orig_params=True).\\\n  _fsdp_wrapped_module]\n"
    places = [(use.line, use.column) for use in uses(code)]
    assert places == [(1, 36), (2, 18), (2, 26), (3, 3)]
    formatted = FSDP + "x = f'a {FSDP(m)} {m._flat_param}'\n"
    assert [(use.line, use.column) for use in uses(formatted)][1:] == [(2, 5), (2, 5)]


@pytest.mark.matrix
def test_time_grows_with_the_length_of_a_file():
    """A name that is bound and read 20,000 times took minutes where each pair is looked at."""
    code = FSDP + "x = FSDP(m)\n" + "x = f(x)\n" * 20_000
    limit = Limit(20)
    assert beside(code, CLASS) == [CLASS]
    assert limit.left()


# --- What to write instead. ---

CALL = "h, n = prepare_fsdp_module(model, opt, config)\n"
NEW_IMPORT = "from composer_fsdp2 import prepare_fully_shard"


def replaced(code: str | bytes) -> list[str | None]:
    """The new lines, in order of place."""
    return [use.replacement for use in uses(code) if use.row.kind is Kind.REPLACE]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (PREPARE + CALL, [NEW_IMPORT, "h, n = prepare_fully_shard(model, opt, config)"]),
        (
            PREPARE.strip() + " as p  # why\np(m, None, fsdp_config=c, device='cpu')",
            [f"{NEW_IMPORT} as p", "p(m, None, fsdp2_config=c, device='cpu')"],
        ),
        (
            "def f():\n\tfrom composer.distributed.dist_strategy  import (\n"
            "\t\tprepare_fsdp_module,"
            "  # é\n\t)\n\treturn 'é', prepare_fsdp_module(\n\t\tm,o, fsdp_config = c,), g(1)",
            [NEW_IMPORT, "return 'é', prepare_fully_shard( m,o, fsdp2_config = c,), g(1)"],
        ),
        (
            "from composer.distributed import prepare_ddp_module, prepare_fsdp_module\n"
            "prepare_fsdp_module(*a, **k)",
            [NEW_IMPORT, "prepare_fully_shard(*a, **k)"],
        ),
        (
            "import composer.distributed as d\nd.prepare_fsdp_module(m, o, c)",
            ["composer_fsdp2.prepare_fully_shard(m, o, c)"],
        ),
        (PREPARE + "f(prepare_fsdp_module, 1)", [NEW_IMPORT, "f(prepare_fully_shard, 1)"]),
        (PREPARE + "f'{prepare_fsdp_module(m, o, c)}'", [NEW_IMPORT, None]),
        ("patch('composer.distributed.prepare_fsdp_module')", [None]),
        ("from .shared import prepare_fsdp_module", [None]),
    ],
)
def test_the_line_to_write_instead(old, new):
    assert replaced(old) == new


@pytest.mark.table(
    "-utf-8-x = '\\u2028\\x0b\\x0c'-\\n",
    "-utf-8-\\x0cy = 1\\n-\\r",
    "-utf-8-sig-x = '\\u2028\\x0b\\x0c'-\\n",
    "-utf-8-sig-\\x0cy = 1\\n-\\r\\n",
    "# -*- coding: utf-8 -*-\\n-utf-8-sig--\\r",
    "# -*- coding: utf-8 -*-\\n-utf-8-sig-\\x0cy = 1\\n-\\n",
    "# coding: latin-1\\n-latin-1--\\r\\n",
    "# coding: latin-1\\n-latin-1-x = '\\u2028\\x0b\\x0c'-\\r\\n",
    "# coding: latin-1\\n-latin-1-\\x0cy = 1\\n-\\n",
    "#!/usr/bin/env python\\n# vim: set fileencoding=cp1252 :\\n-cp1252--\\n",
    (
        "#!/usr/bin/env python\\n# vim: set fileencoding=cp1252 :\\n-cp1252-x = '\\u2028\\x0b"
        "\\x0c'-\\n"
    ),
    ("#!/usr/bin/env python\\n# vim: set fileencoding=cp1252 :\\n-cp1252-\\x0cy = 1\\n-\\n"),
)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", ["", "x = '\u2028\x0b\x0c'", "\x0cy = 1\n"])
@pytest.mark.parametrize(
    ("declared", "encoding"),
    [
        ("", "utf-8"),
        ("", "utf-8-sig"),
        ("# -*- coding: utf-8 -*-\n", "utf-8-sig"),
        ("# coding: latin-1\n", "latin-1"),
        ("#!/usr/bin/env python\n# vim: set fileencoding=cp1252 :\n", "cp1252"),
    ],
)
def test_lines_and_encodings(end, last, declared, encoding):
    if encoding in ("latin-1", "cp1252"):
        last = last.replace("\u2028", "ÿ")
    code = f"{declared}é = 'é'; {PREPARE}é, n = prepare_fsdp_module(é, 0, fsdp_config=1)\n{last}"
    old = code.replace("\n", end).encode(encoding)
    if end == "\r" and not encoding.startswith("utf-8"):
        with pytest.raises(Unreadable):  # Python reads the declaration up to a line feed, too
            Source.read(old)
        return
    assert replaced(old) == [NEW_IMPORT, "é, n = prepare_fully_shard(é, 0, fsdp2_config=1)"]


_STATEMENTS = st.sampled_from(
    [
        PREPARE.strip(),
        PREPARE.strip() + " as prepare",
        "from composer.distributed import (prepare_fsdp_module)",
        "from composer.distributed import prepare_ddp_module, prepare_fsdp_module",
        CALL.strip(),
        "é = 'ü'; prepare_fsdp_module(é, None, fsdp_config=é)  # prepare_fsdp_module",
        "prepare(m, o, c)",
        "x = a.b(prepare_fsdp_module)",
        "d.prepare_fsdp_module(m)",
        "import composer.distributed as d",
        "x = f'{prepare_fsdp_module}'",
        "prepare_fully_shard = 1",
        "from shared import *",
        FSDP.strip(),
        "FSDP(m, use_orig_params=True)",
        "del prepare_fsdp_module",
    ]
)


@given(st.lists(_STATEMENTS, max_size=7), st.sampled_from(["\n", "\r\n"]))
def test_a_new_line_is_the_same_statement_but_for_the_words(statements, end):
    code = "\n".join(statements).replace("\n", end)
    words = {
        "prepare_fsdp_module": "prepare_fully_shard",
        "composer.distributed": "composer_fsdp2",
        "fsdp_config": "fsdp2_config",
    }
    for use in uses(code):
        if use.replacement is None:
            assert use.row.kind is not Kind.REPLACE or not use.certain or "f'" in use.code
            continue
        new = use.replacement
        assert "prepare_fsdp_module" not in found(new)
        if "import" in use.code:
            assert new.startswith(NEW_IMPORT)
            continue
        expected = ast.dump(ast.parse(use.code.replace("d.prepare", "composer_fsdp2.prepare")))
        for old, changed in words.items():
            expected = re.sub(rf"'{re.escape(old)}'", f"'{changed}'", expected)
        assert ast.dump(ast.parse(new)) == expected


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(raw):
    try:
        source = Source.read(raw + b"\n" + FSDP.encode())
    except Unreadable:
        return
    ast.parse(source.text)
    assert "\n".join(source.lines) == source.text
    find_uses(source)


# --- Files and folders. ---


@pytest.fixture
def tree(tmp_path):
    """Writes files; returns the folder."""

    def write(files: dict[str, str | bytes]) -> Path:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    return write


def names(files) -> list[str]:
    return [file.path.name for file in files]


def test_which_files_are_read(tree):
    places = ("a.py", "env/b.py", "sub/c.py", "d.txt", ".hid/e.py", "node_modules/f.py")
    places += ("build/g.py", "v/pyvenv.cfg", "v/h.py", "x/site-packages/i.py", "conda-meta/j.py")
    folder = tree(dict.fromkeys(places, FSDP))
    (folder / "sub" / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.py")
    assert names(migrate_code(folder)) == ["a.py", "j.py", "b.py", "c.py"]
    assert names(migrate_code(folder / ".hid")) == ["e.py"]
    assert names(migrate_code(folder / "d.txt")) == ["d.txt"]


def test_files_that_cannot_be_read_are_listed(tree):
    deep = "x = " + "(" * 3000 + ")" * 3000
    folder = tree(
        {
            "binary.py": b"\x7fELF\x00\xff\xfe",
            "codec.py": b"# coding: no-such-codec\n",
            "deep.py": deep,
            "long.py": FSDP + "x = " + "-" * 5000 + "1",
            "good.py": FSDP,
            "null.py": b"x = 1\x00",
            "rot.py": b"# coding: rot13\nvzcbeg bf\n",
            "syntax.py": "def f(:\n",
            "wrong.py": b"# coding: utf-8\nx = '\xff'\n",
        }
    )
    (folder / "gone.py").symlink_to(folder / "nowhere.py")
    files = migrate_code(folder)
    assert [file.path.name for file in files if file.problem is None] == ["good.py"]
    assert len(files) == 10
    problems = {file.path.name: file.problem for file in files}
    assert "line 1: " in problems["syntax.py"]
    assert "No such file" in problems["gone.py"]


def test_no_file_is_touched(tree):
    folder = tree({"a.py": PREPARE + CALL})
    before = (folder / "a.py").stat()
    (file,) = migrate_code(folder)
    assert len(file.uses) == 2
    after = (folder / "a.py").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [entry.name for entry in folder.iterdir()] == ["a.py"]


@pytest.mark.parametrize("missing", ["nowhere", "empty"])
def test_nothing_to_look_through(tmp_path, missing):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="There is nothing to look through"):
        migrate_code(tmp_path / missing)


# --- The command. ---


def run(*args):
    result = CliRunner().invoke(app, ["migrate", *map(str, args)])
    assert result.exit_code in (0, 1, 2), result.exception
    return result


def refused(result, *parts):
    message = " ".join(result.stderr.split())
    assert result.exit_code == 2
    assert "ConfigError" in message
    for part in parts:
        assert part in message


def test_the_report(tree):
    folder = tree(
        {
            "a.py": FSDP + "m = FSDP(net, use_orig_params=True)\n" + "x" * 200 + " = m.module\n",
            "b.py": PREPARE + CALL,
            "c.py": "def f(:",
            "d.py": "build(use_orig_params=True)  # \x1b[31m",
        }
    )
    result = run("--code", folder)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert f"      {folder}/a.py:1:36  "[:90] in "\n".join(lines)
    assert "  by hand: FullyShardedDataParallel" in lines
    assert "  replace: prepare_fsdp_module" in lines
    assert "        write: h, n = prepare_fully_shard(model, opt, config)" in lines
    assert "  perhaps by hand: FSDP(..., use_orig_params=)" in lines
    assert "\x1b" not in result.stdout
    assert lines[-1] == ("3 files read: 2 replace, 4 by hand, 1 perhaps. 1 could not be read.")


def test_the_report_fits_a_terminal(tree, monkeypatch):
    monkeypatch.chdir(tree({"a.py": "\n".join(code for _, code, _ in CASES)}))
    result = run("--code", "a.py")
    assert max(map(len, result.stdout.splitlines())) <= 100
    fits = "FSDP.state_dict_type(" + "x" * 62 + ")"
    Path("b.py").write_text(f"{FSDP}{fits}\n{fits}#\n")
    lines = run("--code", "b.py").stdout.splitlines()
    assert f"      b.py:2:6  {fits}" in lines
    assert f"      b.py:3:6  {fits}"[:97] + "..." in lines
    shown = [row.title for row in CODE_ROWS if f": {row.title}" in result.stdout]
    assert len(shown) == len(CODE_ROWS)


def test_json(tree):
    folder = tree({"a.py": PREPARE + CALL + "m._flat_param\n", "b.py": "x = 1"})
    document = json.loads(run("--code", folder, "--json").stdout)
    (file,) = document["files"]
    assert [(use["line"], use["column"], use["kind"]) for use in file["uses"]] == [
        (1, 34, "replace"),
        (2, 8, "replace"),
        (3, 3, "by hand"),
    ]
    assert [use["replacement"] for use in file["uses"]] == [
        NEW_IMPORT,
        "h, n = prepare_fully_shard(model, opt, config)",
        None,
    ]
    assert document["files_read"] == 2
    assert document["counts"]["replace"] == 2


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("x = 1", 0),
        (PREPARE + CALL, 1),
        ("state.fsdp_enabled", 0),
        ("build(use_orig_params=True)", 0),
        (PREPARE, 1),
        (FSDP, 1),
        ("def f(:", 1),
    ],
)
def test_check(tree, code, exit_code):
    assert run("--code", tree({"a.py": code}), "--check").exit_code == exit_code


def test_no_use(tree):
    assert run("--code", tree({"a.py": "x = 1"})).stdout == "1 file read: no use of FSDP1.\n"


def test_neither_or_both(tree, tmp_path):
    refused(run(), "Neither CONFIG nor --code is given", "--code and a Python file")
    refused(run(tmp_path / "a.yaml", "--code", tmp_path), "CONFIG cannot be given together")


@pytest.mark.parametrize(
    "option",
    [
        ("-o", "x.yaml"),
        ("--from", "composer"),
        ("--world-size", 2),
        ("--gpus-per-node", 2),
        ("--set", "a=1"),
        ("--strict",),
    ],
)
def test_options_about_configurations(tmp_path, option):
    refused(run("--code", tmp_path, *option), "cannot be given together with --code")


def test_a_path_that_is_not_there():
    refused(run("--code", "nowhere"), "no file or folder 'nowhere'")


# --- Real code. ---

KNOWN = {
    "composer": [
        ("trainer/trainer.py", "FSDP_VERSION"),
        ("core/state.py", "prepare_fsdp_module"),
        ("algorithms/gradient_clipping/gradient_clipping.py", "FSDP.clip_grad_norm_"),
        ("algorithms/ema/ema.py", "is_model_fsdp"),
        ("models/huggingface.py", "FSDP.summon_full_params"),
        ("distributed/mosaic_parallelism.py", "ShardingStrategy"),
        ("trainer/_patch_pytorch.py", "FlatParameter"),
    ],
    "llmfoundry": [
        ("callbacks/monolithic_ckpt_callback.py", "fsdp_state_dict_type_context"),
        ("callbacks/hf_checkpointer.py", CHECKED),
        ("command_utils/train.py", "parallelism_config={'fsdp': ...}"),
    ],
}


@pytest.mark.table("composer")
@pytest.mark.parametrize("package", KNOWN)
def test_installed_packages(package):
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip("needs the extra foundry")
    root = Path(spec.origin).parent
    limit = Limit(60)
    result = run("--code", root, "--json", "--check")
    assert limit.left()
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["counts"]["not read"] == 0
    assert document["files_read"] > 50
    in_files = {
        (Path(file["path"]).relative_to(root).as_posix(), use["found"])
        for file in document["files"]
        for use in file["uses"]
        if use["certain"] or use["found"].startswith("FSDP.")
    }
    assert set(KNOWN[package]) <= in_files


LOOP = """# prepare a model, as under FSDP1
import torch
from composer.distributed import prepare_fsdp_module
from composer.utils.parallelism import FSDPConfig

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = FSDPConfig(sharding_strategy="SHARD_GRAD_OP")
handles, units = prepare_fsdp_module(model, optimizer, fsdp_config=config, device="cpu")
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:FSDP1 to FSDP2")
def test_the_new_lines_run():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    lines = LOOP.splitlines()
    for use in uses(LOOP):
        lines[use.line - 1] = use.replacement or lines[use.line - 1]
    assert not any("prepare_fsdp_module" in line for line in lines)
    names: dict = {}
    exec("\n".join(lines), names)
    assert isinstance(names["model"], FSDPModule)
    assert list(names["units"]) == [""]
    stepped = names["optimizer"].param_groups[0]["params"]
    assert [type(parameter) for parameter in stepped] == [DTensor] * 4

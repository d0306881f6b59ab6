"""Places that read numbers out of sharded tensors, as `migrate --code` lists them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_fsdp2.cli.main import app
from composer_fsdp2.tools.migrate.python_code import table
from composer_fsdp2.tools.migrate.python_code.source import Source
from composer_fsdp2.tools.migrate.python_code.table import Found
from composer_fsdp2.tools.migrate.python_code.uses import find_uses
from tests.support.limits import Limit

NUMBER, VALUES, SAVED = (row.title for row in (table.NUMBER, table.VALUES, table.SAVED))


def reads(code: str) -> list[str]:
    found = find_uses(Source.read(code.encode()))
    return [use.row.title for use in found if use.row.found is Found.READ]


FOUND = [
    "sum(float(p.detach().norm()) for p in state.model.parameters())",
    "sum(p.norm().item() for p in model.parameters())",
    "for p in model.parameters():\n    print(p.data.norm(2).item())",
    "for n, p in model.named_parameters():\n    log({n: p.grad.norm().item()})",
    "for n, p in state.model.module.named_parameters():\n    log(f'{n}: {p.grad.norm():.3f}')",
    "total = 0\nfor p in model.parameters():\n    total += p.grad.norm() ** 2\nprint(float(total))",
    "norms = [p.grad.norm() for p in model.parameters()]\ntorch.stack(norms).norm().item()",
    "if torch.isnan(model.head.weight).any():\n    stop()",
    "for p in model.parameters():\n    if not torch.isfinite(p.grad).all(): stop()",
    "while x and torch.isnan(model.fc.weight).any(): stop()",
    "assert p.grad.isnan().any()",
    "sd = model.state_dict()\nfor k, v in sd.items():\n    print(k, v.mean().item())",
    "model.state_dict()['a.weight'].sum().item()",
    "math.sqrt(sum(p.grad.pow(2).sum() for p in model.parameters()))",
    "for (n, p), q in zip(model.named_parameters(), others): print(float((p - q).norm()))",
    "for i, (n, p) in enumerate(model.named_parameters()): print(p.min().item())",
    "{n: p.norm().item() for n, p in model.named_parameters()}",
    "async def f():\n    return [g.sum().item() for g in (p.grad for p in net.parameters())]",
]
VALUES_FOUND = [
    "[p.detach().cpu().numpy() for p in model.parameters()]",
    "model.fc.bias.tolist()",
    "np.asarray(model.fc.weight)",
    "w = model.fc.weight.detach().float().cpu()\nplot(w.numpy())",
]
SAVED_FOUND = [
    "torch.save(state.model.state_dict(), 'm.pt')",
    "if rank == 0:\n    torch.save({'model': model.state_dict(), 'step': 1}, f)",
    "sd = {k: v.cpu() for k, v in model.state_dict().items()}\ntorch.save(sd, f)",
    "pickle.dump(model.state_dict(), file)",
    "torch.save(optimizer.state_dict(), f)",
    "torch.save(dict(model.named_parameters()), f)",
]
NOT_FOUND = [
    "sum(p.numel() for p in model.parameters())",
    "float(p.full_tensor().norm())\nfor p in model.parameters(): float(p.full_tensor().norm())",
    "for p in model.parameters():\n    print(p.to_local().norm().item())",
    "for n, p in model.named_parameters():\n    if n[0] == 'a' and p.requires_grad: int(n[1])",
    "for n, p in model.named_parameters():\n    if p.grad is not None: x = p.grad.numel()",
    "with summon_full_params(model):\n    print(float(model.fc.weight.norm()))",
    "with FSDP.summon_full_params(model):\n    torch.save(model.state_dict(), f)",
    "loss.item()\nfloat(loss)\nparameters = f.parameters()\nfloat(x)",
    "torch.save(scheduler.state_dict(), f)",
    "torch.save(loss, f)\nmodel.parameters()",
    "int(model.fc.weight.shape[0])\nint(model.fc.weight.size(0))\nlen(model.state_dict())",
    "def f(p): return p\nfor p in model.parameters(): pass\ndef g(q): return float(q.norm())",
    "opt = torch.optim.SGD(model.parameters(), lr=float(lr))\nopt.step()",
    "copy.deepcopy(model.state_dict())",
]


@pytest.mark.table(
    "sum(p.norm().item() for p in model.parameters())-number of a parameter",
    "assert p.grad.isnan().any()-number of a parameter",
    "model.state_dict()['a.weight'].sum().item()-number of a parameter",
    (
        "for i, (n, p) in enumerate(model.named_parameters()): print(p.min().item())-numb"
        "er of a parameter"
    ),
    (
        "async def f():\\n    return [g.sum().item() for g in (p.grad for p in net.paramet"
        "ers())]-number of a parameter"
    ),
    "model.fc.bias.tolist()-values of a parameter",
    "np.asarray(model.fc.weight)-values of a parameter",
    ("torch.save(state.model.state_dict(), 'm.pt')-parameters saved with torch.save or pickle"),
    (
        "sd = {k: v.cpu() for k, v in model.state_dict().items()}\\ntorch.save(sd, f)-para"
        "meters saved with torch.save or pickle"
    ),
    "torch.save(optimizer.state_dict(), f)-parameters saved with torch.save or pickle",
)
@pytest.mark.parametrize(
    ("code", "title"),
    [
        *((code, NUMBER) for code in FOUND),
        *((code, VALUES) for code in VALUES_FOUND),
        *((code, SAVED) for code in SAVED_FOUND),
    ],
)
def test_a_read_is_listed(code: str, title: str):
    assert reads(code) == [title]


@pytest.mark.table(
    "for p in model.parameters():\\n    print(p.to_local().norm().item())",
    ("for n, p in model.named_parameters():\\n    if n[0] == 'a' and p.requires_grad: int(n[1])"),
    "with summon_full_params(model):\\n    print(float(model.fc.weight.norm()))",
    "with FSDP.summon_full_params(model):\\n    torch.save(model.state_dict(), f)",
    "loss.item()\\nfloat(loss)\\nparameters = f.parameters()\\nfloat(x)",
    "torch.save(scheduler.state_dict(), f)",
    "torch.save(loss, f)\\nmodel.parameters()",
    ("int(model.fc.weight.shape[0])\\nint(model.fc.weight.size(0))\\nlen(model.state_dict())"),
    ("def f(p): return p\\nfor p in model.parameters(): pass\\ndef g(q): return float(q.norm())"),
    "opt = torch.optim.SGD(model.parameters(), lr=float(lr))\\nopt.step()",
    "copy.deepcopy(model.state_dict())",
)
@pytest.mark.parametrize("code", NOT_FOUND)
def test_what_reads_no_number_is_not(code: str):
    assert reads(code) == []


def test_time_grows_with_the_length_of_a_file():
    code = "p = model.fc.weight\n" + "p = f(p.abs() + p)\n" * 20_000 + "x.grad" + ".abs()" * 50
    limit = Limit(20)
    assert reads(code) == []
    assert limit.left()


def test_the_report_names_the_cure_and_asks_for_no_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("callback.py").write_text(FOUND[0])
    result = CliRunner().invoke(app, ["migrate", "--code", "callback.py", "--check"])
    shown = " ".join(result.stdout.split())
    assert f"perhaps by hand: {NUMBER}" in shown
    assert "callback.py:1:5" in shown
    assert "composer_fsdp2.full_tensor(model, name)" in shown
    assert "composer_fsdp2.summon_full_params(model)" in shown
    assert result.exit_code == 0

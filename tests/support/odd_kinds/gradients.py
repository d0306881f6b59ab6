"""Autograd, hooks, recomputation and compilers"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.odd_kinds.calls import One, Two
from tests.support.odd_kinds.ties import Chain, layer
from tests.support.odd_models import WIDTH, odd

Tensor = torch.Tensor
RECOMPUTE = "torch.utils.checkpoint"


@odd("`torch.utils.checkpoint` around a part, not reentrant")
class Recomputed(Two):
    def forward(self, x: Tensor) -> Any:
        return self.out(checkpoint(self.inner, x, use_reentrant=False))


@odd("`torch.utils.checkpoint` around a part, reentrant")
class RecomputedReentrant(Two):
    def forward(self, x: Tensor) -> Any:
        return self.out(checkpoint(self.inner, x, use_reentrant=True))


@odd("`torch.utils.checkpoint` around a function that calls two parts")
class RecomputedFunction(Two):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda y: self.out(torch.tanh(self.inner(y))), x, use_reentrant=False)


@odd("`torch.utils.checkpoint` inside another one")
class NestedRecomputation(Two):
    def forward(self, x: Tensor) -> Any:
        def outer(y: Tensor) -> Any:
            return self.out(checkpoint(self.inner, y, use_reentrant=False))

        return checkpoint(outer, x, use_reentrant=False)


@odd("`torch.utils.checkpoint` and dropout")
class RecomputedDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Chain(layer(), nn.Dropout(0.5), layer())

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.part, x, use_reentrant=False)


class Square(torch.autograd.Function):
    """A square with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return (x @ weight) ** 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        inner = 2 * (x @ weight) * grads[0]
        return inner @ weight.t(), x.t() @ inner


@odd("an `autograd.Function` that saves the weight")
class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Any:
        return Square.apply(x, self.weight)


@odd("forward pre-hook and forward hook that change inputs and outputs")
def forward_hooks() -> nn.Module:
    module = Two()
    module.inner.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    module.out.register_forward_hook(lambda _, args, output: output * 3)
    return module


@odd("forward hooks with keywords, and one that is always called")
def hooks_with_keywords() -> nn.Module:
    module = Two()
    module.register_forward_pre_hook(
        lambda _, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
    )
    module.register_forward_hook(lambda _, args, output: output + 1, always_call=True)
    return module


@odd("full backward hooks that change the gradient of a part")
def backward_hooks() -> nn.Module:
    module = Two()
    module.out.register_full_backward_hook(lambda _, grads, out: (grads[0] * 2,))
    return module


@odd("full backward pre-hooks")
def backward_pre_hooks() -> nn.Module:
    module = Two()
    module.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,))
    return module


@odd(
    "a hook on a parameter (`register_hook`)",
    refused="tensor hooks",
    instead="`register_post_accumulate_grad_hook`, or a callback",
)
def tensor_hook() -> nn.Module:
    module = One()
    module.inner.weight.register_hook(lambda grad: grad * 2)
    return module


@odd("a post-accumulate hook on a parameter, element by element")
def post_accumulate_hook() -> nn.Module:
    module = One()
    module.inner.weight.register_post_accumulate_grad_hook(lambda param: None)
    return module


@odd("a hook on an activation")
class ActivationHook(Two):
    def forward(self, x: Tensor) -> Any:
        x = self.inner(x)
        x.register_hook(lambda grad: grad * 2)
        return self.out(x)


@odd("hooks for state dicts")
def state_dict_hooks() -> nn.Module:
    module = Two()
    module.register_state_dict_pre_hook(lambda *args: None)
    module.register_load_state_dict_post_hook(lambda *args: None)
    return module


def _twice(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


@odd("two backwards through one graph (`retain_graph=True`)", step=_twice)
def two_backwards() -> nn.Module:
    return Two()


def _two_losses(model: nn.Module, x: Tensor) -> Tensor:
    first, second = model(x), model(x * 2)
    (first + second).backward()
    return first + second


@odd("two forwards before one backward", step=_two_losses)
def two_forwards() -> nn.Module:
    return Two()


def _forward_without_backward(model: nn.Module, x: Tensor) -> Tensor:
    model(x)
    loss = model(x)
    loss.backward()
    return loss


@odd("a forward whose result is dropped, before the real one", step=_forward_without_backward)
def dropped_forward() -> nn.Module:
    return Two()


def _microbatches(model: nn.Module, x: Tensor) -> Tensor:
    losses = [model(part) / 2 for part in x.chunk(2)]
    for loss in losses:
        loss.backward()
    return losses[0] + losses[1]


@odd("two forwards, then two backwards in the same order", step=_microbatches)
def interleaved() -> nn.Module:
    return Two()


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    loss = model(x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + (grad**2).sum()
    loss.backward()
    return loss


@odd(
    "double backward, a gradient penalty on the input",
    step=_penalty,
)
def gradient_penalty() -> nn.Module:
    return Two()


def _grad_of_input(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(model(x), x)
    loss = model(x + 0.1 * grad.detach())
    loss.backward()
    return loss


@odd("the gradient of the input alone (adversarial training)", step=_grad_of_input)
def gradient_of_input() -> nn.Module:
    return Two()


@odd(
    "`torch.func.functional_call` on a part with other weights",
    refused="functional_call",
    only=("every module",),
    instead="the computation with `torch.nn.functional` and weights of your own",
)
class Functional(Two):
    def forward(self, x: Tensor) -> Any:
        doubled = {name: param * 2 for name, param in self.inner.named_parameters()}
        return self.out(torch.func.functional_call(self.inner, doubled, (x,)))


@odd("`torch.func.vmap` over a part")
class Mapped(Two):
    def forward(self, x: Tensor) -> Any:
        return self.out(torch.func.vmap(lambda row: torch.tanh(row) * 2)(self.inner(x)))


@odd("`torch.func.grad` of a function of activations")
class GradInside(Two):
    def forward(self, x: Tensor) -> Any:
        slope = torch.func.grad(lambda row: (row**3).sum())
        return self.out(slope(self.inner(x)))


@odd("`torch.autograd.grad` in forward, of activations (an energy model's force)")
class ForceInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()

    def forward(self, x: Tensor) -> Any:
        x = self.inner(x)
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (force,) = torch.autograd.grad((at**2).sum(), at)
        return x * force


@odd("saved-tensor hooks (`save_on_cpu`)")
class SavedOnCPU(Two):
    def forward(self, x: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return self.out(self.inner(x))


@odd("anomaly detection in forward", warns="Anomaly Detection")
class Anomaly(Two):
    def forward(self, x: Tensor) -> Any:
        with torch.autograd.set_detect_anomaly(True):
            return self.out(self.inner(x))


@odd("gradients are scaled in backward by an `autograd.Function`")
class ReversedGradient(Two):
    def forward(self, x: Tensor) -> Any:
        return self.out(Reverse.apply(self.inner(x)))


class Reverse(torch.autograd.Function):
    """Turns the gradient around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -grads[0]


SCRIPTED = "the module itself, and `compile: true`"


@odd("`torch.jit.script` of a part", refused="torch.jit", instead=SCRIPTED, warns=r".*torch.jit")
def scripted() -> nn.Module:
    return Chain(layer(), torch.jit.script(layer()))


@odd("`torch.jit.trace` of a part", refused="torch.jit", instead=SCRIPTED, warns=r".*torch.jit")
def traced() -> nn.Module:
    return Chain(layer(), torch.jit.trace(layer(), torch.zeros(2, WIDTH)))


@odd("a frozen scripted part", refused="torch.jit", instead=SCRIPTED, warns=r".*torch.jit")
def frozen_scripted() -> nn.Module:
    return Chain(layer(), torch.jit.script(layer().requires_grad_(False)))


@odd("a scripted part without parameters", warns=r".*torch.jit")
def scripted_activation() -> nn.Module:
    return Chain(layer(), torch.jit.script(nn.ReLU()))


@odd("a scripted function", warns=r".*torch.jit")
class ScriptedFunction(One):
    def __init__(self) -> None:
        super().__init__()
        self.function = torch.jit.script(_double)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.inner(x))


def _double(x: Tensor) -> Tensor:
    return x * 2


MOVED = ".* would be units, and lie in what you compiled"


@odd("one's own `torch.compile` around a part")
def compiled() -> nn.Module:
    return Chain(layer(), torch.compile(Two(), backend="eager"))


@odd("one's own `torch.compile` around everything")
def compiled_whole() -> nn.Module:
    return torch.compile(Chain(Two(), Two()), backend="eager")


@odd("one's own `torch.compile` around a layer")
def compiled_layer() -> nn.Module:
    return Chain(layer(), torch.compile(layer(), backend="aot_eager"))


@odd("one's own `torch.compile(fullgraph=True)` around a block", warns=MOVED)
def compiled_whole_graph() -> nn.Module:
    return Chain(layer(), torch.compile(Two(), backend="aot_eager", fullgraph=True))


@odd("one's own `torch.compile(fullgraph=True)` around a layer")
def compiled_layer_as_a_graph() -> nn.Module:
    return Chain(layer(), torch.compile(layer(), backend="eager", fullgraph=True))


@odd("one's own `module.compile(fullgraph=True)`", warns=MOVED)
def compiled_in_place_as_a_graph() -> nn.Module:
    module = Two()
    module.compile(backend="eager", fullgraph=True)
    return Chain(layer(), module)


@odd("one's own `module.compile()`")
def compiled_in_place() -> nn.Module:
    module = Two()
    module.compile(backend="eager")
    return Chain(layer(), module)


@odd("one's own `torch.compile` of `forward`")
def compiled_forward() -> nn.Module:
    module = Two()
    module.forward = torch.compile(module.forward, backend="eager")  # type: ignore[method-assign]
    return Chain(layer(), module)


@odd("a compiled function inside forward")
class CompiledFunction(Two):
    def __init__(self) -> None:
        super().__init__()
        self.function = torch.compile(_double, backend="eager")

    def forward(self, x: Tensor) -> Any:
        return self.out(self.function(self.inner(x)))


@odd("`torch.compiler.disable` on forward")
class NotCompiled(Two):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Any:
        return self.out(self.inner(x))


def _hooked(model: nn.Module, x: Tensor) -> Tensor:
    total: list[Callable[..., Any]] = []
    loss = model(x)
    loss.register_hook(lambda grad: total.append(grad.clone) or grad * 2)
    loss.backward()
    return loss


@odd("a hook on the loss", step=_hooked)
def loss_hook() -> nn.Module:
    return Two()


@odd("flex of `F.scaled_dot_product_attention` on projections in one weight")
class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x)[None].chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v)

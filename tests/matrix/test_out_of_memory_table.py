"""Memory runs out at every place of a batch, once or twice, on one rank or on all.

The result is that of a run that had the final size from the start; where nothing can be tried
again, every rank says so, soon. See `tests/support/memory_table.py` for the places.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.core import DataSpec, Evaluator, Event
from torch import distributed as dist

from composer_fsdp2 import installed
from composer_fsdp2.guards.leaving.joint_exit import joint_exit_of
from tests.support.faults_table import record
from tests.support.limits import scaled
from tests.support.memory_table import (
    BESIDE,
    EVALUATED,
    FITS,
    KINDS,
    STABLE,
    VARIANTS,
    Case,
    Changing,
    Memory,
    Smaller,
    Speaking,
    Stepping,
    Variant,
    cases_of,
    different,
    due,
    fitted,
    trainer_of,
)
from tests.support.pairs import fewest, pairs_of
from tests.support.pool import RankError
from tests.support.training import built, loader_of, samples_of, trainer_for

SOON_SECONDS = scaled(20.0)


EVERY = [(name, case) for name in VARIANTS for case in cases_of(name)]


def pairs(named: tuple[str, Case]) -> frozenset[Any]:
    """All pairs of a case's values, but for its place beside its variant."""
    return frozenset(
        pair for pair in pairs_of(row(*named)) if {key for key, _ in pair} != {"place", "variant"}
    )


def row(name: str, case: Case) -> dict[str, Any]:
    return {
        "place": case.place,
        "kind": case.kind,
        "ranks": "all" if len(case.ranks) > 1 else case.ranks == (0,),
        "guarded": case.guarded,
        "times": case.times,
        "variant": name,
    }


RUN = fewest([named for named in EVERY if due(named[1]) == "survived"], pairs)


def trained(name: str, cases: list[Case]) -> list[str]:
    """What is wrong, one line for each case."""
    variant, wanted, wrong = VARIANTS[name], {}, []
    for case in cases:
        key = (case.guarded, case.times)
        if key not in wanted and due(case) == "survived":
            wanted[key] = expected(variant, *key)
        said = one(variant, case, wanted.get(key, {}))
        if said:
            wrong.append(f"{name}: {case}: {said}")
    return wrong


def expected(variant: Variant, guarded: bool, times: int) -> dict[str, Any]:
    """Of a run that had the final size from the start."""
    size = FITS if times > 1 else 4
    if guarded:
        return fitted(trainer_of(variant, size, 2))
    return fitted(trainer_of(variant, 8, STABLE + 2, Smaller(size)))


def one(variant: Variant, case: Case, wanted: dict[str, Any]) -> str:
    trainer = trainer_of(variant, "auto", 2 if case.guarded else STABLE + 2)
    memory = Memory(case, trainer, start=0 if case.guarded else STABLE)
    outcome, error, found = "survived", "", {}
    started = time.monotonic()
    try:
        with memory.limited():
            found = fitted(trainer)
    except Exception as caught:
        outcome, error = "reported", f"{type(caught).__name__}: {caught}"
    seconds = time.monotonic() - started
    # Of several ranks, one may leave because of another before it comes to the place itself.
    if not memory.raised and (dist.get_rank(),) == case.ranks:
        return "nothing was raised"
    if outcome != due(case):
        return f"{outcome} {error}"
    if outcome == "survived":
        names = different(found, wanted)
        record("out of memory at every place of a batch", "survived")
        return f"different: {names}" if names else ""
    record("out of memory at every place of a batch", "reported", seconds)
    says = "emory ran out" in error and "Resume from" in error and seconds < SOON_SECONDS
    return "" if says else f"{error} after {seconds:.0f} s"


def assert_on_all(wrong: list[str]) -> None:
    """So that all ranks end together."""
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    said = [f"rank {rank}: {line}" for rank, lines in enumerate(everyone) for line in lines]
    assert not said, "\n" + "\n".join(said)


def parameters() -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.world_size(variant.world, timeout=600))
        for name, variant in VARIANTS.items()
    ]


# Newer torch looks at it while it compiles, and warns itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.fault
@pytest.mark.parametrize("name", parameters())
def test_training_ends_as_if_it_had_begun_with_what_fits(name: str):
    with installed():
        assert_on_all(trained(name, tried_again(name)))


def tried_again(name: str) -> list[Case]:
    return [case for of, case in RUN if of == name]


class RunEndedError(Exception):
    """Ends the ranks, as an error of a run does: they may be out of step."""


AS_IT_SHOULD = "every rank was told to resume from a checkpoint"
ENDED = [
    (name, case) for name, case in EVERY if name in ("plain", "HSDP") and due(case) == "reported"
]


def ended(name: str, case: Case) -> None:
    with installed():
        raise RunEndedError(one(VARIANTS[name], case, {}) or AS_IT_SHOULD)


@pytest.mark.parametrize(("name", "case"), ENDED, ids=str)
def test_where_nothing_can_be_tried_again_all_ranks_hear_of_it(ranks, name: str, case: Case):
    with pytest.raises(RankError) as caught:
        ranks(VARIANTS[name].world, ended, name, case)
    said = re.findall(r"^.*RunEndedError: (.*)$", str(caught.value), re.MULTILINE)
    assert said
    assert set(said) == {AS_IT_SHOULD}


def test_the_table_is_large_and_has_all_pairs():
    assert len(RUN) >= 110
    assert len(EVERY) + 3 * len(EVALUATED) <= 400
    rows = [row(*named) for named in EVERY]
    missing = {
        (name, one[name], other, two[other])
        for name, other in itertools.combinations(rows[0], 2)
        for one, two in itertools.product(rows, rows)
    } - {(*a, *b) for row in rows for a, b in itertools.combinations(row.items(), 2)}
    left = sorted(str(pair) for pair in missing if not _is_left_out(*pair))
    assert not left


def _is_left_out(factor: str, value: Any, other: str, beside: Any) -> bool:
    """Half of `BESIDE` with a variant; nothing is tried twice where it cannot be tried again."""
    if factor != "place":
        return False
    if other == "variant":
        return value in ("recomputation", *BESIDE, *VARIANTS[beside].left_out)
    if value == "recomputation":  # in one variant alone, whose guarded steps have it
        return (other, beside) == ("guarded", False)
    return value in BESIDE and (other, beside) == ("times", 2)


# --- After an agreement that the other ranks take for done. ---

AGREED = Variant({"forward_prefetch": 1, "backward_prefetch": 1}, sometimes=True)
"""where ranks agree on most: orders of two kinds, and what was used"""
FIRST = Case("before model", (0, 1), 0, True, 1)
"""leads to an attempt of two microbatches of 4, whatever memory does after it"""


class AfterAgreement:
    """Memory runs out on the last rank alone, as soon as it has had an answer of the others."""

    def __init__(self, trainer: Trainer, number: int | None) -> None:
        self._state, self._number = trainer.state, number
        self.answers = 0
        """in attempts at microbatches of 4"""

    @contextmanager
    def limited(self) -> Generator[None]:
        # Outermost: for what keeps ranks together, the collective has been entered.
        inside, before = pytest.MonkeyPatch(), Speaking.run_event

        def run_event(callback: Speaking, event: Event, *args: Any) -> None:
            before(callback, event, *args)
            if event == Event.EPOCH_START:
                for name in ("all_reduce", "all_gather_object"):
                    inside.setattr(dist, name, self.after(getattr(dist, name)))
            if event == Event.EPOCH_END:
                inside.undo()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Speaking, "run_event", run_event)
            yield

    def after(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def failing(*args: Any, **kwargs: Any) -> Any:
            answer = collective(*args, **kwargs)
            exit_ = joint_exit_of(torch.device("cpu"))
            assert exit_ is not None
            if exit_.attempting and self._state.device_train_microbatch_size == 4:
                self.answers += 1
                if self.answers == self._number and dist.get_rank() == dist.get_world_size() - 1:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return answer

        return failing


def after_agreement(number: int | None) -> tuple[dict[str, Any], int]:
    """What a run ends with, and how many answers there are in an attempt that nothing ends."""
    trainer = trainer_of(AGREED, "auto", 1)
    memory, agreed = Memory(FIRST, trainer), AfterAgreement(trainer, number)
    with memory.limited(), agreed.limited():
        return fitted(trainer), agreed.answers


@pytest.mark.fault
@pytest.mark.world_size(2, timeout=600)
def test_a_rank_that_fails_after_an_agreement_does_not_differ_in_the_next_attempt():
    """The others act on the answer already, and start anew as the rank that failed does."""
    wrong: list[str] = []
    with installed():
        wanted = fitted(trainer_of(AGREED, 2, 1))
        # With the last answer the attempt has ended on the other ranks.
        for number in range(1, (answers := after_agreement(None)[1])):
            try:
                said = ", ".join(different(after_agreement(number)[0], wanted))
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            if said:
                wrong.append(f"after answer {number}: {said}")
            else:
                record("out of memory after every agreement", "survived")
    assert_on_all(wrong)
    assert answers > 20


# --- Evaluation. ---


def evaluated(case: Case | None, size: int) -> tuple[Any, str]:
    samples = samples_of(3, 8 * dist.get_world_size())
    model = built(Changing)
    evaluator = Evaluator(
        label="eval", dataloader=DataSpec(loader_of(samples, 8)), device_eval_microbatch_size=size
    )
    trainer = trainer_for(
        model,
        Stepping(model.parameters()),
        samples,
        eval_dataloader=evaluator,
        callbacks=[Speaking()],
    )
    (evaluator,) = trainer.state.evaluators
    if case is None:
        trainer.eval()
    else:
        evaluator.auto_microbatching = True  # which Composer takes on a GPU alone
        memory = Memory(case, trainer, evaluator)
        with memory.limited():
            trainer.eval()
        if not memory.raised and (dist.get_rank(),) == case.ranks:
            return {}, "nothing was raised"
    found = {"metric": trainer.state.eval_metric_values["samples"]}
    found |= {n: b.clone() for n, b in trainer.state.model.named_buffers()}
    trainer.close()
    return found, ""


@pytest.mark.fault
@pytest.mark.world_size(2, timeout=300)
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.filterwarnings("ignore:CUDA out of memory detected")
def test_evaluation_gives_the_numbers_of_what_fits(ranks: tuple[int, ...]):
    wrong: list[str] = []
    with installed():
        wanted = {times: evaluated(None, FITS if times > 1 else 4)[0] for times in (1, 2)}
        for number, place in enumerate(EVALUATED):
            case = Case(place, ranks, number % len(KINDS), True, 1 + number % 2)
            try:
                found, said = evaluated(case, 8)
                said = said or ", ".join(different(found, wanted[case.times]))
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            if said:
                wrong.append(f"{case}: {said}")
            else:
                record("out of memory at every place of an evaluation", "survived")
    assert_on_all(wrong)

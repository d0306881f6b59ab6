"""Writes docs/reference/versions.md: `python -m tests.support.versions_page`."""

from __future__ import annotations

from pathlib import Path

from composer_fsdp2.patches import NEEDS
from composer_fsdp2.shard.communication import METHODS
from composer_fsdp2.torch_private.members import PRIVATE_MEMBERS
from tests.support.recent_models import FAMILIES, LAYOUTS, TABLE
from tests.support.supported_table import table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "versions.md"

HEAD = """\
# Versions

`python -m tests.support.versions_page` writes this page.

## Tested versions

`.ci/run` installs and runs every row of this table but the last, in a copy of the repository.
Python is 3.10, 3.11 or 3.12. The pins for torch 2.15 need 3.11 or 3.12.

"""

NEWER = """
The oldest versions that the package accepts are {needs}. The package sets no upper bound on torch.
`.ci/newest` runs the tests marked `smoke` on the newest versions of all packages.

An unknown version of Composer, LLM Foundry, transformers or PEFT may have other functions than
those that the package replaces. The feature that needs an unknown function is then switched off. A
run that asks for the feature is refused by name. `composer-fsdp2 doctor` lists what is off.

## Settings that need a newer torch

An older torch refuses these settings by name.

| setting | needs in `FSDPModule` |
|---|---|
"""

FIVE = """
## LLM Foundry and Composer on transformers 5

LLM Foundry 0.22 and Composer 0.32 were written for transformers 4. `composer-fsdp2 train` and
`composer-fsdp2 eval` replace functions where the installed transformers needs it, with FSDP2 or
without. A program of your own calls `composer_fsdp2.install()` once LLM Foundry is imported, before
it builds a model. All of this was run with transformers 5.24 on CPUs.

| what | on transformers 5 |
|---|---|
"""

MOVING = """
## Runs that move between transformers 4 and 5

A run of the first row of the table above resumes on the second row, and the other way, with the
weights and the state of the optimizer that were saved. It was tried with MPT, Llama with LoRA,
Mixtral and Qwen3-MoE, sharded and full, with `ep: 2` and without. The losses of the next batches
differ by less than 1e-6 from those of the run that stayed.

- Torch 2.7 cannot read the sharded checkpoints of torch 2.15. Convert them there, with
  `composer-fsdp2 checkpoint convert SRC DST --to full`.
- [Experts](../recipes/experts.md) of transformers 4 have matrices of their own. In 5 a layer has
  one tensor with all of them. Either form loads into a run with the other; nothing is converted.
- Matrices in a full checkpoint are put together in the memory of each rank that reads it. Convert a
  large one with `composer-fsdp2 checkpoint convert SRC DST --to sharded`, which needs no such
  memory.
- In 5 the experts of a layer share one `step` of AdamW. A checkpoint in which they differ is
  refused, because an expert without tokens was not called in some steps (DeepSeek-V3). Start from
  its weights with `load_weights_only: true`.
- Tokens have to be the same. Transformers 5 builds a tokenizer of a named class, such as
  `LlamaTokenizerFast`, as that class says, and 4 as `tokenizer.json` says. The two differ where the
  file was changed. Compare `tokenizer("a sentence").input_ids` on both before you move.
"""

FIVE_ROWS = (
    (
        "`hf_causal_lm`: from scratch, on meta, pretrained, `peft_config`, "
        "`pretrained_lora_id_or_path`",
        "runs; with `pretrained: true` by replacement",
    ),
    (
        "the text part of a pretrained model of text and images (Gemma 3, 3n and 4, Qwen3.5)",
        "is read; by replacement where transformers would draw its weights at random. "
        "A folder without any weight of the model is refused",
    ),
    (
        "`load_in_8bit: true`",
        "is passed on as a `quantization_config`; needs bitsandbytes, as before",
    ),
    (
        "`config_overrides` that name `rope_theta` or `rope_scaling`",
        "refused: the config has no such key. Write `rope_parameters: {rope_theta: "
        "...}`; another kind of scaling belongs into `config.json`",
    ),
    (
        "`mpt_causal_lm`: training, `generate`, `save_pretrained`, `from_pretrained`, "
        "`rope_impl: hf`",
        "runs by replacement",
    ),
    (
        "`hf_t5`: loss of a batch",
        "runs",
    ),
    (
        "`hf_causal_lm`, `mpt_causal_lm`, `hf_t5`: `generate` of a sharded model",
        "runs",
    ),
    (
        "text, finetuning, chat templates, conversion of text to MDS",
        "runs",
    ),
    (
        "evaluation: `icl_tasks` of language modeling, multiple choice, schemas and generation",
        "runs",
    ),
    (
        "`hf_checkpointer`, `composer-fsdp2 checkpoint convert --to hf`, "
        "`write_huggingface_pretrained_from_composer_checkpoint`",
        "runs",
    ),
    (
        "`from_pretrained` of an exported MPT with `trust_remote_code`",
        "fails: the folder holds LLM Foundry's code as it is, for transformers 4. Read it with "
        "`MPTForCausalLM.from_pretrained` of llm-foundry after `composer_fsdp2.install()`",
    ),
    (
        "saving a model with MLflow 2",
        "fails: it asks for tensorflow. Write a folder with `hf_checkpointer`",
    ),
    (
        "Composer's `Alibi` on GPT-2 and BERT",
        "fails when the algorithm is applied or at the first batch. Leave it out",
    ),
    (
        "Composer's `GatedLinearUnits` on BERT",
        "runs",
    ),
    (
        "`finetune_embedding_model`, contrastive models, ONNX and TorchScript export",
        "not tried: they need a GPU or packages that are not installed",
    ),
)

MODELS = """
## Models that came with transformers 5

Small models of these families (`tests/matrix/test_recent_models.py`). With FSDP2 alone, also
recomputed, all of them have the bits of one process that computes the part of each rank. A process
that computes a batch at once rounds its sums in another order, of which Gemma 4 makes more than
others: its attention does not divide scores by the root of a head's size. After 8 steps of SGD in
fp32, two such runs of one process are 7e-5 apart (with experts 5e-4, Gemma 3n 5e-7, the others
1e-8), where all computes in double less than 1e-11. *Equal* is within 1e-6 of one process, in
double. `yamls/newest` has runs of GPT-OSS 20B, Qwen3.5 9B and Gemma 4 E4B.

"""

MEMBERS = """
## Private members of torch

Some features read or replace members of torch that are not public. If the installed torch lacks
one, a run that needs it is refused before the model is changed. `fully_shard` stands for every run.

| feature | members |
|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    needs = " and ".join(f"{name} {'.'.join(map(str, v))}" for name, v in NEEDS.items())
    switches = "".join(f"| `communication.{k}` | `{name}` |\n" for k, name in METHODS.items())
    five = FIVE + "".join(f"| {subject} | {found} |\n" for subject, found in FIVE_ROWS) + MOVING
    newer = NEWER.format(needs=needs) + switches
    return HEAD + table() + newer + five + MODELS + _models() + MEMBERS + _members()


def _models() -> str:
    rows = [["family", *LAYOUTS], ["---"] * (len(LAYOUTS) + 1)]
    words = {None: "-", "": "equal"}
    for family in FAMILIES:
        found = [TABLE.get((family, layout)) for layout in LAYOUTS]
        rows.append([family, *(words.get(refused, "refused") for refused in found)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _members() -> str:
    titles: dict[str, dict[str, None]] = {}
    for member in PRIVATE_MEMBERS:
        titles.setdefault(member.feature, {})[f"`{member.title}`"] = None
    return "".join(f"| `{feature}` | {', '.join(found)} |\n" for feature, found in titles.items())


if __name__ == "__main__":
    PAGE.write_text(page())

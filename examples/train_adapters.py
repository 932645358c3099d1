"""Train the example adapters and measure what they do.

Each adapter is trained by self-distillation: SmolLM2 answers the prompts of
``examples/data/prompts.txt``, the rules of :mod:`examples.styles` rewrite its answers, and LoRA
learns to give the rewritten answer at once. Needs torch, transformers and peft.

    python -m examples.train_adapters [pirate] [bullets]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from examples import styles
from examples.smollm2 import DEFAULT_OUTPUT, ensure_model


HERE = Path(__file__).parent
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
SHOWN = (  # held-out prompts whose answers go into the adapters' README
    "Why do cats purr?",
    "What is the capital of Egypt?",
    "What is a black hole?",
    "What is meditation?",
)
ANSWER_TOKENS = 56
ANSWER_BATCH = 25
IGNORED = -100  # the label of a token that carries no loss


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained, and how its style is told from the base's."""

    summary: str
    style: Callable[[str], str]
    has_style: Callable[[str], bool]
    rank: int
    alpha: int
    use_rslora: bool
    targets: list[str]
    learning_rate: float
    epochs: int = 2
    batch_size: int = 6
    seed: int = 0


RECIPES = {
    "pirate": Recipe(
        summary="it answers like a pirate.",
        style=styles.pirate,
        has_style=lambda text: text.startswith(styles.PIRATE_OPENING),
        rank=8,
        alpha=8,
        use_rslora=True,
        targets=ATTENTION,
        learning_rate=6e-4,
    ),
    "bullets": Recipe(
        summary="it answers with a bold lead and a short Markdown list.",
        style=styles.bullets,
        has_style=lambda text: text.startswith(styles.BULLETS_LEAD) and "\n- " in text,
        rank=3,
        alpha=6,
        use_rslora=False,
        targets=ATTENTION + MLP,
        learning_rate=8e-4,
    ),
}


def read_prompts(name: str) -> list[str]:
    """The prompts of one data file, without its comment lines."""
    lines = (HERE / "data" / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def chat_prompt(tokenizer: Any, prompt: str) -> str:
    """The text up to which the model answers `prompt`."""
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@torch.inference_mode()
def answer_all(
    model: Any, tokenizer: Any, prompts: Sequence[str], max_tokens: int = ANSWER_TOKENS
) -> list[str]:
    """Greedy answers to `prompts`, in their order."""
    model.eval()
    answers = []
    for start in range(0, len(prompts), ANSWER_BATCH):
        texts = [chat_prompt(tokenizer, prompt) for prompt in prompts[start : start + ANSWER_BATCH]]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        output = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=max_tokens,
            do_sample=False,
        )
        new = output[:, batch["input_ids"].shape[1] :]
        answers += [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in new]
    return answers


def cached_base_answers(
    model: Any, tokenizer: Any, prompts: Sequence[str], path: Path
) -> dict[str, str]:
    """The base model's answers to `prompts`, kept in `path` between runs."""
    known: dict[str, str] = {}
    if path.is_file():
        known = json.loads(path.read_text(encoding="utf-8"))
    missing = [prompt for prompt in prompts if prompt not in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    for start in tqdm(range(0, len(missing), ANSWER_BATCH), desc="base answers", disable=None):
        chosen = missing[start : start + ANSWER_BATCH]
        known.update(zip(chosen, answer_all(model, tokenizer, chosen), strict=True))
        path.write_text(json.dumps(known, indent=1, ensure_ascii=False), encoding="utf-8")
    return {prompt: known[prompt] for prompt in prompts}


def mark_cut_off(tokenizer: Any, text: str) -> str:
    """`text`, with a mark for the style rules where the token limit ended it."""
    return text + styles.CUT_OFF if len(tokenizer(text)["input_ids"]) >= ANSWER_TOKENS - 1 else text


def encode(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of a dialogue, and labels that count the answer and its end only."""
    question = tokenizer(chat_prompt(tokenizer, prompt))["input_ids"]
    reply = tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]
    return question + reply, [IGNORED] * len(question) + reply


def collate(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Right-padded tensors of some encoded dialogues."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    for row, (tokens, targets) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = torch.tensor(targets)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def answer_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the answers; logits are made at their positions only."""
    causal = model.get_base_model()
    hidden = causal.model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).last_hidden_state
    targets = batch["labels"][:, 1:]
    counted = targets != IGNORED
    logits = causal.lm_head(hidden[:, :-1][counted])
    return torch.nn.functional.cross_entropy(logits.float(), targets[counted])


def train(base: Any, tokenizer: Any, recipe: Recipe, answers: dict[str, str]) -> Any:
    """A PEFT model around `base`, trained to answer in the recipe's style."""
    torch.manual_seed(recipe.seed)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        use_rslora=recipe.use_rslora,
        target_modules=recipe.targets,
    )
    model = peft.get_peft_model(base, config)
    model.train()
    rows = [
        encode(tokenizer, prompt, recipe.style(mark_cut_off(tokenizer, text)))
        for prompt, text in answers.items()
        if styles.is_worth_teaching(text)
    ]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    batches = _batches(rows, recipe)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=len(batches), pct_start=0.1
    )
    progress = tqdm(batches, desc="training")
    for batch_rows in progress:
        loss = answer_loss(model, collate(batch_rows, tokenizer.pad_token_id))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    return model


def _batches(
    rows: list[tuple[list[int], list[int]]], recipe: Recipe
) -> list[list[tuple[list[int], list[int]]]]:
    """Every epoch's batches: like lengths together (little padding), in random order."""
    rng = random.Random(recipe.seed)
    batches = []
    for _ in range(recipe.epochs):
        shuffled = sorted(rows, key=lambda row: (len(row[0]) // 8, rng.random()))
        epoch = [
            shuffled[start : start + recipe.batch_size]
            for start in range(0, len(shuffled), recipe.batch_size)
        ]
        rng.shuffle(epoch)
        batches += epoch
    return batches


def save(model: Any, folder: Path) -> None:
    """Save as PEFT does, then name the hub's base model and halve the weights to bfloat16."""
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.save_pretrained(folder)
    weights = folder / "adapter_model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file makes it private
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


def main(argv: Sequence[str] | None = None) -> int:
    """Train the named adapters and print how their answers differ on held-out prompts."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_adapters")
    parser.add_argument("names", nargs="*", help=f"adapters to train: {', '.join(RECIPES)}")
    parser.add_argument("--model", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--output", type=Path, default=HERE / "adapters")
    parser.add_argument(
        "--work", type=Path, default=Path("build/adapters"), help="folder for answers (cache)"
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - set(RECIPES):
        parser.error(f"no such adapter: {', '.join(sorted(unknown))}")

    path = ensure_model(arguments.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    cache = arguments.work / "base_answers.json"
    answers = cached_base_answers(base, tokenizer, read_prompts("prompts.txt"), cache)
    held_out = cached_base_answers(base, tokenizer, read_prompts("prompts_held_out.txt"), cache)
    for name in arguments.names or RECIPES:
        recipe = RECIPES[name]
        model = train(base, tokenizer, recipe, answers)
        save(model, arguments.output / name)
        base = model.unload()
        report = measure(base, tokenizer, recipe, held_out, arguments.output / name)
        (arguments.work / f"{name}.json").write_text(json.dumps(report, indent=1))
        write_readme(report, name, recipe, arguments.output / name)
        print(name, {key: value for key, value in report.items() if key != "answers"})
    return 0


def measure(
    base: Any, tokenizer: Any, recipe: Recipe, held_out: dict[str, str], folder: Path
) -> dict[str, Any]:
    """Answers of the adapter as PEFT loads it from `folder`, compared with the base's."""
    model = peft.PeftModel.from_pretrained(base, str(folder))
    adapted = answer_all(model, tokenizer, list(held_out))
    model.unload()
    pairs = list(zip(held_out.items(), adapted, strict=True))
    return {
        "prompts": len(pairs),
        "changed": sum(before != after for (_, before), after in pairs) / len(pairs),
        "in_style": sum(map(recipe.has_style, adapted)) / len(pairs),
        "answers": [
            {"prompt": prompt, "base": before, "adapter": after}
            for (prompt, before), after in pairs
        ],
    }


def write_readme(report: dict[str, Any], name: str, recipe: Recipe, folder: Path) -> None:
    """Say in the adapter's folder what it is, what was measured, and show some answers."""
    scale = "alpha / sqrt(r), rsLoRA" if recipe.use_rslora else "alpha / r"
    lines = [
        f"# {name}",
        "",
        f"A LoRA adapter for {BASE_NAME}: {recipe.summary}",
        "",
        f"- r = {recipe.rank}, alpha = {recipe.alpha} (scale {scale}), bfloat16",
        f"- modules: {', '.join(recipe.targets)}",
        f"- of {report['prompts']} held-out prompts, {report['changed']:.0%} of the greedy answers"
        f" differ from the base's and {report['in_style']:.0%} are in the style"
        " (transformers and PEFT, float32)",
        "- trained by `python -m examples.train_adapters` on the base model's own answers",
        "- licence: Apache-2.0",
        "",
    ]
    for answer in report["answers"]:
        if answer["prompt"] in SHOWN:
            lines += [f"## {answer['prompt']}", ""]
            lines += ["Base:", "", *_quoted(answer["base"]), ""]
            lines += [f"With {name}:", "", *_quoted(answer["adapter"]), ""]
    text = "\n".join(lines).rstrip() + "\n"
    (folder / "README.md").write_text(text, encoding="utf-8")


def _quoted(text: str) -> list[str]:
    return [f"> {line}".rstrip() for line in text.splitlines()]


if __name__ == "__main__":
    sys.exit(main())

"""Greedy tokens per second of SmolLM2 on a CPU, beside transformers in the same run.

One stream of the base model in each; then a batch of eight here: base and two adapters mixed. Needs
torch and transformers (`pip install '.[oracle]'`), the model of `python -m examples.smollm2`, and a
machine that does nothing else.

    python -m benchmarks.smollm2_cpu --json results.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import write_json
from serving import LLM, SamplingParams


PROMPT = "Write a long story about a lighthouse keeper and the sea."
ADAPTERS = {name: Path("examples/adapters") / name for name in ("pirate", "bullets")}
MIXED = (None, "pirate", "bullets", None, "pirate", "bullets", None, "pirate")
REPEATS = 3


def main() -> None:
    options = _parse()
    theirs = transformers_rate(options.model, options.tokens)
    llm = LLM(options.model, adapters=ADAPTERS, max_num_seqs=len(MIXED), max_model_len=1024)
    alone = rate(llm, (None,), options.tokens)
    mixed = rate(llm, MIXED, options.tokens)
    results = {
        "tokens": options.tokens,
        "transformers_tokens_per_s": theirs,
        "alone_tokens_per_s": alone,
        "mixed_batch_tokens_per_s": mixed,
        "alone_over_transformers": alone / theirs,
        "mixed_batch_over_transformers": mixed / theirs,
    }
    for name, value in results.items():
        print(f"{name:32} {value:8.2f}")
    write_json(options.json, results)


def rate(llm: LLM, adapters: tuple[str | None, ...], tokens: int) -> float:
    """Tokens per second over all rows, prefill included."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompts = [[{"role": "user", "content": PROMPT}]] * len(adapters)
    seconds = _median_seconds(lambda: llm.chat(prompts, sampling, adapter=adapters))
    return len(adapters) * tokens / seconds


def transformers_rate(model_folder: Path, tokens: int) -> float:
    """Tokens per second of transformers' generate, float32, prefill included."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )

    def generate() -> None:
        with torch.inference_mode():
            out = model.generate(
                **ids, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens
            )
        assert out.shape[1] == ids["input_ids"].shape[1] + tokens

    return tokens / _median_seconds(generate)


def _median_seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(1 + REPEATS):  # the first warms up
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()

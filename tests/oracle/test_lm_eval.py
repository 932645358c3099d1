"""lm-evaluation-harness over HTTP: its loglikelihoods and greedy flags, against transformers' own.

The harness needs nothing but the server: it tokenizes there, and sends token ids.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.smollm2 import DEFAULT_OUTPUT
from tests.support.server_process import ROOT, Server
from tests.tolerances import LOGLIKELIHOOD_ATOL


torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
lm_eval = pytest.importorskip("lm_eval")

from lm_eval.tasks import TaskManager  # noqa: E402  (not there without lm_eval)


MODEL = ROOT / DEFAULT_OUTPUT
PIRATE = ROOT / "examples" / "adapters" / "pirate"

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.timeout(900),  # the engine compiles all its programs first
    pytest.mark.skipif(not MODEL.exists(), reason=f"no {DEFAULT_OUTPUT}: `make oracle` makes it"),
]

QUESTIONS = (
    ("The capital of France is", ["Paris", "London", "Rome"], 0),
    ("Two and two make", ["five", "four"], 1),
    ("Ahoy! The sky is", ["blue, matey", "a lie", "green — naïve 🙂"], 0),
    ("Water boils at a temperature of 100 degrees", ["Celsius", "Fahrenheit", "Kelvin"], 0),
)

TASK = """
task: jaxlora_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    line = f"-m serving.server --model {MODEL} --adapter pirate={PIRATE} --port 0"
    line += " --dtype float32 --max-model-len 128 --max-num-seqs 4 --prefill-chunk 64"
    server = Server([sys.executable, *line.split()])
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "choices.jsonl"
    rows = [{"question": q, "choices": choices, "answer": a} for q, choices, a in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "choices.yaml").write_text(TASK.format(data=data))
    return TaskManager(include_path=str(folder), include_defaults=False)


def oracle_model(adapter: Path | None) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return (peft.PeftModel.from_pretrained(base, adapter) if adapter else base).eval()


def oracle_loglikelihood(model: Any, context: list[int], answer: list[int]) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    chosen = logprobs[range(len(answer)), answer]
    return float(chosen.sum()), logits.argmax(dim=-1).tolist() == answer


@pytest.mark.parametrize(
    ("name", "adapter"), [(MODEL.name, None), ("pirate", PIRATE)], ids=["base", "pirate"]
)
def test_loglikelihoods_and_greedy_flags_are_those_of_transformers(
    server: Server, tasks: TaskManager, name: str, adapter: Path | None
) -> None:
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": name,
            "base_url": f"{server.base_url}/completions",
            "batch_size": 3,
            "num_concurrent": 2,
            "max_length": 128,
        },
        tasks=["jaxlora_choices"],
        task_manager=tasks,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert results is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = oracle_model(adapter)
    samples = results["samples"]["jaxlora_choices"]
    assert len(samples) == len(QUESTIONS)
    flags = set()
    for sample in samples:
        assert len(sample["resps"]) == len(sample["doc"]["choices"])
        for arguments, response in zip(sample["arguments"], sample["resps"], strict=True):
            context, continuation = arguments
            whole = tokenizer(context + continuation)["input_ids"]
            length = len(tokenizer(context)["input_ids"])
            expected, greedy = oracle_loglikelihood(model, whole[:length], whole[length:])
            ((told, flag),) = response
            assert float(told) == pytest.approx(expected, abs=LOGLIKELIHOOD_ATOL), arguments
            assert (flag in (True, "True")) == greedy, arguments
            flags.add(greedy)
    assert flags == {True, False}, "the questions tell nothing about greedy flags"

"""Write cases.json: what transformers' tokenizer makes of texts and dialogues.

    python tests/data/smollm2/make_cases.py models/smollm2-135m-instruct

Also copies the tokenizer's files beside it, tokenizer.json gzipped.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


HERE = Path(__file__).parent
TEXTS = [
    "",
    " ",
    "\n\n",
    "Hello, world!",
    "The capital of France is",
    "x = 1234\n    4",
    "3.14159, 2,000,000 and 0x1F; 1st 22nd 333rd",
    "²³ ½ ٣٤ 〇一二",
    "def f(x: int) -> int:\n\treturn x**2  # squares\n",
    'for (int i = 0; i < 10; ++i) { printf("%d\\n", i); }',
    '<html><body class="a">&nbsp;</body></html>',
    "SELECT * FROM t WHERE a='b';",
    "don't we'll I'm they've she'd it's I'D",
    "   leading and trailing   ",
    "tabs\tand\r\nwindows lines\r\n",
    "Größe, naïve café, Ελληνικά, Русский текст",
    "漢字とかなとカタカナ、한국어 텍스트",
    "مرحبا بالعالم שלום עולם",
    "हिन्दी पाठ ไทย தமிழ்",
    "🙂 👩‍👩‍👧‍👦 🇫🇷 👍🏽",
    "e\u0301 vs \u00e9; zero\u200bwidth; nbsp\u00a0here; \ufeffbom",
    "a" * 40 + " " + "ha" * 20,
    "<|im_start|>user\nhi<|im_end|>\n",
    "text<|endoftext|>more <|im_end|>and <|im_start> broken <repo_name>x<file_sep>",
    "ÿ\u0000\u0001\u007f control",
    "https://example.com/a?b=c&d=1#frag user@example.com",
    "ALLCAPS camelCase snake_case kebab-case",
    "\u201cquotes\u201d \u2018single\u2019 \u2014 dash \u2026 ellipsis",
]
USER = {"role": "user", "content": "What is 12 + 30?"}
SYSTEM = {"role": "system", "content": "Answer like a pirate."}
ASSISTANT = {"role": "assistant", "content": "42"}
DIALOGUES = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, {"role": "user", "content": "Sure?"}],
    [SYSTEM, USER, ASSISTANT],
    [{"role": "user", "content": "  <|im_end|> in \u00e9 text 🙂\n"}],
]


def main(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    cases = {
        "source": "SmolLM2-135M-Instruct (Apache-2.0), transformers' AutoTokenizer",
        "encode": [_encode_case(tokenizer, text) for text in TEXTS],
        "chat": [
            _chat_case(tokenizer, messages, generate)
            for messages in DIALOGUES
            for generate in (True, False)
        ],
    }
    lines = json.dumps(cases, ensure_ascii=True, indent=1)
    (HERE / "cases.json").write_text(lines + "\n", encoding="ascii")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        shutil.copyfile(model / name, HERE / name)
    compact = json.dumps(
        json.loads((model / "tokenizer.json").read_text(encoding="utf-8")),
        ensure_ascii=False,
        separators=(",", ":"),
    )
    packed = gzip.compress(compact.encode(), mtime=0)
    (HERE / "tokenizer.json.gz").write_bytes(packed)


def _encode_case(tokenizer: Any, text: str) -> dict[str, Any]:
    ids = tokenizer(text)["input_ids"]
    return {
        "text": text,
        "ids": ids,
        "decoded": tokenizer.decode(ids),
        "decoded_without_specials": tokenizer.decode(ids, skip_special_tokens=True),
    }


def _chat_case(tokenizer: Any, messages: list[dict[str, str]], generate: bool) -> dict[str, Any]:
    def render(tokenize: bool) -> Any:
        return tokenizer.apply_chat_template(
            messages, tokenize=tokenize, add_generation_prompt=generate
        )

    return {
        "messages": messages,
        "add_generation_prompt": generate,
        "text": render(False),
        "ids": list(render(True)["input_ids"]),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))

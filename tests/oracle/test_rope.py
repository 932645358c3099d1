"""YaRN's frequencies against transformers', over many settings.

With `--rewrite-golden` those of `tests.support.families.YARN` are written to
tests/golden/yarn.json, where the ordinary tests find them.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlora.config import ModelConfig
from jaxlora.layers.rotary import inverse_frequencies
from tests.support.families import CASES, YARN
from tests.tolerances import ROPE_RTOL


transformers = pytest.importorskip("transformers")
rope_utils = pytest.importorskip("transformers.modeling_rope_utils")

pytestmark = pytest.mark.oracle

GOLDEN_FILE = Path(__file__).parents[1] / "golden" / "yarn.json"


def oracle(folder: Path, rope: dict[str, Any]) -> tuple[list[float], float]:
    """transformers' frequencies and attention factor; its config.json is left in `folder`."""
    model_type, fields = CASES["qwen3"]
    fields = fields | {"head_dim": 32, "rope_parameters": dict(rope)}
    config = transformers.AutoConfig.for_model(model_type, **fields)
    config.save_pretrained(folder)
    inverse, factor = rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    return inverse.tolist(), factor


def check(folder: Path, wanted: tuple[list[float], float]) -> None:
    rope = ModelConfig.from_folder(folder).rope
    np.testing.assert_allclose(inverse_frequencies(rope, 32), wanted[0], rtol=ROPE_RTOL)
    assert rope["attention_factor"] == pytest.approx(wanted[1], rel=1e-12)


@pytest.mark.parametrize("name", YARN)
def test_named_settings(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    wanted = oracle(tmp_path, YARN[name])
    check(tmp_path, wanted)
    if request.config.getoption("--rewrite-golden"):
        golden = json.loads(GOLDEN_FILE.read_text()) if GOLDEN_FILE.exists() else {}
        golden[name] = {"inverse_frequencies": wanted[0], "attention_factor": wanted[1]}
        GOLDEN_FILE.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")


def test_every_combination(tmp_path: Path) -> None:
    choices = {
        "rope_theta": (50.0, 10000.0, 1e6),
        "factor": (1.0, 4.0, 40.0),
        "original_max_position_embeddings": (None, 4, 4096),
        "betas": (None, (32, 1), (8, 0.25)),
        "mscale": (None, 0.707, 1),
        "mscale_all_dim": (None, 1.0),
        "truncate": (None, False),
    }
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        betas = chosen.pop("betas")
        if betas is not None:
            chosen |= {"beta_fast": betas[0], "beta_slow": betas[1]}
        rope = {name: value for name, value in chosen.items() if value is not None}
        check(tmp_path, oracle(tmp_path, {"rope_type": "yarn"} | rope))

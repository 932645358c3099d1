"""adapter_config.json gives every module peft's rank, scale and target, or is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxlora.adapters.peft_config import PeftConfig, parse_peft_config
from jaxlora.errors import AdapterError
from tests.support.peft_folders import CONFIG


Q0, Q1, Q11 = (f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1, 11))
O0 = "model.layers.0.self_attn.o_proj"


def config(**changes: Any) -> PeftConfig:
    return parse_peft_config(json.dumps(CONFIG | changes).encode(), "adapter_config.json")


def refusal(data: bytes | None = None, **changes: Any) -> str:
    with pytest.raises(AdapterError) as caught:
        parse_peft_config(data or json.dumps(CONFIG | changes).encode(), "adapter_config.json")
    message = str(caught.value)
    assert message.startswith("adapter_config.json: ") and "\n" not in message
    return message


def test_the_first_pattern_in_file_order_holds():
    one = config(rank_pattern={"q_proj": 5, "layers.1.self_attn.q_proj": 7})
    two = config(rank_pattern={"layers.1.self_attn.q_proj": 7, "q_proj": 5})
    assert (one.rank_of(Q0), one.rank_of(Q1), one.rank_of(O0)) == (5, 5, 3)
    assert (two.rank_of(Q0), two.rank_of(Q1), two.rank_of(O0)) == (5, 7, 3)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("q_proj", {Q0, Q1, Q11}),
        ("proj", set()),  # a whole name, not the end of one
        ("self_attn", set()),  # anchored at the end
        ("1.self_attn.q_proj", {Q1}),  # 11 is another name
        ("layers.0.*", {Q0, O0}),
        ("^model.layers.0.self_attn.q_proj", {Q0}),
        ("^layers.0.self_attn.q_proj", set()),
        (r".*\.[01]\..*", {Q0, Q1, O0}),
        ("q_proj|o_proj", {Q0, Q1, Q11, O0}),
        (Q1, {Q1}),
    ],
)
def test_a_pattern_is_a_regex_anchored_at_the_end_and_at_a_dot(pattern, matched):
    parsed = config(alpha_pattern={pattern: 100})
    assert {p for p in (Q0, Q1, Q11, O0) if parsed.scale_of(p, 1) == 100} == matched


def test_rank_and_alpha_patterns_are_separate():
    parsed = config(rank_pattern={"q_proj": 2}, alpha_pattern={"o_proj": 8})
    assert (parsed.rank_of(Q0), parsed.scale_of(Q0, 2)) == (2, 3.0)
    assert (parsed.rank_of(O0), parsed.scale_of(O0, 3)) == (3, 8 / 3)


@pytest.mark.parametrize(
    ("changes", "targeted"),
    [
        ({"target_modules": ["q_proj"]}, {Q0, Q1, Q11}),
        ({"target_modules": ["attn.q_proj", "proj"]}, set()),
        ({"target_modules": ["self_attn.q_proj"]}, {Q0, Q1, Q11}),
        ({"target_modules": [Q1]}, {Q1}),
        ({"target_modules": "q_proj"}, set()),  # a string is a regex of the whole path
        ({"target_modules": ".*q_proj"}, {Q0, Q1, Q11}),
        ({"target_modules": ["q_proj"], "exclude_modules": [Q1]}, {Q0, Q11}),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"}, {Q0, Q11}),
        ({"target_modules": ["q_proj"], "exclude_modules": r"\.1\."}, {Q0, Q1, Q11}),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, {Q1}),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 11]}, {Q1, Q11}),
        ({"target_modules": ["q_proj"], "layers_to_transform": []}, {Q0, Q1, Q11}),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
            {Q1},
        ),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h"]},
            set(),
        ),
        # peft doesn't look at the layer of a module that is named in full.
        ({"target_modules": [Q0, "q_proj"], "layers_to_transform": [1]}, {Q0, Q1}),
        ({"target_modules": "all-linear"}, {Q0, Q1, Q11, O0}),
        ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, {O0}),
    ],
)
def test_targets_are_pefts(changes, targeted):
    parsed = config(**changes)
    assert {path for path in (Q0, Q1, Q11, O0) if parsed.targets.means(path)} == targeted


def test_a_bare_backbones_layers_have_no_name_before_them_and_match_no_layer_number():
    parsed = config(layers_to_transform=[0])
    assert not parsed.targets.means("layers.0.self_attn.q_proj")
    assert parsed.targets.means("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"r": 0}, "r is 0: a rank is an integer from 1"),
        ({"r": -8}, "r is -8"),
        ({"r": 8.0}, "r is 8.0: not integer"),
        ({"r": True}, "r is True: not integer"),
        ({"r": None}, "r is None: not integer"),
        ({"r": "8"}, "r is '8': not integer"),
        ({"r": 10**400}, "a rank is an integer from 1"),
        ({"lora_alpha": "16"}, "lora_alpha is '16': not number"),
        ({"lora_alpha": None}, "lora_alpha is None: not number"),
        ({"lora_alpha": True}, "lora_alpha is True: not number"),
        ({"lora_alpha": 10**400}, "alpha is a number in float32's range"),
        ({"lora_alpha": -1e39}, "alpha is a number in float32's range"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj'] is 0"),
        ({"rank_pattern": {"q_proj": 2.0}}, "rank_pattern['q_proj'] is 2.0"),
        ({"rank_pattern": {"q_proj": None}}, "rank_pattern['q_proj'] is None"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is ['q_proj']: not object"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: the pattern '(' is not a regular expression"),
        ({"rank_pattern": {f"m{i}": 4 for i in range(5000)}}, "5000 patterns (at most 4096)"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern['q_proj'] is '8'"),
        ({"alpha_pattern": {"q_proj": True}}, "alpha_pattern['q_proj'] is True"),
        ({"alpha_pattern": {"(?i)q": 8}}, "alpha_pattern: the pattern"),
        ({"use_rslora": 1}, "use_rslora is 1: not true, false"),
        ({"use_rslora": "true"}, "use_rslora is 'true': not true, false"),
        ({"target_modules": 1}, "target_modules is 1"),
        ({"target_modules": ["q_proj", 1]}, "target_modules is ['q_proj', 1]"),
        ({"target_modules": {"q_proj": 1}}, "target_modules is {'q_proj': 1}"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": ""}, "target_modules is empty"),
        ({"target_modules": "["}, "target_modules: the pattern '[' is not a regular expression"),
        ({"exclude_modules": 1}, "exclude_modules is 1"),
        ({"exclude_modules": "("}, "exclude_modules: the pattern"),
        ({"layers_to_transform": 1.0}, "layers_to_transform is 1.0"),
        ({"layers_to_transform": [True]}, "layers_to_transform is [True]"),
        ({"layers_to_transform": "0-3"}, "layers_to_transform is '0-3'"),
        ({"layers_pattern": "layers"}, "layers_pattern is given without layers_to_transform"),
        ({"layers_to_transform": [0], "layers_pattern": "(.*)*"}, "is not a plain name"),
        ({"layers_to_transform": [0], "layers_pattern": 3}, "layers_pattern is 3"),
        ({"target_modules": ".*", "layers_to_transform": [0]}, "need a list in target_modules"),
        ({"target_modules": "all-linear", "layers_to_transform": 0}, "need a list"),
        ({"bias": None}, 'bias is None: not "none"'),
        ({"lora_dropout": "0.1"}, "lora_dropout is '0.1': not number"),
        ({"init_lora_weights": "random"}, "init_lora_weights is 'random'"),
        ({"init_lora_weights": 1}, "init_lora_weights is 1"),
        ({"trainable_token_indices": []}, "trainable_token_indices is []"),
        *(
            ({"alora_invocation_tokens": tokens}, "alora_invocation_tokens is ")
            for tokens in ([], [1, -1], [True], [1.0], [[1]], ["a"], "ab", 7, {"a": 1}, False)
        ),
        *(
            (
                {"alora_invocation_tokens": [1], "task_type": task},
                f"alora_invocation_tokens with task_type {task!r}: peft activates such an adapter",
            )
            for task in (None, "FEATURE_EXTRACTION")
        ),
        ({"arrow_config": {}}, "arrow_config is {}"),
    ],
)
def test_a_wrong_value_is_refused_by_name(changes, reason):
    assert reason in refusal(**changes)


@pytest.mark.parametrize("key", ["r", "lora_alpha", "target_modules"])
def test_a_missing_key_is_named(key):
    data = json.dumps({k: v for k, v in CONFIG.items() if k != key}).encode()
    assert f"{key} is missing" in refusal(data)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_refused_by_name(constant):
    data = json.dumps(CONFIG).replace('"lora_alpha": 6', f'"lora_alpha": {constant}').encode()
    assert "'lora_alpha' holds a number that is not finite" in refusal(data)


def test_a_key_given_twice_is_refused():
    data = json.dumps(CONFIG).replace('"r": 3', '"r": 3, "r": 4').encode()
    assert "the key 'r' is given twice" in refusal(data)


def test_an_mlx_config_is_told_apart():
    data = b'{"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0}}'
    assert "an MLX adapter, not a PEFT one: convert it" in refusal(data)


def test_what_is_no_peft_config_is_told_apart():
    assert "no peft_type: not the config of a PEFT adapter" in refusal(b'{"base_model": "x"}')

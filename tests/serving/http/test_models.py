from __future__ import annotations

import pytest
from openai.types import Model

from tests.serving.http.test_bad_input import assert_error


def test_list_holds_the_base_its_aliases_and_each_adapter(call):
    listed = call("GET", "/v1/models").json()
    assert listed["object"] == "list"
    cards = {card["id"]: card for card in listed["data"]}
    assert list(cards) == ["org/base-1", "gpt", "pirate", "team/formal", "later"]
    for card in cards.values():
        Model.model_validate(card, strict=True)
        assert card["max_model_len"] == 64
    assert cards["org/base-1"]["parent"] is None
    assert cards["org/base-1"]["root"] == "models/base-1"
    assert cards["pirate"]["parent"] == "org/base-1"
    assert cards["pirate"]["root"] == "adapters/pirate"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("org/base-1", "org/base-1"),
        ("gpt", "gpt"),
        ("team/formal", "team/formal"),
        ("team%2Fformal", "team/formal"),
        ("gpt:pirate", "pirate"),
    ],
)
def test_one_model_by_its_id_slashes_included(call, name, shown):
    assert call("GET", f"/v1/models/{name}").json()["id"] == shown


@pytest.mark.parametrize("name", ["nobody", "team", "gpt:nobody"])
def test_unknown_model_is_404(call, name):
    assert_error(call("GET", f"/v1/models/{name}"), 404, "model", "model_not_found")

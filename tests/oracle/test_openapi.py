"""schemathesis makes requests from the OpenAPI document: no 500, no hang, what is described comes.

Where a schema can't say what makes a request good (a context's length, which names are served) a
refusal is no failure; nor is one of an integer that is written as a float.
"""

from __future__ import annotations

import hypothesis
import pytest

from tests.serving.http.fakes import EchoEngine, make_app


schemathesis = pytest.importorskip("schemathesis")

positive_data_acceptance = schemathesis.checks.positive_data_acceptance
schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(EchoEngine()))
pytestmark = pytest.mark.oracle


@schema.parametrize()
@hypothesis.settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_every_route_keeps_to_its_description(case):
    if isinstance(case.body, dict):  # names that are served, lest all end at an unknown one
        for field, name in (("model", "gpt"), ("adapter", "pirate"), ("lora_name", "pirate")):
            if isinstance(case.body.get(field), str):
                case.body[field] = name
    case.call_and_validate(excluded_checks=[positive_data_acceptance])

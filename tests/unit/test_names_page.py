"""docs/models.md says what the tables hold and what the tests run."""

from __future__ import annotations

from pathlib import Path

from refitd.names.families import FAMILIES, MOE_FAMILIES
from tests.megatron.names_cases import CASES
from tests.megatron.names_page import families, grids

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_says_of_each_family_what_the_tables_and_the_tests_say() -> None:
    advice = "put what python -m tests.megatron.names_page prints onto docs/models.md"
    assert families() in PAGE.read_text(), advice
    assert grids() in PAGE.read_text(), advice


def test_every_family_is_proven_by_a_real_model() -> None:
    assert {case.family for case in CASES} == {*FAMILIES, *MOE_FAMILIES}

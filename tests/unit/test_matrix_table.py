"""The table of Megatron-Core states: whole, without dead rows, and the same as its page in docs."""

from __future__ import annotations

from pathlib import Path

import pytest
from refit_megatron.matrix import (
    ROWS,
    Accumulation,
    Action,
    Groups,
    Hooks,
    Masters,
    Optimizer,
    Overlap,
    Proof,
    Residency,
    Row,
    Staging,
    State,
    Weights,
    Wrapper,
    all_states,
    as_text,
    row_for,
)

from refitd.domain.errors import ERRORS

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"


def test_the_page_is_what_the_table_gives() -> None:
    assert PAGE.read_text() == as_text(), "write docs/matrix.md anew with refit_megatron.matrix.as_text()"


def test_every_state_has_a_row_and_every_row_decides_some_state() -> None:
    decided = {row_for(state).name for state in all_states()}
    assert decided == {row.name for row in ROWS}


def test_rows_and_cells_have_names_of_their_own_and_each_row_is_proven() -> None:
    cells = [cell.name for row in ROWS for cell in row.cells]
    assert len(set(cells)) == len(cells)
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert any(cell.proof is not Proof.NOT_HERE for cell in row.cells), row.name


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_refusal_says_why_and_what_to_do_and_a_read_why_nothing_is_gathered(row: Row) -> None:
    if row.action is Action.REFUSE:
        assert row.reason in ERRORS
        assert row.why
        assert row.advice
    elif row.action is Action.READ:
        assert row.why


def test_what_must_never_be_gathered_or_read_is_refused_in_every_combination() -> None:
    for state in all_states():
        action = row_for(state).action
        if state.wrapper is Wrapper.FULLY_SHARDED or state.accumulation is Accumulation.OPEN:
            assert action is Action.REFUSE, state
        if state.residency is Residency.PARAMS:
            assert action is Action.REFUSE, state
        through_gradients = state.weights is Weights.SHARED or state.optimizer is Optimizer.LEGACY
        if state.wrapper is Wrapper.DDP and state.overlap is Overlap.ON and through_gradients:
            if state.residency is Residency.GRADS:
                assert action is Action.REFUSE, state
            if state.weights is Weights.SHARED and state.staging is Staging.MISSING:
                assert action is Action.REFUSE, state
        packed = state.weights is not Weights.PLAIN
        if packed and state.masters is Masters.MISSING and state.wrapper is not Wrapper.NONE:
            assert action is Action.REFUSE, state


def test_only_a_gathered_model_is_published_without_a_gather_while_overlap_is_on() -> None:
    for state in all_states():
        if state.wrapper is Wrapper.DDP and state.overlap is Overlap.ON and row_for(state).action is Action.READ:
            assert state.groups is Groups.GATHERED, state
        if state.overlap is Overlap.OFF or state.wrapper is Wrapper.NONE:
            assert row_for(state).action is not Action.GATHER, state


def test_hooks_off_do_not_mean_gathered() -> None:
    assert row_for(State(hooks=Hooks.OFF, groups=Groups.MISSING)).action is Action.GATHER
    assert row_for(State(hooks=Hooks.OFF, groups=Groups.GATHERED)).action is Action.READ

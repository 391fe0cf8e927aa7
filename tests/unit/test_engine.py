"""The engine's decisions, with a runner that has no model."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.engine.engine import StepOutput
from pdserve.engine.sequence import Sequence
from pdserve.errors import RequestError
from pdserve.sampling import SamplingParams
from tests.support.engines import assert_nothing_leaked, run_to_end, tokens_of
from tests.support.fake_runner import EOS_TOKEN_ID, VOCAB_SIZE, fake_engine, scripted_token


def sequence(
    name: str, num_prompt: int, max_tokens: int, *, seed: int = 0, keep_blocks: bool = False
) -> Sequence:
    prompt = [2 + (seed + index) % 90 for index in range(num_prompt)]
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
    return Sequence(name, prompt, sampling, keep_blocks=keep_blocks)


def expected_tokens(num_prompt: int, max_tokens: int, seed: int = 0) -> list[int]:
    model = sequence("model", num_prompt, max_tokens, seed=seed)
    for _ in range(max_tokens):
        model.output_token_ids.append(scripted_token(model))
    return model.output_token_ids


def test_prefill_goes_in_chunks_and_several_prompts_share_a_step() -> None:
    engine, runner = fake_engine(max_num_batched_tokens=10, prefill_chunk_tokens=10)
    engine.add(sequence("a", 14, 1))
    engine.add(sequence("b", 3, 1, seed=50))
    run_to_end(engine)
    sizes = [[chunk.num_tokens for chunk in plan.chunks] for plan in runner.plans]
    assert sizes == [[10], [4, 3]]


def test_while_others_decode_a_long_prompt_gets_only_its_share_of_a_step() -> None:
    engine, runner = fake_engine(num_blocks=40, max_num_batched_tokens=32, prefill_chunk_tokens=5)
    engine.add(sequence("decoding", 4, 12))
    engine.step()
    engine.add(sequence("long", 20, 1, seed=40))
    run_to_end(engine)
    beside = [plan for plan in runner.plans if len(plan.chunks) == 2]
    assert beside
    assert all(plan.chunks[1].num_tokens <= 5 for plan in beside)


def test_when_blocks_run_out_the_youngest_is_recomputed_and_all_finish() -> None:
    """Each fits alone, all together do not: 4 of 4 prompt blocks and up to 4 more, 17 in all."""
    engine, _ = fake_engine(num_blocks=18, enable_prefix_cache=False)
    for index in range(4):
        engine.add(sequence(str(index), 16, 16, seed=index))
    outputs = run_to_end(engine)
    for index in range(4):
        assert tokens_of(outputs, str(index)) == expected_tokens(16, 16, seed=index)
    assert engine.stats().num_preemptions > 0
    assert_nothing_leaked(engine)


def test_what_can_never_fit_is_refused_at_the_door() -> None:
    engine, _ = fake_engine(num_blocks=5)
    with pytest.raises(RequestError, match="need 5 KV blocks, this worker has 4"):
        engine.add(sequence("huge", 10, 9))
    engine.add(sequence("fits", 10, 7))
    assert len(run_to_end(engine)) == 7
    assert_nothing_leaked(engine)


@pytest.mark.parametrize("bad", [[], [VOCAB_SIZE]])
def test_prompts_that_would_break_the_model_never_reach_it(bad: list[int]) -> None:
    engine, runner = fake_engine()
    with pytest.raises(RequestError):
        engine.add(Sequence("bad", bad, SamplingParams(max_tokens=1)))
    assert not engine.has_work
    assert runner.plans == []


def test_an_abort_between_layers_frees_at_once_and_nothing_follows() -> None:
    engine, runner = fake_engine()
    engine.add(sequence("goes", 6, 5))
    engine.add(sequence("stays", 6, 5, seed=30))

    owned = []

    def abort() -> None:
        owned.append(engine.stats().num_owned_blocks)
        engine.abort("goes")

    engine.on_boundary = abort
    outputs = engine.step()
    assert owned == [4, 2]
    assert runner.detached == {"goes"}
    outputs += run_to_end(engine)
    assert tokens_of(outputs, "goes") == []
    assert tokens_of(outputs, "stays") == expected_tokens(6, 5, seed=30)
    assert_nothing_leaked(engine)


def test_blocks_of_an_aborted_prompt_are_not_in_the_prefix_cache_beyond_what_was_computed() -> None:
    engine, _ = fake_engine(max_num_batched_tokens=8)
    engine.add(sequence("first", 20, 1))
    engine.step()
    engine.abort("first")
    engine.add(sequence("again", 20, 1))
    (output,) = run_to_end(engine)
    assert output.num_cached_tokens == 8
    assert_nothing_leaked(engine)


def test_a_step_that_raises_fails_its_sequences_and_the_engine_goes_on() -> None:
    engine, runner = fake_engine()
    engine.add(sequence("a", 5, 3))
    runner.fail_next = True
    with pytest.raises(RuntimeError, match="scripted") as failure:
        engine.step()
    (output,) = engine.fail_step(failure.value)
    assert output.error is not None
    assert_nothing_leaked(engine)
    engine.add(sequence("b", 5, 3))
    assert tokens_of(run_to_end(engine), "b") == expected_tokens(5, 3)


def test_kept_blocks_stay_until_they_are_freed() -> None:
    engine, _ = fake_engine()
    engine.add(sequence("handed off", 9, 30, keep_blocks=True))
    (output,) = run_to_end(engine)
    assert (len(output.token_ids), output.finish_reason) == (1, "")
    assert engine.stats().num_owned_blocks == 3
    engine.free("handed off")
    engine.free("handed off")
    assert_nothing_leaked(engine)


def test_an_adopted_sequence_goes_on_after_the_token_it_was_given() -> None:
    engine, _ = fake_engine()
    held = sequence("held", 9, 4)
    assert engine.hold(held)
    engine.adopt("held", 77)
    outputs = run_to_end(engine)
    assert [output.first_index for output in outputs] == [1, 2, 3]
    assert outputs[-1].finish_reason == "length"
    assert_nothing_leaked(engine)


def test_an_adopted_sequence_whose_token_ends_it_runs_no_step() -> None:
    engine, runner = fake_engine()
    assert engine.hold(sequence("held", 9, 4))
    engine.adopt("held", EOS_TOKEN_ID)
    assert not engine.has_work
    assert runner.plans == []
    assert_nothing_leaked(engine)


def test_no_room_to_hold_is_an_answer_and_changes_nothing() -> None:
    engine, _ = fake_engine(num_blocks=6)
    assert engine.hold(sequence("a", 12, 4))
    assert not engine.hold(sequence("b", 12, 4, seed=50))
    engine.check_integrity()
    engine.abort("a")
    assert engine.hold(sequence("b", 12, 4, seed=50))
    engine.abort("b")
    assert_nothing_leaked(engine)


class EngineMachine(RuleBasedStateMachine):
    """Adds, holds, adopts, aborts (also between layers) and steps in any order, in a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.engine, _ = fake_engine(num_blocks=16, max_num_batched_tokens=7, prefill_chunk_tokens=3)
        self.num_added = 0
        self.live: dict[str, tuple[int, int]] = {}
        self.held: list[str] = []
        self.tokens: dict[str, list[int]] = {}

    def _new(self, num_prompt: int, max_tokens: int) -> Sequence:
        self.num_added += 1
        name = str(self.num_added)
        self.tokens[name] = []
        return sequence(name, num_prompt, max_tokens, seed=self.num_added % 3)

    @rule(num_prompt=st.integers(1, 20), max_tokens=st.integers(1, 12))
    def add(self, num_prompt: int, max_tokens: int) -> None:
        new = self._new(num_prompt, max_tokens)
        self.engine.add(new)
        self.live[new.seq_id] = (num_prompt, max_tokens)

    @rule(num_prompt=st.integers(1, 20), max_tokens=st.integers(2, 12))
    def hold(self, num_prompt: int, max_tokens: int) -> None:
        new = self._new(num_prompt, max_tokens)
        if self.engine.hold(new):
            self.held.append(new.seq_id)
            self.live[new.seq_id] = (num_prompt, max_tokens)

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        if self.held:
            name = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            num_prompt, max_tokens = self.live[name]
            first = expected_tokens(num_prompt, max_tokens, seed=int(name) % 3)[0]
            self.engine.adopt(name, first)
            self.tokens[name].append(first)

    @rule(data=st.data(), between_layers=st.booleans())
    def abort(self, data: st.DataObject, between_layers: bool) -> None:
        if not self.live:
            return
        name = data.draw(st.sampled_from(sorted(self.live)))
        if between_layers:
            self.engine.on_boundary = self._abort_once(name)
            self.step()
            self.engine.on_boundary = lambda: None
        self.engine.abort(name)
        self.live.pop(name, None)
        if name in self.held:
            self.held.remove(name)

    def _abort_once(self, name: str) -> Callable[[], None]:
        return lambda: self.engine.abort(name)

    @rule()
    def step(self) -> None:
        for output in self.engine.step():
            self._take(output)

    def _take(self, output: StepOutput) -> None:
        name = output.seq_id
        assert name in self.live, "a token after the end"
        assert output.first_index == len(self.tokens[name])
        self.tokens[name] += output.token_ids
        if output.finish_reason:
            num_prompt, max_tokens = self.live.pop(name)
            assert self.tokens[name] == expected_tokens(num_prompt, max_tokens, seed=int(name) % 3)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        self.engine.check_integrity()

    def teardown(self) -> None:
        for name in list(self.held):
            self.engine.abort(name)
            del self.live[name]
        for output in run_to_end(self.engine):
            self._take(output)
        assert not self.live, "a sequence never finished"
        assert_nothing_leaked(self.engine)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)

"""The reservation states, explored by hypothesis: every grant ends exactly once."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from pdserve.clock import ManualClock
from pdserve_decode.reservations import Grant, Phase, Reservations

DRAIN_LIMIT_S = 2.0


class ReservationMachine(RuleBasedStateMachine):
    grants = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.reservations = Reservations(decode_incarnation=1, drain_limit_s=DRAIN_LIMIT_S, clock=self.clock)
        self.filling: set[Grant] = set()
        self.draining: set[Grant] = set()
        self.ended: set[Grant] = set()
        self.num_granted = 0

    @rule(target=grants)
    def grant(self) -> Grant:
        self.num_granted += 1
        grant = self.reservations.grant(f"r-{self.num_granted}", num_blocks=3)
        assert grant.fence > max((old.fence for old in self.ended | self.filling | self.draining), default=0)
        self.filling.add(grant)
        return grant

    @rule(grant=grants)
    def seal(self, grant: Grant) -> None:
        sealed = self.reservations.seal(grant.reservation_id)
        assert sealed == (grant if grant in self.filling else None)
        if sealed:
            self.filling.remove(grant)
            self.ended.add(grant)

    @rule(grant=grants)
    def drain(self, grant: Grant) -> None:
        drained = self.reservations.drain(grant.reservation_id)
        assert drained == (grant if grant in self.filling else None)
        if drained:
            self.filling.remove(grant)
            self.draining.add(grant)

    @rule(target=grants, data=st.data())
    def quiet(self, data: st.DataObject) -> object:
        if not self.draining:
            return multiple()
        grant = data.draw(st.sampled_from(sorted(self.draining, key=lambda grant: grant.fence)))
        assert self.reservations.quiet(grant.reservation_id) == grant
        self.draining.remove(grant)
        self.ended.add(grant)
        return multiple()

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        before = len(self.draining)
        self.clock.advance(seconds)
        self.reservations.quarantine_overdue()
        assert len(self.draining) == before, "time alone ends nothing"

    @invariant()
    def every_grant_is_in_one_place(self) -> None:
        assert self.reservations.count(Phase.GRANTED) == len(self.filling)
        waiting = self.reservations.count(Phase.DRAINING) + self.reservations.count(Phase.QUARANTINED)
        assert waiting == len(self.draining)
        for grant in self.filling:
            assert self.reservations.of_request(grant.request_id) == grant
        for grant in self.draining | self.ended:
            assert self.reservations.of_request(grant.request_id) is None


TestReservations = ReservationMachine.TestCase
TestReservations.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_only_what_drains_for_too_long_is_quarantined_and_only_quiet_ends_it() -> None:
    clock = ManualClock()
    reservations = Reservations(decode_incarnation=1, drain_limit_s=DRAIN_LIMIT_S, clock=clock)
    slow, kept = reservations.grant("slow", num_blocks=4), reservations.grant("kept", num_blocks=1)
    reservations.drain(slow.reservation_id)
    clock.advance(DRAIN_LIMIT_S + 0.1)
    assert reservations.quarantine_overdue() == [slow]
    assert reservations.quarantine_overdue() == []
    assert reservations.num_quarantined_blocks == 4
    assert reservations.of_request("kept") == kept
    assert reservations.quiet(slow.reservation_id) == slow
    assert reservations.num_quarantined_blocks == 0

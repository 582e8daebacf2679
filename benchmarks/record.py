"""What one call went through: the times of everything that came back, in seconds from the start of the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallRecord:
    """`scheduled_s` is when the call should have been sent, and every latency counts from it: a generator or connection
    that fell behind makes users wait just as a slow server does (coordinated omission). In a closed loop it is the
    moment the user was ready. `token_s` has one time per output token; tokens of one delta share theirs. `error` is
    empty for a full answer.
    """

    index: int
    scheduled_s: float
    sent_s: float | None
    token_s: tuple[float, ...]
    deltas: int
    end_s: float
    input_tokens: int
    expected_tokens: int
    error: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def output_tokens(self) -> int:
        return len(self.token_s)

    @property
    def send_lag_s(self) -> float | None:
        """How late the generator itself was; None when the call was never sent."""
        return None if self.sent_s is None else self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.token_s[0] - self.scheduled_s if self.token_s else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Inter-token latencies: the gap before every token but the first; 0.0 between tokens of one delta."""
        return tuple(later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False))

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: the mean gap; None below two tokens."""
        if len(self.token_s) < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)

    @property
    def e2e_s(self) -> float:
        """From scheduled to the end of the stream."""
        return self.end_s - self.scheduled_s

    def meets(self, slo_ttft_ms: float | None, slo_tpot_ms: float | None) -> bool:
        """A full answer within each given target. One without a second token has no TPOT to miss."""
        if not self.ok or self.ttft_s is None:
            return False
        in_time = slo_ttft_ms is None or self.ttft_s * 1e3 <= slo_ttft_ms
        return in_time and (slo_tpot_ms is None or (self.tpot_s or 0.0) * 1e3 <= slo_tpot_ms)

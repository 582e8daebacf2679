"""From the records of all calls to the figures of one run, and their JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.options import BenchOptions
from benchmarks.percentiles import Summary, summary
from benchmarks.record import CallRecord

FORMAT = 1
"""Of the JSON; raised when a field changes its meaning."""


@dataclass(frozen=True)
class BenchReport:
    """Times in seconds. Latencies, token counts and rates are of calls that got their full answer."""

    options: BenchOptions
    model: str
    host: Mapping[str, object]
    started_at: datetime
    duration_s: float
    """From the first scheduled call to the end of the last."""
    users: int | None
    left_out: int
    records: tuple[CallRecord, ...]
    completed: int
    errors: tuple[tuple[str, int], ...]
    """(kind, how many), most first."""
    input_tokens: int
    output_tokens: int
    tokens_per_delta: float | None
    """Above 1 when deltas were coalesced: ITL then has zeros, and TPOT is the figure to read."""
    met_slo: int | None
    """None when no target was given."""
    ttft: Summary | None
    itl: Summary | None
    tpot: Summary | None
    e2e: Summary | None
    send_lag: Summary | None

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def requests_per_s(self) -> float:
        return self._rate(self.completed)

    @property
    def input_tokens_per_s(self) -> float:
        return self._rate(self.input_tokens)

    @property
    def output_tokens_per_s(self) -> float:
        return self._rate(self.output_tokens)

    @property
    def goodput_per_s(self) -> float | None:
        return None if self.met_slo is None else self._rate(self.met_slo)

    def _rate(self, count: int) -> float:
        return count / self.duration_s if self.duration_s > 0 else 0.0

    def as_json(self) -> dict[str, object]:
        """Everything, the times of every token included, so that any other figure can be computed later."""
        return {**self.figures_json(), "records": [_record_json(record) for record in self.records]}

    def figures_json(self) -> dict[str, object]:
        """All but the records."""
        fields = {name: _plain(value) for name, value in vars(self).items() if name != "records"}
        fields["errors"] = dict(self.errors)
        rates = ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s", "goodput_per_s")
        return {"format": FORMAT, **{name: getattr(self, name) for name in rates}, **fields}

    def save(self, folder: str | Path) -> Path:
        """Writes `<UTC time>[-label].json`, never over an earlier one. OSError as the file system says."""
        stamp = self.started_at.strftime("%Y%m%dT%H%M%S")
        word = "".join(c if c.isalnum() or c in "._-" else "_" for c in self.options.label)
        name = f"{stamp}-{word}" if word else stamp
        text = json.dumps(self.as_json(), ensure_ascii=False, separators=(",", ":"))
        Path(folder).mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1_000):
            path = Path(folder) / (f"{name}.json" if attempt == 1 else f"{name}.{attempt}.json")
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text + "\n")
            except FileExistsError:
                continue
            return path
        raise FileExistsError(f"{folder} holds too many results named {name}")


def build_report(
    options: BenchOptions,
    records: Iterable[CallRecord],
    *,
    model: str,
    host: Mapping[str, object],
    started_at: datetime,
    users: int | None,
    left_out: int = 0,
) -> BenchReport:
    """Pure: the same records give the same figures."""
    ordered = tuple(sorted(records, key=lambda record: record.index))
    full = [record for record in ordered if record.ok]
    tokens, deltas = sum(r.output_tokens for r in full), sum(r.deltas for r in full)
    wanted_slo = options.slo_ttft_ms is not None or options.slo_tpot_ms is not None
    begin_s = min((record.scheduled_s for record in ordered), default=0.0)
    return BenchReport(
        options=options,
        model=model,
        host=host,
        started_at=started_at,
        duration_s=max((record.end_s for record in ordered), default=0.0) - begin_s,
        users=users,
        left_out=left_out,
        records=ordered,
        completed=len(full),
        errors=tuple(Counter(record.error for record in ordered if not record.ok).most_common()),
        input_tokens=sum(record.input_tokens for record in full),
        output_tokens=tokens,
        tokens_per_delta=tokens / deltas if deltas else None,
        met_slo=sum(r.meets(options.slo_ttft_ms, options.slo_tpot_ms) for r in full) if wanted_slo else None,
        ttft=summary(r.ttft_s for r in full if r.ttft_s is not None),
        itl=summary(gap for r in full for gap in r.itl_s),
        tpot=summary(r.tpot_s for r in full if r.tpot_s is not None),
        e2e=summary(r.e2e_s for r in full),
        send_lag=summary(r.send_lag_s for r in ordered if r.send_lag_s is not None),
    )


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _record_json(record: CallRecord) -> dict[str, object]:
    return {
        name: round(value, 6)
        if isinstance(value, float)
        else [round(time_s, 6) for time_s in value]
        if isinstance(value, tuple)
        else value
        for name, value in vars(record).items()
    }

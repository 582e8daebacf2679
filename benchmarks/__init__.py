"""The load generator behind `headrace bench`: it asks a running cluster as users do, and reports how long they waited.

    python -m benchmarks.load --preset mixed64          the peers' heavy-tailed workload, all 64 requests at once
    python -m benchmarks.load --concurrency 32          closed loop: 32 users, each asks again when answered
    python -m benchmarks.load --rate 4 --requests 200   open loop: Poisson arrivals, whether or not the cluster keeps up
    python -m benchmarks.load --trace chat.jsonl        open loop: a recorded day's arrivals and lengths

Who owns what:

- `options`, `presets`: what one run is asked to do.
- `lengths`, `arrivals`, `prompts`, `trace`, `workload`: pure; equal options give
  equal token ids at equal times.
- `transports/`: how a call reaches the cluster and how its tokens come back (gRPC, or HTTP with server-sent events).
- `drive`: when each call is sent; the only place that reads a clock. One thread, one event loop, no locks.
- `record`, `percentiles`, `report`, `table`: from the time of every token to the figures, their JSON and
  their table; all but the last are pure.
- `compare`: medians and ratios of saved runs.
- `load`: `run(options) -> BenchReport`, and the command line.

`docs/benchmarks.md` says what each figure means and how to compare two of them.
"""

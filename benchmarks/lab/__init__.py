"""The policy lab: the same requests, the same engine and the same kernels under all four batching policies.

    headrace lab policies                    the book's two examples counted, one mixed load measured
    headrace lab policies --counted          the counts alone: no model is loaded
    headrace lab policies --measure late     another workload on the model

It drives an engine inside its own process, without Ray, Redis or a network, so what differs between two columns is the
policy and nothing else. *Counted* figures come from an engine whose model computes nothing: they are exact, the same
on every machine, and carry no times. *Measured* ones come from the real model, policies in turns, medians over rounds.

- `workloads`: who asks what, when; pure.
- `counting_runner`: the model that computes nothing, and the clock that only it moves.
- `replay`: one workload through one engine.
- `figures`: from a replay to its figures, and medians of them; pure.
- `table`: the figures for the eye.
- `policies`: the run, and the command line.

`docs/batching.md` says what the figures mean.
"""

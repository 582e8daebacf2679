"""What the next forward pass computes: a pure function of plain data and a clock.

Policies read `SchedulerState` and answer with a frozen `StepPlan`; the roster applies it. Standard library only: no
tensors, no block ids, no threads.
"""

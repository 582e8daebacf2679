"""The model: weights, paged KV memory, the forward pass. Its border to the engine is `workers.model.interface`."""

import os

# GNU OpenMP's threads spin some 14 ms for the next parallel region before they sleep, and read how long when torch
# loads the library, hence here. On a machine that has other work (a second worker, the router, Redis) spinners hold the
# cores that the awaited thread needs: two workers of two threads on two cores decoded 5 to 50 times slower without.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
